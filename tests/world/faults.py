"""Faults: what happens to a fleet from outside, and which ends of requests it explains.

A fault that only concerns what the router knows (events lost, clocks moved, a reload, an engine drained)
explains nothing: every request must be answered anyway. ``Window`` says when a fault counts, until
``AFTER_S`` after its end, since routers notice at their next poll, and engines rest after failures; and for
which machines: a dead engine explains no failure of a request that another one was asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from kvatlas.router.reloads import apply
from tests.world.fleet import REDIS, Fleet, engine_host, router_host
from tests.world.plan import MODEL, Fault

if TYPE_CHECKING:
    from tests.world.kinds import Draft

AFTER_S = 12.0
_STALL_S_MAX = 4.0
_HANG_S_MAX = 15.0
_JUMPS_S = (-3600.0, 3600.0, -5.0)
_SLOW_S, _SLOW_RATE = (0.05, 0.4), 20_000.0
_LOST_SHARE = 0.3
OTHER_MODEL = "another-model"

Run = Callable[[Fleet, Fault], Awaitable[None]]


class Kind(msgspec.Struct, frozen=True):
    """``explains``: ends of requests, of "error", "cut" and "silent", on the machine that it ``touches``:
    the "engine" or the "router" of its target, or "all". ``restarts``: it needs an engine that is up, takes
    that out of the fleet, and needs a fleet of more than one."""

    run: Run
    explains: frozenset[str] = frozenset()
    restarts: bool = False
    touches: Literal["engine", "router", "all"] = "engine"


FAULTS: dict[str, Kind] = {}
_ANSWERS = frozenset({"error", "cut"})


def _fault(
    *explains: str, restarts: bool = False, touches: Literal["engine", "router", "all"] = "engine"
) -> Callable[[Run], Run]:
    def enter(run: Run) -> Run:
        name = run.__name__.lstrip("_")  # type: ignore[attr-defined]
        FAULTS[name] = Kind(run, frozenset(explains), restarts, touches)
        return run

    return enter


class Window(msgspec.Struct):
    """When a fault may be the reason of an end, and of which machine's requests; "": of all."""

    begin_s: float
    end_s: float
    kind: Kind
    host: str


def fitting(draft: Draft) -> list[str]:
    """Faults that this draft's engines can have."""
    left_out = {"join", "core", "api_server", "rollout", *REDIS_FAULTS}
    if draft.kind in ("pd", "sglang"):
        left_out |= {"other_model"}
    if len({one["max_model_len"] for one in draft.engines}) > 1:
        left_out |= {"leave", "drain", "other_model"}  # the only engine for long prompts may not go
    return [name for name in FAULTS if name not in left_out]


REDIS_FAULTS = (
    "redis_stop",
    "redis_cut",
    "redis_slow",
    "redis_clock",
    "router_kill",
    "router_power",
    "router_stop",
)


BREAKS = ("die", "stop", "core", "api_server", "restart", "power", "hang", "http", "reset", "drain")
"""Faults that break streams, and those that may not."""


# Engines that end.


@_fault("error", "cut", restarts=True)
async def die(fleet: Fleet, fault: Fault) -> None:
    """SIGKILL; a new process after a while."""
    fleet.kill(fault.target, power=False)
    await asyncio.sleep(fault.lasts_s)
    await fleet.boot(fault.target)


@_fault("error", "cut", restarts=True)
async def stop(fleet: Fleet, fault: Fault) -> None:
    """SIGTERM; a new process after a while."""
    await fleet.stop(fault.target)
    await asyncio.sleep(fault.lasts_s)
    await fleet.boot(fault.target)


@_fault("error", "cut", restarts=True)
async def core(fleet: Fleet, fault: Fault) -> None:
    """The engine's core dies behind its server, which says so in each stream; a new process after a while."""
    stepper: Any = fleet.engines[fault.target].stepper

    def dies() -> Any:
        raise MemoryError("CUDA out of memory")

    stepper.scheduler.begin_step = dies
    stepper._wake.set()
    await asyncio.sleep(1.0)
    await stop(fleet, fault)


