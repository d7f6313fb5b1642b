"""Parts of an answer that the proxy reads while passing it on, in the shape of each API: line ends, the first
token, the usage, and whether an event is an error, or says that the engine gave the request up.

``SseRelay`` gives every piece of an event stream back at once and unchanged, except that the beginning of a
line whose end has not arrived yet waits for it. So a client has only ever been given whole lines, and if the
engine dies in the middle of one, an error event can still be added that the client understands. Chunks are
not parsed; only lines that contain ``"usage"`` are, the first one of a Responses stream, for its id, and
those before the first token. Where another engine could be asked instead, events that come before anything is
generated wait for the first one that is. Pure.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Final

import msgspec

from router.openai.request import BATCH, CHAT, COMPLETION, GENERATE, MESSAGES, RESPONSES, Usage

# Beginning and end of an answer: whether an event is generated already, is an error, or says that the engine
# gave the request up.
#
# An engine that ends by SIGTERM aborts what it was asked and answers 200 (vLLM 0.32 and 0.33 with
# ``shutdown_timeout = 0``: entrypoints/launchers/launcher.py): ``finish_reason`` is ``abort`` in ``choices``;
# a message has no ``stop_reason`` (entrypoints/anthropic/serving.py); a response is ``cancelled``, or
# ``completed`` with what had been generated, if anything (entrypoints/openai/responses/serving.py).


# APIs whose aborts are a ``finish_reason``, null in the events before.
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


class _OutputCount(msgspec.Struct, gc=False):
    output_tokens: int | None = None


class _Response(msgspec.Struct, gc=False):
    status: Any = None
    usage: _OutputCount | None = None

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


_ENDING_DECODER: Final = msgspec.json.Decoder(_Said)


def _read_ending(text: bytes) -> _Said | None:
    try:
        return _ENDING_DECODER.decode(text)
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
    said = _read_ending(body)
    if said is None:
        return False
    if path == MESSAGES:
        return said.type == "message" and said.stop_reason is None
    return said.aborted if path == RESPONSES else _gave_up(said)


def _gave_up(said: _Said) -> bool:
    return any(choice.finish_reason == "abort" for choice in said.choices or ())


def event_aborted(path: str, data: bytes) -> bool:
    """Whether the engine gives up with this event, which has the API's mark."""
    said = _read_ending(data)
    if said is None:
        return False
    if path == MESSAGES:
        stops = isinstance(said.delta, dict) and said.delta.get("stop_reason", "") is None
        return said.type == "message_delta" and stops
    if path == RESPONSES:
        return said.response is not None and said.response.aborted
    return _gave_up(said)


def error_status(data: bytes) -> int:
    """The status that an event of an error names, 500 where it names none; 0: it is no error."""
    if data.find(b'"error"') < 0:
        return 0
    said = _read_ending(data)
    if said is None or not (said.error or said.type == "error"):
        return 0
    code = said.error.get("code") if isinstance(said.error, dict) else None
    return code if isinstance(code, int) and _ERROR_MIN <= code <= _ERROR_MAX else 500


# What an answer says of its prompt, in the shape of each API, whole or as one event of a stream.
#
# ``prompt_tokens`` (OpenAI), ``input_tokens`` (Responses; Anthropic counts there what was not cached), or
# ``tokens.input_tokens`` (Cohere); at the top, or in ``response``, ``message`` or ``delta`` of an event.
# What transcriptions report are seconds of audio, embeddings of Cohere's API tokens in
# ``meta.billed_units``.


# Positions of Whisper's encoder: 1500 for 30 s (vllm/model_executor/models/whisper.py of 0.32).
AUDIO_TOKENS_PER_S: Final = 50


# Reports beyond it are not believed: they would be charged, and are no 64 bits.
_TOKENS_MAX: Final = 1 << 40
_Count = Annotated[int, msgspec.Meta(ge=0, le=_TOKENS_MAX)] | None
_Number = Annotated[float, msgspec.Meta(ge=0, le=_TOKENS_MAX)]


class _Details(msgspec.Struct, gc=False):
    cached_tokens: _Count = None


