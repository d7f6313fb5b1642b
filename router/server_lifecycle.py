"""The server of one process: start, address, shutdown."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any

import msgspec
import structlog

from kvatlas.router.app import Router
from kvatlas.router.http.descriptors import raise_descriptor_limit
from kvatlas.router.http.server import ListenError, ProxyServer, listen_config
from kvatlas.router.http.settings import ListenSettings, ListenStats
from kvatlas.router.http.side_ports import server_url
from kvatlas.router.http.tls import server_context
from kvatlas.router.startup_check import TLS_KEYS
from kvatlas.router.workers.context import WorkerContext

_log = structlog.get_logger()
_NAMED_MAX = 20
_ASYNCIO = Path(asyncio.__file__).parent


class ShutdownGuard:
    """``limit_s`` is called once, when the shutdown begins; ``end`` ends the process with a status.

    The last time limit of a shutdown, after which what did not end is logged. Every step has its own; this
    one is for a task that swallows its cancellation, a thread that hangs, a blocked event loop. So it runs in
    its own thread. Invariants: it does nothing before ``begin``, and a process that ends by itself does not
    wait for it.
    """

    def __init__(self, limit_s: Callable[[], float], *, end: Callable[[int], object] = os._exit) -> None:
        self._limit_s = limit_s
        self._end = end
        self._begun = False

    def begin(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Start the time limit; idempotent. Tasks of ``loop`` that do not end are logged."""
        if not self._begun:
            self._begun = True
            limit_s = self._limit_s()
            timer = threading.Timer(limit_s, self._ended_not, (limit_s, loop))
            timer.daemon = True
            timer.start()

    def _ended_not(self, limit_s: float, loop: asyncio.AbstractEventLoop | None) -> None:
        tasks = [] if loop is None else sorted(map(_named, asyncio.all_tasks(loop)))
        _log.error(
            "shutdown does not end, ending the process",
            after_s=limit_s,
            tasks=tasks[:_NAMED_MAX],
            threads=list(_threads())[:_NAMED_MAX],
        )
        self._end(1)


def _named(task: asyncio.Task[Any]) -> str:
    """Return the task's name, its coroutine, and the line that it waits at: the innermost that is not
    asyncio's own, as ``sleep``, which all that sleep share."""
    outer = task.get_coro()
    inner: Any = outer
    at = ""
    while isinstance(inner, CoroutineType):
        frame = inner.cr_frame
        if frame is not None and (not at or Path(frame.f_code.co_filename).parent != _ASYNCIO):
            at = f" at {frame.f_code.co_filename}:{frame.f_lineno}"
        inner = inner.cr_await
    return f"{task.get_name()} ({getattr(outer, '__qualname__', outer)}){at}"


def _threads() -> Iterator[str]:
    """Return the threads that the process waits for, each with its current line."""
    frames = sys._current_frames()  # noqa: SLF001  # the only way to see another thread
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if not thread.daemon and frame is not None:
            yield f"{thread.name} at {frame.f_code.co_filename}:{frame.f_lineno}"


# Time that a process may take to end beyond its drain.
STOP_S = 8.0


class RouterServer(ProxyServer):
    """Logs its address once it listens: port 0 takes a free one. ``worker``: the parent logs instead, and the
    worker drains when the parent exits. ``guard`` ends the process if a signal does not."""

    worker: WorkerContext | None = None
    guard: ShutdownGuard | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self._guarded()
        super().handle_exit(sig, frame)

    def _guarded(self) -> None:
        if self.guard is not None:
            self.guard.begin(self._loop)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen. Raises ``ListenError``."""
        await super().startup(sockets)
        if self.started:
            self.on_listening()

    def on_listening(self) -> None:
        """Log the address, or report to the parent."""
        if self.worker is None:
            _log.info("listening", url=self.base_url)
        else:
            asyncio.get_running_loop().add_reader(self.worker.parent, self._parent_ended, self.worker.parent)
            self.worker.started()

    def _parent_ended(self, pipe: int) -> None:
        asyncio.get_running_loop().remove_reader(pipe)
        if self.worker is not None:
            shutil.rmtree(self.worker.folder, ignore_errors=True)
        self._guarded()
        self.drain()

    @property
    def base_url(self) -> str:
        """Return the server's URL on its own machine; only once it is ``started``."""
        return server_url(self)


def make_server(router: Router) -> RouterServer:
    """Make the server of this router, with the configured port and limits, not started yet. Raises
    ``TlsError``."""
    router.listen_stats = ListenStats()
    config, certificates = router.config, router.certificates
    context, files = None, config.server.tls
    if files.given:
        context = certificates.add(server_context(files, TLS_KEYS), files, TLS_KEYS)
    server = RouterServer(
        listen_config(
            router,
            host=config.server.host,
            port=config.server.port,
            listen=_within_descriptors(config.listen),
            stats=router.listen_stats,
            lifespan="on",
            tls=context,
        )
    )
    router.draining = lambda: server.draining
    router.on_listen = lambda listen: server.configure(_within_descriptors(listen))
    server.on_drain = router.retire
    return server


def _within_descriptors(listen: ListenSettings) -> ListenSettings:
    held = raise_descriptor_limit(listen.connections_max, default=ListenSettings().connections_max)
    return msgspec.structs.replace(listen, connections_max=held)


def run_server(server: RouterServer, router: Router, sockets: list[socket.socket] | None = None) -> int:
    """Serve until a signal; returns the exit status."""
    server.guard = ShutdownGuard(lambda: ends_within_s(router))
    try:
        server.run(sockets)
    except ListenError as error:
        if not server.lifespan.should_exit:  # else the application has logged the reason
            _log.error("not started", problem=f"server.port: {error}")
        return 1
    return 0 if server.started else 1


def ends_within_s(router: Router) -> float:
    """Return the time limit of a router's shutdown after a signal."""
    listen, picker = router.config.listen, router.config.epp
    drain_s = 0.0 if router.picker is None else picker.drain_delay_s + picker.drain_s_max
    return max(listen.drain_delay_s + listen.drain_s_max, drain_s) + STOP_S
