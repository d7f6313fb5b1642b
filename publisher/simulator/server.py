"""Serve a simulated engine: HTTP by uvicorn, events by ZMQ, steps by one task.

``SimulatedEngine`` runs in the caller's event loop, which may have several. ``run`` is a process that ends
cleanly on SIGTERM or SIGINT.
"""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from contextlib import ExitStack
from typing import Any

import msgspec
import structlog
import uvicorn
import uvloop
import zmq

from kvatlas.publisher.block_pool import HybridBlockPool
from kvatlas.publisher.events import Event
from kvatlas.publisher.pool.host_tier import OWNER, HostTier
from kvatlas.publisher.pool.radix import RadixPool
from kvatlas.publisher.simulator.api_answers import Json
from kvatlas.publisher.simulator.http_app import CrashSwitch, EngineApp
from kvatlas.publisher.simulator.kv_connector import KvConnector, TransferLink
from kvatlas.publisher.simulator.kv_protocols import (
    MooncakeConnector,
    MooncakeLink,
    OffloadingConnector,
    OffloadingLink,
)
from kvatlas.publisher.simulator.loop_server import LoopServer
from kvatlas.publisher.simulator.model import EngineModel
from kvatlas.publisher.simulator.scheduler import Scheduler, StepCosts
from kvatlas.publisher.simulator.settings import (
    EngineSettings,
    check_settings,
    hash_scheme,
    model_length,
    release,
    resolve_groups,
)
from kvatlas.publisher.simulator.stepper import Stepper
from kvatlas.publisher.snapshot import SnapshotLedger
from kvatlas.publisher.zmq_publisher import ZmqPublisher

_WILDCARDS = ("0.0.0.0", "::", "")  # noqa: S104  # recognised, not bound by default

log = structlog.get_logger()

# How often SGLang repeats an unchanged load, and how often changes are looked for here.
_LOAD_EVERY_S, _LOAD_LOOK_S = 1.0, 0.01
_LOADS_MAX = 8


