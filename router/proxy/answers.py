"""Parts of an answer that the proxy reads while passing it on: usage, beginning, and end.

``SseRelay`` gives every event of a stream back at once and unchanged; what has come of an event waits for its
end. So a client has only ever been given whole events, and if the engine dies in the middle of one, an error
event can still be added that the client understands. Chunks are not decoded, but for those that have
``"usage"``, those that may be an error or an abort, and those before the first token. Where another engine
could be asked instead, openings wait for the first token (``events``), and comments pass. Pure.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from kvatlas.router.openai.apis import BATCH, CHAT, COMPLETION, GENERATE, MESSAGES, RESPONSES
from kvatlas.router.openai.request import Usage
from kvatlas.router.proxy.events import (
    ERROR_MARK,
    EVENT_ENDS,
    Kind,
    Said,
    abort_mark,
    blocks,
    data_of,
    ends_line_of,
    in_background,
    is_comment,
    last_event_end,
    names_opening,
    read_event,
    tokens_in,
)
from kvatlas.router.proxy.stream_usage import UsageFilter
from kvatlas.router.proxy.usage_reports import read_usage

# A longer unfinished event is passed on in parts, and so are openings that are longer together.
_EVENT_BYTES_MAX = 256 * 1024
_HELD_BYTES_MAX = 4 << 20
# Within which an event is named.
_NAME_BYTES_MAX = 1024
# Enough of what was passed on to recognise its end.
_MARK_BYTES = 256
# APIs whose events have a ``finish_reason``, null but in the last one.
_IN_CHOICES: Final = frozenset({CHAT, COMPLETION, GENERATE, BATCH})
_GOES_ON = b'"finish_reason":null'
_REASON = b'"finish_reason"'
_UNKNOWN_END = b"\0"  # of no event
# APIs that name their events: the names of those that come by the hundred.
_DELTAS: Final = {
    MESSAGES: (b"event: content_block_delta\n",),
    RESPONSES: (b"event: response.output_text.delta\n", b"event: response.reasoning_text.delta\n"),
}
_COLON = ord(":")
# Of a stream that has said its end: nothing is missing.
_ENDED = re.compile(
    rb"^data: ?\[DONE\]|^event: ?(?:message_stop|message-end|response\.(?:completed|incomplete|failed))",
    re.MULTILINE,
)


class SseRelay:
    """One event stream on its way through. Feed it pieces, pass on what it gives back.

    Invariants: what is given back are whole events, but for one that is too long to wait for its end; while
    openings are held, comments pass, so that they keep the connection open.
    """

    __slots__ = (
        "_abort_mark",
        "_filter",
        "_held",
        "_held_bytes",
        "_holds",
        "_last",
        "_opened",
        "_partial",
        "_path",
        "_replaceable",
        "_tail",
        "_tail_seen",
        "_usual_end",
        "_usual_start",
        "aborted",
        "begun",
        "count",
        "error",
        "exposed",
        "failed",
        "given_up",
        "said",
        "unread_usages",
        "usage",
        "waits",
    )

    def __init__(self, path: str = "", *, replaceable: bool = False, hides_usage: bool = False) -> None:
        """``path``: the API's, where it is known; ``replaceable``: another engine may be asked while no
        opening and no token has been passed on; ``hides_usage``: its client has not asked for usage."""
        self._path = path
        self._filter = UsageFilter() if hides_usage else None
        self._replaceable = self._holds = replaceable
        self._held: list[bytes] = []
        self._held_bytes = 0
        # The beginning of an opening too long to wait for its end has been passed on.
        self._partial = False
        self._abort_mark = abort_mark(path)
        # An event that ends, or begins, like this is neither an error nor the end.
        self._usual_start = _DELTAS.get(path, b"")
        self._usual_end = _UNKNOWN_END if path not in _DELTAS else b"\n\n"
        self.aborted = False
        """The engine gave up: nothing more is to be passed on."""
        self.given_up = False
        """It gave up an answer that cannot be replaced, and has been passed on."""
        self.failed = 0
        """Status of the first error; 0: there was none."""
        self.exposed = False
        """An opening has been passed on: only the engine that it names can go on."""
        self.begun = False
        """A token has come, an error, or the end."""
        self.said = Said(Kind.OPENING)
        """By what it began."""
        self.error = b""
        """Data of the first error."""
        self.waits = False
        """The last piece was no part of an answer: comments or openings. To be reset by the reader."""
        self.count = 0
        """Events with tokens in the last piece, about one for each."""
        self.usage: Usage | None = None
        self.unread_usages = 0
        self._tail = bytearray()
        self._tail_seen = 0
        self._last = self._opened = b"\n\n"

    def passes(self, data: bytes) -> bool:
        """Whether this piece of a stream that has begun is one whole event, and only a part of the answer:
        most are. It is to be passed on then, as one token."""
        usual = (
            self.begun
            and not self._tail
            and data.endswith(self._usual_end)
            and data.startswith(self._usual_start)
            and data.count(b"\n\n") == 1
            # Not by ``in``, which tries its left side as a number first: 1,600 instructions per chunk.
            and data.find(b'"usage"') < 0
            # Of several answers in one event, the last one says nothing of the others.
            and data.find(_REASON, 0, -len(self._usual_end)) < 0
        )
        if usual:
            self._last = data
        return usual

    def feed(self, data: bytes) -> bytes:
        """The bytes to pass on now; empty if no event has ended, or openings are held."""
        if self.passes(data):
            self.count = 1
            return data
        # By far the most pieces are whole events.
        if (self._tail or not data.endswith(EVENT_ENDS)) and not (data := self._whole(data)):
            self.count, self.waits = 0, not self.begun
            return data
        if not self.begun:
            if not (data := self._begin(data)):
                return data
        elif data[0] == _COLON:
            self.waits = all(map(is_comment, blocks(data)))
        data = self._watch(data)
        self.count = tokens_in(self._path, data)
        if data.find(b'"usage"') >= 0:
            self._read_usage(data)
        if self._filter is not None:
            data = self._filter.feed(data)
        self._last = data if len(data) > _MARK_BYTES else self._last[-_MARK_BYTES:] + data
        return data

    @property
    def passing(self) -> bool:
        """Something of an answer has been passed on, or ends what was held: an opening, a token, an error."""
        return self.begun or self.exposed

    @property
    def done(self) -> bool:
        """The stream's own end mark has been passed on: nothing is missing."""
        return _ENDED.search(self._last.replace(b"\r", b"\n")) is not None

    def take_back(self) -> None:
        """Note that the piece with the first token has not been passed on."""
        self._last = self._opened

    @property
    def passed_on(self) -> bytes:
        """The end of what was passed on."""
        return self._last

    def end(self) -> bytes:
        """The stream ended as it should: what is left of it. An event without its blank line counts too."""
        rest = bytes(self._tail)
        self._tail.clear()
        if not self.begun:
            rest = self._begin(rest)
            held = b"".join(self._held)
            self._held.clear()
            rest, self.begun = held + rest, True
        if rest:
            rest = self._watch(rest)
        if rest.find(b'"usage"') >= 0:
            self._read_usage(rest)
        return rest if self._filter is None else self._filter.feed(rest) + self._filter.rest()

    def broken(self, error: bytes, name: bytes = b"") -> bytes:
        """The stream broke off: an event with ``error`` (a JSON object), after the whole lines that came."""
        came = b"" if self._filter is None else self._filter.rest()
        if self._tail and not self._holds:
            came += bytes(self._tail[: max(self._tail.rfind(b"\n"), self._tail.rfind(b"\r")) + 1])
        last = came or self._last
        if last.endswith(EVENT_ENDS):
            closing = b""
        elif last.endswith(b"\n"):
            closing = b"\n"
        else:
            # Also after CR, which may be a line end or half of one.
            closing = b"\n\n"
        head = b"event: %b\n" % name if name else b""
        return b"%b%b%bdata: %b\n\n" % (came, closing, head, error)

    def _whole(self, data: bytes) -> bytes:
        """The whole events up to here; what follows them is kept for the next piece."""
        tail = self._tail
        tail += data
        # A blank line may have begun in the piece before.
        end = last_event_end(tail, max(0, self._tail_seen - 2))
        if not end and len(tail) >= (_HELD_BYTES_MAX if self._holds else _EVENT_BYTES_MAX):
            end, self._holds = len(tail), False
            # Any other one counts as the first token, which the lease must cover.
            self._partial = not self.begun and (self._partial or names_opening(tail[:_NAME_BYTES_MAX]))
        whole = bytes(tail[:end])
        del tail[:end]
        self._tail_seen = len(tail)
        return whole

    def _begin(self, data: bytes) -> bytes:
        """Whole events, of which none before was a token: those to be passed on now."""
        self.waits = True
        out: list[bytes] = []
        found = blocks(data)
        for block in found:
            if self._partial:
                self.exposed, self._partial = True, last_event_end(block) < len(block)
                out += (*self._held, block)
                self._held.clear()
                continue
            if self._held and ends_line_of(block, self._held[-1]):
                self._held[-1] += block
                continue
            if is_comment(block):
                out.append(block)
                continue
            value = data_of(block)
            said = read_event(self._path, value)
            if said.kind is Kind.ABORT and self._replaceable:
                self.aborted = True
                break
            if said.kind is not Kind.OPENING:
                self.begun, self.said, self._opened = True, said, self._last
                out += (*self._held, block, *found)
                self._held.clear()
                self.waits = False
                break
            self._held.append(block)
            self._held_bytes += len(block)
            # A background response goes on without its client, who gets its name at once.
            if self._held_bytes > _HELD_BYTES_MAX or in_background(value):
                self._holds = False
            if not self._holds:
                self.exposed = True
                out += self._held
                self._held.clear()
        return b"".join(out)

    def _watch(self, data: bytes) -> bytes:
        """Events that may have an error or the end of an answer: those to be passed on."""
        if data.find(ERROR_MARK) < 0 and data.find(self._abort_mark) < 0:
            # The next one that ends like this one needs no second look.
            if self._path in _IN_CHOICES and self.begun:
                at = data.rfind(_GOES_ON)
                self._usual_end = data[at:] if at >= 0 else self._usual_end
            return data
        passed: list[bytes] = []
        for block in blocks(data):
            value = data_of(block)
            said = read_event(self._path, value)
            if said.kind is Kind.ABORT:
                self.aborted, self.given_up = self._replaceable, not self._replaceable
                if self.aborted:
                    break
            elif said.kind is Kind.ERROR and not self.failed:
                self.failed, self.error = said.status, value or b""
            passed.append(block)
        return b"".join(passed)

    def _read_usage(self, data: bytes) -> None:
        for block in blocks(data):
            if block.find(b'"usage"') < 0 or (value := data_of(block)) is None:
                continue
            try:
                usage = read_usage(value)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self.unread_usages += 1
                continue
            if usage is not None:
                if usage.cached_tokens is None and self.usage is not None:
                    usage.cached_tokens = self.usage.cached_tokens  # told at the beginning only
                self.usage = usage