@_fault("error", "cut", restarts=True)
async def api_server(fleet: Fleet, fault: Fault) -> None:
    """The API server is killed; the core behind it computes, and its events come, for a while."""
    server: Any = fleet.engines[fault.target]._server
    for listening in server.servers:
        listening.close()
    for connection in list(server.server_state.connections):
        connection.transport.abort()
    await asyncio.sleep(min(fault.lasts_s, _HANG_S_MAX))
    fleet.kill(fault.target, power=False)
    await asyncio.sleep(0.01)
    await fleet.boot(fault.target)


@_fault("error", "cut", restarts=True)
async def restart(fleet: Fleet, fault: Fault) -> None:
    """Killed, and there again before anyone has looked."""
    fleet.kill(fault.target, power=False)
    await asyncio.sleep(0.01)
    await fleet.boot(fault.target)


@_fault("error", "cut", restarts=True)
async def power(fleet: Fleet, fault: Fault) -> None:
    """The machine loses power: connections to it stay half open."""
    fleet.kill(fault.target, power=True)
    await asyncio.sleep(fault.lasts_s)
    fleet.net.power_on(engine_host(fault.target))
    await fleet.boot(fault.target)


@_fault("error", "cut", restarts=True)
async def other_speed(fleet: Fleet, fault: Fault) -> None:
    """Restarted on another GPU."""
    await fleet.stop(fault.target)
    await asyncio.sleep(min(fault.lasts_s, 4.0))
    speed = fleet.plan.engines[fault.target].get("prefill_s_per_token", 1e-5)
    fleet.changed[fault.target] = {"prefill_s_per_token": speed * (10 if fault.value < 0.5 else 0.1)}
    await fleet.boot(fault.target)


@_fault("error", "cut", restarts=True)
async def other_model(fleet: Fleet, fault: Fault) -> None:
    """Restarted with another model for a while, under the same address."""
    for model in (OTHER_MODEL, MODEL):
        await fleet.stop(fault.target)
        fleet.changed[fault.target] = {"model": model}
        await asyncio.sleep(0.01 if fault.value < 0.5 else 2.0)
        await fleet.boot(fault.target)
        await asyncio.sleep(fault.lasts_s if model == OTHER_MODEL else 0.0)


@_fault("error", "cut")
async def hang(fleet: Fleet, fault: Fault) -> None:
    """The scheduler stands still; the HTTP server answers."""
    if fault.target in fleet.down:
        return
    scheduler: Any = fleet.engines[fault.target].scheduler
    begin, stands_s = scheduler.begin_step, min(fault.lasts_s, _HANG_S_MAX)

    def stands() -> Any:
        scheduler.begin_step = begin
        step = begin()
        return msgspec.structs.replace(step, duration_s=step.duration_s + stands_s)

    scheduler.begin_step = stands
    await asyncio.sleep(stands_s)


# The network.


@_fault()
async def events(fleet: Fleet, fault: Fault) -> None:
    """Events do not arrive; connections wait."""
    await _cut(fleet, fault, tcp=False, zmq=True)


@_fault("error", "cut")
async def http(fleet: Fleet, fault: Fault) -> None:
    await _cut(fleet, fault, tcp=True, zmq=False)


@_fault("error", "cut")
async def both(fleet: Fleet, fault: Fault) -> None:
    await _cut(fleet, fault, tcp=True, zmq=True)


async def _cut(fleet: Fleet, fault: Fault, *, tcp: bool, zmq: bool) -> None:
    fleet.cut(fault.target, tcp=tcp, zmq=zmq, up=False)
    await asyncio.sleep(fault.lasts_s)
    fleet.cut(fault.target, tcp=tcp, zmq=zmq, up=True)


@_fault("error", "cut", touches="all")
async def between(fleet: Fleet, fault: Fault) -> None:
    """An engine does not reach the other engines, nor they it."""
    others = [engine_host(i) for i in range(len(fleet.plan.engines)) if i != fault.target]
    for other in others:
        fleet.net.cut(engine_host(fault.target), other)
    await asyncio.sleep(fault.lasts_s)
    for other in others:
        fleet.net.cut(engine_host(fault.target), other, up=True)


