"""An engine's answer as the gateway shows it, for the proxy.

Invariants: bytes are held until the proxy has taken them; their number is known, so that the gateway can be
throttled.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

from kvatlas.router.http.client_head import Header
from kvatlas.router.http.upstream import UpstreamError

# Beginnings of Envoy's local replies, which are no answer of an engine.
_GATEWAYS_OWN = (b"upstream connect error", b"no healthy upstream", b"upstream request timeout")


class GatewayAnswer:
    """Implement ``kvatlas.router.proxy.attempt.Answer``. ``taken``: no bytes are held; ``next_event`` waits
    for the next state change and raises ``UpstreamError`` if there will be none."""

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
        return self.complete and not self._pieces

    def read_nowait(self) -> bytes | None:
        pieces = self._pieces
        if not pieces:
            return b"" if self.complete else None
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self.held_bytes = 0
        self._taken()
        return data

    def next_event(self, step: Callable[[bytes], bool] | None = None) -> Awaitable[None]:
        """Implement ``Answer``: a task reads the gateway's stream, so ``step`` is not used."""
        return self._next_event()

    async def read(self) -> bytes:
        while (data := self.read_nowait()) is None:
            await self.next_event()
        return data

    def kept_alive(self) -> None:
        """Implement ``Answer``: gateways have time-outs of their own."""

    heard_s = math.inf
    """Implement ``Answer``."""

    def lose(self, since_s: float) -> bool:
        """Implement ``Answer``: the gateway owns the connection, and sees its end itself."""
        return False

    async def check_origin(self) -> None:
        """Raise ``UpstreamError`` if the gateway answered for an engine that it could not reach."""
        if self.status not in (503, 504) or (b"content-type", b"text/plain") not in self.headers:
            return
        while not self._pieces and not self.complete:
            await self.next_event()
        if self._pieces and self._pieces[0].startswith(_GATEWAYS_OWN):
            raise UpstreamError("timeout" if self.status == 504 else "refused", sent=False)
