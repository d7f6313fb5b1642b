"""Puts a simulated engine on the network: HTTP by uvicorn, events by ZMQ, steps by one task.

``SimulatedEngine`` lives in the caller's event loop, several of them if wanted; ``run`` is a process of its
own that ends cleanly on SIGTERM or SIGINT.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Iterator

import structlog
import uvicorn
import uvloop
import zmq

from publisher.block_pool import HybridBlockPool
from publisher.events import Event
from publisher.pool.host_tier import HostTier
from publisher.simulator.api.answers import Json
from publisher.simulator.http.app import EngineApp
from publisher.simulator.model import EngineModel
from publisher.simulator.scheduler import Scheduler, StepCosts
from publisher.simulator.settings import (
    EngineSettings,
    check_settings,
    hash_scheme,
    model_length,
    resolve_groups,
)
from publisher.simulator.stepper import Stepper
from publisher.snapshot import SnapshotLedger
from publisher.zmq_publisher import ZmqPublisher

_BACKLOG = 2048
_DRAIN_S = 1
"""How long ``stop`` waits for connections whose requests it has just ended."""
_WILDCARDS = ("0.0.0.0", "::", "")  # noqa: S104  # recognised, not bound by default

log = structlog.get_logger()


class _Server(uvicorn.Server):
    """uvicorn inside somebody's event loop: no signal handlers, and an event for "it listens"."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


class SimulatedEngine:
    """One engine: ``start``, then ``base_url`` and the endpoints are good until ``stop``.

    ``pool``, ``scheduler`` and ``publisher`` (None where events are off) may be looked at in between.
    Raises ``ValueError`` for settings that cannot be used, or contradict each other.
    """

    def __init__(self, settings: EngineSettings) -> None:
        check_settings(settings)
        self.settings = settings
        self.groups = resolve_groups(settings)
        self.scheme = hash_scheme(settings, self.groups)
        self.model = EngineModel(settings, model_length(settings, self.groups))
        self.pool = HybridBlockPool(
            self.groups,
            num_blocks=settings.num_blocks,
            scheme=self.scheme,
            retention_interval=settings.retention_interval,
            int_hashes=settings.int_hashes,
            chunk_tokens_max=settings.max_num_batched_tokens,
            events=settings.publish_events,
        )
        host = HostTier(self.pool.layout, settings.host_blocks) if settings.host_blocks else None
        self.scheduler = Scheduler(
            self.pool,
            costs=StepCosts(
                settings.prefill_s_per_token, settings.decode_s_per_token, settings.load_s_per_token
            ),
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            clock=time.monotonic,
            tier=host,
        )
        self.stepper = Stepper(self.scheduler, publish=self._publish, clock=time.monotonic)
        self.publisher: ZmqPublisher | None = None
        self.base_url = ""
        self._server: _Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def events_endpoint(self) -> str | None:
        """Where the events are published; None where events are off."""
        return None if self.publisher is None else self.publisher.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """Where past batches can be asked for; None where events are off."""
        return None if self.publisher is None else self.publisher.replay_endpoint

    async def start(self) -> None:
        """Bind every port and begin to serve. Raises ``OSError`` that names the address it cannot have."""
        settings = self.settings
        listener = _listen(settings.host, settings.port)
        try:
            if settings.publish_events:
                self.publisher = ZmqPublisher(
                    _tcp(settings.host, settings.events_port),
                    replay_endpoint=_tcp(settings.host, settings.replay_port),
                    data_parallel_rank=settings.dp_rank,
                    ledger=SnapshotLedger(),
                )
                self.publisher.start()
        except zmq.ZMQError as error:
            listener.close()
            raise OSError(f"cannot listen for event subscribers on {settings.host}: {error}") from None
        except BaseException:
            listener.close()
            raise
        port = listener.getsockname()[1]
        self.base_url = f"http://{_reachable(settings.host)}:{port}"
        app = EngineApp(
            self.model,
            self.stepper,
            event_sources=self._event_sources(),
            enable_scale_out=settings.enable_scale_out,
        )
        self._server = server = _Server(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                access_log=False,
                log_config=None,
                timeout_graceful_shutdown=_DRAIN_S,
            )
        )
        self._tasks = [
            asyncio.create_task(server.serve([listener]), name="engine-http"),
            asyncio.create_task(self.stepper.run(), name="engine-steps"),
        ]
        await server.listening.wait()

    async def stop(self) -> None:
        """End every request (finish reason "abort"), close every socket. A second call does nothing."""
        server, self._server = self._server, None
        if server is None:
            return
        serving, stepping = self._tasks
        self.stepper.abort_all()
        server.should_exit = True
        await serving
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)
        if self.publisher is not None:
            self.publisher.close()

    def _publish(self, events: list[Event]) -> None:
        if self.publisher is not None:
            self.publisher.publish(events)

    def _event_sources(self) -> Json:
        """GET /kv_event_sources: the publisher's configuration by data-parallel rank."""
        if self.publisher is None:
            return {}
        source = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": _advertised(self.publisher.endpoint),
            "replay_endpoint": _advertised(self.publisher.replay_endpoint or ""),
            "buffer_steps": 10_000,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": self.publisher.topic,
        }
        return {str(self.settings.dp_rank): source}


def run(settings: EngineSettings) -> None:
    """Serve one engine until SIGTERM or SIGINT; POSIX only, on an event loop of its own.

    Raises ``ValueError`` for settings that cannot be used, ``OSError`` for an address that cannot be had.
    """
    uvloop.run(_serve(SimulatedEngine(settings)))


async def _serve(engine: SimulatedEngine) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await engine.start()
    log.info(
        "engine_ready",
        base_url=engine.base_url,
        model=engine.settings.model,
        events=engine.events_endpoint,
        replay=engine.replay_endpoint,
    )
    await stopped.wait()
    await engine.stop()


def _listen(host: str, port: int) -> socket.socket:
    """Raises ``OSError`` that names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


def _tcp(host: str, port: int) -> str:
    """The ZMQ form of an address; port 0 is any."""
    return f"tcp://{'*' if host in _WILDCARDS else host}:{port or '*'}"


def _reachable(host: str) -> str:
    """A host name by which this machine reaches a listener on ``host``."""
    if host in _WILDCARDS:
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _advertised(endpoint: str) -> str:
    """An endpoint bound on every address is announced as vLLM writes it, ``tcp://*:port``."""
    return endpoint.replace("//0.0.0.0:", "//*:")
