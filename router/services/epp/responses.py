"""The responses that are sent to the gateway.

Invariants: a stream ends once and nothing is sent after that; a body is sent in pieces smaller than the
gateway's initial window.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvatlas.router.http.client_head import Header
from kvatlas.router.http.h2_streams import Stream
from kvatlas.router.proxy.headers import NAMES_ENGINE
from kvatlas.router.services.epp import grpc
from kvatlas.router.services.epp import messages as m
from kvatlas.router.services.epp.grpc import message_head

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

    def send(self, *pieces: bytes) -> None:
        """Send one message, in one piece or several."""
        stream = self._stream
        if not stream.headers_sent:
            stream.send_headers(grpc.HEAD)
        stream.send_data(message_head(sum(map(len, pieces))), *pieces)

    def resume(self, kind: m.Kind) -> None:
        """Acknowledge a message without changes."""
        self.send(m.unchanged(kind))

    def choose_buffered(self, headers: bytes, metadata: bytes, body: bytes | None) -> None:
        """Send the choice in the response to a buffered body; ``body`` replaces it."""
        common = m.common_response(headers=headers, body=body, clear_route_cache=True)
        self.send(m.answer("request_body", common=common, metadata=metadata))

    def choose(self, headers: bytes, metadata: bytes) -> None:
        """Send the choice in the response to the request's headers."""
        common = m.common_response(headers=headers, clear_route_cache=True)
        self.send(m.answer("request_headers", common=common, metadata=metadata))

    def send_headers(self, had: list[Header], fields: Iterable[Header]) -> None:
        """Respond to the answer's head, once: set missing fields, remove those that may name the engine."""
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
        last = max(0, len(body) - 1) // _PIECE_BYTES * _PIECE_BYTES
        for at in range(0, last, _PIECE_BYTES):
            self._give(kind, body[at : at + _PIECE_BYTES], ends=False)
        if body or ends:
            self._give(kind, body[last:] if last else body, ends=ends)

    def _give(self, kind: m.Kind, piece: bytes, *, ends: bool) -> None:
        before, behind = m.around_piece(kind, len(piece), ends=ends)
        self.send(before, piece, behind)

    def finish(self, status: int = grpc.OK, text: str = "") -> None:
        """End the stream."""
        self.over = True
        if self._stream.headers_sent:
            self._stream.send_trailers(grpc.trailers(status, text))
        else:
            self._stream.send_headers(grpc.only_trailers(status, text), end=True)

    def reset(self, code: int) -> None:
        self.over = True
        self._stream.reset(code)
