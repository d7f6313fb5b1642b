"""The ops port: metrics and ``/kvatlas/*``, which tell what others send, on a listener of their own.

A browser may be led here by a page of another name (DNS rebinding), so that a port that wants no token
answers by names of this machine alone: its addresses, as probes and scrapes have them, ``localhost``, and
those that settings give. Always true: unless ``server.ops_port`` is "public", the port of clients answers
none of them, whatever the spelling; from another machine they are had with a token only, unless
``server.ops_open`` says otherwise.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

from fastapi import Request, Response

from router.api.admin.authenticator import Authenticator
from router.api.admin.tokens import TokenFile
from router.api.app import CONTROL_PREFIX, error_answer
from router.http.server.server import listen_config
from router.http.server.side_server import SIDE_LISTEN, SideServer
from router.openai.errors import ApiError, on_ops_port, ops_name_unknown

_PORT = re.compile(r":[0-9]*$")
_OPEN = frozenset({"/health", "/ready", "/version", "/", CONTROL_PREFIX.rstrip("/"), CONTROL_PREFIX})
"""Needs no token; the page has nothing to show without one."""


class OpsPort:
    """``app`` answers everything there, to those whom ``authenticator`` lets in (None: to everybody).
    ``port`` None: there is no such port, or it is another process's, which is ``at`` that place; 0: a free
    one. ``sock`` listens already."""

    def __init__(
        self,
        app: Any,
        *,
        host: str,
        port: int | None,
        authenticator: Authenticator | None,
        names: tuple[str, ...] = (),
        sock: socket.socket | None = None,
        at: str = "",
    ) -> None:
        self._app = app
        self._door = authenticator
        self._names = frozenset(map(_plain, ("localhost", socket.gethostname(), host, *names)))
        self._at = at
        self.server: SideServer | None = None
        if port is not None:
            self.server = SideServer(
                listen_config(self, host=host, port=port, listen=SIDE_LISTEN, lifespan="off"),
                name="ops port",
                key="server.ops_port",
                sock=sock,
            )

    @property
    def base_url(self) -> str | None:
        """Where it is reached from its own machine; None where there is none, or it is not open yet."""
        return self.server.base_url if self.server is not None and self.server.started else None

    def refusal(self, path: str) -> ApiError:
        """What the public port says to somebody who asks there."""
        where = f"{self._at} (server.ops_port)" if self._at else "which is off (server.ops_port)"
        if self.server is not None and self.server.started:
            where = f"port {self.server.port} of {self.server.config.host} (server.ops_port)"
        return on_ops_port(path, where)

    def listening(self) -> AbstractAsyncContextManager[None]:
        """The port is open, if there is one. Raises ``OSError`` where it cannot be had."""
        return nullcontext() if self.server is None else self.server.listening()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI 3, of the port."""
        answer: Any = self._app
        if scope["type"] == "http":
            refused = await self._refused(Request(scope))
            answer = refused or self._app
        await answer(scope, receive, send)

    async def _refused(self, request: Request) -> Response | None:
        if self._door is None:
            host = request.headers.get("host", "")
            return None if self._is_own(host) else error_answer(ops_name_unknown(host))
        if request.url.path in _OPEN:
            return None
        try:
            await self._door.admit(request)
        except ApiError as error:
            return error_answer(error)
        return None

    def _is_own(self, host: str) -> bool:
        """Whether this is a name of this machine. None at all is no browser's."""
        name = _plain(_PORT.sub("", host))
        return not name or name in self._names or _is_address(name)


def _plain(name: str) -> str:
    return name.lower().rstrip(".")


def _is_address(name: str) -> bool:
    """Addresses need no name, so none can be made to lead here."""
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def ops_authenticator(
    tokens: tuple[str, str] | None, *, per_minute: float, clock: Callable[[], float]
) -> Authenticator | None:
    """For tokens of the file that a setting names (setting, path). None: everybody who reaches the port may
    come in. Raises ``AdminFileError`` for a file of no use."""
    if tokens is None:
        return None
    key, path = tokens
    return Authenticator(
        TokenFile(Path(path), key),
        mutual=False,
        per_minute=per_minute,
        clock=clock,
        realm="ops",
        key=key,
        unlimited=True,
    )
