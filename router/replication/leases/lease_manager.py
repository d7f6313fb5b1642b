"""Keeps this replica's leases: renews, takes, gives and loses them, and has the feeds follow.

One tick every ``renew_s``. Whoever holds the lease of an engine is the only one whose writes the
server accepts (the token fences them), and follows its feed. Always true: a feed runs here only after its
lease was had; once a lease is known to be lost nothing more of that engine is written and it is dropped at
once; trouble with the server costs ticks, never the task. A lease that ran out while the server was away is
won back under a new token if nobody took it, and the engine's residency is mirrored anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import msgspec
import structlog

from router.fleet.identity import EngineAddress
from router.replication.leases.assignment import Member, divide
from router.replication.leases.leases import Leases
from router.replication.leases.membership import Membership
from router.replication.redis.errors import IndexUnavailable
from router.replication.schema.registry import IndexRefused

_log = structlog.get_logger()


class LeaseStats(msgspec.Struct):
    """Counters for metrics; ``held``, ``wanted`` and ``replicas`` are current."""

    held: int = 0
    """Gauge: engines whose events this router writes to the shared index."""
    wanted: int = 0
    """Gauge: engines with events that this router knows, whoever of the routers follows them."""
    replicas: int = 0
    """Gauge: routers that share the index, this one included."""
    taken: int = 0
    """Leases taken."""
    given: int = 0
    """Leases released to another router."""
    lost: int = 0
    """Leases that another replica took, or whose writes the server refused."""
    won_back: int = 0
    """Leases lost and regained."""
    failed_ticks: int = 0
    """Rounds of renewing leases that ended in a fault of the router, which is in its log."""


class Held(NamedTuple):
    """One lease. ``until_s`` on this replica's clock: before it nobody else can have it."""

    model: str
    token: int
    until_s: float


class LeaseCandidate(NamedTuple):
    """An engine this replica would follow."""

    engine: EngineAddress
    model: str


class ModelLeases(NamedTuple):
    """Where the leases of one model are had, and who else wants them."""

    leases: Leases
    roll: Membership


class LeaseListener(Protocol):
    """What comes and goes with a lease."""

    async def enter(self, wanted: LeaseCandidate, token: int, *, again: bool) -> None:
        """The lease was had: take over at the server, then follow the feed (``again``: it runs already)."""

    def leave(self, model: str, engine_id: str) -> None:
        """The lease is gone, or is about to be given: write nothing more and forget the engine."""


