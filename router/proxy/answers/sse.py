"""What the proxy looks at in an answer while passing it on: line ends, the first token, the usage.

``SseRelay`` gives every piece of an event stream back at once and unchanged, except that the beginning of a
line whose end has not arrived yet waits for it. So a client has only ever been given whole lines, and if the
engine dies in the middle of one, an error event can still be added that the client understands. Chunks are
not parsed; only lines that contain ``"usage"`` are, and the first one of a Responses stream, for its id.
"""

from __future__ import annotations

import msgspec

from router.openai.request import Usage
from router.proxy.answers.usage import read_response_id, read_usage

_LINE_BYTES_MAX = 256 * 1024  # a longer unfinished line is passed on in parts
_MARK_BYTES = 256  # enough of what was passed on to recognise its end
_END_MARKS = (
    b"data: [DONE]",
    b"event: message_stop",
    b"event: response.completed",
    b"event: response.incomplete",
    b"event: response.failed",
)


class SseRelay:
    """One event stream on its way through. Feed it pieces, pass on what it gives back."""

    __slots__ = ("_last", "_seeks_id", "_tail", "begun", "response_id", "unread_usages", "usage")

    def __init__(self, *, seeks_id: bool = False) -> None:
        """``seeks_id``: it is a Responses stream, whose first event names the response."""
        self._seeks_id = seeks_id
        self.response_id: str | None = None
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
        # Not by ``in``, which tries its left side as a number first: 1,600 instructions per chunk.
        if not self.begun and data.find(b"data:") >= 0:
            self.begun = True
        if self._seeks_id:
            self._read_id(data)
        if data.find(b'"usage"') >= 0:
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
        tail, self._tail = self._tail, b""
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
        else:  # also after CR, which may be a line end or half of one
            closing = b"\n\n"
        head = b"event: %b\n" % name if name else b""
        return b"%b%bdata: %b\n\n" % (closing, head, error)

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

    def _read_id(self, data: bytes) -> None:
        for line in data.splitlines():
            if line.startswith(b"data:"):
                self._seeks_id = False
                self.response_id = read_response_id(line[5:])
                return
