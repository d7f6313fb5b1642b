"""``kvatlas serve`` and ``kvatlas epp``: from a configuration to a listening process, and back at SIGTERM."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import structlog
import uvloop

from router import __version__
from router.app import Router
from router.config.schema import WORKERS_MAX, Config
from router.serve.check import check, check_shared_index
from router.serve.interpreter import share_the_interpreter, tame_garbage_collection
from router.serve.logs import configure_logging
from router.serve.parent import Parent
from router.serve.reload import decide, hold_back, reloads_of
from router.serve.server import ends_within_s, make_server, run_server
from router.serve.shutdown import ShutdownGuard
from router.workers.seat import cores

_log = structlog.get_logger()


def serve(config: Config, load: Callable[[], Config]) -> int:
    """Run until SIGTERM or SIGINT; returns the exit status. ``load`` reads the configuration again."""
    hold_back()
    router = _prepared(config)
    workers = cores() if config.server.workers == "auto" else config.server.workers
    if workers > 1:
        router.discard()
        return Parent(config, load, min(workers, WORKERS_MAX)).run()
    reloads_of(router, lambda running: decide(running, load), on_log=configure_logging)
    return run_server(make_server(router), lambda: ends_within_s(router))


def pick(config: Config, load: Callable[[], Config]) -> int:
    """The endpoint picker alone, until SIGTERM or SIGINT; returns the exit status."""
    hold_back()
    router = _prepared(config)
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
