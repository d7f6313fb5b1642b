"""``kvatlas serve`` with several workers: what the parent does, and one worker in its own process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import structlog

from router.app import Router
from router.config.errors import ConfigError
from router.config.schema import Config
from router.http.server.side_server import address_url
from router.observe.prefix_ids import read_key
from router.serve.check import check
from router.serve.logs import configure_logging
from router.serve.reload import Decided, decide, hand_over, handed_over, refused, reloads_of
from router.serve.server import ends_within_s, make_server, run_server
from router.workers.seat import LEAD, WorkerSeat, WorkerSockets
from router.workers.supervisor import Supervisor

_log = structlog.get_logger()
_STOP_S = 10.0
"""How long it waits for workers beyond their drain. The chart's grace period is as much longer than the
drain, so what is said of it is said before the pod is killed."""


class Parent:
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
        if config.usage.path:
            with contextlib.suppress(OSError):  # said by whoever writes
                read_key(Path(_key_file(config)))
        url = address_url(sockets.public[0][0].getsockname(), is_ssl=server.tls.given)
        return Supervisor(
            sockets,
            lambda seat: _work(self._config, seat),
            on_up=lambda: _log.info("listening", url=url, workers=self._workers),
            on_hup=lambda: self._reload(sockets.folder),
            stop_s_max=listen.drain_delay_s + listen.drain_s_max + _STOP_S,
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
    if router.usage is not None:
        router.usage.worker_paths = [Path(_usage_path(config, slot)) for slot in range(1, seat.count)]
    reloads_of(
        router,
        lambda _: _handed_over(seat),
        on_log=partial(configure_logging, worker=seat.slot),
        counts=seat.slot == LEAD,
    )
    server = make_server(router)
    server.seat = seat
    return run_server(server, lambda: ends_within_s(router), seat.public)


def _handed_over(seat: WorkerSeat) -> Decided:
    """What holds at the parent, whichever of its decisions this worker has missed."""
    decided = handed_over(seat.folder)
    if decided.config is None:
        return decided
    return msgspec.structs.replace(decided, config=worker_config(decided.config, seat))


def worker_config(config: Config, seat: WorkerSeat) -> Config:
    """What differs at one worker: names that must be its own, and its part of the usage record."""
    index, usage = config.index, config.usage
    if index.replica:
        index = msgspec.structs.replace(index, replica=f"{index.replica}/{seat.slot}")
    if usage.path:
        usage = msgspec.structs.replace(
            usage,
            path=_usage_path(config, seat.slot),
            key_file=_key_file(config),
            file_bytes_max=max(1, usage.file_bytes_max // seat.count),
        )
    return msgspec.structs.replace(config, index=index, usage=usage)


def _usage_path(config: Config, slot: int) -> str:
    return config.usage.path + (f".worker{slot}" if slot else "")


def _key_file(config: Config) -> str:
    return config.usage.key_file or f"{config.usage.path}.key"
