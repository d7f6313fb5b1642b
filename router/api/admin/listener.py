"""The admin API's own port, with TLS where configured; the router's own connections serve it.

Always true: with a client authority configured, no byte of a request is read from somebody without a
certificate of it.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from router.api.admin.authenticator import PEER
from router.api.admin.settings import AdminSettings
from router.http.server.config import ListenConfig
from router.http.server.connection.client_connection import ClientConnection
from router.http.server.side_server import SIDE_LISTEN, SideServer
from router.http.tls import Certificates, server_context

_KEYS = "admin.tls_cert_file, tls_key_file or client_ca_file"


class _Connection(ClientConnection):
    def shared_scope(self, transport: asyncio.BaseTransport, app_state: dict[str, Any]) -> dict[str, Any]:
        scope = super().shared_scope(transport, app_state)
        certificate = transport.get_extra_info("peercert")
        if certificate:
            scope[PEER] = common_name(certificate)
        return scope


def make_admin_server(
    app: Any, settings: AdminSettings, certificates: Certificates, sock: socket.socket | None = None
) -> SideServer:
    """The server of the separate port; ``sock`` listens already. Raises ``TlsError`` for TLS files of no
    use."""
    context = None
    if settings.tls.given:
        context = certificates.hold(server_context(settings.tls, _KEYS), settings.tls, _KEYS)
    config = ListenConfig(
        app,
        protocol=_Connection,
        host=settings.host,
        port=settings.port or 0,
        listen=SIDE_LISTEN,
        lifespan="off",
        tls=context,
    )
    return SideServer(config, name="admin API", key="admin.port", sock=sock)


def common_name(certificate: dict[str, Any]) -> str:
    """The common name in a checked certificate, or its whole subject."""
    subject = [pair for part in certificate.get("subject", ()) for pair in part]
    names = [value for key, value in subject if key == "commonName"]
    return str(names[0] if names else subject or "certificate")[:64]