class LeaseManager:
    def __init__(
        self,
        me: str,
        desk_of: Callable[[str], ModelLeases],
        estate: LeaseListener,
        *,
        lease_s: float,
        renew_s: float,
        clock: Callable[[], float],
    ) -> None:
        """``desk_of`` gives a model's desk, always the same one."""
        self.stats = LeaseStats()
        self.held: dict[str, Held] = {}
        self.others_alive = False
        self._me = me
        self._desk_of = desk_of
        self._estate = estate
        self._lease_s = lease_s
        self._renew_s = renew_s
        self._clock = clock
        self._wanted: dict[str, LeaseCandidate] = {}
        self._free_since: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._failing = False
        self._leaving = False

    def want(self, engine: EngineAddress, model: str) -> None:
        """Follow this engine of ``model``, if its lease can be had; moved, or of another model, anew."""
        if not self.wants(engine, model):
            self.unwant(engine.engine_id)
            self._wanted[engine.engine_id] = LeaseCandidate(engine, model)
            self._wake.set()

    def wants(self, engine: EngineAddress, model: str) -> bool:
        """Whether this engine is wanted, at these addresses and for this model."""
        return self._wanted.get(engine.engine_id) == (engine, model)

    def unwant(self, engine_id: str) -> None:
        """Follow this engine no longer; its lease runs out by itself where it cannot be released."""
        self._wanted.pop(engine_id, None)
        self._free_since.pop(engine_id, None)
        held = self.held.pop(engine_id, None)
        if held is not None:
            self._estate.leave(held.model, engine_id)

    def follows(self, engine_id: str) -> bool:
        """Whether the feed runs here; perhaps elsewhere too by now."""
        return engine_id in self.held

    def sure_of(self, engine_id: str) -> bool:
        """Whether nobody else can be following this engine now."""
        held = self.held.get(engine_id)
        return held is not None and self._clock() < held.until_s

    def lost(self, engine_id: str) -> None:
        """The server refused a write: another replica has the engine."""
        held = self.held.pop(engine_id, None)
        if held is not None:
            self.stats.lost += 1
            _log.warning("lease lost", engine=engine_id, token=held.token)
            self._estate.leave(held.model, engine_id)
            self._wake.set()

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            self._wake.clear()
            try:
                async with asyncio.timeout(self._lease_s):
                    if not self._leaving:
                        await self._tick()
                self._failing = False
            except (IndexUnavailable, TimeoutError) as error:
                self.stats.failed_ticks += 1
                if not self._failing:
                    _log.warning("leases cannot be renewed", problem=f"{type(error).__name__}: {error}")
                self._failing = True
            except IndexRefused as error:
                self.stats.failed_ticks += 1
                if not self._failing:
                    _log.error("the shared index refuses this replica", why=str(error))
                self._failing = True
            except Exception:  # noqa: BLE001  # a fault of ours must not end the feeds of this replica for good
                self.stats.failed_ticks += 1
                _log.exception("lease keeping failed")
            self.stats.held, self.stats.wanted = len(self.held), len(self._wanted)
            await self._pause()

    async def leave(self) -> None:
        """Give everything away and take nothing more, for a replica that ends in order."""
        self._leaving = True
        for engine_id, held in list(self.held.items()):
            del self.held[engine_id]
            self._estate.leave(held.model, engine_id)
            await self._desk_of(held.model).leases.release(engine_id, held.token)
        for model in {wanted.model for wanted in self._wanted.values()}:
            await self._desk_of(model).roll.leave()

    async def _pause(self) -> None:
        """Until the next tick; sooner if something changed and the server can be used."""
        pause_s = self._renew_s
        if self._failing:
            await asyncio.sleep(pause_s)
            return
        try:
            async with asyncio.timeout(pause_s):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _tick(self) -> None:
        alive = 1
        for model in sorted({wanted.model for wanted in self._wanted.values()}):
            desk = self._desk_of(model)
            await self._renew(model, desk)
            held = sum(held.model == model for held in self.held.values())
            engines = [wanted.engine for wanted in self._wanted.values() if wanted.model == model]
            live = await desk.roll.sign(engines, held)
            alive = max(alive, len(live))
            await self._move(desk, live, await self._holders(desk, engines))
        self.stats.replicas, self.others_alive = alive, alive > 1

    async def _move(
        self, desk: ModelLeases, live: Mapping[str, Member], holder_of: Mapping[str, str | None]
    ) -> None:
        """Take and give what the division says."""
        now = self._clock()
        for engine_id, holder in holder_of.items():
            if holder is None:
                self._free_since.setdefault(engine_id, now)
            else:
                self._free_since.pop(engine_id, None)
        plan = divide(
            self._me,
            holder_of,
            live,
            free_s={engine_id: now - since for engine_id, since in self._free_since.items()},
            patience_s=self._lease_s,
        )
        for engine_id in plan.take:
            await self._take(desk, engine_id)
        if plan.give is not None:
            await self._give(desk, plan.give)

    async def _holders(self, desk: ModelLeases, engines: list[EngineAddress]) -> dict[str, str | None]:
        """Who holds each engine. A lease of an earlier life of this replica is nobody's."""
        leases = await desk.leases.holders()
        found: dict[str, str | None] = {}
        for engine_id in [engine.engine_id for engine in engines]:
            lease = leases.get(engine_id)
            holder = lease.holder if lease is not None and lease.held and lease.holder != self._me else None
            found[engine_id] = self._me if engine_id in self.held else holder
        return found

    async def _renew(self, model: str, desk: ModelLeases) -> None:
        """Renew what is held; what was lost without anybody taking it is won back."""
        held = {engine_id: held for engine_id, held in self.held.items() if held.model == model}
        if not held:
            return
        asked_s = self._clock()
        lost = await desk.leases.renew({engine_id: one.token for engine_id, one in held.items()})
        for engine_id, one in held.items():
            if self.held.get(engine_id) is not one:
                continue
            if engine_id not in lost:
                self.held[engine_id] = one._replace(until_s=asked_s + self._lease_s)
            elif not await self._win_back(desk, engine_id, one):
                self.lost(engine_id)

    async def _win_back(self, desk: ModelLeases, engine_id: str, held: Held) -> bool:
        asked_s = self._clock()
        wanted = self._wanted[engine_id]
        token = await desk.leases.acquire(engine_id, above=held.token)
        if token is None or self.held.get(engine_id) is not held:
            return False
        self.held[engine_id] = Held(held.model, token, asked_s + self._lease_s)
        self.stats.won_back += 1
        _log.info("lease regained", engine=engine_id, token=token)
        await self._estate.enter(wanted, token, again=True)
        return True

    async def _take(self, desk: ModelLeases, engine_id: str) -> None:
        wanted, asked_s = self._wanted.get(engine_id), self._clock()
        if wanted is None or engine_id in self.held or self._leaving:
            return
        token = await desk.leases.acquire(engine_id)
        if token is None:
            return
        if self._wanted.get(engine_id) != wanted or self._leaving:
            await desk.leases.release(engine_id, token)
            return
        self.held[engine_id] = Held(wanted.model, token, asked_s + self._lease_s)
        try:
            await self._estate.enter(wanted, token, again=False)
        except BaseException:
            if self.held.pop(engine_id, None) is not None:
                self._estate.leave(wanted.model, engine_id)
            raise
        self.stats.taken += 1
        self._free_since.pop(engine_id, None)
        _log.info("lease taken", engine=engine_id, token=token)

    async def _give(self, desk: ModelLeases, engine_id: str) -> None:
        held = self.held.pop(engine_id)
        self._estate.leave(held.model, engine_id)
        self.stats.given += 1
        _log.info("lease released", engine=engine_id, token=held.token)
        await desk.leases.release(engine_id, held.token)
