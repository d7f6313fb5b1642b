"""Shared state of the connections of one listener: configuration, capacity, TLS handshakes under way.

``Capacity`` counts connections, by client address too, and the bytes of request bodies. Where it is full a
connection is a *spare*: it may ask for the server's health and nothing else, so that a probe or a scrape is
answered however many connections others hold. There are few spares; the newest takes the oldest one's place.
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

import uvicorn

from router.http.settings import HandshakeStats, ListenSettings, ListenStats
from router.http.sockets import Sweeper, is_last, tick_for

PROBE_PATHS = frozenset({"/health", "/metrics", "/ready", "/version"})
"""Share that a spare connection may ask for."""
_SPARES_MAX = 64
_CLIENT_SHARE_MIN = 64
"""Connections that one address may hold, however small its share is."""


class Spare(Protocol):
    """A connection without a place."""

    def abort(self) -> None:
        """Close it at once."""


class Capacity:
    """Used from the event loop only."""

    def __init__(self, settings: ListenSettings) -> None:
        self.configure(settings)
        self._connections = 0
        self._by_client: Counter[str] = Counter()
        self._spares: OrderedDict[Spare, None] = OrderedDict()
        self.body_bytes = 0

    def configure(self, settings: ListenSettings) -> None:
        """Other bounds, for who comes from now on."""
        self._connections_max = settings.connections_max
        self._client_max = max(_CLIENT_SHARE_MIN, int(settings.connections_max * settings.client_share_max))
        self._bodies_max = settings.bodies_bytes_max

    def enter(self, client: str) -> bool:
        """A connection from this address (``client_of``) takes its place; False: there is none."""
        if self._connections >= self._connections_max:
            return False
        if client and self._by_client[client] >= self._client_max:
            return False
        self._connections += 1
        self._by_client[client] += 1
        return True

    def leave(self, client: str) -> None:
        """Its place is free."""
        self._connections -= 1
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]

    def add_spare(self, spare: Spare) -> None:
        """The oldest one goes where there are too many."""
        self._spares[spare] = None
        if len(self._spares) > _SPARES_MAX:
            oldest, _ = self._spares.popitem(last=False)
            oldest.abort()

    def drop_spare(self, spare: Spare) -> None:
        """It is closed."""
        self._spares.pop(spare, None)

    def take(self, size: int) -> bool:
        """These bytes of a body are held from now on, until ``give``; False: they would be too many."""
        if self.body_bytes + size > self._bodies_max:
            return False
        self.body_bytes += size
        return True

    def give(self, size: int) -> None:
        """They are held no more."""
        self.body_bytes -= size


def client_of(peer: object) -> str:
    """Whose connection it is: an IPv4 address, the /64 of an IPv6 address, empty where nothing tells."""
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


# The TLS handshake of one accepted connection, which counts as a connection from its first byte on.
#
# asyncio tells a protocol of a connection only after its handshake, so that half-open ones would be bounded
# by nothing but time. Here the connection is accepted plain, takes its place (``Capacity``; without one it
# is a spare), and is given to its protocol once TLS stands. Always true: a handshake ends within its
# time-out.


class Handshakes:
    """Of one listener; ``timeout_s`` is asked for at each. ``close`` ends those that are under way."""

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

    def protocol(self, inner: asyncio.Protocol) -> Handshake:
        """Of an accepted connection, before ``inner``."""
        return Handshake(self, inner)

    def close(self) -> None:
        """No protocol will get what has not shaken hands yet."""
        for handshake in list(self.open):
            handshake.abort()


@types.coroutine
def _rest(begun: Coroutine[Any, Any, Any], first: Any) -> Generator[Any, Any, Any]:
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
    """See the module."""

    def __init__(self, line: Handshakes, inner: asyncio.Protocol) -> None:
        self._line = line
        self._inner = inner
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []  # came in the packet that ended the handshake
        self._ended = False
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        line = self._line
        self._transport = cast(asyncio.Transport, transport)
        self._client = client_of(transport.get_extra_info("peername"))
        self._spare = not line.capacity.enter(self._client)
        if self._spare:
            line.capacity.add_spare(self)
        line.open.add(self)
        line.stats.descriptor_shortages += is_last(transport.get_extra_info("socket"))
        self._task = asyncio.get_running_loop().create_task(self._shake(self._transport), name="handshake")

    async def _shake(self, transport: asyncio.Transport) -> None:
        line = self._line
        tls: Any = None
        try:
            loop = asyncio.get_running_loop()
            begun = loop.start_tls(
                transport, self, line.context, server_side=True, ssl_handshake_timeout=line.timeout_s()
            )
            first = begun.send(None)
            loop.call_soon(self._feed, transport)  # behind what ``start_tls`` has put there, before a read
            tls = await _rest(begun, first)
        except (OSError, asyncio.CancelledError):  # ssl.SSLError and TimeoutError are of the former
            line.stats.handshakes_failed += 1
            transport.abort()
        finally:
            self._leave()
        if tls is not None and not self._ended:
            tls.set_protocol(self._inner)
            self._inner.connection_made(tls)
            for data in self._early:
                self._inner.data_received(data)

    def _feed(self, transport: asyncio.Transport) -> None:
        """Give TLS what came before it stood there: uvloop reads before it makes another turn."""
        data, self._early = b"".join(self._early), []
        protocol: Any = transport.get_protocol()
        while data and protocol is not self and not transport.is_closing():
            room = protocol.get_buffer(len(data))
            size = min(len(room), len(data))
            room[:size] = data[:size]
            protocol.buffer_updated(size)
            data = data[size:]

    def _leave(self) -> None:
        line = self._line
        line.open.discard(self)
        line.capacity.drop_spare(self)
        if not self._spare:
            line.capacity.leave(self._client)

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True

    def abort(self) -> None:
        """Close it at once."""
        if self._task is not None:
            self._task.cancel()
        if self._transport is not None:
            self._transport.abort()


# Configuration of one HTTP server, and what its connections share.


LINGER_S_MAX = 2.0
"""How long the rest of a request is read and dropped after an early answer such as 413, before the connection
closes. A client that is still sending needs a round trip to see the answer (RFC 9112, section 9.6)."""


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
        self._tls = tls
        self.handshakes: Handshakes | None = None
        self.lame = False
        """The server is about to end: every connection is closed with its next answer."""
        self.sweeper = Sweeper(clock, _tick(listen))
        self.configure(listen)

    def configure(self, listen: ListenSettings) -> None:
        """Set limits for new connections; existing ones keep their time-outs."""
        self.listen = listen
        self.capacity.configure(listen)
        self.sweeper.tick_s = min(self.sweeper.tick_s, _tick(listen))

    @property
    def is_ssl(self) -> bool:
        """Once it is loaded; before, uvicorn would make a context of its own."""
        return self.loaded and self._tls is not None

    def load(self) -> None:
        super().load()
        if self._tls is None:
            return
        line = self.handshakes = Handshakes(
            self._tls, self.capacity, self.listen_stats, lambda: self.listen.header_timeout_s
        )
        inner: Any = self.http_protocol_class
        self.http_protocol_class = cast(Any, lambda **given: line.protocol(inner(**given)))


def _tick(listen: ListenSettings) -> float:
    return tick_for(
        listen.header_timeout_s,
        listen.body_timeout_s,
        listen.body_grace_s,
        listen.keepalive_timeout_s,
        listen.stall_timeout_s,
        LINGER_S_MAX,
    )
