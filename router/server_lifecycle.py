"""The server of one process: start, address, reload at SIGHUP, shutdown.

Reload: ``decide`` reads and checks, in the process that reads the file (the parent, if there are workers);
``Reloads`` applies, in each serving process. Keys and certificates are read again too, as if their files had
changed. Invariants: an unusable configuration changes nothing and is logged; changes that need a restart are
logged and not applied; reloads do not overlap.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any

import msgspec
import structlog

from kvatlas.router.admission.key_file import KeyFile, KeyFileError
from kvatlas.router.api.admin_tokens import AdminFileError
from kvatlas.router.api.metrics_page import ReloadStats
from kvatlas.router.app import Router
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.config.reload import Change, changes
from kvatlas.router.config.schema import Config
from kvatlas.router.http.descriptors import raise_descriptor_limit
from kvatlas.router.http.server import ListenError, ProxyServer, listen_config
from kvatlas.router.http.settings import ListenSettings, ListenStats
from kvatlas.router.http.side_ports import server_url
from kvatlas.router.http.tls import TlsError, server_context
from kvatlas.router.observe.traces import TracesNotInstalledError
from kvatlas.router.placement.policies import policy
from kvatlas.router.prompts.model_dir import ModelDirError
from kvatlas.router.proxy.settings import Aliases
from kvatlas.router.replication.settings import SettingsError, redacted
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


# Tries everything of a configuration that can fail, before anything listens.


def check(config: Config) -> Router:
    """Build everything that can fail before listening. Raises ``ConfigError`` naming the key."""
    try_usage_record(config)
    try:
        router = Router(config)
        if config.server.tls.given:
            server_context(config.server.tls, TLS_KEYS)
    except (AdminFileError, KeyFileError, TlsError, TracesNotInstalledError) as error:
        raise ConfigError(str(error)) from None
    except ModelDirError as error:
        raise ConfigError(f"models: {error}") from None
    except SettingsError as error:
        raise ConfigError(f"index: {error}") from None
    check_engines(config)
    return router


def check_engines(config: Config) -> None:
    """Check that engines are configured or can be discovered. Raises ``ConfigError``."""
    if not config.engines and not config.fleet.discovers and not config.admin.enabled:
        raise ConfigError(
            "no engine configured: give --engine URL (repeatable), e.g. kvatlas serve --engine "
            "http://HOST:8000, [[engines]] in the --config file, or a source of engines "
            "(fleet.kubernetes.selector or inference_pool, fleet.dns.names, fleet.file.path, or the admin "
            "API)"
        )


def try_usage_record(config: Config) -> None:
    """Create and remove a file: permissions do not show whether the file system accepts files.

    Raises ``ConfigError`` naming the key.
    """
    for name in ("path", "key_file"):
        text = getattr(config.usage, name)
        if not text:
            continue
        path = Path(text)
        try:
            with path.open("ab") if path.exists() else tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise ConfigError(f"usage.{name} = {text!r}: cannot be written: {error.strerror}") from None


def check_shared_index(config: Config) -> None:
    """Refuse an index of another schema. An unreachable one does not prevent the start.

    Raises ``ConfigError``.
    """
    if not config.index.is_shared:
        return
    from kvatlas.router.replication.registry import IndexRefused  # noqa: PLC0415  # redis-py comes with it
    from kvatlas.router.replication.service import check_index  # noqa: PLC0415

    try:
        problem = asyncio.run(check_index(config.index))
    except IndexRefused as error:
        raise ConfigError(f"index: {error}") from None
    if problem:
        _log.warning("starting without the shared index", index=redacted(config.index.url), problem=problem)


_PENDING_NAME = "config"
Decide = Callable[[Config], "Decided"]


class Decided(msgspec.Struct, frozen=True):
    """Result of one reload. ``config``: the new configuration; None: the old one stays in effect."""

    outcome: str
    config: Config | None = None
    waiting: int = 0


def decide(running: Config, load: Callable[[], Config]) -> Decided:
    """Read the configuration again and log the result."""
    try:
        change = changes(running, load())
        check_engines(change.config)
        policy(change.config.policy.policy)
    except (ConfigError, ValueError) as error:
        return refused(error)
    _tell(change)
    if not change.taken:
        return Decided("unchanged", None, len(change.waiting))
    return Decided("applied", change.config, len(change.waiting))


def refused(error: Exception) -> Decided:
    """Log an unusable configuration."""
    _log.error("configuration not reloaded, the old one stays", problem=str(error))
    return Decided("refused")


def _tell(change: Change) -> None:
    _log.info("configuration read again", changed=list(change.taken))
    if change.waiting:
        _log.warning("settings that need a restart were not changed", keys=list(change.waiting))


def hand_over(folder: Path, decided: Decided) -> None:
    """Save the decision for the workers, which share this folder."""
    part = folder / f"{_PENDING_NAME}.part"
    part.write_bytes(msgspec.msgpack.encode(decided))
    part.replace(folder / _PENDING_NAME)


def inherited(folder: Path) -> Decided:
    """Return the parent's last decision."""
    return msgspec.msgpack.decode((folder / _PENDING_NAME).read_bytes(), type=Decided)