@_fault("error", "cut")
async def slow(fleet: Fleet, fault: Fault) -> None:
    """A bad link: late, and 20 KB a second."""
    links = fleet.links(fault.target)
    before = [(link.latency_s, link.rate) for link in links]
    for link in links:
        link.latency_s, link.rate = _SLOW_S, _SLOW_RATE
    await asyncio.sleep(fault.lasts_s)
    for link, (latency_s, rate) in zip(links, before, strict=True):
        link.latency_s, link.rate = latency_s, rate


@_fault()
async def lose(fleet: Fleet, fault: Fault) -> None:
    """A share of the batches of events gets lost."""
    fleet.losing[engine_host(fault.target)] = _LOST_SHARE
    await asyncio.sleep(fault.lasts_s)
    fleet.losing.pop(engine_host(fault.target), None)


# Clocks, and slow code.


@_fault()
async def clock(fleet: Fleet, fault: Fault) -> None:
    """A wall clock jumps: the engine's, or the router's."""
    host = engine_host(fault.target) if fault.value < 0.5 else router_host(0)
    fleet.loop.skew_s[host] = _JUMPS_S[int(fault.value * 100) % len(_JUMPS_S)]


@_fault("error", "cut", touches="all")
async def stall(fleet: Fleet, fault: Fault) -> None:
    """Nothing runs for a while, and then everything is late."""
    fleet.loop.now += min(fault.lasts_s, _STALL_S_MAX)


# What operators do: nothing of it may end a request.


@_fault(restarts=True)
async def leave(fleet: Fleet, fault: Fault) -> None:
    await _listed(fleet, fault, drain=False)


@_fault(restarts=True)
async def drain(fleet: Fleet, fault: Fault) -> None:
    await _listed(fleet, fault, drain=True)


@_fault(touches="all")
async def rollout(fleet: Fleet, fault: Fault) -> None:
    """Each engine is drained with a deadline, stopped then, and begun again before the next one is. In plans
    of its own only: a stream that may not go on elsewhere ends with an error."""
    routers = list(fleet.serving.values())
    for i in sorted(fleet.listed):
        url = f"http://{engine_host(i)}:8000"
        for one in routers:
            one.router.desired.drain(url, "ops", one.router.accounts.wall() + fault.lasts_s)
            await fleet.as_router(one, _assigned(one.router))
        await asyncio.sleep(fault.lasts_s)
        await fleet.stop(i)
        await asyncio.sleep(0.5)
        await fleet.boot(i)
        for one in routers:
            one.router.desired.undrain(url)
            await fleet.as_router(one, _assigned(one.router))
        while not all(one.router.fleet.get(url).up for one in routers):  # type: ignore[union-attr]
            await asyncio.sleep(0.2)


async def _assigned(router: Any) -> None:
    router._assign()


async def _listed(fleet: Fleet, fault: Fault, *, drain: bool) -> None:
    i = fault.target
    role = fleet.plan.engines[i].get("role")
    alike = [
        j for j, state in fleet.listed.items() if state == "up" and fleet.plan.engines[j].get("role") == role
    ]
    if fleet.listed.get(i) != "up" or len(alike) < 2:
        return
    if drain:
        fleet.listed[i] = "drain"
    else:
        del fleet.listed[i]
    fleet.write_list()
    await asyncio.sleep(fault.lasts_s)
    fleet.listed[i] = "up"
    fleet.write_list()


@_fault()
async def join(fleet: Fleet, fault: Fault) -> None:
    """An engine that was not there at the start."""
    await fleet.boot(fault.target)
    fleet.listed[fault.target] = "up"
    fleet.write_list()


@_fault()
async def reload(fleet: Fleet, fault: Fault) -> None:
    """Another configuration while requests run."""
    for serving in list(fleet.serving.values()):
        before = serving.router.config
        policy = msgspec.structs.replace(before.policy, beta=fault.value)
        proxy = msgspec.structs.replace(before.proxy, body_bytes_max=before.proxy.body_bytes_max + 1)
        queue = before.queue
        if queue.saturation_s is not None:
            queue = msgspec.structs.replace(queue, saturation_s=queue.saturation_s * (1.5 - fault.value))
        changed = msgspec.structs.replace(before, policy=policy, proxy=proxy, queue=queue)
        await fleet.as_router(serving, apply(serving.router, changed))


