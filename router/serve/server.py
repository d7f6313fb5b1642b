"""The listening server of one process: start, address, shutdown."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import sys
import threading
import tomllib
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any

import msgspec
import structlog

from router.app import Router
from router.config.schema import Config
from router.http.server import ListenError, ProxyServer, listen_config, server_url
from router.http.settings import ListenSettings, ListenStats
from router.http.sockets import Certificates, raise_descriptor_limit, server_context
from router.workers.context import WorkerContext

# Last time limit of a shutdown: after it the process is ended, and what did not end is logged.
#
# Every step of a shutdown has its own time limit; this one is for unforeseen cases: a task that swallows its
# cancellation, a thread that hangs, a blocked event loop. So it runs in its own thread. Invariants: it does
# nothing before ``begin``, and a process that ends by itself does not wait for it.


_log = structlog.get_logger()
_NAMED_MAX = 20


class ShutdownGuard:
    """``limit_s`` is called once, when the shutdown begins; ``end`` ends the process with a status."""

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
    """Return the task's name, its coroutine, and the line that it waits at."""
    outer = inner = task.get_coro()
    while isinstance(inner, CoroutineType) and isinstance(inner.cr_await, CoroutineType):
        inner = inner.cr_await
    frame = inner.cr_frame if isinstance(inner, CoroutineType) else None
    at = "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"
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
TLS_KEYS = "server.tls_cert_file, tls_key_file or client_ca_file"


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
    """Make the server of this router, not started yet."""
    router.listen_stats = ListenStats()
    server = server_of(router, router.config, router.certificates, router.listen_stats)
    router.draining = lambda: server.draining
    router.on_listen = lambda listen: configure(server, listen)
    server.on_drain = router.retire
    return server


def server_of(app: Any, config: Config, certificates: Certificates, stats: ListenStats) -> RouterServer:
    """Make a server of this application, with the configured port and limits. Raises ``TlsError``."""
    context, files = None, config.server.tls
    if files.given:
        context = certificates.add(server_context(files, TLS_KEYS), files, TLS_KEYS)
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
    """Apply changed limits."""
    server.configure(_within_descriptors(listen))


def _within_descriptors(listen: ListenSettings) -> ListenSettings:
    held = raise_descriptor_limit(listen.connections_max, default=ListenSettings().connections_max)
    return msgspec.structs.replace(listen, connections_max=held)


def run_server(
    server: RouterServer, ends_within_s: Callable[[], float], sockets: list[socket.socket] | None = None
) -> int:
    """Serve until a signal; returns the exit status. ``ends_within_s``: time limit of the shutdown."""
    server.guard = ShutdownGuard(ends_within_s)
    try:
        server.run(sockets)
    except ListenError as error:
        if not server.lifespan.should_exit:  # else the application has logged the reason
            _log.error("not started", problem=f"server.port: {error}")
        return 1
    return 0 if server.started else 1


def ends_within_s(router: Router) -> float:
    """Return the time limit of a router's shutdown after a signal."""
    picker = router.config.epp
    drain_s = 0.0 if router.picker is None else picker.drain_delay_s + picker.drain_s_max
    return max(server_ends_within_s(router.config.listen), drain_s + STOP_S)


def server_ends_within_s(listen: ListenSettings) -> float:
    """Return the time limit of a shutdown that only closes the port."""
    return listen.drain_delay_s + listen.drain_s_max + STOP_S


# Health check of this container's process: ``python -m router.serve.server``, for Docker's HEALTHCHECK.
#
# ``serve``, ``epp`` and ``sidecar`` serve ``/health`` on the ops port; the first and the last also on the
# public one, over TLS if configured. The ports are read from the arguments of process 1, its environment and
# its configuration file, the sources of ``router/config/load.py``. Light, since it runs often.


_DEFAULTS = {"host": "127.0.0.1", "port": "8000", "ops_host": "127.0.0.1", "ops_port": "9001"}
_KEYS = (*_DEFAULTS, "tls_cert_file")
_TIMEOUT_S = 2.0
_ANY = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104  # wildcard addresses are checked on loopback


def main() -> int:
    """Return 0 if ``/health`` answers, 1 if not."""
    words = Path("/proc/1/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    return 0 if any(map(_answers, urls(words, os.environ))) else 1


def urls(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the URLs of ``/health`` to try, in order."""
    found = {**_DEFAULTS, **_of_file(words), **_of_environment(environ), **dict(_flags(words))}
    ops, scheme = found["ops_port"], "https" if found.get("tls_cert_file") else "http"
    asked = [] if ops in {"off", "public"} else [f"http://{_at(found['ops_host'])}:{ops}/health"]
    if "epp" not in words:  # the picker has no public port
        asked.append(f"{scheme}://{_at(found['host'])}:{found['port']}/health")
    return asked


def _at(host: str) -> str:
    return _ANY.get(host, f"[{host}]" if ":" in host else host)


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    names = {"--host": "host", "--port": "port", "--ops-port": "ops_port"}
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not equals:
            value = words[number + 1] if number + 1 < len(words) else ""
        if name in names:
            yield names[name], value
        key, _, value = value.partition("=")
        if name == "--set" and key.startswith("server.") and key.removeprefix("server.") in _KEYS:
            yield key.removeprefix("server."), value


def _of_environment(environ: Mapping[str, str]) -> dict[str, str]:
    named = {key: environ.get(f"KVATLAS_SERVER_{key.upper()}") for key in _KEYS}
    return {key: value for key, value in named.items() if value}


def _of_file(words: Sequence[str]) -> dict[str, str]:
    """Read the settings of the file; none if it is unreadable, which the process itself reports."""
    path = ""
    for number, word in enumerate(words):
        if word == "--config" and number + 1 < len(words):
            path = words[number + 1]
        elif word.startswith("--config="):
            path = word.partition("=")[2]
    try:
        tree: Any = tomllib.loads(Path(path).read_text(encoding="utf-8")) if path else {}
        return {key: str(value) for key, value in tree.get("server", {}).items() if key in _KEYS}
    except (OSError, ValueError, AttributeError):
        return {}


def _answers(url: str) -> bool:
    context = ssl.create_default_context()
    context.check_hostname = False  # connects to loopback, whatever name the certificate has
    context.verify_mode = ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S, context=context) as answer:  # noqa: S310
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


if __name__ == "__main__":
    sys.exit(main())
