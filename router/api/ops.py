"""The ops port: metrics and ``/kvatlas/*``, which tell what others send, on a listener of their own.

Always true: unless ``server.ops_port`` is "public", the port of clients answers none of them, whatever the
spelling; from another machine they are had with a token only, unless ``server.ops_open`` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

from fastapi import Request, Response

from router.api.admin.door import Doorkeeper
from router.api.admin.tokens import TokenFile
from router.api.app import error_answer
from router.config.schema import Config
from router.http.server.server import listen_config
from router.http.server.side_server import SIDE_LISTEN, SideServer
from router.openai.errors import ApiError


class OpsPort:
    """``app`` answers everything there. Raises ``AdminFileError`` for a token file of no use."""

    def __init__(self, app: Any, config: Config, *, clock: Callable[[], float]) -> None:
        self._app = app
        self._setting = config.server.ops_port
        self._door = _door(config, clock)
        self.server: SideServer | None = None
        number = config.server.ops_listens_on
        if number is not None:
            self.server = SideServer(
                listen_config(
                    self, host=config.server.ops_host, port=number, listen=SIDE_LISTEN, lifespan="off"
                ),
                name="ops port",
                key="server.ops_port",
            )

    @property
    def base_url(self) -> str | None:
        """Where it is reached from its own machine; None where there is none, or it is not open yet."""
        return self.server.base_url if self.server is not None and self.server.started else None

    def refusal(self, path: str) -> ApiError:
        """What the public port says to somebody who asks there."""
        where = "which is off (server.ops_port)"
        if self.server is not None and self.server.started:
            where = f"port {self.server.port} of {self.server.config.host} (server.ops_port)"
        message = f"{path} is not answered on this port but on the router's ops port, {where}."
        return ApiError(404, "ops_port", message, kind="not_found_error")

    def listening(self) -> AbstractAsyncContextManager[None]:
        """The port is open, if there is one. Raises ``OSError`` where it cannot be had."""
        return nullcontext() if self.server is None else self.server.listening()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI 3, of the port."""
        answer: Any = self._app
        if self._door is not None and scope["type"] == "http":
            refused = await self._refused(Request(scope))
            answer = refused or self._app
        await answer(scope, receive, send)

    async def _refused(self, request: Request) -> Response | None:
        if self._door is None or request.url.path in {"/health", "/ready", "/version"}:
            return None
        try:
            await self._door.admit(request)
        except ApiError as error:
            return error_answer(error)
        return None


def _door(config: Config, clock: Callable[[], float]) -> Doorkeeper | None:
    """None: everybody who reaches the port may come in."""
    found = config.ops_tokens
    if found is None:
        return None
    key, path = found
    return Doorkeeper(
        TokenFile(Path(path), key),
        mutual=False,
        per_minute=config.admin.requests_per_minute,
        clock=clock,
        realm="ops",
        key=key,
        unlimited=True,
    )
