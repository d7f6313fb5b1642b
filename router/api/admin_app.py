"""The admin API of one router: its application, and its own port if it has one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

from kvatlas.router.api.admin_actions import FleetActions
from kvatlas.router.api.admin_auth import PEER, AdminSettings, AdminStats, Authenticator
from kvatlas.router.api.admin_tokens import TokenFile
from kvatlas.router.http.asgi import Application
from kvatlas.router.http.downstream import DownstreamConnection
from kvatlas.router.http.listen_config import ListenConfig
from kvatlas.router.http.side_ports import SIDE_LISTEN, SideServer
from kvatlas.router.http.tls import Certificates, server_context

_KEYS = "admin.tls_cert_file, tls_key_file or client_ca_file"


class _Connection(DownstreamConnection):
    def shared_scope(self, transport: asyncio.BaseTransport, app_state: dict[str, Any]) -> dict[str, Any]:
        scope = super().shared_scope(transport, app_state)
        certificate = transport.get_extra_info("peercert")
        if certificate:
            scope[PEER] = common_name(certificate)
        return scope


def make_admin_server(
    app: Any, settings: AdminSettings, certificates: Certificates, sock: socket.socket | None = None
) -> SideServer:
    """Make the separate port's server, with TLS if configured; ``sock`` already listens. Raises ``TlsError``
    for unusable files.

    Invariant: with a client CA configured, no byte of a request is read from a client without a certificate
    signed by it.
    """
    context = None
    if settings.tls.given:
        context = certificates.add(server_context(settings.tls, _KEYS), settings.tls, _KEYS)
    config = ListenConfig(
        app,
        protocol=_Connection,
        host=settings.host,
        port=settings.port or 0,
        listen=SIDE_LISTEN,
        lifespan="off",
        tls=context,
    )
    return SideServer(config, name="admin API", setting="admin.port", sock=sock)


def common_name(certificate: dict[str, Any]) -> str:
    """Return the common name in a verified certificate, or its whole subject."""
    subject = [pair for part in certificate.get("subject", ()) for pair in part]
    names = [value for key, value in subject if key == "commonName"]
    return str(names[0] if names else subject or "certificate")[:64]


PREFIX = "/admin/"


class AdminApi:
    """The admin API. ``settings.enabled`` must be on.

    ``port`` False: another process has the API's own port; ``sock`` already listens there. ``settled`` is
    awaited before a change is answered. Raises ``AdminFileError`` or ``TlsError`` for unusable files.
    """

    def __init__(
        self,
        settings: AdminSettings,
        actions: FleetActions,
        *,
        clock: Callable[[], float],
        certificates: Certificates,
        port: bool = True,
        sock: socket.socket | None = None,
        settled: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._public = settings.port is None
        self.stats = AdminStats()
        self.server: SideServer | None = None
        tokens = TokenFile(Path(settings.token_file)) if settings.token_file is not None else None
        self._actions = actions
        self._settled = settled
        self._authenticator = Authenticator(
            tokens,
            mutual=settings.client_ca_file is not None,
            per_minute=settings.requests_per_minute,
            clock=clock,
        )
        if port and settings.port is not None:
            self.server = make_admin_server(self, settings, certificates, sock)

    @cached_property
    def app(self) -> Application:
        """The application, which only the process that serves it makes: it loads FastAPI."""
        from kvatlas.router.api.admin_routes import create_admin  # noqa: PLC0415

        return create_admin(self._actions, self._authenticator, self.stats, self._settled)

    def here(self, path: str) -> bool:
        """Whether the router's own port serves this path through ``__call__``."""
        return self._public and path.startswith(PREFIX)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI 3."""
        await self.app(scope, receive, send)

    def listening(self) -> AbstractAsyncContextManager[None]:
        """Keep its own port open, if it has one. Raises ``OSError`` if it cannot be bound."""
        return nullcontext() if self.server is None else self.server.listening()
