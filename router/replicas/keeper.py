"""Keeps this replica's leases: renews, takes, gives and loses them, and has the feeds follow.

One tick every third of the lease time. Whoever holds the lease of an engine is the only one whose writes the
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

from router.index.shared.link import IndexUnavailable
from router.replicas.division import Member, divide
from router.replicas.roll import Roll

_log = structlog.get_logger()
_TICKS_PER_LEASE = 3


class LeaseStats(msgspec.Struct):
    """Counters for metrics; ``held``, ``wanted`` and ``replicas`` are current."""

    held: int = 0
    wanted: int = 0
    replicas: int = 0
    taken: int = 0
    given: int = 0
    lost: int = 0
    """Leases that another replica took, or whose writes the server refused."""
    won_back: int = 0
    failed_ticks: int = 0


class Held(NamedTuple):
    """One lease. ``until_s`` on this replica's clock: before it nobody else can have it."""

    model: str
    token: int
    until_s: float


class LeaseStore(Protocol):
    """Leases at the server; see ``router.index.shared.leases``."""

    async def acquire(self, model: str, engine_id: str, replica: str) -> int | None: ...
    async def renew(self, model: str, engine_id: str, token: int) -> bool: ...
    async def release(self, model: str, engine_id: str, token: int) -> None: ...
    async def holders(self, model: str) -> Mapping[str, str]: ...


class Estate(Protocol):
    """What comes and goes with a lease."""

    async def enter(self, model: str, engine_id: str, token: int, *, again: bool) -> None:
        """The lease was had: take over at the server, then follow the feed (``again``: it runs already)."""

    def leave(self, model: str, engine_id: str) -> None:
        """The lease is gone, or is about to be given: write nothing more and forget the engine."""


class LeaseKeeper:
    def __init__(
        self,
        me: str,
        store: LeaseStore,
        estate: Estate,
        roll: Roll,
        *,
        lease_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.stats = LeaseStats()
        self.held: dict[str, Held] = {}
        self.others_alive = False
        self._me = me
        self._store = store
        self._estate = estate
        self._roll = roll
        self._lease_s = lease_s
        self._clock = clock
        self._wanted: dict[str, str] = {}
        self._free_since: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._failing = False

    def want(self, engine_id: str, model: str) -> None:
        """Follow this engine of ``model``, if its lease can be had."""
        if self._wanted.get(engine_id) != model:
            self.unwant(engine_id)
            self._wanted[engine_id] = model
            self._wake.set()

    def unwant(self, engine_id: str) -> None:
        """Follow this engine no longer; its lease runs out by itself where it cannot be released."""
        self._wanted.pop(engine_id, None)
        self._free_since.pop(engine_id, None)
        held = self.held.pop(engine_id, None)
        if held is not None:
            self._estate.leave(held.model, engine_id)

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
                    await self._tick()
                self._failing = False
            except (IndexUnavailable, TimeoutError) as error:
                self.stats.failed_ticks += 1
                if not self._failing:
                    _log.warning("leases cannot be kept", problem=f"{type(error).__name__}: {error}")
                self._failing = True
            except Exception:  # noqa: BLE001  # a fault of ours must not end the feeds of this replica for good
                self.stats.failed_ticks += 1
                _log.exception("lease keeping failed")
            self.stats.held, self.stats.wanted = len(self.held), len(self._wanted)
            await self._pause()

    async def leave(self) -> None:
        """Give everything away, for a replica that ends in order."""
        for engine_id, held in list(self.held.items()):
            del self.held[engine_id]
            self._estate.leave(held.model, engine_id)
            await self._store.release(held.model, engine_id, held.token)
        await self._roll.leave()

    async def _pause(self) -> None:
        """Until the next tick; sooner if something changed and the server can be used."""
        pause_s = self._lease_s / _TICKS_PER_LEASE
        if self._failing:
            await asyncio.sleep(pause_s)
            return
        try:
            async with asyncio.timeout(pause_s):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _tick(self) -> None:
        await asyncio.gather(*[self._renew(engine_id, held) for engine_id, held in list(self.held.items())])
        live = await self._roll.sign(Member(frozenset(self._wanted), len(self.held)))
        self.stats.replicas, self.others_alive = len(live), len(live) > 1
        holder_of = await self._holders()
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
            await self._take(engine_id)
        if plan.give is not None:
            await self._give(plan.give)

    async def _holders(self) -> dict[str, str | None]:
        """Who holds each engine that is wanted here. What this replica lost track of is nobody's."""
        found: dict[str, str | None] = {}
        for model in set(self._wanted.values()):
            holders = await self._store.holders(model)
            for engine_id in [e for e, m in self._wanted.items() if m == model]:
                holder = holders.get(engine_id)
                found[engine_id] = self._me if engine_id in self.held else holder
                if holder == self._me and engine_id not in self.held:
                    found[engine_id] = None  # an earlier life of this replica: the server decides
        return found

    async def _renew(self, engine_id: str, held: Held) -> None:
        asked_s = self._clock()
        if await self._store.renew(held.model, engine_id, held.token):
            if self.held.get(engine_id) is held:
                self.held[engine_id] = held._replace(until_s=asked_s + self._lease_s)
            return
        token = await self._store.acquire(held.model, engine_id, self._me)
        if self.held.get(engine_id) is not held:
            return
        if token is None:
            self.lost(engine_id)
            return
        self.held[engine_id] = Held(held.model, token, asked_s + self._lease_s)
        self.stats.won_back += 1
        _log.info("lease won back", engine=engine_id, token=token)
        await self._estate.enter(held.model, engine_id, token, again=True)

    async def _take(self, engine_id: str) -> None:
        model, asked_s = self._wanted.get(engine_id), self._clock()
        if model is None or engine_id in self.held:
            return
        token = await self._store.acquire(model, engine_id, self._me)
        if token is None:
            return
        if self._wanted.get(engine_id) != model:
            await self._store.release(model, engine_id, token)
            return
        self.held[engine_id] = Held(model, token, asked_s + self._lease_s)
        try:
            await self._estate.enter(model, engine_id, token, again=False)
        except BaseException:
            if self.held.pop(engine_id, None) is not None:
                self._estate.leave(model, engine_id)
            raise
        self.stats.taken += 1
        _log.info("lease taken", engine=engine_id, token=token)

    async def _give(self, engine_id: str) -> None:
        held = self.held.pop(engine_id)
        self._estate.leave(held.model, engine_id)
        self.stats.given += 1
        _log.info("lease given", engine=engine_id, token=held.token)
        await self._store.release(held.model, engine_id, held.token)
