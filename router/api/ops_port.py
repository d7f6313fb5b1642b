"""The ops port, and who may reach it.

DNS rebinding can make a browser send requests to the ops port under another host name. So without tokens it
answers only to host names of this machine: its addresses, as probes and scrapes use them, ``localhost``, and
configured names. Invariant: other machines need a token, unless ``server.ops_open`` is set.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

from kvatlas.router.api.admin_auth import Authenticator, header_of
from kvatlas.router.api.admin_tokens import TokenFile
from kvatlas.router.api.app import CONTROL_PREFIX
from kvatlas.router.api.asgi import OwnAnswer, error_answer
from kvatlas.router.http.server import listen_config
from kvatlas.router.http.side_ports import SIDE_LISTEN, SideServer
from kvatlas.router.openai.errors import (
    ApiError,
    on_ops_port,
    ops_name_unknown,
)

_PORT = re.compile(r":[0-9]*$")
# Paths without a token; the page is empty without one.
_OPEN = frozenset({"/health", "/ready", "/version", "/", CONTROL_PREFIX.rstrip("/"), CONTROL_PREFIX})


class OpsPort:
    """The ops port. ``app`` answers every request that ``authenticator`` admits (None: all).

    ``port`` None: there is no such port, or another process has it, at address ``at``; 0: a free one.
    ``sock`` already listens.
    """

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
                setting="server.ops_port",
                sock=sock,
            )

    @property
    def base_url(self) -> str | None:
        """Its URL on this machine; None without a port, or before it is open."""
        return self.server.base_url if self.server is not None and self.server.started else None

    def refusal(self, path: str) -> ApiError:
        """Return the public port's error for a request to an ops path."""
        where = f"{self._at} (server.ops_port)" if self._at else "which is off (server.ops_port)"
        if self.server is not None and self.server.started:
            where = f"port {self.server.port} of {self.server.config.host} (server.ops_port)"
        return on_ops_port(path, where)

    def listening(self) -> AbstractAsyncContextManager[None]:
        """Keep the port open, if there is one. Raises ``OSError`` if it cannot be bound."""
        return nullcontext() if self.server is None else self.server.listening()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI 3 application of the port."""
        answer: Any = self._app
        if scope["type"] == "http":
            refused = await self._refused(scope)
            answer = refused or self._app
        await answer(scope, receive, send)

    async def _refused(self, scope: Any) -> OwnAnswer | None:
        if self._door is None:
            host = header_of(scope, b"host")
            return None if self._is_own(host) else error_answer(ops_name_unknown(host), scope)
        if scope["path"] in _OPEN:
            return None
        try:
            await self._door.admit(scope)
        except ApiError as error:
            return error_answer(error, scope)
        return None

    def _is_own(self, host: str) -> bool:
        """Whether this is a host name of this machine. Browsers always send one, so none is accepted."""
        name = _plain(_PORT.sub("", host))
        return not name or name in self._names or _is_address(name)


def _plain(name: str) -> str:
    return name.lower().rstrip(".")


def _is_address(name: str) -> bool:
    """Whether it is an IP address: those need no DNS, so rebinding does not apply."""
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def ops_authenticator(
    tokens: tuple[str, str] | None, *, per_minute: float, clock: Callable[[], float]
) -> Authenticator | None:
    """Authenticate by the tokens in the file of a setting (setting, path); None: admit everyone who reaches
    the port. Raises ``AdminFileError`` for an unusable file."""
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