class LoadStat(msgspec.Struct, array_like=True, tag=True, gc=False):
    """SGLang's message of load; fields as there."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_tokens: int
    max_total_num_tokens: int
    attn_dp_rank: int | None = None
    num_waiting_uncached_tokens: int = 0
    num_total_tokens: int = 0
    max_running_requests: int = 0
    total_prefill_uncached_tokens: int = 0
    total_prefill_busy_us: int = 0


_CONNECTORS: dict[str, type[KvConnector]] = {
    "nixl": KvConnector,
    "mooncake": MooncakeConnector,
    "offloading": OffloadingConnector,
}


class SimulatedEngine:
    """One engine; ``base_url`` and the endpoints are valid between ``start`` and ``stop``.

    ``pool``, ``scheduler`` and ``publisher`` (None if events are off) may be inspected in between. Raises
    ``ValueError`` for settings that are invalid or contradict each other.
    """

    def __init__(self, settings: EngineSettings) -> None:
        check_settings(settings)
        self.settings = settings
        self.groups = resolve_groups(settings)
        self.scheme = hash_scheme(settings, self.groups)
        self.model = EngineModel(settings, model_length(settings, self.groups))
        self.pool = self._pool()
        pulls = settings.kv_connector == "offloading"
        owner = None if pulls else OWNER
        self.tier: HostTier | None = None
        self.connector: KvConnector | None = None
        if isinstance(self.pool, HybridBlockPool):
            if settings.host_blocks:
                self.tier = HostTier(self.pool.layout, settings.host_blocks, owner=owner)
            if settings.role is not None or pulls:
                self.connector = self._connector(self.pool)
        self.scheduler = Scheduler(
            self.pool,
            costs=StepCosts(
                settings.prefill_s_per_token, settings.decode_s_per_token, settings.load_s_per_token
            ),
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            clock=time.monotonic,
            tier=self.tier,
            connector=self.connector,
            wrong_answer=self.model.wrong_answer,
            by_priority=settings.scheduling_policy == "priority",
        )
        self.stepper = Stepper(
            self.scheduler,
            publish=self._publish,
            clock=time.monotonic,
            recomputes_failed_loads=settings.kv_load_failure_policy == "recompute",
            stream_interval=settings.stream_interval,
        )
        self.link = None if self.connector is None else self._link(self.connector)
        self.crash_switch = CrashSwitch(settings.dies_at, self.die)
        self.publisher: ZmqPublisher | None = None
        self._load_socket: zmq.Socket[bytes] | None = None
        self.base_url = ""
        self._server: LoopServer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def events_endpoint(self) -> str | None:
        """Address of the event socket; None if events are off."""
        return None if self.publisher is None else self.publisher.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """Address of the replay socket; None if events are off."""
        return None if self.publisher is None else self.publisher.replay_endpoint

    async def start(self) -> None:
        """Bind every port and begin to serve. Raises ``OSError`` naming an address that cannot be bound."""
        settings = self.settings
        with ExitStack() as undo:
            undo.callback(self._close_publisher)
            try:
                self._open_sockets(settings)
            except zmq.ZMQError as error:
                text = f"cannot listen for event subscribers on {settings.host}: {error}"
                raise OSError(text) from None
            if self.link is not None:
                undo.callback(self.link.close)
                await self.link.listen(settings.host, settings.side_channel_port, _host(settings.host))
            app = EngineApp(
                self.model,
                self.stepper,
                event_sources=self._event_sources() if settings.kind == "vllm" else None,
                server_info=self._server_info() if settings.kind == "sglang" else None,
                enable_scale_out=settings.enable_scale_out,
                crash_switch=self.crash_switch,
                drops_salt=settings.drops_salt,
            )
            config = uvicorn.Config(app, lifespan="off", ws="none", access_log=False, log_config=None)
            server = LoopServer(config)
            port = await server.listen(settings.host, settings.port)
            undo.pop_all()
        self._server = server
        self.base_url = f"http://{_reachable(settings.host)}:{port}"
        self._tasks = [
            asyncio.create_task(server.serve(), name="engine-http"),
            asyncio.create_task(self._step(), name="engine-steps"),
        ]
        if self.link is not None:
            self._tasks.append(asyncio.create_task(self.link.run(), name="engine-transfers"))
        if self._load_socket is not None:
            task = asyncio.create_task(self._publish_load(self._load_socket), name="engine-load")
            self._tasks.append(task)

    def _open_sockets(self, settings: EngineSettings) -> None:
        if settings.publish_events:
            self.publisher = ZmqPublisher(
                _tcp(settings.host, settings.events_port),
                replay_endpoint=_tcp(settings.host, settings.replay_port),
                data_parallel_rank=settings.dp_rank,
                ledger=None if settings.kind == "sglang" else SnapshotLedger(),
                sglang=settings.kind == "sglang",
            )
            self.publisher.start()
        if settings.load_port is not None:
            self._load_socket = zmq.Context.instance().socket(zmq.PUB)
            self._load_socket.set_hwm(_LOADS_MAX)
            self._load_socket.bind(_tcp(settings.host, settings.load_port))

    async def stop(self) -> None:
        """End every request (finish reason "abort") and close every socket. A second call does nothing."""
        server, self._server = self._server, None
        if server is None:
            return
        serving, *others = self._tasks
        self.stepper.abort_all()
        server.ending.set()
        await serving
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self.link is not None:
            self.link.close()
        self._close_publisher()

    def die(self) -> None:
        """End immediately like a killed process: cut every connection, close every port. ``stop`` must
        follow."""
        server = self._server
        if server is None:
            return
        server.should_exit = server.force_exit = True
        for listening in server.servers:
            listening.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        for task in self._tasks[1:]:
            task.cancel()
        if self.link is not None:
            self.link.close()
        self._close_publisher()

    async def _step(self) -> None:
        """Step until the engine fails; with a connector, the server exits after that, as in vLLM."""
        await self.stepper.run()
        if self.connector is not None and self._server is not None:
            self._server.should_exit = True

    def _pool(self) -> HybridBlockPool | RadixPool:
        settings = self.settings
        chunk = settings.max_num_batched_tokens
        if settings.kind == "sglang":
            return RadixPool(
                num_blocks=settings.num_blocks,
                scheme=self.scheme,
                chunk_tokens_max=chunk,
                host_pages=settings.host_blocks,
                write_policy=settings.hicache_write_policy or "write_through",
            )
        return HybridBlockPool(
            self.groups,
            num_blocks=settings.num_blocks,
            scheme=self.scheme,
            retention_interval=settings.retention_interval,
            dcp_world_size=settings.decode_context_parallel_size,
            int_hashes=settings.int_hashes,
            chunk_tokens_max=chunk,
            events=settings.publish_events,
        )

    def _connector(self, pool: HybridBlockPool) -> KvConnector:
        settings = self.settings
        more = {"tier": self.tier} if settings.kv_connector == "offloading" else {}
        return _CONNECTORS[settings.kv_connector](
            pool,
            **more,
            engine_id=settings.engine_id or str(uuid.uuid4()),
            lease_s=settings.kv_lease_s,
            release=release(settings.version),
            clock=time.monotonic,
        )

    def _link(self, connector: KvConnector) -> TransferLink:
        settings = self.settings
        options: dict[str, Any] = {
            "loaded": self.stepper.loaded,
            "failed": self.stepper.load_failed,
            "common": f"{settings.version} {settings.model} {self.groups}",
            "s_per_block": settings.transfer_s_per_block,
            "block_bytes": settings.block_bytes,
        }
        if isinstance(connector, MooncakeConnector):
            port = None if settings.role == "decode" else settings.bootstrap_port
            link: TransferLink = MooncakeLink(connector, bootstrap_port=port, **options)
        elif isinstance(connector, OffloadingConnector):
            link = OffloadingLink(
                connector,
                probed=self.stepper.probed,
                working=lambda: self.scheduler.has_work,
                handshake_s=settings.handshake_timeout_s,
                **options,
            )
        else:
            link = TransferLink(connector, **options)
        self.stepper.kick = link.kick
        return link

    def _close_publisher(self) -> None:
        if self.publisher is not None:
            self.publisher.close()
        if self._load_socket is not None:
            self._load_socket.close(linger=0)

    async def _publish_load(self, socket: zmq.Socket[bytes]) -> None:
        """Publish changed loads at once and others once a second, as ``SchedulerLoadPublisher`` does
        (srt/managers/scheduler_components/load_publisher.py, SGLang 0.5.23)."""
        told, told_s, sequence = None, 0.0, 0
        tokens_max = self.settings.num_blocks * self.scheme.hash_block_size
        while True:
            gauges = self.scheduler.gauges()
            now = time.monotonic()
            if gauges != told or now - told_s >= _LOAD_EVERY_S:
                told, told_s = gauges, now
                used = round(gauges.kv_cache_usage * tokens_max)
                counts = gauges.num_running, gauges.num_waiting, used, tokens_max
                payload = msgspec.msgpack.encode(LoadStat(*counts, self.settings.dp_rank))
                socket.send_multipart([b"load", sequence.to_bytes(8, "big"), payload])
                sequence += 1
            await asyncio.sleep(_LOAD_LOOK_S)

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

    def _server_info(self) -> Json:
        """GET /server_info of SGLang (``build_server_info``): what routers read of it."""
        size = self.scheme.hash_block_size
        info: Json = {
            "version": "0.5.23",
            "page_size": size,
            "enable_cache_report": True,
            "enable_metrics": True,
            "enable_lora": False,
            "speculative_algorithm": self.settings.speculative_algorithm,
            "internal_states": [{"memory_usage": {"token_capacity": self.settings.num_blocks * size}}],
            "kv_events": None,
        }
        if self.publisher is not None:
            ports = [
                int(endpoint.rpartition(":")[2])
                for endpoint in (self.publisher.endpoint, self.publisher.replay_endpoint or "")
            ]
            info["kv_events"] = {
                "publisher": "zmq",
                "endpoint_host": "*",
                "endpoint_port_base": ports[0],
                "replay_endpoint_port_base": ports[1],
                "topic": self.publisher.topic,
                "block_size": size,
                "dp_size": 1,
            }
        if self._load_socket is not None:
            endpoint = self._load_socket.getsockopt_string(zmq.LAST_ENDPOINT)
            load = {"load_endpoint_port_base": int(endpoint.rpartition(":")[2]), "load_topic": "load"}
            info["kv_events"] |= load
        return info


def run(settings: EngineSettings) -> None:
    """Serve one engine until SIGTERM or SIGINT; POSIX only, on an event loop of its own.

    Raises ``ValueError`` for invalid settings, ``OSError`` for an address that cannot be bound.
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


def _tcp(host: str, port: int) -> str:
    """The ZMQ form of an address; port 0 means any port."""
    return f"tcp://{'*' if host in _WILDCARDS else host}:{port or '*'}"


def _host(host: str) -> str:
    """An address through which this machine reaches a listener on ``host``."""
    return "127.0.0.1" if host in _WILDCARDS else host


def _reachable(host: str) -> str:
    """The address of ``_host`` in URL form."""
    return f"[{host}]" if ":" in host else _host(host)


def _advertised(endpoint: str) -> str:
    """The announced form of an endpoint: ``tcp://*:port`` for every address, as vLLM writes it."""
    return endpoint.replace("//0.0.0.0:", "//*:")
