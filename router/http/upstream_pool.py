"""Keep-alive connections to engines: a bounded pool per origin, and one retry on a new connection.

An idle connection that the engine closed may look alive until it is written to. A reused connection that
fails before a byte of the response is therefore replaced once by a new one to the same engine, without
counting as a failure (RFC 9112, section 9.3.1). Methods that must not be sent twice never reuse one.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec

from kvatlas.router.http.deadlines import NEVER, Sweeper, sweep_interval_s
from kvatlas.router.http.descriptors import is_out_of_descriptors
from kvatlas.router.http.settings import ClientSettings, ClientStats
from kvatlas.router.http.tls import TlsFiles, client_context
from kvatlas.router.http.upstream import IDLE_CONNECTIONS_MAX, KnownAnswers, UpstreamConnection, UpstreamError

# Methods that may be sent twice. POST is inference; everything else is sent at most once.
REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "POST"})


class Origin(msgspec.Struct, gc=False):
    """Address of a base URL, and its connections."""

    host: str
    port: int
    tls: bool
    host_header: bytes
    path_prefix: bytes
    idle: list[UpstreamConnection]
    open: int = 0
    socket_path: str = ""
    """A Unix socket to connect to instead of host and port."""

    @classmethod
    def parse(cls, base_url: str) -> Origin:
        """Parse ``http(s)://host[:port][/prefix]``. Raises ``ValueError`` for anything else."""
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"not an http(s) URL: {base_url!r}")
        tls = url.scheme == "https"
        return cls(
            host=url.hostname,
            port=url.port or (443 if tls else 80),
            tls=tls,
            host_header=url.netloc.rpartition("@")[2].encode(),
            path_prefix=url.path.rstrip("/").encode(),
            idle=[],
        )


class UpstreamClient:
    """Client with a connection pool. One per event loop; ``tls`` is for ``https://`` origins."""

    def __init__(
        self,
        settings: ClientSettings,
        stats: ClientStats,
        clock: Callable[[], float],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._stats = stats
        self._clock = clock
        self.origins: dict[str, Origin] = {}
        """By base URL, those used so far."""
        self._tls = tls or client_context(TlsFiles(), "")
        self._sweeper = Sweeper(clock, _tick(settings))
        self._known = KnownAnswers()
        self._owner: dict[UpstreamConnection, Origin] = {}
        self.configure(settings)

    def configure(self, settings: ClientSettings) -> None:
        """Set limits for new connections."""
        self._settings = settings
        self._sweeper.tick_s = min(self._sweeper.tick_s, _tick(settings))

    def origin(self, base_url: str) -> Origin:
        """Return the origin of an engine, which is created on first use and removed by ``drop_origin``."""
        origin = self.origins.get(base_url)
        if origin is None:
            origin = self.origins[base_url] = Origin.parse(base_url)
        return origin

    async def request(
        self,
        origin: Origin,
        method: str,
        head: bytes,
        body: bytes | memoryview,
        head_timeout_s: float,
        *,
        once: Callable[[], None] | None = None,
        ready: Callable[[], None] | None = None,
        fresh: bool = False,
    ) -> UpstreamConnection:
        """Send a request and wait for the response's head. Raises ``UpstreamError``.

        The caller owns the connection until ``release``. It is closed if this raises or is cancelled.
        ``once``: the request is written at most once, and this is called right before; ``ready`` is called
        after the wait for a new connection. If one of them raises, nothing is sent. ``fresh``: on a
        connection of its own.
        """
        stale = False
        connection = self._pop_idle(origin) if method in REPEATABLE and not fresh else None
        if connection is not None:
            try:
                if once is not None:
                    once()
                connection.send_request(method, head, body, head_timeout_s)
                while not connection.head_received():
                    await connection.next_event()
            except UpstreamError as error:
                error.stale = error.reason == "reset" and not connection.response_started
                if not error.stale or once is not None:
                    raise
                self._stats.stale_reconnects += 1
                stale = True
            except BaseException:
                connection.abort()
                raise
            else:
                return connection
        try:
            connection = await self._connect(origin)
        except UpstreamError as error:
            # The engine may have received the request on the stale connection.
            error.sent = error.sent or stale
            raise
        try:
            _call(ready, once)
            connection.send_request(method, head, body, head_timeout_s)
            while not connection.head_received():
                await connection.next_event()
        except BaseException:
            connection.abort()
            raise
        return connection

    def _pop_idle(self, origin: Origin) -> UpstreamConnection | None:
        while origin.idle:
            connection = origin.idle.pop()
            if connection.is_available():
                return connection
        return None

    def release(self, connection: UpstreamConnection) -> None:
        """Return the connection to the pool if it can be used again; otherwise close it."""
        if connection.make_idle():
            idle = self._owner[connection].idle
            if len(idle) < IDLE_CONNECTIONS_MAX:
                idle.append(connection)
            else:
                connection.abort()

    async def _connect(self, origin: Origin) -> UpstreamConnection:
        if origin.open >= self._settings.engine_connections_max:
            self._stats.engine_pool_overflows += 1
            raise UpstreamError("overflow", sent=False)
        origin.open += 1
        connection = UpstreamConnection(
            self._settings, self._stats, self._clock, self._connection_lost, self._known
        )
        self._owner[connection] = origin
        self._stats.engine_connects += 1
        try:
            loop = asyncio.get_running_loop()
            # Ended by the sweeper: a timer would fail connections that were made while the loop was busy.
            connection.deadline = self._clock() + self._settings.connect_timeout_s
            self._sweeper.add(connection)
            async with asyncio.timeout(None) as connection.connecting:
                if origin.socket_path:
                    await loop.create_unix_connection(lambda: connection, origin.socket_path)
                else:
                    tls = self._tls if origin.tls else None
                    await loop.create_connection(lambda: connection, origin.host, origin.port, ssl=tls)
        except TimeoutError:
            self._connection_lost(connection)
            raise UpstreamError("timeout", sent=False) from None
        except OSError as error:
            self._connection_lost(connection)
            if is_out_of_descriptors(error):
                self._stats.descriptor_shortages += 1
                raise UpstreamError("overflow", sent=False) from error
            raise UpstreamError("refused", sent=False) from error
        except BaseException:
            connection.abort()
            self._connection_lost(connection)
            raise
        connection.connecting = None
        connection.deadline = NEVER
        return connection

    def _connection_lost(self, connection: UpstreamConnection) -> None:
        origin = self._owner.pop(connection, None)
        if origin is None:
            return
        self._sweeper.discard(connection)
        origin.open -= 1
        if connection in origin.idle:
            origin.idle.remove(connection)

    def drop_origin(self, base_url: str) -> None:
        """Remove an engine: close its idle connections. Requests under way end by themselves."""
        origin = self.origins.pop(base_url, None)
        if origin is not None:
            while origin.idle:
                origin.idle.pop().abort()

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self._owner):
            connection.abort()
            self._connection_lost(connection)
        self.origins.clear()


def _call(*given: Callable[[], None] | None) -> None:
    for one in given:
        if one is not None:
            one()


def _tick(settings: ClientSettings) -> float:
    return sweep_interval_s(
        settings.connect_timeout_s,
        settings.keepalive_s,
        settings.stream_head_timeout_s,
        settings.first_byte_timeout_s,
        settings.idle_timeout_s,
    )
