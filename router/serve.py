"""``kvatlas serve``: from a checked configuration to a listening process, and back at SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import logging
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

import msgspec
import structlog
import uvloop

from router import __version__
from router.admission.key_file import KeyFileError
from router.api.admin.tokens import AdminFileError
from router.app import Router
from router.config.errors import ConfigError
from router.config.load import Loaded
from router.config.schema import WORKERS_MAX, Config
from router.http.descriptors import connections_held
from router.http.server.server import ProxyServer, listen_config
from router.http.server.settings import ListenSettings
from router.http.server.side_server import address_url, url_of
from router.http.server.stats import ListenStats
from router.http.tls import Certificates, TlsError, server_context
from router.observe.prefix_ids import read_key
from router.observe.traces import TracesNotInstalledError
from router.placement.policies import policy
from router.prompts.reader import ModelDirError
from router.reload import Decided, Reloads, decide, hand_over, handed_over, hold_back, refused
from router.replication.redis.errors import SettingsError
from router.replication.redis.url import redacted
from router.replication.schema.registry import IndexRefused
from router.replication.service import check_index
from router.shutdown import ShutdownGuard
from router.workers.seat import LEAD, WorkerSeat, WorkerSockets, cores
from router.workers.supervisor import Supervisor

_log = structlog.get_logger()
_STOP_S, _STOP_WORKERS_S = 8.0, 10.0
"""How long a process may take to end beyond its drain, and how long its parent waits for it. The chart's
grace period is as much longer than the drain, so what is said of it is said before the pod is killed."""
_TLS_KEYS = "server.tls_cert_file, tls_key_file or client_ca_file"


class ListenError(OSError):
    """The address to listen on cannot be had."""


class LogSink(io.TextIOBase):
    """Where log lines go. Whoever reads them may go away: that costs lines, never the work that is logged."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out = out

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # a broken pipe, a full disk, a closed file
            self._out.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._out.flush()


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
        try:
            await super().startup(sockets)
        except SystemExit:  # uvicorn's way; it has logged the reason and ended the lifespan
            if self.lifespan.should_exit:
                raise ListenError(
                    "the router could not be started; the previous log line has the reason"
                ) from None
            raise ListenError(f"cannot listen on {self.config.host}:{self.config.port}") from None
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


def check(config: Config) -> Router:
    """Build everything that can be wrong before listening. Raises ``ConfigError`` naming the key."""
    try:
        policy(config.policy.policy)
    except ValueError as error:
        raise ConfigError(f"policy.policy: {error}") from None
    _try_access_log(config)
    try:
        router = Router(config)
        if config.server.tls.given:
            server_context(config.server.tls, _TLS_KEYS)
    except (AdminFileError, KeyFileError, TlsError, TracesNotInstalledError) as error:
        raise ConfigError(str(error)) from None
    except ModelDirError as error:
        raise ConfigError(f"models: {error}") from None
    except SettingsError as error:
        raise ConfigError(f"index: {error}") from None
    return router


def _try_access_log(config: Config) -> None:
    """Permissions do not tell of file systems that take no files, so one is made, and is gone at once."""
    for name in ("path", "key_file"):
        text = getattr(config.access_log, name)
        if not text:
            continue
        path = Path(text)
        try:
            with path.open("ab") if path.exists() else tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise ConfigError(f"access_log.{name} = {text!r}: cannot be written: {error.strerror}") from None


def check_shared_index(config: Config) -> None:
    """Refuse an index of another schema. One that cannot be reached is no reason not to start.

    Raises ``ConfigError``.
    """
    if not config.index.is_shared:
        return
    try:
        problem = asyncio.run(check_index(config.index))
    except IndexRefused as error:
        raise ConfigError(f"index: {error}") from None
    if problem:
        _log.warning("starting without the shared index", index=redacted(config.index.url), problem=problem)


