"""The admin API of one router, as configured: its application, and its own port where it has one."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

from router.api.admin.actions import FleetActions
from router.api.admin.authenticator import Authenticator
from router.api.admin.listener import make_admin_server
from router.api.admin.routes import PREFIX, create_admin
from router.api.admin.settings import AdminSettings
from router.api.admin.stats import AdminStats
from router.api.admin.tokens import TokenFile
from router.http.server.side_server import SideServer
from router.http.tls import Certificates


class AdminApi:
    """``settings.enabled`` must be on. ``port`` False: another process has the API's own port; ``sock``
    listens there already. ``settled`` is awaited before a change is answered. Raises ``AdminFileError`` or
    ``TlsError`` for files of no use."""

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
        authenticator = Authenticator(
            tokens,
            mutual=settings.client_ca_file is not None,
            per_minute=settings.requests_per_minute,
            clock=clock,
        )
        self._app: Any = create_admin(actions, authenticator, self.stats, settled)
        if port and settings.port is not None:
            self.server = make_admin_server(self._app, settings, certificates, sock)

    def here(self, path: str) -> bool:
        """Whether the router's own port serves this path by ``__call__``."""
        return self._public and path.startswith(PREFIX)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI 3."""
        await self._app(scope, receive, send)

    def listening(self) -> AbstractAsyncContextManager[None]:
        """Keep its own port open, if it has one. Raises ``OSError`` if it cannot be bound."""
        return nullcontext() if self.server is None else self.server.listening()