def hold_back() -> None:
    """Defer SIGHUP until ``Reloads`` handles it; by default it would end the process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


class Reloads:
    """Reloads of one serving process; ``on_log`` is called with a level and a format."""

    def __init__(self, router: Router, decide: Decide, *, on_log: Callable[[str, str], None]) -> None:
        self._router = router
        self._decide = decide
        self._on_log = on_log
        self._asked = asyncio.Event()
        self.stats = ReloadStats()

    async def run(self) -> None:
        """Reload at each SIGHUP, until cancelled. Call it in the main thread."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._asked.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        try:
            while True:
                await self._asked.wait()
                self._asked.clear()
                await self.once()
        finally:
            hold_back()  # the process is already ending
            loop.remove_signal_handler(signal.SIGHUP)

    async def once(self) -> None:
        """Reload once."""
        try:
            running = self._router.config
            decided = await asyncio.to_thread(self._decide, running)
            if decided.config not in (None, running):
                await apply(self._router, decided.config)
                self._on_log(decided.config.server.log_level, decided.config.server.log_format)
        except (KeyFileError, ModelDirError) as error:
            decided = refused(error)
        except Exception as error:  # noqa: BLE001  # the router continues after any error
            decided = refused(error)
            _log.exception("fault in a reload")
        self._renew()
        self.stats.reloads[decided.outcome] += 1
        if decided.outcome != "refused":
            self.stats.waiting = decided.waiting
        _log.info("configuration reload done", outcome=decided.outcome, pid=os.getpid())

    def _renew(self) -> None:
        """Read certificates and keys again."""
        self._router.certificates.reload_changed()
        if self._router.gate is not None:
            self._router.gate.keys.reload()


def reloads_of(
    router: Router, decide: Decide, *, on_log: Callable[[str, str], None], counts: bool = True
) -> Reloads:
    """Make and install the reloads of a router; ``counts``: this process counts them (of workers, the
    lead)."""
    made = Reloads(router, decide, on_log=on_log)
    if counts:
        router.sources.reloads = made.stats
    router.works.append(made.run)
    return made


async def apply(router: Router, config: Config) -> None:
    """Apply everything that ``LIVE`` names. Raises ``KeyFileError`` or ``ModelDirError`` before any
    change."""
    before = router.config
    keys, gate = config.keys, router.gate
    file = None if gate is None else gate.keys
    if file is not None and keys.file is not None and keys.file != before.keys.file:
        file = KeyFile(Path(keys.file), clock=router.clock)
    aliases = Aliases.from_shares(config.alias_shares())
    if config.models != before.models:
        await router.reader.set_models(router.lifecycle.prompts_of(config))
    # From here on nothing fails and nothing waits.
    if gate is not None and file is not None:
        priorities = keys.engine_priorities and not config.policy.engine_priority
        gate.configure(file, forward=keys.forward, engine_priorities=priorities)
    router.aliases = router.sources.aliases = aliases
    server = config.server
    router.planner.configure(
        config.policy,
        config.queue,
        config.pd,
        config.pull,
        expose_decision=server.expose_decision,
        check_every=server.check_every,
    )
    claims = router.planner.reads_claims
    router.proxy.configure(config.proxy, config.pd, aliases, claims=claims, targets=config.policy.targets)
    router.proxy.requests.log = server.log_requests
    if config.listen != before.listen:
        router.on_listen(config.listen)
    if router.picker is not None:
        router.picker.configure(config.proxy, config.listen)
    if router.poller is not None:
        router.poller.configure(config.fleet)
        router.poller.versions = config.pull.enabled
    router.take(config)
