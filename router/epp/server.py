"""The ports of the endpoint picker: listen, and drain.

A drain tells gateways to go elsewhere (health checks say so at once, GOAWAY after ``drain_delay_s``), lets
what runs finish for ``drain_s_max``, and cuts what is left. Gateways are let in until the port closes.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import structlog

from router.epp.calls import opener
from router.epp.certificate import self_signed
from router.epp.context import PickerContext
from router.epp.settings import EppSettings, EppStats, parse_listen
from router.http.deadlines import Sweeper, tick_for
from router.http.h2.connection import H2Connection
from router.http.reasons import reason_of
from router.http.server.capacity import Capacity
from router.http.server.handshake import Handshakes
from router.http.server.settings import ListenSettings
from router.http.server.side_server import address_url
from router.http.tls import Certificates, server_context
from router.proxy.settings import ProxySettings

_log = structlog.get_logger()
_KEYS = "epp.tls_cert_file, tls_key_file or client_ca_file"
_LOOK_S = 0.02


class PickerServer:
    """``app`` is the router as an ASGI application. Raises ``TlsError`` for files of no use."""

    def __init__(
        self,
        app: Any,
        settings: EppSettings,
        *,
        proxy: ProxySettings,
        listen: ListenSettings,
        certificates: Certificates,
        clock: Callable[[], float],
        readiness: Callable[[], bool],
        synced: Callable[[], bool] = lambda: True,
        endpoints: Callable[[], list[str]] = list,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._tls = self._make_tls(certificates)
        self._drains_from = self._drains_until = 0.0
        self._members: set[H2Connection] = set()
        self._handshakes: Handshakes | None = None
        times_s = (settings.handshake_timeout_s, settings.stall_timeout_s, settings.request_timeout_s)
        self._context = PickerContext(
            app,
            settings,
            proxy,
            listen.header_bytes_max,
            Capacity(listen),
            clock,
            Sweeper(clock, tick_for(*times_s, proxy.stream_head_timeout_s, proxy.idle_timeout_s)),
            readiness,
            synced,
            endpoints,
        )
        self.addresses: dict[str, tuple[str, int]] = {}
        """Where it listens, by setting, once it does."""

    def configure(self, proxy: ProxySettings, listen: ListenSettings) -> None:
        """Limits of requests from now on."""
        context = self._context
        context.proxy, context.header_bytes_max = proxy, listen.header_bytes_max
        context.capacity.configure(listen)

    @property
    def stats(self) -> EppStats:
        """Counters for metrics."""
        return self._context.stats

    @property
    def draining(self) -> bool:
        """It is about to end."""
        return self._context.draining

    def _make_tls(self, certificates: Certificates) -> ssl.SSLContext | None:
        settings = self._settings
        if not settings.tls:
            return None
        if settings.files.cert is None:
            context = self_signed()
        else:
            context = certificates.hold(server_context(settings.files, _KEYS), settings.files, _KEYS)
        context.set_alpn_protocols(["h2"])
        return context

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """The ports are open for as long as the context lasts. Raises ``OSError`` where one cannot be had."""
        servers = [await self._bind("listen", self._tls, health_only=False)]
        try:
            if self._settings.health_listen:
                servers.append(await self._bind("health_listen", None, health_only=True))
            async with asyncio.TaskGroup() as tasks:
                self._context.tasks = tasks
                for server in servers:
                    await server.start_serving()
                try:
                    yield
                finally:
                    await self.drained()
                    for member in list(self._members):
                        member.abort()
                    for let_go in list(self._context.passing):
                        let_go()
        finally:
            self._context.tasks = None
            for server in servers:
                server.close()
            if self._handshakes is not None:
                self._handshakes.close()

    async def _bind(self, key: str, tls: ssl.SSLContext | None, *, health_only: bool) -> asyncio.Server:
        host, port = parse_listen(getattr(self._settings, key))
        opens = opener(self._context, health_only=health_only)
        settings = self._settings
        if tls is not None:
            room = Capacity(ListenSettings(connections_max=settings.connections_max, client_share_max=1.0))
            self._handshakes = Handshakes(
                tls, room, self._context.stats, lambda: settings.handshake_timeout_s
            )

        def accepted() -> asyncio.Protocol:
            inner = H2Connection(
                opens,
                settings,
                stats=self._context.stats,
                clock=self._clock,
                sweeper=self._context.sweeper,
                members=self._members,
            )
            return inner if tls is None or self._handshakes is None else self._handshakes.protocol(inner)

        try:
            server = await asyncio.get_running_loop().create_server(
                accepted, host or None, port, start_serving=False
            )
        except OSError as error:
            raise OSError(f"epp.{key}: cannot listen on {host}:{port}: {reason_of(error)}") from None
        address = server.sockets[0].getsockname()
        self.addresses[key] = (address[0], address[1])
        url = address_url(address, is_ssl=tls is not None).replace("http", "grpc", 1)
        _log.info("endpoint picker open" if key == "listen" else "health port open", url=url)
        return server

    def drain(self) -> None:
        """Begin to end; idempotent."""
        if not self._context.draining:
            self._context.draining = True
            self._drains_from = self._clock() + self._settings.drain_delay_s
            self._drains_until = self._drains_from + self._settings.drain_s_max
            _log.info("endpoint picker drains", connections=len(self._members))

    async def drained(self) -> None:
        """Drain, and wait for what runs as long as it may take."""
        self.drain()
        await asyncio.sleep(max(0.0, self._drains_from - self._clock()))
        while self._members and self._clock() < self._drains_until:  # connections tell nobody
            for member in list(self._members):
                member.drain()
            await asyncio.sleep(_LOOK_S)
