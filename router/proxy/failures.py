"""Reports of a failed answer: to the attempt, the record, and the log."""

from __future__ import annotations

import asyncio
from typing import Final

from kvatlas.router.http.upstream import UpstreamError
from kvatlas.router.observe.requests import RequestRecord
from kvatlas.router.proxy.attempt import Attempt
from kvatlas.router.proxy.settings import ProxyStats

# Statuses after which another engine is asked: this one is busy, broken or going down.
REFUSALS: Final = frozenset({429, 500, 502, 503, 504})
# The status of an engine that the request may have broken.
BROKEN: Final = 500
# What a proxy in front of an engine says when the connection behind it broke (502), or when nothing came
# within its time (504): the engine had the request, as where our own connection breaks. 503 comes from those
# that did not take it.
BROKEN_STATUSES: Final = frozenset({BROKEN, 502, 504})


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


def ended_with_process(attempt: Attempt, error: UpstreamError) -> bool:
    """Whether the process that had the request has ended since, as far as is known."""
    return error.abandoned and error.sent and attempt.died


def broke_off(
    attempt: Attempt, record: RequestRecord, problem: UpstreamError | int, stats: ProxyStats
) -> None:
    """The answer ended before its end, and the client has had a part of it. ``problem``: why, or the status
    of the error by which the engine ended it."""
    client_told(attempt, record, stream_failed(attempt, problem, stats), stats)


def stream_failed(attempt: Attempt, problem: UpstreamError | int, stats: ProxyStats) -> str:
    """The engine's stream ended before its end, as ``problem`` of ``broke_off`` says. Returns what to log."""
    if isinstance(problem, UpstreamError):
        engine_failed(attempt, problem, stats)
        return problem.reason
    # Like a refusal: requests may have errors of their own, which must not exclude an engine.
    if problem in REFUSALS and attempt.refused(problem, 0.0):
        stats.count_failure("status")
    return f"status {problem}"


def client_told(attempt: Attempt, record: RequestRecord, problem: str, stats: ProxyStats) -> None:
    """The client has had a part of an answer, and an error instead of its end."""
    stats.streams_broken += 1
    record.broken = True
    engine_id = attempt.engine_id
    record.tracker.warn("answer broke off", record, engine_id, engine=engine_id, problem=problem)
