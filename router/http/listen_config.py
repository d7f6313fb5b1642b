"""Configuration of one HTTP server, and what its connections share."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from typing import Any, cast

import uvicorn

from kvatlas.router.http.client_head import ClientHead
from kvatlas.router.http.deadlines import Sweeper, sweep_interval_s
from kvatlas.router.http.handshakes import Handshakes
from kvatlas.router.http.known_heads import KnownHeads
from kvatlas.router.http.listener import Capacity
from kvatlas.router.http.refusal_log import RefusalLog
from kvatlas.router.http.settings import ListenSettings, ListenStats

# How far a body may fall behind ``body_bytes_per_s_min``, at its start too.
BODY_GRACE_S = 30.0
# Seconds for which the rest of a request is discarded after an early response such as 413, before the close.
# A client that is still sending needs a round trip to see the answer (RFC 9112, section 9.6).
LINGER_S_MAX = 2.0


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
        self.refusals = RefusalLog(clock)
        self._tls = tls
        self.handshakes: Handshakes | None = None
        self.draining = False
        """The server is shutting down: each connection closes after its next response."""
        self.heads = KnownHeads[ClientHead]()
        self.sweeper = Sweeper(clock, _sweep_interval_s(listen))
        self.configure(listen)

    def configure(self, listen: ListenSettings) -> None:
        """Set limits for new connections; existing ones keep their time-outs."""
        self.listen = listen
        self.capacity.configure(listen)
        self.sweeper.tick_s = min(self.sweeper.tick_s, _sweep_interval_s(listen))

    @property
    def is_ssl(self) -> bool:
        """Whether TLS is used. False before ``load``: uvicorn would create a context of its own."""
        return self.loaded and self._tls is not None

    def load(self) -> None:
        super().load()
        if self._tls is None:
            return
        handshakes = self.handshakes = Handshakes(
            self._tls, self.capacity, self.listen_stats, lambda: self.listen.header_timeout_s
        )
        inner: Any = self.http_protocol_class
        self.http_protocol_class = cast(Any, lambda **given: handshakes.wrap(inner(**given)))


def _sweep_interval_s(listen: ListenSettings) -> float:
    return sweep_interval_s(
        listen.header_timeout_s,
        listen.body_timeout_s,
        BODY_GRACE_S,
        listen.keepalive_timeout_s,
        listen.stall_timeout_s,
        LINGER_S_MAX,
    )
