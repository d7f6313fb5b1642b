"""The meaning of one event of an engine's stream: an opening, a token, an error, or that the engine gave up.

One definition of "the answer has begun", for retries, leases, time-outs and receipts alike: its first token,
in every API and framing (WHATWG HTML, section 9.2.6). Comments, events without data, and openings (roles,
ids, empty deltas, empty choices, whatever their size) are no tokens. What ends an answer counts as its token:
an answer without text is one. So does data of no known shape, which must not be held back. Pure.

An engine that ends by SIGTERM aborts what it was asked and answers 200 (vLLM 0.32 and 0.33 with
``shutdown_timeout = 0``: entrypoints/launchers/launcher.py): ``finish_reason`` is ``abort`` in ``choices``,
an object of that type in SGLang's ``meta_info`` (one with a status is an error); a message has no
``stop_reason`` (entrypoints/anthropic/serving.py); a response is ``cancelled``, or ``completed`` with what
had been generated, if anything (entrypoints/openai/responses/serving.py). An engine whose core dies ends its
streams with an event that is an error, and the connection as after a success.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import Any, Final

import msgspec

from kvatlas.router.openai.apis import CHAT, COMPLETION, MESSAGES, RESPONSES

EVENT_ENDS: Final = (b"\n\n", b"\n\r\n", b"\r\r", b"\n\r", b"\r\r\n")
"""How data ends that ends with an event: a line end and an empty line, which may end with CR, LF or both. The
LF behind a last CR may be missing yet."""
_BOM: Final = b"\xef\xbb\xbf"


def last_event_end(data: bytes | bytearray, start: int = 0) -> int:
    """Position after the last of ``EVENT_ENDS``, sought from ``start``; 0: there is none."""
    same, mixed, old = data.rfind(b"\n\n", start), data.rfind(b"\n\r", start), data.rfind(b"\r\r", start)
    end = max(same, mixed, old) + 2
    if end < 2:
        return 0
    # The second line end may be CR LF.
    return end + (data[end - 1 : end + 1] == b"\r\n")


def blocks(data: bytes) -> Iterator[bytes]:
    """Its events with their blank lines, in order; the last one may have none yet."""
    if data.find(b"\r") < 0:
        start = 0
        while (end := data.find(b"\n\n", start)) >= 0:
            yield data[start : end + 2]
            start = end + 2
        if start < len(data):
            yield data[start:]
        return
    lines: list[bytes] = []
    for line in data.splitlines(keepends=True):
        lines.append(line)
        if line in (b"\n", b"\r", b"\r\n"):
            yield b"".join(lines)
            lines.clear()
    if lines:
        yield b"".join(lines)


def ends_line_of(block: bytes, before: bytes) -> bool:
    """Whether this is the LF of a line end that was cut within CR LF, the CR of which ends the event
    ``before``."""
    return block == b"\n" and before.endswith(b"\r")


def data_of(block: bytes) -> bytes | None:
    """The data of one event: its ``data`` lines, joined by line feeds. None: it has none, and is no event."""
    if block.startswith(b"data: ") and block.find(b"\n") == len(block) - 2 and block.find(b"\r") < 0:
        return block[6:-2]  # by far the most of them
    found = []
    for line in block.removeprefix(_BOM).splitlines():
        name, _, value = line.partition(b":")
        if name == b"data":
            found.append(value.removeprefix(b" "))
    return b"\n".join(found) if found else None


def is_comment(block: bytes) -> bool:
    """Whether it has no field at all: comments and line ends, which keep a connection open."""
    if block.startswith((b"data:", b"event:")):
        return False
    return all(not line or line.startswith(b":") for line in block.removeprefix(_BOM).splitlines())


# A chunk without choices, and one that opens a choice, have no token. Two passes: as alternatives of one
# pattern, they would be sought byte by byte.
_CHOICES = re.compile(rb'"choices": ?\[(?!\s*\])')
_CHOICE_OPENS = re.compile(rb'"role": ?"assistant", ?"content": ?(?:""|null)[,}]')
_DELTA = re.compile(rb"^event: ?(?:content_block_delta|response\.[a-z_.]+\.delta)\r?$", re.MULTILINE)


def tokens_in(path: str, data: bytes) -> int:
    """Events of these that bring tokens, in a stream of this API: engines send one for each token, unless
    they speculate, fall behind, or hold text back. Nothing is decoded."""
    if path in (CHAT, COMPLETION):
        found = len(_CHOICES.findall(data)) - len(_CHOICE_OPENS.findall(data))
        return found if found > 0 else 0  # noqa: FURB136  # a third of the time of max()
    if path in (MESSAGES, RESPONSES):
        return len(_DELTA.findall(data))
    return data.count(b"\n\n") - data.count(b"data: [DONE]")


class Kind(Enum):
    """Meaning of an event."""

    OPENING = "opening"
    """Nothing has been generated yet."""
    TOKEN = "token"  # noqa: S105  # no password
    """Something has been, or the answer is over."""
    ABORT = "abort"
    """The engine gave the request up."""
    ERROR = "error"
    """It failed."""


class Said(msgspec.Struct, frozen=True, gc=False):
    """One event. ``status``: what an error names, 500 where it names none."""

    kind: Kind
    status: int = 0


_OPENING, _TOKEN, _ABORT = Said(Kind.OPENING), Said(Kind.TOKEN), Said(Kind.ABORT)
_EMPTY: Final = (b"", b"{}", b"null")
_ERROR_MIN, _SERVER_ERRORS, _ERROR_MAX = 400, 500, 599


class _Choice(msgspec.Struct, gc=False):
    finish_reason: Any = None
    text: Any = None
    delta: Any = None
    token_ids: Any = None
    logprobs: Any = None

    @property
    def has_token(self) -> bool:
        if self.finish_reason is not None or self.text or self.token_ids:
            return True
        logprobs, delta = self.logprobs, self.delta
        if any(logprobs.values()) if isinstance(logprobs, dict) else logprobs:
            return True
        if isinstance(delta, dict):
            return any(value and name != "role" for name, value in delta.items())
        return bool(delta)


class _OutputCount(msgspec.Struct, gc=False):
    output_tokens: int | None = None


class _Response(msgspec.Struct, gc=False):
    status: Any = None
    usage: _OutputCount | None = None
    error: Any = None
    background: Any = None

    @property
    def aborted(self) -> bool:
        """Also one that is complete without a token: a whole answer has at least its last one."""
        nothing = self.usage is not None and self.usage.output_tokens == 0
        return self.status == "cancelled" or (self.status == "completed" and nothing)


class _Meta(msgspec.Struct, gc=False):
    finish_reason: Any = None
    completion_tokens: Any = None


class _Event(_Response, gc=False):
    type: Any = None
    object: Any = None
    code: Any = None
    choices: list[_Choice] | None = None
    delta: Any = None
    stop_reason: Any = None
    response: _Response | None = None
    content_block: Any = None
    item: Any = None
    part: Any = None
    text: Any = None
    arguments: Any = None
    output_ids: Any = None
    meta_info: _Meta | None = None


_EVENT: Final = msgspec.json.Decoder(_Event)
# Several answers of SGLang's own API, whole.
_WHOLE: Final = msgspec.json.Decoder(_Event | list[_Event])


def _decoded(text: bytes) -> _Event | None:
    try:
        return _EVENT.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def read_event(path: str, data: bytes | None) -> Said:
    """Read an event with this data in a stream of this API (``path``, which need not be known)."""
    if data is None or data.strip() in _EMPTY:
        return _OPENING
    event = _decoded(data)
    if event is None:
        return _TOKEN
    if status := _error_status(event) or _abort_status(event):
        return Said(Kind.ERROR, status)
    if _gave_up(path, event):
        return _ABORT
    return _TOKEN if _has_token(event) else _OPENING


def names_opening(begin: bytes | bytearray) -> bool:
    """Whether an event that begins like this has the name of an opening."""
    for line in begin.removeprefix(_BOM).splitlines():
        name, _, value = line.partition(b":")
        if name == b"event":
            return value.strip().decode("utf-8", "replace") in _OPENING_TYPES
    return False


def in_background(data: bytes | None) -> bool:
    """Whether this opening names a response that is computed on without its client."""
    if data is None or data.find(b'"background"') < 0:
        return False
    event = _decoded(data)
    return event is not None and event.response is not None and event.response.background is True


def _error_status(event: _Event) -> int:
    error = event.error
    if event.response is not None and not error:
        error = event.response.error
    ended_so = any(choice.finish_reason == "error" for choice in event.choices or ())
    if not (error or ended_so or "error" in (event.type, event.object) or event.type == "response.failed"):
        return 0
    for code in (error.get("code") if isinstance(error, dict) else None, event.code):
        if isinstance(code, int) and _ERROR_MIN <= code <= _ERROR_MAX:
            return code
    return 500


def _abort_status(event: _Event) -> int:
    """Status that SGLang names for an abort of its own: it refuses a request in its stream so, or fails
    (srt/managers/schedule_batch.py ``FINISH_ABORT``). 0: none, or it is no abort."""
    reason = None if event.meta_info is None else event.meta_info.finish_reason
    if not isinstance(reason, dict) or reason.get("type") != "abort":
        return 0
    code = reason.get("status_code")
    return code if isinstance(code, int) and _ERROR_MIN <= code <= _ERROR_MAX else 0


def _gave_up(path: str, event: _Event) -> bool:
    if path == MESSAGES:
        stops = isinstance(event.delta, dict) and event.delta.get("stop_reason", "") is None
        return event.type == "message_delta" and stops
    if path == RESPONSES:
        return event.response is not None and event.response.aborted
    return _choices_gave_up(event)


def _choices_gave_up(event: _Event) -> bool:
    if event.meta_info is not None:
        reason = event.meta_info.finish_reason
        aborts = isinstance(reason, dict) and reason.get("type") == "abort"
        return aborts and not _ERROR_MIN <= _abort_status(event) < _SERVER_ERRORS
    return any(choice.finish_reason == "abort" for choice in event.choices or ())


# Of these APIs: Messages, Responses and Cohere's. An opening of a block has its first text, if any.
_OPENING_TYPES: Final = frozenset(
    {
        "message_start",
        "ping",
        "content_block_stop",
        "message-start",
        "content-end",
        "response.created",
        "response.in_progress",
        "response.queued",
    }
)
_CHUNKS: Final = ("chat.completion.chunk", "text_completion")
# Blocks, items and parts that are empty when they are opened; any other kind is generated already.
_EMPTY_KINDS: Final = (
    None,
    "text",
    "thinking",
    "message",
    "reasoning",
    "output_text",
    "reasoning_text",
    "summary_text",
    "refusal",
)
_OPENED: Final = {
    "content_block_start": "content_block",
    "response.output_item.added": "item",
    "response.content_part.added": "part",
    "response.reasoning_part.added": "part",
    "response.reasoning_summary_part.added": "part",
    "content-start": "delta",
}
_IN_PARTS: Final = re.compile(r"response\..*\.(?:delta|done)|content_block_delta|content-delta")


def _has_token(event: _Event) -> bool:
    if event.choices is not None:
        return any(choice.has_token for choice in event.choices)
    if event.meta_info is not None:
        meta = event.meta_info
        return bool(event.text or event.output_ids or meta.finish_reason or meta.completion_tokens)
    kind = event.type
    if not isinstance(kind, str):
        return event.object not in _CHUNKS  # one without choices says nothing
    if kind in _OPENING_TYPES:
        return False
    if kind in _OPENED:
        return _has_content(getattr(event, _OPENED[kind]))
    if _IN_PARTS.fullmatch(kind):
        values = (event.delta, event.text, event.arguments, event.item, event.part)
        return any(_has_content(value) for value in values)
    return True


_DEPTH_MAX: Final = 4


def _has_content(value: Any, depth: int = 0) -> bool:
    """Whether a block, an item, a part or a delta has more than its kind and its name."""
    if not isinstance(value, dict) or depth >= _DEPTH_MAX:
        return bool(value)
    if value.get("type") not in _EMPTY_KINDS and not str(value.get("type")).endswith("_delta"):
        return True
    return any(
        _has_content(one, depth + 1)
        for name, one in value.items()
        if name not in ("type", "id", "role", "status", "index", "annotations")
    )


# A chunk with it must be looked at: it may be an error. In a string its quote would be escaped.
ERROR_MARK: Final = b'"error'


_NO_OUTPUT: Final = re.compile(rb'"output_tokens"\s*:\s*0\b')


def abort_mark(path: str) -> bytes:
    """In every event of this API by which an engine gives up."""
    return {MESSAGES: b'"message_delta"', RESPONSES: b'"response.c'}.get(path, b'"abort"')


def aborted(path: str, body: bytes) -> bool:
    """Whether this whole answer of success is one that the engine gave up."""
    if path == MESSAGES:
        if body.find(b'"stop_reason":"') >= 0:
            return False
    elif path == RESPONSES:
        if body.find(b'"cancelled"') < 0 and _NO_OUTPUT.search(body) is None:
            return False
    elif body.find(b'"abort"') < 0:
        return False
    try:
        found = _WHOLE.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    said = found if isinstance(found, list) else [found]
    if path == MESSAGES:
        return any(one.type == "message" and one.stop_reason is None for one in said)
    if path == RESPONSES:
        return any(one.aborted for one in said)
    return any(map(_choices_gave_up, said))
