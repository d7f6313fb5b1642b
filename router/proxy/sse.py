"""What the proxy looks at in an answer while passing it on: line ends, the first token, the usage.

``SseRelay`` gives every piece of an event stream back at once and unchanged, except that the beginning of a
line whose end has not arrived yet waits for it. So a client has only ever been given whole lines, and if the
engine dies in the middle of one, an error event can still be added that the client understands. Chunks are
not parsed; only lines that contain ``"usage"`` are.
"""

from __future__ import annotations

import msgspec

from router.openai.request import Usage

_LINE_BYTES_MAX = 256 * 1024  # a longer unfinished line is passed on in parts
_MARK_BYTES = 32  # enough of what was passed on to recognise its end


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct, gc=False):
    usage: _Usage | None = None


_DECODER = msgspec.json.Decoder(_Answer)


def read_usage(body: bytes) -> Usage | None:
    """The usage in a JSON answer or in one event's data; None where there is none (or null).

    Raises ``msgspec.MsgspecError`` where it is not of OpenAI's shape.
    """
    usage = _DECODER.decode(body).usage
    if usage is None:
        return None
    details = usage.prompt_tokens_details
    return Usage(
        usage.prompt_tokens, usage.completion_tokens or 0, details.cached_tokens if details else None
    )


class SseRelay:
    """One event stream on its way through. Feed it pieces, pass on what it gives back."""

    __slots__ = ("_last", "_tail", "begun", "unread_usages", "usage")

    def __init__(self) -> None:
        self.begun = False
        """A data line has been seen: the first token."""
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
        if not self.begun and b"data:" in data:
            self.begun = True
        if b'"usage"' in data:
            self._read_usage(data)
        self._last = data if len(data) > _MARK_BYTES else self._last[-_MARK_BYTES:] + data
        return data

    @property
    def done(self) -> bool:
        """The stream's own end mark has been passed on: nothing is missing."""
        return b"data: [DONE]" in self._last

    def end(self) -> bytes:
        """The stream ended as it should: what is left of it."""
        tail, self._tail = self._tail, b""
        if b'"usage"' in tail:
            self._read_usage(tail)
        return tail

    def broken(self, error: bytes) -> bytes:
        """The stream broke off: an event with ``error`` (a JSON object), after closing an open one."""
        last = self._last
        if last.endswith((b"\n\n", b"\n\r\n", b"\r\r")):
            closing = b""
        elif last.endswith(b"\n"):
            closing = b"\n"
        else:  # also after CR, which may be a line end or half of one
            closing = b"\n\n"
        return b"%bdata: %b\n\n" % (closing, error)

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
                self.usage = usage
