"""Read an engine's answer as the gateway shows it while forwarding it.

Invariants: bytes are held until the proxy has taken them; their number is known, so that the gateway can be
throttled.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from router.epp import messages as m
from router.epp.grpc import own_fields
from router.http.request_cycle import Message
from router.http.upstream import UpstreamError

Header = tuple[bytes, bytes]
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