@_fault()
async def reset(fleet: Fleet, fault: Fault) -> None:
    """An operator empties an engine's cache."""
    if fault.target not in fleet.down:
        fleet.engines[fault.target].stepper.scheduler.reset_prefix_cache()


# Redis and routers.


@_fault()
async def redis_stop(fleet: Fleet, fault: Fault) -> None:
    """Redis ends, and comes back empty."""
    if not fleet.redis_up:
        return
    fleet.stop_redis()
    await asyncio.sleep(fault.lasts_s)
    await fleet.start_redis()


@_fault()
async def redis_cut(fleet: Fleet, fault: Fault) -> None:
    for r in range(fleet.plan.routers):
        fleet.net.cut(router_host(r), REDIS)
    await asyncio.sleep(fault.lasts_s)
    for r in range(fleet.plan.routers):
        fleet.net.cut(router_host(r), REDIS, up=True)


@_fault()
async def redis_slow(fleet: Fleet, fault: Fault) -> None:
    link = fleet.net.link(REDIS, router_host(0))
    before, link.latency_s = link.latency_s, (0.05, 0.3)
    await asyncio.sleep(fault.lasts_s)
    link.latency_s = before


@_fault()
async def redis_clock(fleet: Fleet, fault: Fault) -> None:
    fleet.loop.skew_s[REDIS] = _JUMPS_S[int(fault.value * 100) % len(_JUMPS_S)]


@_fault("error", "cut", touches="router")
async def router_kill(fleet: Fleet, fault: Fault) -> None:
    await _router_ends(fleet, fault, power=False)


@_fault("error", "cut", "silent", touches="router")
async def router_power(fleet: Fleet, fault: Fault) -> None:
    await _router_ends(fleet, fault, power=True)


async def _router_ends(fleet: Fleet, fault: Fault, *, power: bool) -> None:
    r = fault.target % fleet.plan.routers
    if r not in fleet.serving:
        return
    fleet.kill_router(r, power=power)
    await asyncio.sleep(fault.lasts_s)
    fleet.net.power_on(router_host(r))
    await fleet.start_router(r)


@_fault("error", "cut", touches="router")
async def router_stop(fleet: Fleet, fault: Fault) -> None:
    r = fault.target % fleet.plan.routers
    if r not in fleet.serving:
        return
    await fleet.stop_router(r)
    await asyncio.sleep(fault.lasts_s)
    await fleet.start_router(r)


class Faults:
    """The faults of one run, and when they count."""

    def __init__(self, fleet: Fleet, begin_s: float) -> None:
        self._fleet, self.begin_s = fleet, begin_s
        self.windows: list[Window] = []

    async def run(self, fault: Fault) -> None:
        fleet, kind = self._fleet, FAULTS[fault.kind]
        await asyncio.sleep(max(0.0, self.begin_s + fault.at_s - fleet.loop.time()))
        if kind.restarts and fault.target in fleet.down | fleet.busy:
            return
        window = Window(fleet.loop.time(), float("inf"), kind, _host(fleet, kind, fault.target))
        self.windows.append(window)
        fleet.busy.add(fault.target) if kind.restarts else None
        try:
            await kind.run(fleet, fault)
        finally:
            fleet.busy.discard(fault.target) if kind.restarts else None
        window.end_s = fleet.loop.time() + AFTER_S

    def explain(self, end: str, begin_s: float, end_s: float, hosts: Collection[str]) -> bool:
        """Whether a fault of one of these machines counted between these times that may end a request so."""
        return any(
            end in one.kind.explains and (not one.host or one.host in hosts)
            for one in self._counted(begin_s, end_s)
        )

    def gone(self, end: str, begin_s: float, end_s: float, host: str) -> bool:
        """Whether an engine may not have been there, or such an end is explained at it."""
        return self.explain(end, begin_s, end_s, (host,)) or any(
            one.kind.restarts and one.host == host for one in self._counted(begin_s, end_s)
        )

    def _counted(self, begin_s: float, end_s: float) -> Iterator[Window]:
        return (one for one in self.windows if one.begin_s <= end_s and one.end_s >= begin_s)


def _host(fleet: Fleet, kind: Kind, target: int) -> str:
    match kind.touches:
        case "engine":
            return engine_host(target)
        case "router":
            return router_host(target % fleet.plan.routers)
        case "all":
            return ""
