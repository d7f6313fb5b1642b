"""Listen on the endpoint picker's ports, and drain them.

A drain tells gateways to use another picker (health checks at once, GOAWAY after ``drain_delay_s``), lets
running requests finish for ``drain_s_max``, and then cuts the remaining ones. Gateways are accepted until the
port closes.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import structlog

from kvatlas.router.http.asgi import Answering
from kvatlas.router.http.deadlines import Sweeper, sweep_interval_s
from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.http.h2_codec import encode_literal
from kvatlas.router.http.h2_connection import HANDSHAKE_TIMEOUT_S, STALL_TIMEOUT_S, H2Connection, StreamOpener
from kvatlas.router.http.h2_streams import Stream, StreamHandler
from kvatlas.router.http.handshakes import Handshakes
from kvatlas.router.http.hpack_decoding import Field
from kvatlas.router.http.listener import Capacity
from kvatlas.router.http.settings import ListenSettings
from kvatlas.router.http.side_ports import address_url
from kvatlas.router.http.tls import Certificates, server_context
from kvatlas.router.proxy.settings import ProxySettings
from kvatlas.router.services.epp import grpc
from kvatlas.router.services.epp.context import PickerContext
from kvatlas.router.services.epp.exchange import GatewayExchange
from kvatlas.router.services.epp.grpc import GrpcError, GrpcReader, message_frame
from kvatlas.router.services.epp.own_certificate import self_signed
from kvatlas.router.services.epp.protobuf import ProtobufError, as_text, fields, number_field
from kvatlas.router.services.epp.settings import EppSettings, EppStats, parse_listen

EXTERNAL_PROCESSOR: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_PROCESS: Final = f"/{EXTERNAL_PROCESSOR}/Process".encode()
_CHECK: Final = b"/grpc.health.v1.Health/Check"
# Service name of the probes of the Inference Extension's manifests: its light picker serves once it
# knows its pool (pkg/lwepp/server/runserver.go).
_LIGHT_PICKER: Final = "inference-extension"
_SERVING, _NOT_SERVING = 1, 2
_MESSAGE_BYTES_MAX: Final = 4096
_NOT_GRPC: Final = encode_literal(b":status", b"415")
_NOT_POST: Final = encode_literal(b":status", b"405")


def opener(context: PickerContext, *, health_only: bool = False) -> StreamOpener:
    """Return the handler of new streams of a port; ``health_only``: only health checks are answered."""

    def open_stream(stream: Stream, head: list[Field]) -> StreamHandler | None:
        told = dict(head)
        if told.get(b":method") != b"POST":
            stream.send_headers(_NOT_POST, end=True)
        elif not told.get(b"content-type", b"").startswith(b"application/grpc"):
            stream.send_headers(_NOT_GRPC, end=True)
        elif told.get(b":path") == _PROCESS and not health_only:
            return GatewayExchange(stream, context)
        elif told.get(b":path") == _CHECK:
            return HealthCall(stream, context)
        else:
            stream.send_headers(grpc.only_trailers(grpc.UNIMPLEMENTED, "no such method here"), end=True)
        return None

    return open_stream


class HealthCall:
    """One health check."""

    def __init__(self, stream: Stream, context: PickerContext) -> None:
        self._stream = stream
        self._context = context
        self._reader = GrpcReader(_MESSAGE_BYTES_MAX)

    def on_data(self, data: bytes) -> None:
        self._stream.acknowledge_data(len(data))
        if self._stream.headers_sent:
            return
        try:
            for message in self._reader.feed(data):
                self._answer(message)
                return
        except (GrpcError, ProtobufError) as error:
            self._stream.send_headers(grpc.only_trailers(grpc.INVALID_ARGUMENT, str(error)), end=True)

    def on_end(self) -> None:
        if not self._stream.headers_sent:
            text = "a check is one message"
            self._stream.send_headers(grpc.only_trailers(grpc.INVALID_ARGUMENT, text), end=True)

    def on_lost(self) -> None:
        """Implement ``StreamHandler``."""

    def _answer(self, message: bytes) -> None:
        service = as_text(dict(fields(message)).get(1, b""))
        if service in ("", "liveness"):
            serves = True
        elif service in ("readiness", EXTERNAL_PROCESSOR):
            serves = not self._context.draining and self._context.readiness()
        elif service == _LIGHT_PICKER:
            serves = self._context.synced()
        else:
            self._stream.send_headers(grpc.only_trailers(grpc.NOT_FOUND, "unknown service"), end=True)
            return
        self._stream.send_headers(grpc.HEAD)
        self._stream.send_data(message_frame(number_field(1, _SERVING if serves else _NOT_SERVING)))
        self._stream.send_trailers(grpc.trailers(grpc.OK))


_log = structlog.get_logger()
_KEYS = "epp.tls_cert_file, tls_key_file or client_ca_file"
_LOOK_S = 0.02


class PickerServer:
    """Serves the picker's ports; ``answer``: the router's. Raises ``TlsError`` for unusable files."""

    def __init__(
        self,
        answer: Answering,
        settings: EppSettings,
        *,
        proxy: ProxySettings,
        listen: ListenSettings,
        certificates: Certificates,
        clock: Callable[[], float],
        readiness: Callable[[], bool],
        synced: Callable[[], bool] = lambda: True,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._tls = self._make_tls(certificates)
        self._drains_from = self._drains_until = 0.0
        self._members: dict[H2Connection, None] = {}
        self._handshakes: Handshakes | None = None
        times_s = (HANDSHAKE_TIMEOUT_S, STALL_TIMEOUT_S, settings.request_timeout_s)
        self._context = PickerContext(
            answer,
            settings,
            proxy,
            listen.header_bytes_max,
            Capacity(listen),
            clock,
            Sweeper(clock, sweep_interval_s(*times_s, proxy.stream_head_timeout_s, proxy.idle_timeout_s)),
            readiness,
            synced,
        )
        self.addresses: dict[str, tuple[str, int]] = {}
        """Bound addresses by setting, while listening."""

    def configure(self, proxy: ProxySettings, listen: ListenSettings) -> None:
        """Change the limits of later requests."""
        context = self._context
        context.proxy, context.header_bytes_max = proxy, listen.header_bytes_max
        context.capacity.configure(listen)

    @property
    def stats(self) -> EppStats:
        """Counters for metrics."""
        return self._context.stats

    @property
    def draining(self) -> bool:
        return self._context.draining

    def _make_tls(self, certificates: Certificates) -> ssl.SSLContext | None:
        settings = self._settings
        if not settings.tls:
            return None
        if settings.files.cert is None:
            context = self_signed()
        else:
            context = certificates.add(server_context(settings.files, _KEYS), settings.files, _KEYS)
        context.set_alpn_protocols(["h2"])
        return context

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Keep the ports open for the duration of the context. Raises ``OSError`` if one cannot be bound."""
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
                    for end_unobserved in list(self._context.passing):
                        end_unobserved()
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
            self._handshakes = Handshakes(tls, room, self._context.stats, lambda: HANDSHAKE_TIMEOUT_S)

        def accepted() -> asyncio.Protocol:
            inner = H2Connection(
                opens,
                stats=self._context.stats,
                clock=self._clock,
                sweeper=self._context.sweeper,
                connections=self._members,
                connections_max=settings.connections_max,
            )
            return inner if tls is None or self._handshakes is None else self._handshakes.wrap(inner)

        try:
            server = await asyncio.get_running_loop().create_server(
                accepted, host or None, port, start_serving=False
            )
        except OSError as error:
            raise OSError(f"epp.{key}: cannot listen on {host}:{port}: {describe_error(error)}") from None
        address = server.sockets[0].getsockname()
        self.addresses[key] = (address[0], address[1])
        url = address_url(address, is_ssl=tls is not None).replace("http", "grpc", 1)
        _log.info("endpoint picker open" if key == "listen" else "health port open", url=url)
        return server

    def drain(self) -> None:
        """Begin to drain; idempotent."""
        if not self._context.draining:
            self._context.draining = True
            self._drains_from = self._clock() + self._settings.drain_delay_s
            self._drains_until = self._drains_from + self._settings.drain_s_max
            _log.info("endpoint picker drains", connections=len(self._members))

    async def drained(self) -> None:
        """Drain, and wait for running requests up to the limit."""
        self.drain()
        await asyncio.sleep(max(0.0, self._drains_from - self._clock()))
        # Connections do not signal their end.
        while self._members and self._clock() < self._drains_until:
            for member in list(self._members):
                member.drain()
            await asyncio.sleep(_LOOK_S)
