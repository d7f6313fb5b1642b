"""Read an engine's answer as the gateway shows it, and write the picker's messages to the gateway.

Invariants of reading: bytes are held until the proxy has taken them; their number is known, so that the
gateway can be throttled. Invariants of writing: a stream ends once and nothing is sent after that; a body is
sent in pieces smaller than the gateway's initial window.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable

from router.epp import grpc
from router.epp import messages as m
from router.epp.grpc import Header, message_head, own_fields
from router.http.h2_streams import Stream
from router.http.request_cycle import Message
from router.http.upstream import UpstreamError
from router.proxy.headers import NAMES_ENGINE

# Beginnings of Envoy's local replies, which are no answer of an engine.
_GATEWAYS_OWN = (b"upstream connect error", b"no healthy upstream", b"upstream request timeout")


class GatewayAnswer:
    """Implement ``router.proxy.attempt.Answer``. ``taken``: no bytes are held; ``next_event`` waits for the
    next state change and raises ``UpstreamError`` if there will be none."""

    __slots__ = ("_next_event", "_pieces", "_taken", "complete", "headers", "held_bytes", "status")

    def __init__(
        self,
        status: int,
        headers: list[Header],
        *,
        taken: Callable[[], None],
        next_event: Callable[[], Awaitable[None]],
    ) -> None:
        self.status = status
        self.headers = headers
        self.complete = False
        """Whether the gateway has shown the whole answer."""
        self.held_bytes = 0
        self._pieces: list[bytes] = []
        self._taken = taken
        self._next_event = next_event

    def add(self, piece: bytes) -> None:
        """Append the next bytes of the body."""
        if piece:
            self._pieces.append(piece)
            self.held_bytes += len(piece)

    @property
    def at_eof(self) -> bool:
        """Implement ``Answer``."""
        return self.complete and not self._pieces

    def read_nowait(self) -> bytes | None:
        """Implement ``Answer``."""
        pieces = self._pieces
        if not pieces:
            return b"" if self.complete else None
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self.held_bytes = 0
        self._taken()
        return data

    def next_event(self, step: Callable[[], bool] | None = None) -> Awaitable[None]:
        """Implement ``Answer``: a task reads the gateway's stream, so ``step`` is not used."""
        return self._next_event()

    async def read(self) -> bytes:
        """Implement ``Answer``."""
        while (data := self.read_nowait()) is None:
            await self.next_event()
        return data

    async def check_origin(self) -> None:
        """Raise ``UpstreamError`` if the gateway answered for an engine that it could not reach."""
        if self.status not in (503, 504) or (b"content-type", b"text/plain") not in self.headers:
            return
        while not self._pieces and not self.complete:
            await self.next_event()
        if self._pieces and self._pieces[0].startswith(_GATEWAYS_OWN):
            raise UpstreamError("timeout" if self.status == 504 else "refused", sent=False)


# Answers of the picker itself, sent as the gateway's reply: errors, and paths that need no engine.
#
# Pure. For an error, a header of the Inference Extension carries the reason why the request was dropped.


_DROPPED = b"x-llm-d-request-dropped-reason"
_BY_STATUS = {429: b"rejected-saturated", 503: b"rejected-no-endpoints"}
_BY_CODE = {
    b"queue_timeout": b"rejected-ttl-expired",
    b"too_many_bodies": b"rejected-saturated",
}
_CODE = re.compile(rb'"code":\s*"(\w+)"')


def dropped_reason(status: int, body: bytes) -> bytes | None:
    """Return the Inference Extension's reason for a dropped request; None if the request was not dropped."""
    if status not in _BY_STATUS:
        return None
    code = _CODE.search(body)
    return _BY_CODE.get(code[1] if code else b"", _BY_STATUS[status])


def immediate_answer(start: Message, body: bytes) -> bytes:
    """Encode this answer as an immediate response; ``start`` is its ASGI start message."""
    status = start["status"]
    headers = own_fields(start["headers"])
    reason = dropped_reason(status, body)
    if reason is not None:
        headers.append((_DROPPED, reason))
    return m.immediate(status, headers, body, f"kvatlas_{status}")


_PIECE_BYTES = 62_000


class ResponseWriter:
    """Writes responses to one stream. ``modes``: how the gateway sends bodies; ``over``: the stream has
    ended; ``shown``: the answer's head has been acknowledged."""

    __slots__ = ("_stream", "modes", "over", "shown")

    def __init__(self, stream: Stream) -> None:
        self.modes = m.Modes()
        self.over = False
        self.shown = False
        self._stream = stream

    @property
    def buffers(self) -> bool:
        """Whether the request's body comes and goes in one message."""
        return self.modes.request_body == m.BUFFERED

    @property
    def sends_body_back(self) -> bool:
        """Whether the answer's body is sent back (full duplex); otherwise it is only shown here."""
        return self.modes.response_body == m.FULL_DUPLEX

    def send(self, message: bytes) -> None:
        """Send one message."""
        self._say(message)

    def _say(self, *pieces: bytes) -> None:
        stream = self._stream
        if not stream.headers_sent:
            stream.send_headers(grpc.HEAD)
        stream.send_data(message_head(sum(map(len, pieces))), *pieces)

    def resume(self, kind: m.Kind) -> None:
        """Acknowledge a message without changes."""
        self._say(m.unchanged(kind))

    def choose_buffered(self, headers: bytes, metadata: bytes, body: bytes | None) -> None:
        """Send the choice in the response to a buffered body; ``body`` replaces it."""
        common = m.common_response(headers=headers, body=body, clear_route_cache=True)
        self.send(m.answer("request_body", common=common, metadata=metadata))

    def choose(self, headers: bytes, metadata: bytes) -> None:
        """Send the choice in the response to the request's headers."""
        common = m.common_response(headers=headers, clear_route_cache=True)
        self.send(m.answer("request_headers", common=common, metadata=metadata))

    def send_headers(self, had: list[Header], fields: Iterable[Header]) -> None:
        """Respond to the answer's head: set missing fields, and remove those that may name the engine; only
        once."""
        if self.shown:
            return
        self.shown = True
        sets = [field for field in fields if field not in had]
        removes = [name for name, _ in had if name in NAMES_ENGINE]
        if not sets and not removes:
            self.resume("response_headers")
            return
        common = m.common_response(headers=m.header_mutation(sets, removes))
        self.send(m.answer("response_headers", common=common))

    def forward(self, kind: m.Kind, body: bytes, *, ends: bool) -> None:
        """Forward a piece of an answer's body unchanged."""
        if self.sends_body_back:
            self.send_body(kind, body, ends=ends)
        else:
            self.resume(kind)

    def send_body(self, kind: m.Kind, body: bytes, *, ends: bool) -> None:
        """Send a body back."""
        last = max(0, len(body) - 1) // _PIECE_BYTES * _PIECE_BYTES
        for at in range(0, last, _PIECE_BYTES):
            self._give(kind, body[at : at + _PIECE_BYTES], ends=False)
        if body or ends:
            self._give(kind, body[last:] if last else body, ends=ends)

    def _give(self, kind: m.Kind, piece: bytes, *, ends: bool) -> None:
        before, behind = m.around_piece(kind, len(piece), ends=ends)
        self._say(before, piece, behind)

    def finish(self, status: int = grpc.OK, text: str = "") -> None:
        """End the stream."""
        self.over = True
        if self._stream.headers_sent:
            self._stream.send_trailers(grpc.trailers(status, text))
        else:
            self._stream.send_headers(grpc.only_trailers(status, text), end=True)

    def reset(self, code: int) -> None:
        """Reset the stream."""
        self.over = True
        self._stream.reset(code)