class _Counts(msgspec.Struct, gc=False):
    input_tokens: _Number = 0
    output_tokens: _Number = 0


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: _Count = None
    completion_tokens: _Count = None
    prompt_tokens_details: _Details | None = None
    input_tokens: _Count = None
    output_tokens: _Count = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: _Count = None
    cache_creation_input_tokens: _Count = None
    tokens: _Counts | None = None
    seconds: _Number | None = None
    cached_tokens: _Number | None = None


class _Part(msgspec.Struct, gc=False):
    """Member of an event that may carry the usage."""

    usage: _Usage | None = None


class _Meta(msgspec.Struct, gc=False):
    billed_units: _Counts | None = None


class _Answer(_Part, gc=False):
    meta: Any = None
    response: _Part | None = None
    message: Any = None
    delta: Any = None


_DECODER: Final = msgspec.json.Decoder(_Answer)


def read_usage(body: bytes) -> Usage | None:
    """The usage in a JSON answer or in one event's data; None where there is none (or null).

    Raises ``msgspec.MsgspecError`` where it is of no known shape.
    """
    answer = _DECODER.decode(body)
    usage = answer.usage
    if usage is None and answer.response is not None:
        usage = answer.response.usage
    if usage is None:
        for part in (answer.message, answer.delta):
            if usage is None and isinstance(part, dict):
                usage = msgspec.convert(part.get("usage"), _Usage | None)
    if usage is None:
        if not isinstance(answer.meta, dict):
            return None
        billed = msgspec.convert(answer.meta, _Meta).billed_units
        return None if billed is None else Usage(int(billed.input_tokens), int(billed.output_tokens))
    if usage.prompt_tokens is None:
        return _in_other_terms(usage)
    details = usage.prompt_tokens_details
    cached = None if details is None else details.cached_tokens
    return Usage(usage.prompt_tokens, usage.completion_tokens or 0, cached)


def _in_other_terms(usage: _Usage) -> Usage | None:
    if usage.tokens is not None:
        cached = None if usage.cached_tokens is None else int(usage.cached_tokens)
        return Usage(int(usage.tokens.input_tokens), int(usage.tokens.output_tokens), cached)
    if usage.input_tokens is None:
        return None if usage.seconds is None else Usage(math.ceil(usage.seconds * AUDIO_TOKENS_PER_S))
    if usage.input_tokens_details is not None:
        cached, more = usage.input_tokens_details.cached_tokens, 0
    else:
        cached = usage.cache_read_input_tokens
        more = (cached or 0) + (usage.cache_creation_input_tokens or 0)
    return Usage(usage.input_tokens + more, usage.output_tokens or 0, cached)


# A longer unfinished line is passed on in parts.
_LINE_BYTES_MAX = 256 * 1024
# Enough of what was passed on to recognise its end.
_MARK_BYTES = 256
_GOES_ON = b'"finish_reason":null'
_UNKNOWN_END = b"\0"  # of no line
_END_MARKS = (
    b"data: [DONE]",
    b"event: message_stop",
    b"event: response.completed",
    b"event: response.incomplete",
    b"event: response.failed",
)


