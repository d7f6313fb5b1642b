"""The admin API's own port, with TLS where configured; the router's own connections serve it.

Runs in the router's loop beside the main listener and ends with it. Always true: with a client authority
configured, no byte of a request is read from somebody without a certificate of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import structlog

from router.api.admin.routes import PEER
from router.api.admin.settings import AdminSettings
from router.api.admin.tokens import AdminFileError
from router.http.server import ProxyServer
from router.http.server_config import ListenConfig
from router.http.server_connection import ClientConnection
from router.proxy.settings import ListenSettings

_log = structlog.get_logger()
_LISTEN = ListenSettings(connections_max=64, drain_s_max=2.0, keepalive_timeout_s=10.0)


class _Connection(ClientConnection):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        certificate = transport.get_extra_info("peercert")
        if certificate:
            self._scope[PEER] = common_name(certificate)


class AdminServer(ProxyServer):
    """``await serve()`` until ``drain()``; signals are the main server's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen. Raises ``OSError``."""
        try:
            await super().startup(sockets)
        except SystemExit:  # uvicorn's way of saying that the address cannot be had
            raise OSError(f"admin.port: cannot listen on {self.config.host}:{self.config.port}") from None
        if self.started:
            _log.info("admin API listening", port=self.port, tls=self.config.is_ssl)

    @property
    def port(self) -> int:
        """The port it listens on. Only once it is ``started``."""
        number: int = self.servers[0].sockets[0].getsockname()[1]
        return number


def make_admin_server(app: Any, settings: AdminSettings) -> AdminServer:
    """The server of the separate port. Raises ``AdminFileError`` for TLS files of no use."""
    config = ListenConfig(
        app,
        protocol=_Connection,
        host=settings.host,
        port=settings.port or 0,
        listen=_LISTEN,
        lifespan="off",
        ssl_certfile=settings.tls_cert_file,
        ssl_keyfile=settings.tls_key_file,
        ssl_ca_certs=settings.client_ca_file,
        ssl_cert_reqs=ssl.CERT_REQUIRED if settings.client_ca_file else ssl.CERT_NONE,
    )
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise AdminFileError(f"admin.tls_cert_file, tls_key_file or client_ca_file: {error}") from None
    return AdminServer(config)


def common_name(certificate: dict[str, Any]) -> str:
    """The common name in a checked certificate, or its whole subject."""
    subject = [pair for part in certificate.get("subject", ()) for pair in part]
    names = [value for key, value in subject if key == "commonName"]
    return str(names[0] if names else subject or "certificate")[:64]
