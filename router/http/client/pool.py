"""Keep-alive connections to engines: a bounded pool per origin, and the free second try on a stale one.

An idle connection that the engine closed may look alive until it is written to. A reused connection that
dies before a byte of the answer is therefore replaced once by a fresh one, to the same engine, without
counting as a failure. Methods that must not be sent twice never reuse a connection.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec

from router.http.client.connection import UpstreamConnection, UpstreamError
from router.http.client.settings import ClientSettings
from router.http.client.stats import ClientStats
from router.http.deadlines import Sweeper, tick_for
from router.http.descriptors import ran_out

REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "POST"})
"""Inference is POSTed and may be repeated; everything else is sent at most once."""


class Origin(msgspec.Struct, gc=False):
    """Where a base URL leads, and the connections there."""

    host: str
    port: int
    tls: bool
    host_header: bytes
    path_prefix: bytes
    idle: list[UpstreamConnection]
    open: int = 0

    @classmethod
    def of(cls, base_url: str) -> Origin:
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
    """Asks engines. One per event loop; ``close`` when done. ``tls`` is for ``https://`` origins."""

    def __init__(
        self,
        settings: ClientSettings,
        stats: ClientStats,
        clock: Callable[[], float],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._stats = stats
        self._clock = clock
        self._origins: dict[str, Origin] = {}
        self._tls = tls or ssl.create_default_context()
        self._sweeper = Sweeper(clock, _tick(settings))
        self._owner: dict[UpstreamConnection, Origin] = {}
        self.configure(settings)

    def configure(self, settings: ClientSettings) -> None:
        """What holds for connections from now on."""
        self._settings = settings
        self._sweeper.tick_s = min(self._sweeper.tick_s, _tick(settings))

    def origin(self, base_url: str) -> Origin:
        """The origin of an engine; made on first use, dropped by ``forget``."""
        origin = self._origins.get(base_url)
        if origin is None:
            origin = self._origins[base_url] = Origin.of(base_url)
        return origin

    async def exchange(
        self,
        origin: Origin,
        method: str,
        head: bytes,
        body: bytes,
        head_timeout_s: float,
        *,
        once: Callable[[], None] | None = None,
    ) -> UpstreamConnection:
        """Send a request and wait for the answer's head. Raises ``UpstreamError``.

        The caller owns the connection until ``done``; when this raises (cancelled, too) it is closed.
        ``once``: the request is written once at most, and this is called right before; what it raises ends
        the exchange.
        """
        stale = False
        connection = self._reusable(origin) if method in REPEATABLE else None
        if connection is not None:
            try:
                if once is not None:
                    once()
                connection.start(method, head, body, head_timeout_s)
                while not connection.has_head():
                    await connection.changed()
            except UpstreamError as error:
                error.stale = error.reason == "reset" and not connection.answered
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
            error.sent = (
                error.sent or stale
            )  # the stale connection may have taken the request, and the engine
            raise
        try:
            if once is not None:
                once()
            connection.start(method, head, body, head_timeout_s)
            while not connection.has_head():
                await connection.changed()
        except BaseException:
            connection.abort()
            raise
        return connection

    def _reusable(self, origin: Origin) -> UpstreamConnection | None:
        while origin.idle:
            connection = origin.idle.pop()
            if connection.usable():
                return connection
        return None

    def done(self, connection: UpstreamConnection) -> None:
        """The exchange is over, whole or not: keep the connection if it can be used again."""
        if connection.release():
            idle = self._owner[connection].idle
            if len(idle) < self._settings.idle_connections_max:
                idle.append(connection)
            else:
                connection.abort()

    async def _connect(self, origin: Origin) -> UpstreamConnection:
        if origin.open >= self._settings.engine_connections_max:
            self._stats.engine_pool_overflows += 1
            raise UpstreamError("overflow", sent=False)
        origin.open += 1
        connection = UpstreamConnection(self._settings, self._stats, self._clock, self._lost)
        self._owner[connection] = origin
        self._stats.engine_connects += 1
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: connection,
                    origin.host,
                    origin.port,
                    ssl=self._tls if origin.tls else None,
                )
        except TimeoutError:
            self._lost(connection)
            raise UpstreamError("timeout", sent=False) from None
        except OSError as error:
            self._lost(connection)
            if ran_out(error):
                self._stats.descriptor_shortages += 1
                raise UpstreamError("overflow", sent=False) from None
            raise UpstreamError("refused", sent=False) from None
        except BaseException:
            connection.abort()
            self._lost(connection)
            raise
        if not connection.lost:
            self._sweeper.add(connection)
        return connection

    def _lost(self, connection: UpstreamConnection) -> None:
        origin = self._owner.pop(connection, None)
        if origin is None:
            return
        self._sweeper.discard(connection)
        origin.open -= 1
        if connection in origin.idle:
            origin.idle.remove(connection)

    def forget(self, base_url: str) -> None:
        """The engine left the fleet: close what is idle; running exchanges end by themselves."""
        origin = self._origins.pop(base_url, None)
        if origin is not None:
            while origin.idle:
                origin.idle.pop().abort()

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self._owner):
            connection.abort()
            self._lost(connection)
        self._origins.clear()


def _tick(settings: ClientSettings) -> float:
    return tick_for(
        settings.keepalive_s,
        settings.stream_head_timeout_s,
        settings.first_byte_timeout_s,
        settings.idle_timeout_s,
    )
