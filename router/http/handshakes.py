"""TLS handshakes: an accepted connection counts from its first byte on.

asyncio calls a protocol only after its handshake, so half-open connections would be limited by time alone.
Here a connection is accepted without TLS, counted by ``Capacity`` or made probe-only, and passed to its
protocol after the handshake, which ends within its time-out.
"""

from __future__ import annotations

import asyncio
import ssl
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, cast

from kvatlas.router.http.descriptors import is_last_descriptor
from kvatlas.router.http.listener import Capacity, client_key
from kvatlas.router.http.settings import HandshakeStats


class Handshakes:
    """Handshakes of one listener; ``timeout_s`` is called for each."""

    def __init__(
        self,
        context: ssl.SSLContext,
        capacity: Capacity,
        stats: HandshakeStats,
        timeout_s: Callable[[], float],
    ) -> None:
        self.context = context
        self.capacity = capacity
        self.stats = stats
        self.timeout_s = timeout_s
        self.open: set[Handshake] = set()

    def wrap(self, inner: asyncio.Protocol) -> Handshake:
        """Return the protocol of an accepted connection, which passes it to ``inner``."""
        return Handshake(self, inner)

    def close(self) -> None:
        """Abort the handshakes under way."""
        for handshake in list(self.open):
            handshake.abort()


@types.coroutine
def _await_rest(begun: Coroutine[Any, Any, Any], first: Any) -> Generator[Any, Any, Any]:
    """Return the result of a coroutine that waits for ``first`` and for nothing else."""
    try:
        yield first
    except BaseException as error:
        begun.throw(error)
        raise
    try:
        begun.send(None)
    except StopIteration as done:
        return done.value
    raise RuntimeError("start_tls waits twice")


class Handshake(asyncio.Protocol):
    """The handshake of one connection."""

    def __init__(self, handshakes: Handshakes, inner: asyncio.Protocol) -> None:
        self._handshakes = handshakes
        self._inner = inner
        self._transport: asyncio.Transport | None = None
        # Received together with the end of the handshake.
        self._early_data: list[bytes] = []
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        handshakes = self._handshakes
        self._transport = cast(asyncio.Transport, transport)
        self._client = client_key(transport.get_extra_info("peername"))
        self._probe_only = not handshakes.capacity.add_connection(self._client)
        if self._probe_only:
            handshakes.capacity.add_probe_only(self)
        handshakes.open.add(self)
        handshakes.stats.descriptor_shortages += is_last_descriptor(transport.get_extra_info("socket"))
        self._task = asyncio.get_running_loop().create_task(self._run(self._transport), name="handshake")

    async def _run(self, transport: asyncio.Transport) -> None:
        handshakes = self._handshakes
        tls: Any = None
        try:
            loop = asyncio.get_running_loop()
            begun = loop.start_tls(
                transport,
                self,
                handshakes.context,
                server_side=True,
                ssl_handshake_timeout=handshakes.timeout_s(),
            )
            first = begun.send(None)
            # After start_tls's own callback, before a read.
            loop.call_soon(self._feed_early_data, transport)
            tls = await _await_rest(begun, first)
        except (OSError, asyncio.CancelledError):
            # ssl.SSLError and TimeoutError are of the former.
            handshakes.stats.handshakes_failed += 1
            transport.abort()
        finally:
            self._release()
        if tls is not None and not self._closed:
            tls.set_protocol(self._inner)
            self._inner.connection_made(tls)
            for data in self._early_data:
                self._inner.data_received(data)

    def _feed_early_data(self, transport: asyncio.Transport) -> None:
        """Pass on bytes that arrived before TLS was set up: uvloop reads before its next turn."""
        data, self._early_data = b"".join(self._early_data), []
        protocol: Any = transport.get_protocol()
        while data and protocol is not self and not transport.is_closing():
            room = protocol.get_buffer(len(data))
            size = min(len(room), len(data))
            room[:size] = data[:size]
            protocol.buffer_updated(size)
            data = data[size:]

    def _release(self) -> None:
        handshakes = self._handshakes
        handshakes.open.discard(self)
        handshakes.capacity.remove_probe_only(self)
        if not self._probe_only:
            handshakes.capacity.remove_connection(self._client)

    def data_received(self, data: bytes) -> None:
        self._early_data.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True

    def abort(self) -> None:
        """Close at once."""
        if self._task is not None:
            self._task.cancel()
        if self._transport is not None:
            self._transport.abort()
