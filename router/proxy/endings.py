"""Beginning and end of an answer, in the shape of each API: whether an event is generated
already, is an error, or says that the engine gave the request up.

An engine that ends by SIGTERM aborts what it was asked and answers 200 (vLLM 0.32 and 0.33 with
``shutdown_timeout = 0``: entrypoints/launchers/launcher.py): ``finish_reason`` is ``abort`` in ``choices``; a
message has no ``stop_reason`` (entrypoints/anthropic/serving.py); a response is ``cancelled``, or
``completed`` with what had been generated, if anything (entrypoints/openai/responses/serving.py). Pure.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final

import msgspec

from router.http.upstream import UpstreamError
from router.observe.requests import RequestRecord
from router.openai.request import BATCH, CHAT, COMPLETION, GENERATE, MESSAGES, RESPONSES
from router.proxy.attempt import Attempt, Carrier
from router.proxy.stats import ProxyStats

_IN_CHOICES: Final = frozenset({CHAT, COMPLETION, GENERATE, BATCH})
# Events that come before anything is generated, or say nothing of it.
_OPENINGS: Final = {
    CHAT: re.compile(
        rb'"role": ?"assistant", ?"content": ?""(?!.*(?:"finish_reason": ?"|"tool_calls": ?\[\{))'
    ),
    MESSAGES: re.compile(rb'"type": ?"(?:message_start|ping|content_block_start)"(?!.*"tool_use")'),
    RESPONSES: re.compile(rb'"type": ?"response\.(?:created|in_progress|queued)"'),
}
_IN_BACKGROUND: Final = re.compile(rb'"background": ?true')
# In every event that says that the engine gave up, as vLLM writes it; within a string its quotes would be
# escaped. Few other texts share their last letters, which makes looking for them quick.
_MARKS: Final = {
    **dict.fromkeys(_IN_CHOICES, b'reason":"abort'),
    MESSAGES: b'"message_delta"',
    RESPONSES: b'"response.completed"',
}
_ERROR_MIN, _ERROR_MAX = 400, 599


class _Choice(msgspec.Struct, gc=False):
    finish_reason: Any = None


class _Counts(msgspec.Struct, gc=False):
    output_tokens: int | None = None


class _Response(msgspec.Struct, gc=False):
    status: Any = None
    usage: _Counts | None = None

    @property
    def aborted(self) -> bool:
        """Also one that is complete without a token: a whole answer has at least its last one."""
        nothing = self.usage is not None and self.usage.output_tokens == 0
        return self.status == "cancelled" or (self.status == "completed" and nothing)


class _Said(_Response, gc=False):
    type: Any = None
    choices: list[_Choice] | None = None
    delta: Any = None
    stop_reason: Any = None
    response: _Response | None = None
    error: Any = None


_DECODER: Final = msgspec.json.Decoder(_Said)


def _read(text: bytes) -> _Said | None:
    try:
        return _DECODER.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def aborted(path: str, body: bytes) -> bool:
    """Whether this whole answer of success is one that the engine gave up."""
    if path in _IN_CHOICES:
        if body.find(_MARKS[path]) < 0:
            return False
    elif path == MESSAGES:
        if body.find(b'"stop_reason":"') >= 0:
            return False
    elif path != RESPONSES or (body.find(b'"cancelled"') < 0 and body.find(b'"output_tokens":0') < 0):
        return False
    said = _read(body)
    if said is None:
        return False
    if path == MESSAGES:
        return said.type == "message" and said.stop_reason is None
    return said.aborted if path == RESPONSES else _gave_up(said)


def _gave_up(said: _Said) -> bool:
    return any(choice.finish_reason == "abort" for choice in said.choices or ())


def abort_mark(path: str) -> bytes:
    """Bytes in every event by which an engine gives up; empty: this API has none."""
    return _MARKS.get(path, b"")


def aborts_in_choices(path: str) -> bool:
    """Whether that event has a ``finish_reason``, which is null in those before it."""
    return path in _IN_CHOICES


def event_aborted(path: str, data: bytes) -> bool:
    """Whether the engine gives up with this event, which has the API's mark."""
    said = _read(data)
    if said is None:
        return False
    if path == MESSAGES:
        stops = isinstance(said.delta, dict) and said.delta.get("stop_reason", "") is None
        return said.type == "message_delta" and stops
    if path == RESPONSES:
        return said.response is not None and said.response.aborted
    return _gave_up(said)


def is_opening(path: str, data: bytes) -> bool:
    """Whether nothing is generated yet as far as this event says."""
    opening = _OPENINGS.get(path)
    return opening is not None and opening.search(data) is not None


def waits_for_more(data: bytes) -> bool:
    """Whether an opening may wait for what comes next. That of a background response names what goes on
    without its client, who is to have it at once."""
    return _IN_BACKGROUND.search(data) is None


def error_status(data: bytes) -> int:
    """The status that an event of an error names, 500 where it names none; 0: it is no error."""
    if data.find(b'"error"') < 0:
        return 0
    said = _read(data)
    if said is None or not (said.error or said.type == "error"):
        return 0
    code = said.error.get("code") if isinstance(said.error, dict) else None
    return code if isinstance(code, int) and _ERROR_MIN <= code <= _ERROR_MAX else 500


# Reports of a failed answer: to the attempt, the record, and the log.


# Statuses after which another engine is asked: this one is busy, broken or going down.
REFUSALS: Final = frozenset({429, 500, 502, 503, 504})
# The status of an engine that the request may have broken.
BROKEN: Final = 500


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