class SseRelay:
    """One event stream on its way through. Feed it pieces, pass on what it gives back."""

    __slots__ = (
        *("_abort_mark", "_held", "_holds", "_last", "_path", "_tail", "_usual_end", "aborted"),
        *("begun", "first", "unread_usages", "usage"),
    )

    def __init__(self, path: str = "", *, replaceable: bool = False) -> None:
        """``path``: the API's, where it is known; ``replaceable``: another engine may be asked while nothing
        has been passed on."""
        self._path = path
        self._holds = replaceable
        self._held = b""
        self._abort_mark = _MARKS.get(path, b"") if replaceable else b""
        # The last event of what aborts a message or a response has the usage; of choices, it has another end.
        self._usual_end = _UNKNOWN_END if replaceable and path in _IN_CHOICES else b""
        self.aborted = False
        """The engine gave up: nothing more is to be passed on."""
        self.begun = False
        """A data line has been seen that is no opening: the first token, or an error."""
        self.first = b""
        """Its data."""
        self.usage: Usage | None = None
        self.unread_usages = 0
        self._tail = b""
        self._last = b"\n\n"

    def feed(self, data: bytes) -> bytes:
        """The bytes to pass on now; empty if only the beginning of a line has come."""
        if self._tail:
            data = self._tail + data
            self._tail = b""
        if not data.endswith((b"\n", b"\r")) and len(data) < _LINE_BYTES_MAX:
            end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            self._tail = data[end:]
            data = data[:end]
            if not data:
                return data
        if not self.begun:
            data = self._begin(data)
            if not data:
                return data
        # Not by ``in``, which tries its left side as a number first: 1,600 instructions per chunk.
        has_usage = data.find(b'"usage"') >= 0
        if has_usage or not data.endswith(self._usual_end):
            data = self._watch(data)
        if has_usage:
            self._read_usage(data)
        self._last = data if len(data) > _MARK_BYTES else self._last[-_MARK_BYTES:] + data
        return data

    @property
    def done(self) -> bool:
        """The stream's own end mark has been passed on: nothing is missing."""
        return any(mark in self._last for mark in _END_MARKS)

    @property
    def passed_on(self) -> bytes:
        """The end of what was passed on."""
        return self._last

    def end(self) -> bytes:
        """The stream ended as it should: what is left of it."""
        tail, self._held, self._tail = self._held + self._tail, b"", b""
        if b'"usage"' in tail:
            self._read_usage(tail)
        return tail

    def broken(self, error: bytes, name: bytes = b"") -> bytes:
        """The stream broke off: an event with ``error`` (a JSON object), after closing an open one."""
        last = self._last
        if last.endswith((b"\n\n", b"\n\r\n", b"\r\r")):
            closing = b""
        elif last.endswith(b"\n"):
            closing = b"\n"
        else:
            # Also after CR, which may be a line end or half of one.
            closing = b"\n\n"
        head = b"event: %b\n" % name if name else b""
        return b"%b%bdata: %b\n\n" % (closing, head, error)

    def _begin(self, data: bytes) -> bytes:
        """Return the lines to pass on up to here, while only openings have come."""
        data, self._held = self._held + data, b""
        for line in data.splitlines():
            if line.startswith(b"data:"):
                opening = _OPENINGS.get(self._path)
                if opening is None or opening.search(line) is None:
                    self.begun, self.first = True, line[5:]
                    return data
                # A background response's opening names what goes on without its client, who gets it at once.
                self._holds = self._holds and _IN_BACKGROUND.search(line) is None
            elif line.startswith(b":"):
                # A comment keeps the connection open.
                self._holds = False
        if self._holds and len(data) < _LINE_BYTES_MAX:
            self._held = data
            return b""
        self._holds = False
        return data

    def _watch(self, data: bytes) -> bytes:
        """Lines that may have the end of an answer."""
        if not self._abort_mark:
            return data
        if data.find(self._abort_mark) >= 0:
            return self._until_aborted(data)
        if self._usual_end:
            at = data.rfind(_GOES_ON)
            self._usual_end = data[at:] if at >= 0 else self._usual_end
        return data

    def _until_aborted(self, data: bytes) -> bytes:
        """The lines before the event by which the engine gave up, if one of them does."""
        passed: list[bytes] = []
        for line in data.splitlines(keepends=True):
            if line.startswith(b"data:") and event_aborted(self._path, line[5:]):
                self.aborted = True
                if passed and passed[-1].startswith(b"event:"):
                    passed.pop()
                break
            passed.append(line)
        return b"".join(passed)

    def _read_usage(self, data: bytes) -> None:
        for line in data.splitlines():
            if b'"usage"' not in line or not line.startswith(b"data:"):
                continue
            try:
                usage = read_usage(line[5:])
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self.unread_usages += 1
                continue
            if usage is not None:
                if usage.cached_tokens is None and self.usage is not None:
                    usage.cached_tokens = self.usage.cached_tokens  # told at the beginning only
                self.usage = usage
