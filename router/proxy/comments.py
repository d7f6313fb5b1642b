"""Comments to the client of a stream that says nothing: no proxy on the way takes it for dead."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

from kvatlas.router.observe.requests import RequestRecord


class Comments:
    """A comment whenever nothing has been sent for ``every_s``, until ``cancel``; none to a client that does
    not read. ``send`` writes one, and returns what ``ClientRequest.write`` does."""

    def __init__(
        self, every_s: float, record: RequestRecord, send: Callable[[], Awaitable[None] | None]
    ) -> None:
        self._every_s = every_s
        self._record = record
        self._send = send
        self._watch()

    def _watch(self) -> None:
        self._sent_bytes = self._record.bytes_out
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._tick)

    def _tick(self) -> None:
        if self._sent_bytes == self._record.bytes_out and isinstance(waits := self._send(), Coroutine):
            waits.close()  # it does not read: the comment is not needed
        self._watch()

    def cancel(self) -> None:
        """End them."""
        self._timer.cancel()
