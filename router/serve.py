"""``kvatlas serve`` and ``kvatlas epp``: from a configuration to a listening process, until SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import structlog
import uvloop

from kvatlas import __version__
from kvatlas.router.api.metrics_page import prepare
from kvatlas.router.app import Router
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.config.schema import WORKERS_MAX, Config
from kvatlas.router.http.side_ports import address_url
from kvatlas.router.observe.log_lines import configure_logging
from kvatlas.router.observe.prefix_ids import read_key
from kvatlas.router.reloads import Decided, decide, hand_over, hold_back, inherited, refused, reloads_of
from kvatlas.router.server_lifecycle import ShutdownGuard, ends_within_s, make_server, run_server
from kvatlas.router.startup_check import check, check_shared_index
from kvatlas.router.workers.context import LEAD, WorkerContext, WorkerSockets, cores
from kvatlas.router.workers.supervisor import Supervisor

_log = structlog.get_logger()
# Time after the workers' drain before they are killed. The chart's grace period is longer than both, so the
# log line about it is written before the pod is killed.
_STOP_S = 10.0


class Parent:
    """Parent of several workers. New workers get the current configuration."""

    def __init__(self, config: Config, load: Callable[[], Config], workers: int) -> None:
        self._config = config
        self._load = load
        self._workers = workers

    def run(self) -> int:
        """Run until all workers have ended; returns the exit status."""
        config, listen = self._config, self._config.listen
        server = config.server
        ops = None if server.ops_listens_on is None else (server.ops_host, server.ops_listens_on)
        own_admin = config.admin.enabled and config.admin.port is not None
        admin = (config.admin.host, config.admin.port or 0) if own_admin else None
        try:
            sockets = WorkerSockets(
                self._workers,
                (server.host, server.port),
                ops=ops,
                admin=admin,
                memory_bytes_max=config.prompts.prefix_cache_bytes_max,
            )
        except OSError as error:
            _log.error("not started", problem=str(error))
            return 1
        if config.usage.path:
            with contextlib.suppress(OSError):  # the writer reports it
                read_key(Path(_key_file(config)))
        url = address_url(sockets.public[0][0].getsockname(), is_ssl=server.tls.given)
        return Supervisor(
            sockets,
            lambda worker: _work(self._config, worker),
            on_up=lambda: _log.info("listening", url=url, workers=self._workers),
            on_hup=lambda: self._reload(sockets.folder),
            stop_s_max=listen.drain_delay_s + listen.drain_s_max + _STOP_S,
        ).run()

    def _reload(self, folder: Path) -> None:
        """Reload; everything that could fail in a worker is tried here first, as at the start."""
        decided = decide(self._config, self._load)
        try:
            if decided.config is not None:
                check(decided.config).discard()
                self._config = decided.config
        except ConfigError as error:
            decided = refused(error)
        hand_over(folder, msgspec.structs.replace(decided, config=self._config))
        configure_logging(self._config.server.log_level, self._config.server.log_format)


def _work(config: Config, worker: WorkerContext) -> int:
    """Run one worker in its own process; returns its exit status."""
    configure_logging(config.server.log_level, config.server.log_format, worker=worker.slot)
    router = Router(worker_config(config, worker), worker=worker)
    router.load_ops()
    if router.usage is not None:
        router.usage.worker_paths = [Path(_usage_path(config, slot)) for slot in range(1, worker.count)]
    reloads_of(
        router,
        lambda _: _inherited(worker),
        on_log=partial(configure_logging, worker=worker.slot),
        counts=worker.slot == LEAD,
    )
    server = make_server(router)
    server.worker = worker
    return run_server(server, router, worker.public)


def _inherited(worker: WorkerContext) -> Decided:
    """Return the parent's current decisions, including those this worker has missed."""
    decided = inherited(worker.folder)
    if decided.config is None:
        return decided
    return msgspec.structs.replace(decided, config=worker_config(decided.config, worker))


def worker_config(config: Config, worker: WorkerContext) -> Config:
    """Adapt the settings to one worker: its own names, and its part of the usage record."""
    index, usage = config.index, config.usage
    if index.replica:
        index = msgspec.structs.replace(index, replica=f"{index.replica}/{worker.slot}")
    if usage.path:
        usage = msgspec.structs.replace(
            usage,
            path=_usage_path(config, worker.slot),
            key_file=_key_file(config),
            file_bytes_max=max(1, usage.file_bytes_max // worker.count),
        )
    return msgspec.structs.replace(config, index=index, usage=usage)


def _usage_path(config: Config, slot: int) -> str:
    return config.usage.path + (f".worker{slot}" if slot else "")


def _key_file(config: Config) -> str:
    return config.usage.key_file or f"{config.usage.path}.key"


def tame_garbage_collection() -> None:
    """Exclude loaded objects from garbage collection, and collect the rest less often."""
    # A request makes no reference cycles, so collections find next to nothing, and cost 8 % of the CPU at the
    # interpreter's thresholds (measured with the load generator of benchmarks/proxy.py). Open objects are
    # examined twice: 50,000 at a time, those of 500 streams, block the loop for 30 ms; a million would for
    # 120 (benchmarks/streams.py).
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 4, 2000)


def share_the_interpreter() -> None:
    """Make worker threads yield to the event loop after 1 ms, not 5."""
    sys.setswitchinterval(0.001)


def serve(config: Config, load: Callable[[], Config]) -> int:
    """Run until SIGTERM or SIGINT; returns the exit status. ``load`` reads the configuration again."""
    hold_back()
    workers = cores() if config.server.workers == "auto" else config.server.workers
    router = _prepared(config, serves=workers == 1)
    if workers > 1:
        router.discard()
        return Parent(config, load, min(workers, WORKERS_MAX)).run()
    reloads_of(router, lambda running: decide(running, load), on_log=configure_logging)
    return run_server(make_server(router), router)


def pick(config: Config, load: Callable[[], Config]) -> int:
    """Run the endpoint picker alone until SIGTERM or SIGINT; returns the exit status."""
    hold_back()
    router = _prepared(config, serves=True)
    reloads_of(router, lambda running: decide(running, load), on_log=configure_logging)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_picking(router))


async def _picking(router: Router) -> int:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    guard = ShutdownGuard(lambda: ends_within_s(router))
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
    except OSError as error:  # a port cannot be bound
        if started:
            raise
        _log.error("not started", problem=str(error))
        return 1
    return 0


def _prepared(config: Config, *, serves: bool) -> Router:
    """Make the router of a checked configuration, and prepare the process; ``serves``: it serves requests
    itself. Raises ``ConfigError``."""
    configure_logging(config.server.log_level, config.server.log_format)
    router = check(config)
    check_shared_index(config)
    prepare(router.sources)
    if serves:
        router.load_ops()
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
