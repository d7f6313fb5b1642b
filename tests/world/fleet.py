"""The machines of a world: engines, routers, Redis, and the list of engines that routers read.

Each runs as on a host of its own: its tasks carry its address, and a router's also the number of its process,
so that a killed one never runs again. Invariant: an engine is ``down`` or serves.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.publisher.groups import GroupSpec
from kvatlas.publisher.simulator.request import SimRequest
from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR, EngineSettings
from kvatlas.router.admission.key_file import digest_of
from kvatlas.router.app import Router
from kvatlas.router.config.schema import Config
from kvatlas.router.observe.requests import RequestRecord
from kvatlas.router.observe.usage import UsageLine, usage_line
from kvatlas.router.server_lifecycle import RouterServer, make_server
from tests.world.loop import VirtualLoop
from tests.world.machines import MACHINE, PROCESS
from tests.world.plan import Plan
from tests.world.redis_server import RedisServer

LAYOUTS: dict[str, str | tuple[GroupSpec, ...]] = {
    "full": "full",
    "mla": (GroupSpec(0, "mla_attention", 16),),
    "gemma": "gemma3-like",
    "gptoss": "gptoss-like",
    "mamba": "mamba-hybrid",
    "chunked": (
        GroupSpec(0, "full_attention", 16),
        GroupSpec(1, "chunked_local_attention", 16, attention_chunk_size=128),
    ),
}
REDIS = "10.2.0.1"
GATEWAY = "10.3.0.1"
PORT, PICKER_PORT = 9000, 9002
_KV_SECTIONS = ("role", "kv_connector")


def engine_host(i: int) -> str:
    return f"10.0.0.{i + 1}"


def router_host(r: int) -> str:
    return f"10.1.0.{r + 1}"


def router_replica(r: int) -> str:
    return f"r{r}"


@contextmanager
def on(host: str, process: int = 0) -> Iterator[None]:
    """Tasks that begin within the block run on this machine, in this process."""
    tokens = MACHINE.set(host), PROCESS.set(process)
    try:
        yield
    finally:
        MACHINE.reset(tokens[0])
        PROCESS.reset(tokens[1])


class Work(msgspec.Struct, eq=False):
    """One request as an engine's scheduler got it."""

    engine: int
    at_s: float
    request: SimRequest


class Serving:
    """One router process and what it wrote of each request."""

    def __init__(self, number: int, process: int, router: Router, server: RouterServer) -> None:
        self.number, self.process, self.router, self.server = number, process, router, server
        self.task: asyncio.Task[None]
        self.lines: list[UsageLine] = []
        self.charges: list[tuple[Any, float]] = []
        """Charges to the fair share when a request is placed, with its claim."""

    def ended(self, record: RequestRecord, now: float) -> None:
        """Called by the router for each ended request, as the usage record is."""
        self.lines.append(
            usage_line(record, record.placement_facts(), now, now - record.arrived_s, b"k" * 32)
        )


