"""Parts that all client connections of one server share: uvicorn configuration, limits, counters, sweeper."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from typing import Any, cast

import uvicorn

from router.http.server.capacity import Capacity, Handshakes
from router.http.server.settings import ListenSettings, ListenStats
from router.http.sockets import Sweeper, tick_for

LINGER_S_MAX = 2.0
"""How long the rest of a request is read and dropped after an early answer such as 413, before the connection
closes. A client that is still sending needs a round trip to see the answer (RFC 9112, section 9.6)."""


class ListenConfig(uvicorn.Config):
    """uvicorn's configuration with everything off that the proxied path does not need."""

    def __init__(
        self,
        app: Any,
        *,
        protocol: type[Any],
        host: str = "127.0.0.1",
        port: int = 8000,
        listen: ListenSettings | None = None,
        stats: ListenStats | None = None,
        clock: Callable[[], float] = time.monotonic,
        tls: ssl.SSLContext | None = None,
        **options: Any,
    ) -> None:
        defaults: dict[str, Any] = {
            "http": protocol,
            "ws": "none",
            "loop": "auto",
            "interface": "asgi3",
            "access_log": False,
            "log_config": None,
            "log_level": "warning",
            "proxy_headers": False,
            "server_header": False,
            "date_header": False,
        }
        super().__init__(app, host=host, port=port, **{**defaults, **options})
        listen = listen or ListenSettings()
        self.listen_stats = stats or ListenStats()
        self.clock = clock
        self.capacity = Capacity(listen)
        self._tls = tls
        self.handshakes: Handshakes | None = None
        self.lame = False
        """The server is about to end: every connection is closed with its next answer."""
        self.sweeper = Sweeper(clock, _tick(listen))
        self.configure(listen)

    def configure(self, listen: ListenSettings) -> None:
        """Set limits for new connections; existing ones keep their time-outs."""
        self.listen = listen
        self.capacity.configure(listen)
        self.sweeper.tick_s = min(self.sweeper.tick_s, _tick(listen))

    @property
    def is_ssl(self) -> bool:
        """Once it is loaded; before, uvicorn would make a context of its own."""
        return self.loaded and self._tls is not None

    def load(self) -> None:
        super().load()
        if self._tls is None:
            return
        line = self.handshakes = Handshakes(
            self._tls, self.capacity, self.listen_stats, lambda: self.listen.header_timeout_s
        )
        inner: Any = self.http_protocol_class
        self.http_protocol_class = cast(Any, lambda **given: line.protocol(inner(**given)))


def _tick(listen: ListenSettings) -> float:
    return tick_for(
        listen.header_timeout_s,
        listen.body_timeout_s,
        listen.body_grace_s,
        listen.keepalive_timeout_s,
        listen.stall_timeout_s,
        LINGER_S_MAX,
    )