def tame_garbage_collection() -> None:
    """Leave what was loaded out of every collection, and collect the rest less often.

    A request makes no reference cycles, so collections find next to nothing, and cost 8 % of the CPU at the
    interpreter's thresholds (measured with the load generator of benchmarks/proxy.py). What stays open is
    looked through twice: 50,000 objects at a time, those of 500 streams, hold the loop for 30 ms; a million
    would for 120 (benchmarks/streams.py).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 4, 2000)


def share_the_interpreter() -> None:
    """Worker threads give way to the event loop after 1 ms, not 5."""
    sys.setswitchinterval(0.001)


def serve(config: Config, load: Callable[[], Config]) -> int:
    """Run until SIGTERM or SIGINT; returns the exit status. ``load`` reads the configuration again."""
    hold_back()
    router = _prepared(config)
    workers = cores() if config.server.workers == "auto" else config.server.workers
    if workers > 1:
        router.discard()
        return _Parent(config, load, min(workers, WORKERS_MAX)).run()
    Reloads(router, lambda running: decide(running, load), on_log=configure_logging)
    return run_server(make_server(router), lambda: _ends_within_s(router))


def pick(config: Config, load: Callable[[], Config]) -> int:
    """The endpoint picker alone, until SIGTERM or SIGINT; returns the exit status."""
    hold_back()
    router = _prepared(config)
    Reloads(router, lambda running: decide(running, load), on_log=configure_logging)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_picking(router))


async def _picking(router: Router) -> int:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    guard = ShutdownGuard(lambda: _ends_within_s(router))
    router.draining = stop.is_set

    def stopped() -> None:
        guard.begin(loop)
        stop.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopped)
    started = False
    try:
        async with router.running():
            started = True
            await stop.wait()
            router.retire()
    except OSError as error:  # a port cannot be had
        if started:
            raise
        _log.error("not started", problem=str(error))
        return 1
    return 0


def _prepared(config: Config) -> Router:
    """The router of a checked configuration, in a process that is ready for it. Raises ``ConfigError``."""
    configure_logging(config.server.log_level, config.server.log_format)
    router = check(config)
    check_shared_index(config)
    tame_garbage_collection()
    share_the_interpreter()
    _log.info(
        "kvatlas starts",
        version=__version__,
        engines=[engine.engine_id for engine in config.engines],
        policy=config.policy.policy,
    )
    for model in config.models:
        if (library := router.reader.tokenized_by(model)) is not None:
            _log.info("tokenizer", model=model, library=library)
    return router


def run_server(
    server: RouterServer, ends_within_s: Callable[[], float], sockets: list[socket.socket] | None = None
) -> int:
    """Serve until a signal; returns the exit status. ``ends_within_s``: how long after it the process has
    ended."""
    server.guard = ShutdownGuard(ends_within_s)
    try:
        server.run(sockets)
    except ListenError as error:
        _log.error("not started", problem=str(error))
        return 1
    return 0 if server.started else 1


def _ends_within_s(router: Router) -> float:
    """How long after a signal the process has ended."""
    picker = router.config.epp
    drain_s = 0.0 if router.picker is None else picker.drain_delay_s + picker.drain_s_max
    return max(server_ends_within_s(router.config.listen), drain_s + _STOP_S)


def server_ends_within_s(listen: ListenSettings) -> float:
    """The same of a process that has no more than its port."""
    return listen.drain_delay_s + listen.drain_s_max + _STOP_S


class _Parent:
    """Of several workers. Those that it starts have the configuration that holds then."""

    def __init__(self, config: Config, load: Callable[[], Config], workers: int) -> None:
        self._config = config
        self._load = load
        self._workers = workers

    def run(self) -> int:
        """Until all workers have ended; returns the exit status."""
        config, listen = self._config, self._config.listen
        server = config.server
        ops = None if server.ops_listens_on is None else (server.ops_host, server.ops_listens_on)
        own_admin = config.admin.enabled and config.admin.port is not None
        admin = (config.admin.host, config.admin.port or 0) if own_admin else None
        try:
            sockets = WorkerSockets(self._workers, (server.host, server.port), ops=ops, admin=admin)
        except OSError as error:
            _log.error("not started", problem=str(error))
            return 1
        if config.access_log.path:
            with contextlib.suppress(OSError):  # said by whoever writes
                read_key(Path(_key_file(config)))
        url = address_url(sockets.public[0][0].getsockname(), is_ssl=server.tls.given)
        return Supervisor(
            sockets,
            lambda seat: _work(self._config, seat),
            on_up=lambda: _log.info("listening", url=url, workers=self._workers),
            on_hup=lambda: self._reload(sockets.folder),
            stop_s_max=listen.drain_delay_s + listen.drain_s_max + _STOP_WORKERS_S,
        ).run()

    def _reload(self, folder: Path) -> None:
        """Everything that a worker could stumble over is tried here first, as at the start."""
        decided = decide(self._config, self._load)
        try:
            if decided.config is not None:
                check(decided.config).discard()
                self._config = decided.config
        except ConfigError as error:
            decided = refused(error)
        hand_over(folder, msgspec.structs.replace(decided, config=self._config))
        configure_logging(self._config.server.log_level, self._config.server.log_format)


def _work(config: Config, seat: WorkerSeat) -> int:
    """One worker, in its own process; returns its exit status."""
    configure_logging(config.server.log_level, config.server.log_format, worker=seat.slot)
    router = Router(worker_config(config, seat), seat=seat)
    if router.accounts.access is not None:
        router.accounts.access.beside = [Path(_access_log(config, slot)) for slot in range(1, seat.count)]
    Reloads(
        router,
        lambda _: _handed_over(seat),
        on_log=partial(configure_logging, worker=seat.slot),
        counts=seat.slot == LEAD,
    )
    server = make_server(router)
    server.seat = seat
    return run_server(server, lambda: _ends_within_s(router), seat.public)


def _handed_over(seat: WorkerSeat) -> Decided:
    """What holds at the parent, whichever of its decisions this worker has missed."""
    decided = handed_over(seat.folder)
    if decided.config is None:
        return decided
    return msgspec.structs.replace(decided, config=worker_config(decided.config, seat))


def worker_config(config: Config, seat: WorkerSeat) -> Config:
    """What differs at one worker: names that must be its own, and its part of the access log."""
    index, access = config.index, config.access_log
    if index.replica:
        index = msgspec.structs.replace(index, replica=f"{index.replica}/{seat.slot}")
    if access.path:
        access = msgspec.structs.replace(
            access,
            path=_access_log(config, seat.slot),
            key_file=_key_file(config),
            bytes_max=max(1, access.bytes_max // seat.count),
        )
    return msgspec.structs.replace(config, index=index, access_log=access)


def _access_log(config: Config, slot: int) -> str:
    return config.access_log.path + (f".worker{slot}" if slot else "")


def _key_file(config: Config) -> str:
    return config.access_log.key_file or f"{config.access_log.path}.key"


def make_server(router: Router) -> RouterServer:
    """The server of this router, not started yet."""
    router.listen_stats = ListenStats()
    server = server_of(router, router.config, router.certificates, router.listen_stats)
    router.draining = lambda: server.draining
    router.on_listen = lambda listen: server.configure(_within_descriptors(listen))
    server.on_drain = router.retire
    return server


def server_of(app: Any, config: Config, certificates: Certificates, stats: ListenStats) -> RouterServer:
    """A server of this application, on the port and by the limits of the configuration. Raises
    ``TlsError``."""
    context, files = None, config.server.tls
    if files.given:
        context = certificates.hold(server_context(files, _TLS_KEYS), files, _TLS_KEYS)
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


def _within_descriptors(listen: ListenSettings) -> ListenSettings:
    held = connections_held(listen.connections_max, default=ListenSettings().connections_max)
    return msgspec.structs.replace(listen, connections_max=held)


def configure_logging(level: str, log_format: str, worker: int | None = None) -> None:
    """Log lines to stderr: coloured for people on a terminal, JSON for machines. ``worker``: its number is in
    every line."""

    def by_worker(_logger: Any, _method: str, line: Any) -> Any:
        return line if worker is None else {**line, "worker": worker}

    renderer: Any = structlog.processors.JSONRenderer()
    if log_format == "console":
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[
            by_worker,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", LogSink(sys.stderr))),
    )


def describe(loaded: Loaded) -> str:
    """The merged configuration, one ``key = value`` line each, with the source of what is not a default."""
    lines = []
    for key, value in _flatten(msgspec.to_builtins(loaded.config)):
        shown = redacted(value) if key == "index.url" else value
        source = next(
            (s for k, s in loaded.sources.items() if key == k or key.startswith(f"{k}[")), "default"
        )
        lines.append(f"{key} = {msgspec.json.encode(shown).decode()}  # {source}\n")
    return "".join(lines)


def _flatten(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        pairs = [(f"{prefix}.{name}" if prefix else name, value) for name, value in tree.items()]
        return [leaf for name, value in pairs for leaf in _flatten(value, name)]
    if isinstance(tree, list | tuple) and tree and isinstance(tree[0], dict):
        return [leaf for i, value in enumerate(tree) for leaf in _flatten(value, f"{prefix}[{i}]")]
    return [(prefix, tree)]