class Fleet:
    """All machines of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        loop: Any = asyncio.get_running_loop()
        self.loop: VirtualLoop = loop
        self.net = loop.net
        self.engines: dict[int, SimulatedEngine] = {}
        self.processes: dict[int, int] = {}
        """Number of each engine's process."""
        self.down: set[int] = set(range(len(plan.engines)))
        self.busy: set[int] = set()
        """Engines that a fault ends, or takes out of the list, and brings back."""
        self.changed: dict[int, dict[str, Any]] = {}
        """Settings of an engine that differ from the plan's since its last restart."""
        self.listed: dict[int, str] = {}
        """Engines in the list that routers read: "up" or "drain"."""
        self.serving: dict[int, Serving] = {}
        self.past: list[Serving] = []
        """Processes that ended or were killed."""
        self.works: dict[str, list[Work]] = {}
        """By the client's request id."""
        self.losing: dict[str, float] = {}
        """Host of a publisher -> share of its messages that get lost."""
        self.folder = Path(tempfile.mkdtemp(prefix="world"))
        self.redis = RedisServer((REDIS, 6379)) if plan.kind in {"replicas", "load-only"} else None
        self.redis_up = False
        self._killed: list[SimulatedEngine] = []
        self.loop.zmq.loses = lambda publisher, _subscriber, _message: (
            publisher in self.losing and self.loop.rng.random() < self.losing[publisher]
        )

    # Engines.

    def settings(self, i: int) -> EngineSettings:
        given = {**self.plan.engines[i], **self.changed.get(i, {})}
        if any(name in given for name in _KV_SECTIONS):
            given |= {"side_channel_port": 5710, "bootstrap_port": 8998, "engine_id": None}
        given["groups"] = LAYOUTS[given.get("groups", "full")]
        return EngineSettings(host=engine_host(i), port=8000, events_port=5557, replay_port=5558, **given)

    async def boot(self, i: int) -> None:
        with self.loop.machine(engine_host(i), process=True) as self.processes[i]:
            engine = SimulatedEngine(self.settings(i))
            self._watch_work(i, engine)
            await engine.start()
        self.engines[i] = engine
        self.down.discard(i)

    def _watch_work(self, i: int, engine: SimulatedEngine) -> None:
        submit = engine.stepper.submit

        def noted(request: SimRequest) -> Any:
            which, _, request_id = request.request_id.partition("-")  # "chatcmpl" or "cmpl" before it
            if "_" in which:  # one of several answers or prompts: "0_cmpl-ID-1"
                request_id = request_id.rpartition("-")[0]
            self.works.setdefault(request_id, []).append(Work(i, self.loop.time(), request))
            return submit(request)

        engine.stepper.submit = noted  # type: ignore[method-assign]

    async def stop(self, i: int) -> None:
        """End an engine's process as by SIGTERM."""
        self.down.add(i)
        with on(engine_host(i), self.processes[i]):
            await self.engines[i].stop()
        self.loop.kill(self.processes[i])

    def kill(self, i: int, *, power: bool) -> None:
        """End it as by SIGKILL; with ``power`` its machine is off, and sends nothing."""
        self.down.add(i)
        self._killed.append(self.engines[i])
        self.loop.kill(self.processes[i], silent=power)
        if power:
            self.net.power_off(engine_host(i))

    def write_list(self) -> None:
        """Write the file that names the engines, as a deployment's own tool would."""
        rows = []
        for i, state in sorted(self.listed.items()):
            row: dict[str, Any] = {"base_url": f"http://{engine_host(i)}:8000"}
            if role := self.plan.engines[i].get("role"):
                row["role"] = role
            if state == "drain":
                row["drain"] = True
            rows.append(row)
        new = self.folder / "engines.new"
        new.write_text(json.dumps({"engines": rows}))
        new.replace(self.folder / "engines.json")

    # Routers.

    def config(self, r: int) -> Config:
        """The configuration that a router starts with."""
        host = router_host(r)
        sections: dict[str, Any] = {
            "server": {
                "host": host,
                "port": PORT,
                "ops_port": "off",
                "expose_decision": True,
                "check_every": 1,
            },
            "models": {"*": {"tokenizer": str(DEMO_TOKENIZER_DIR), "attention_chunk_size": 128}},
            "fleet": {
                "poll_interval_s": 1,
                "poll_down_interval_s": 0.5,
                "gauge_interval_s": 1,
                "poll_timeout_s": 3.0,
                "file": {"path": str(self.folder / "engines.json")},
            },
            "listen": {"drain_s_max": 5.0},
        }
        if self.plan.tenants:
            sections["keys"] = self._keys()
        if self.redis is not None:
            sections["index"] = {"url": f"redis://{REDIS}:6379/0", "replica": router_replica(r)}
        if self.plan.gateway:
            sections["epp"] = {"listen": f"{host}:{PICKER_PORT}", "tls": False}
        for name, given in self.plan.config.items():
            if name == "models":
                sections["models"]["*"] |= given["*"]
            else:
                sections[name] = {**sections.get(name, {}), **given}
        return msgspec.convert(sections, Config)

    def _keys(self) -> dict[str, Any]:
        path, secret = self.folder / "keys.toml", self.folder / "secret"
        rows = []
        for tenant, rules in self.plan.tenants.items():
            lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in rules.items())
            rows.append(f"[tenants.{tenant}]\n{lines}")
        rows += [
            f'[[keys]]\ntenant = "{tenant}"\nsha256 = "{digest_of(f"key-of-{tenant}")}"\n'
            for tenant in self.plan.tenants
        ]
        path.write_text("".join(rows))
        secret.write_text("s" * 40)
        path.chmod(0o600)
        secret.chmod(0o600)
        isolates = "isolate" in self.plan.config.get("keys", {})
        return {"file": str(path), **({"isolate_secret_file": str(secret)} if isolates else {})}

    async def start_router(self, r: int) -> None:
        with self.loop.machine(router_host(r), process=True) as process:
            router = Router(self.config(r))
            router.load_ops = lambda: None  # type: ignore[method-assign]  # FastAPI takes longer than a world
            server = make_server(router)
            serving = Serving(r, process, router, server)
            router.proxy.requests.on_end = serving.ended
            _watch_charges(serving)
            serving.task = asyncio.create_task(server.serve())
        while not server.started:
            if serving.task.done():
                serving.task.result()
            await asyncio.sleep(0.05)
        self.serving[r] = serving

    async def stop_router(self, r: int) -> None:
        """A regular end: drain, then exit."""
        serving = self.serving.pop(r)
        self.past.append(serving)
        with on(router_host(r), serving.process):
            serving.server.drain()
        await serving.task

    def kill_router(self, r: int, *, power: bool) -> None:
        """The process ends here and now; with ``power`` its machine does, and sends nothing."""
        serving = self.serving.pop(r)
        self.past.append(serving)
        self.loop.kill(serving.process, silent=power)
        if power:
            self.net.power_off(router_host(r))

    async def as_router(self, serving: Serving, work: Coroutine[Any, Any, None]) -> None:
        """Do something in a router's process, as its own tasks do."""
        with on(router_host(serving.number), serving.process):
            task = asyncio.create_task(work)
        await asyncio.wait((task,))

    def lines(self) -> Iterator[UsageLine]:
        """Usage lines of all routers, those that ended included."""
        return (line for one in (*self.past, *self.serving.values()) for line in one.lines)

    async def start_redis(self) -> None:
        assert self.redis is not None
        await self.redis.start()
        self.redis_up = True

    def stop_redis(self) -> None:
        assert self.redis is not None
        self.redis.stop()
        self.redis_up = False

    # The network between them.

    def hosts(self) -> list[str]:
        gateway = [GATEWAY] if self.plan.gateway else []
        return [
            *gateway,
            *(router_host(r) for r in range(self.plan.routers)),
            *(engine_host(i) for i in range(len(self.plan.engines))),
        ]

    def cut(self, i: int, *, tcp: bool, zmq: bool, up: bool) -> None:
        """Cut or heal an engine's links: HTTP and transfers, events, or both."""
        here, only = engine_host(i), "" if tcp and zmq else "tcp" if tcp else "zmq"
        for other in self.hosts():
            if other != here and (not other.startswith("10.0.") or not only):
                self.net.cut(here, other, up=up, only=only)

    def links(self, i: int) -> list[Any]:
        """An engine's links to and from routers and other engines."""
        here = engine_host(i)
        others = [other for other in self.hosts() if other != here]
        return [self.net.link(a, b) for other in others for a, b in ((here, other), (other, here))]

    def timers(self) -> list[str]:
        """Timers of routers that would still come."""
        return [
            getattr(timer._callback, "__qualname__", repr(timer._callback))
            for timer in self.loop._scheduled
            if not timer.cancelled()
            and timer._context.get(MACHINE, "").startswith("10.1.")
            and timer._context.get(PROCESS, 0) not in self.loop.killed
        ]

    def killed(self, process: int) -> bool:
        return process in self.loop.killed

    async def start(self) -> None:
        if self.redis is not None:
            await self.start_redis()
        for i in range(len(self.plan.engines)):
            if i not in self.plan.spare:
                await self.boot(i)
                self.listed[i] = "up"
        self.write_list()
        for r in range(self.plan.routers):
            await self.start_router(r)

    def unready(self) -> str:
        """Fault of a whole fleet; "" without one."""
        for r, serving in sorted(self.serving.items()):
            router = serving.router
            if not router.readiness().ready:
                return f"router {r}: {router.readiness()}"
            known = list(router.fleet)
            if len(known) != len(self.listed):
                return f"router {r} knows {len(known)} of {len(self.listed)} engines"
            for engine in known:
                if not engine.up:
                    return f"router {r}: {engine.engine_id} is down"
                followed = router.peers.blocks is None and engine.publishes_events
                if followed and engine.feed_state != "ready":
                    return f"router {r}: feed of {engine.engine_id} is {engine.feed_state}"
        return ""

    async def until_ready(self, limit_s: float) -> str:
        """Wait; "" once the fleet is whole, else what is missing after the limit."""
        end = self.loop.time() + limit_s
        while why := self.unready():
            if self.loop.time() > end:
                return why
            await asyncio.sleep(0.1)
        return ""

    async def stop_routers(self) -> None:
        for r in list(self.serving):
            await self.stop_router(r)

    async def stop_engines(self) -> None:
        for i in self.engines:
            if i not in self.down:
                await self.stop(i)
        if self.redis is not None and self.redis_up:
            self.stop_redis()

    def close(self) -> None:
        for engine in self._killed:  # as the end of a process does
            publisher = engine.publisher
            if publisher is not None and publisher._own_context is not None:
                publisher._own_context.destroy(linger=0)
        shutil.rmtree(self.folder, ignore_errors=True)


def _watch_charges(serving: Serving) -> None:
    """Note what is charged to fair shares when requests are placed; ``settle`` corrects such a charge later,
    and adds the generated tokens."""
    queue: Any = serving.router.accounts.room
    if queue is None or not hasattr(queue, "charge"):
        return
    charge, settle = queue.charge, queue.settle
    settling = False

    def noted(claim: Any, pool: str, tokens: float) -> Any:
        if not settling:
            serving.charges.append((claim, tokens))
        return charge(claim, pool, tokens)

    def settled(*args: Any) -> None:
        nonlocal settling
        settling = True
        try:
            settle(*args)
        finally:
            settling = False

    queue.charge, queue.settle = noted, settled
