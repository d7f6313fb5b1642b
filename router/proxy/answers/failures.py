"""What is told where an engine's answer fails: to the attempt, the record, and the log."""

from __future__ import annotations

from typing import Final

from router.http.client.connection import UpstreamError
from router.observe.requests import RequestRecord
from router.proxy.attempt import Attempt
from router.proxy.stats import ProxyStats

REFUSALS: Final = frozenset({429, 500, 502, 503, 504})
"""Statuses after which another engine is asked: this one is busy, broken or going down."""
BROKEN: Final = 500
"""The status of an engine that the request may have broken."""


class EventRefusedError(Exception):
    """An event stream of success began with an error, and nothing has been passed on."""

    def __init__(self, status: int, fields: list[tuple[bytes, bytes]], body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.fields = fields
        self.body = body


def engine_failed(attempt: Attempt, error: UpstreamError, stats: ProxyStats) -> None:
    """Tell the attempt that its connection failed, and count that if it ended it."""
    if attempt.broke(error.reason):
        stats.count_failure("refused" if error.reason == "overflow" else error.reason)


def broke_off(attempt: Attempt, record: RequestRecord, error: UpstreamError, stats: ProxyStats) -> None:
    """The answer ended before its end, and the client has had a part of it."""
    stats.streams_broken += 1
    engine_failed(attempt, error, stats)
    engine_id = attempt.engine_id
    record.broken = True
    record.tracker.warn("answer broke off", record, engine_id, engine=engine_id, problem=error.reason)
