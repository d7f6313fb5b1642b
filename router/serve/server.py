"""The listening server of one process: how it starts, says where it listens, and ends."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec
import structlog

from router.app import Router
from router.config.schema import Config
from router.http.descriptors import connections_held
from router.http.server.server import ListenError, ProxyServer, listen_config
from router.http.server.settings import ListenSettings
from router.http.server.side_server import url_of
from router.http.server.stats import ListenStats
from router.http.tls import Certificates, server_context
from router.serve.shutdown import ShutdownGuard
from router.workers.seat import WorkerSeat

_log = structlog.get_logger()
STOP_S = 8.0
"""How long a process may take to end beyond its drain."""
TLS_KEYS = "server.tls_cert_file, tls_key_file or client_ca_file"


class RouterServer(ProxyServer):
    """Says where it listens, once it does: port 0 takes a free one. ``seat``: it is a worker, whose parent
    says so; it drains when that ends. ``guard`` ends the process where a signal does not."""

    seat: WorkerSeat | None = None
    guard: ShutdownGuard | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        self._guarded()
        super().handle_exit(sig, frame)

    def _guarded(self) -> None:
        if self.guard is not None:
            self.guard.begin(self._loop)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen. Raises ``ListenError``."""
        await super().startup(sockets)
        if self.started:
            self.on_listening()

    def on_listening(self) -> None:
        """It listens."""
        if self.seat is None:
            _log.info("listening", url=self.base_url)
        else:
            asyncio.get_running_loop().add_reader(self.seat.parent, self._parent_ended, self.seat.parent)
            self.seat.started()

    def _parent_ended(self, pipe: int) -> None:
        asyncio.get_running_loop().remove_reader(pipe)
        if self.seat is not None:
            shutil.rmtree(self.seat.folder, ignore_errors=True)
        self._guarded()
        self.drain()

    @property
    def base_url(self) -> str:
        """Where clients reach this server from its own machine. Only once it is ``started``."""
        return url_of(self)


def make_server(router: Router) -> RouterServer:
    """The server of this router, not started yet."""
    router.listen_stats = ListenStats()
    server = server_of(router, router.config, router.certificates, router.listen_stats)
    router.draining = lambda: server.draining
    router.on_listen = lambda listen: configure(server, listen)
    server.on_drain = router.retire
    return server


def server_of(app: Any, config: Config, certificates: Certificates, stats: ListenStats) -> RouterServer:
    """A server of this application, on the port and by the limits of the configuration. Raises
    ``TlsError``."""
    context, files = None, config.server.tls
    if files.given:
        context = certificates.hold(server_context(files, TLS_KEYS), files, TLS_KEYS)
    return RouterServer(
        listen_config(
            app,
            host=config.server.host,
            port=config.server.port,
            listen=_within_descriptors(config.listen),
            stats=stats,
            lifespan="on",
            tls=context,
        )
    )


def configure(server: RouterServer, listen: ListenSettings) -> None:
    """These limits hold from now on."""
    server.configure(_within_descriptors(listen))


def _within_descriptors(listen: ListenSettings) -> ListenSettings:
    held = connections_held(listen.connections_max, default=ListenSettings().connections_max)
    return msgspec.structs.replace(listen, connections_max=held)


def run_server(
    server: RouterServer, ends_within_s: Callable[[], float], sockets: list[socket.socket] | None = None
) -> int:
    """Serve until a signal; returns the exit status. ``ends_within_s``: how long after it the process has
    ended."""
    server.guard = ShutdownGuard(ends_within_s)
    try:
        server.run(sockets)
    except ListenError as error:
        if not server.lifespan.should_exit:  # else the application has said why
            _log.error("not started", problem=f"server.port: {error}")
        return 1
    return 0 if server.started else 1


def ends_within_s(router: Router) -> float:
    """How long after a signal the process has ended."""
    picker = router.config.epp
    drain_s = 0.0 if router.picker is None else picker.drain_delay_s + picker.drain_s_max
    return max(server_ends_within_s(router.config.listen), drain_s + STOP_S)


def server_ends_within_s(listen: ListenSettings) -> float:
    """The same of a process that has no more than its port."""
    return listen.drain_delay_s + listen.drain_s_max + STOP_S
