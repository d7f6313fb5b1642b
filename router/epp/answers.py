"""An engine's answer as the gateway shows it while passing it on.

Always true: bytes are held until the proxy has taken them; how many there are is known, so that the gateway
can be made to wait.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from router.epp import messages as m
from router.epp.grpc import own_fields
from router.http.client import UpstreamError
from router.http.server.request_cycle import Message

Header = tuple[bytes, bytes]
_GATEWAYS_OWN = (b"upstream connect error", b"no healthy upstream", b"upstream request timeout")
"""How a gateway's own error begins, where there is no answer of an engine."""


class GatewayAnswer:
    """Implements ``router.proxy.attempt.Answer``. ``taken``: nothing is held any more; ``changed``:
    waits for the next thing that happens, and raises ``UpstreamError`` where nothing will."""

    __slots__ = ("_changed", "_pieces", "_taken", "complete", "headers", "held_bytes", "status")

    def __init__(
        self,
        status: int,
        headers: list[Header],
        *,
        taken: Callable[[], None],
        changed: Callable[[], Awaitable[None]],
    ) -> None:
        self.status = status
        self.headers = headers
        self.complete = False
        """The gateway has shown all of it."""
        self.held_bytes = 0
        self._pieces: list[bytes] = []
        self._taken = taken
        self._changed = changed

    def add(self, piece: bytes) -> None:
        """The next bytes of the body."""
        if piece:
            self._pieces.append(piece)
            self.held_bytes += len(piece)

    @property
    def finished(self) -> bool:
        """Implement ``Answer``."""
        return self.complete and not self._pieces

    def take(self) -> bytes | None:
        """Implement ``Answer``."""
        pieces = self._pieces
        if not pieces:
            return b"" if self.complete else None
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self.held_bytes = 0
        self._taken()
        return data

    def changed(self, step: Callable[[], bool] | None = None) -> Awaitable[None]:
        """Implement ``Answer``: a task takes from the gateway's stream, so there is no ``step`` to save."""
        return self._changed()

    async def read(self) -> bytes:
        """Implement ``Answer``."""
        while (data := self.take()) is None:
            await self.changed()
        return data

    async def check_origin(self) -> None:
        """Raises ``UpstreamError`` where the gateway speaks for an engine that it could not reach."""
        if self.status not in (503, 504) or (b"content-type", b"text/plain") not in self.headers:
            return
        while not self._pieces and not self.complete:
            await self.changed()
        if self._pieces and self._pieces[0].startswith(_GATEWAYS_OWN):
            raise UpstreamError("timeout" if self.status == 504 else "refused", sent=False)


# An answer that the picker gives itself, in the gateway's place: an error, or what no engine is asked for.
#
# Pure. An error says in a header of the Inference Extension why the request was dropped.


_DROPPED = b"x-llm-d-request-dropped-reason"
_BY_STATUS = {429: b"rejected-saturated", 503: b"rejected-no-endpoints"}
_BY_CODE = {
    b"queue_timeout": b"rejected-ttl-expired",
    b"too_many_bodies": b"rejected-saturated",
}
_CODE = re.compile(rb'"code":\s*"(\w+)"')


def dropped_reason(status: int, body: bytes) -> bytes | None:
    """Why the request was dropped, where it was: in the words of the Inference Extension."""
    if status not in _BY_STATUS:
        return None
    code = _CODE.search(body)
    return _BY_CODE.get(code[1] if code else b"", _BY_STATUS[status])


def own_answer(start: Message, body: bytes) -> bytes:
    """The message with this answer; ``start`` is its head as ASGI has it."""
    status = start["status"]
    headers = own_fields(start["headers"])
    reason = dropped_reason(status, body)
    if reason is not None:
        headers.append((_DROPPED, reason))
    return m.immediate(status, headers, body, f"kvatlas_{status}")
