"""Shared state of the connections of one listener: configuration, capacity, TLS handshakes under way.

``Capacity`` counts connections, also by client address, and the bytes of request bodies. A connection beyond
the limit is *probe-only*: it may request ``PROBE_PATHS`` and nothing else, so that probes and scrapes are
answered regardless of the number of other connections. There are few of them; a new one replaces the oldest.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
import time
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Protocol, cast

import structlog
import uvicorn

from kvatlas.router.http.client_head import ClientHead
from kvatlas.router.http.deadlines import Sweeper, sweep_interval_s
from kvatlas.router.http.descriptors import is_last_descriptor
from kvatlas.router.http.known_heads import KnownHeads
from kvatlas.router.http.settings import HandshakeStats, ListenSettings, ListenStats
from kvatlas.router.openai.errors import ApiError

_log = structlog.get_logger()

# Paths that a probe-only connection may request.
PROBE_PATHS = frozenset({"/health", "/metrics", "/ready", "/version"})
_PROBE_ONLY_MAX = 64
# Connections that one address may have regardless of its share.
_CLIENT_SHARE_MIN = 64


class ProbeOnlyConnection(Protocol):
    """A connection beyond the capacity."""

    def abort(self) -> None:
        """Close at once."""


class Capacity:
    """Connections and body bytes of one server, and their limits; used from the event loop only."""

    def __init__(self, settings: ListenSettings) -> None:
        self.configure(settings)
        self._connections = 0
        self._by_client: Counter[str] = Counter()
        self._probe_only: OrderedDict[ProbeOnlyConnection, None] = OrderedDict()
        self.body_bytes = 0

    def configure(self, settings: ListenSettings) -> None:
        """Set the limits for new connections and bodies."""
        self._connections_max = settings.connections_max
        self._client_max = max(_CLIENT_SHARE_MIN, int(settings.connections_max * settings.client_share_max))
        self._bodies_max = settings.bodies_bytes_max

    def add_connection(self, client: str) -> bool:
        """Count a connection of this address (``client_key``). False: the limit is reached."""
        if self._connections >= self._connections_max:
            return False
        if client and self._by_client[client] >= self._client_max:
            return False
        self._connections += 1
        self._by_client[client] += 1
        return True

    def remove_connection(self, client: str) -> None:
        """Remove a counted connection."""
        self._connections -= 1
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]

    def add_probe_only(self, connection: ProbeOnlyConnection) -> None:
        """Add a probe-only connection; close the oldest one if there are too many."""
        self._probe_only[connection] = None
        if len(self._probe_only) > _PROBE_ONLY_MAX:
            oldest, _ = self._probe_only.popitem(last=False)
            oldest.abort()

    def remove_probe_only(self, connection: ProbeOnlyConnection) -> None:
        """Remove a closed probe-only connection."""
        self._probe_only.pop(connection, None)

    def reserve_body(self, size: int) -> bool:
        """Count body bytes until ``release_body``. False: the limit is reached."""
        if self.body_bytes + size > self._bodies_max:
            return False
        self.body_bytes += size
        return True

    def release_body(self, size: int) -> None:
        """Subtract body bytes that are no longer buffered."""
        self.body_bytes -= size


def client_key(peer: object) -> str:
    """Return the client of an address: IPv4 address, /64 of an IPv6 address, empty if unknown."""
    if not isinstance(peer, tuple):
        return ""
    host = str(peer[0])
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


# TLS handshakes: an accepted connection counts from its first byte on.
#
# asyncio calls a protocol only after its handshake, so half-open connections would be limited by time alone.
# Here a connection is accepted without TLS, counted by ``Capacity`` or made probe-only, and passed to its
# protocol after the handshake, which ends within its time-out.


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


_LINES_PER_S_MAX = 10


class RejectionLog:
    """Log lines of requests that are refused before an application sees them, at most ten a second: any
    client can cause them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._second = self._lines = self._unsaid = 0

    def note(self, error: ApiError, request_id: bytes, client: str) -> None:
        """Log one, or count it for the next line."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._lines = second, 0
        self._lines += 1
        if self._lines > _LINES_PER_S_MAX:
            self._unsaid += 1
            return
        more = {"unsaid": self._unsaid} if self._unsaid else {}
        self._unsaid = 0
        _log.warning(
            "request rejected",
            status=error.status,
            code=error.code,
            request_id=request_id.decode("latin-1"),
            client=client,
            **more,
        )


# Configuration of one HTTP server, and what its connections share.


# How far a body may fall behind ``body_bytes_per_s_min``, at its start too.
BODY_GRACE_S = 30.0
# Seconds for which the rest of a request is discarded after an early response such as 413, before the close.
# A client that is still sending needs a round trip to see the answer (RFC 9112, section 9.6).
LINGER_S_MAX = 2.0


class ListenConfig(uvicorn.Config):
    """uvicorn's configuration with everything off that the proxied path does not need."""

    def __init__(
        self,
        app: Any,
        *,
        protocol: type[Any],
        host: str = "127.0.0.1",
        port: int = 8000,
        listen: ListenSettings | None = None,
        stats: ListenStats | None = None,
        clock: Callable[[], float] = time.monotonic,
        tls: ssl.SSLContext | None = None,
        **options: Any,
    ) -> None:
        defaults: dict[str, Any] = {
            "http": protocol,
            "ws": "none",
            "loop": "auto",
            "interface": "asgi3",
            "access_log": False,
            "log_config": None,
            "log_level": "warning",
            "proxy_headers": False,
            "server_header": False,
            "date_header": False,
        }
        super().__init__(app, host=host, port=port, **{**defaults, **options})
        listen = listen or ListenSettings()
        self.listen_stats = stats or ListenStats()
        self.clock = clock
        self.capacity = Capacity(listen)
        self.rejections = RejectionLog(clock)
        self._tls = tls
        self.handshakes: Handshakes | None = None
        self.draining = False
        """The server is shutting down: each connection closes after its next response."""
        self.heads = KnownHeads[ClientHead]()
        self.sweeper = Sweeper(clock, _sweep_interval_s(listen))
        self.configure(listen)

    def configure(self, listen: ListenSettings) -> None:
        """Set limits for new connections; existing ones keep their time-outs."""
        self.listen = listen
        self.capacity.configure(listen)
        self.sweeper.tick_s = min(self.sweeper.tick_s, _sweep_interval_s(listen))

    @property
    def is_ssl(self) -> bool:
        """Whether TLS is used. False before ``load``: uvicorn would create a context of its own."""
        return self.loaded and self._tls is not None

    def load(self) -> None:
        super().load()
        if self._tls is None:
            return
        handshakes = self.handshakes = Handshakes(
            self._tls, self.capacity, self.listen_stats, lambda: self.listen.header_timeout_s
        )
        inner: Any = self.http_protocol_class
        self.http_protocol_class = cast(Any, lambda **given: handshakes.wrap(inner(**given)))


def _sweep_interval_s(listen: ListenSettings) -> float:
    return sweep_interval_s(
        listen.header_timeout_s,
        listen.body_timeout_s,
        BODY_GRACE_S,
        listen.keepalive_timeout_s,
        listen.stall_timeout_s,
        LINGER_S_MAX,
    )
