"""What the picker says to a gateway on one stream: its choice, the bodies it gives back, the end.

Always true: a stream is ended once, and nothing is said after that; a body is given back in pieces below the
window that gateways begin with.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.epp import grpc
from router.epp import messages as m
from router.epp.grpc import Header, message_head
from router.http.h2.stream import Stream
from router.proxy.headers import NAMES_ENGINE

_PIECE_BYTES = 62_000


class ResponseWriter:
    """``modes``: how the gateway sends bodies; ``over``: nothing more is said; ``shown``: the answer's head
    has been answered to."""

    __slots__ = ("_stream", "modes", "over", "shown")

    def __init__(self, stream: Stream) -> None:
        self.modes = m.Modes()
        self.over = False
        self.shown = False
        self._stream = stream

    @property
    def buffers(self) -> bool:
        """The request's body comes and goes in one message."""
        return self.modes.request_body == m.BUFFERED

    @property
    def gives_back(self) -> bool:
        """The answer's body is given back, as in full duplex; else it is only shown here."""
        return self.modes.response_body == m.FULL_DUPLEX

    def say(self, message: bytes) -> None:
        """One message."""
        self._say(message)

    def _say(self, *pieces: bytes) -> None:
        stream = self._stream
        if not stream.begun:
            stream.send_headers(grpc.HEAD)
        stream.send(message_head(sum(map(len, pieces))), *pieces)

    def go_on(self, kind: m.Kind) -> None:
        """Nothing of this is changed."""
        self._say(m.go_on(kind))

    def choose_buffered(self, headers: bytes, metadata: bytes, body: bytes | None) -> None:
        """The choice, in the answer to a buffered body; ``body`` replaces it."""
        common = m.common_response(headers=headers, body=body, clear_route_cache=True)
        self.say(m.answer("request_body", common=common, metadata=metadata))

    def choose(self, headers: bytes, metadata: bytes) -> None:
        """The choice, in the answer to the request's headers."""
        common = m.common_response(headers=headers, clear_route_cache=True)
        self.say(m.answer("request_headers", common=common, metadata=metadata))

    def show(self, had: list[Header], fields: Iterable[Header]) -> None:
        """Answer to the answer's head, with the fields that it does not have, and without those that may name
        the engine; only once."""
        if self.shown:
            return
        self.shown = True
        sets = [field for field in fields if field not in had]
        removes = [name for name, _ in had if name in NAMES_ENGINE]
        if not sets and not removes:
            self.go_on("response_headers")
            return
        common = m.common_response(headers=m.header_mutation(sets, removes))
        self.say(m.answer("response_headers", common=common))

    def pass_on(self, kind: m.Kind, body: bytes, *, ends: bool) -> None:
        """A piece of an answer's body that is not changed."""
        if self.gives_back:
            self.give(kind, body, ends=ends)
        else:
            self.go_on(kind)

    def give(self, kind: m.Kind, body: bytes, *, ends: bool) -> None:
        """Give a body back."""
        last = max(0, len(body) - 1) // _PIECE_BYTES * _PIECE_BYTES
        for at in range(0, last, _PIECE_BYTES):
            self._give(kind, body[at : at + _PIECE_BYTES], ends=False)
        if body or ends:
            self._give(kind, body[last:] if last else body, ends=ends)

    def _give(self, kind: m.Kind, piece: bytes, *, ends: bool) -> None:
        before, behind = m.around_piece(kind, len(piece), ends=ends)
        self._say(before, piece, behind)

    def finish(self, status: int = grpc.OK, text: str = "") -> None:
        """Nothing more will be said."""
        self.over = True
        if self._stream.begun:
            self._stream.finish(grpc.trailers(status, text))
        else:
            self._stream.send_headers(grpc.only_trailers(status, text), end=True)

    def reset(self, code: int) -> None:
        """End it at once."""
        self.over = True
        self._stream.reset(code)
