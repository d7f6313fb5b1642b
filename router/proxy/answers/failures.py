"""What is told where an engine's answer fails: to the attempt, the record, and the log."""

from __future__ import annotations

import asyncio
from typing import Final

from router.http.client.connection import UpstreamError
from router.observe.requests import RequestRecord
from router.proxy.attempt import Attempt
from router.proxy.carrier import Carrier
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


def await_first_byte(attempt: Attempt, carrier: Carrier) -> None:
    """From now on this task is cancelled where the engine goes down before the first byte, if another engine
    may be asked then."""
    if (task := asyncio.current_task()) is not None and carrier.may_retry():
        attempt.awaited(task.cancel)


def abandoned(attempt: Attempt, stats: ProxyStats) -> UpstreamError | None:
    """Why the wait for the first byte was cancelled, if that is since the engine went down and for no other
    reason. To be called in the task that waited."""
    task = asyncio.current_task()
    if not attempt.abandoned or task is None or task.uncancel():
        return None
    error = UpstreamError("timeout")
    error.abandoned = True
    stats.requests_moved += 1
    return error


def broke_off(attempt: Attempt, record: RequestRecord, error: UpstreamError, stats: ProxyStats) -> None:
    """The answer ended before its end, and the client has had a part of it."""
    stats.streams_broken += 1
    engine_failed(attempt, error, stats)
    engine_id = attempt.engine_id
    record.broken = True
    record.tracker.warn("answer broke off", record, engine_id, engine=engine_id, problem=error.reason)
