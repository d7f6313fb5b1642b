"""Acquires, renews, releases and loses this replica's leases; feeds start and stop with them.

One round every ``renew_s``. Only the holder of an engine's lease follows its feed, and the server accepts
writes of no other replica (the token fences them). Invariants: a feed runs here only after its lease was
acquired; once a lease is known to be lost nothing more of that engine is written and it is dropped
immediately; an unreachable server costs rounds, never the task. A lease that expired while the server was
away is acquired again under a new token if it is free, and the engine's residency is mirrored again.

One writer per engine: leases with monotonic fencing tokens, stored and timed by the server. An acquired lease
has a token higher than every one before it. Writes carry the token and the server compares it
(``block_scripts.WRITE``), so a writer whose lease expired unnoticed cannot write. Invariant: at any time at
most one token of an engine passes the fence.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
import structlog

from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.replication import scripts
from kvatlas.router.replication.assignment import Member, plan_assignment
from kvatlas.router.replication.keys import ScopeKeys
from kvatlas.router.replication.members import Membership
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.redis_connection import IndexUnavailable
from kvatlas.router.replication.registry import IndexRefused


class Lease(NamedTuple):
    """One engine's lease as stored at the server."""

    holder: str
    """Replica id."""
    token: int
    expires_in_s: float
    """Remaining time by the server's clock at the time of the request; not positive if expired or
    released.
    """

    @property
    def held(self) -> bool:
        return self.expires_in_s > 0


class Leases:
    """The leases of one scope, for one replica."""

    def __init__(self, client: Client, model: str, replica_id: str) -> None:
        self._client = client
        self._keys = ScopeKeys(client.settings.namespace, model)
        self.replica_id = replica_id

    async def acquire(self, engine_id: str, *, above: int = 0) -> int | None:
        """Acquire a lease. Returns a token higher than ``above``; None while another replica holds the
        lease.
        """
        settings = self._client.settings
        reply = await self._client.run(
            scripts.ACQUIRE,
            [self._keys.leases],
            engine_id,
            self.replica_id,
            int(settings.lease_s * 1000),
            above,
            int(settings.control_ttl_s * 1000),
        )
        return int(reply[0]) or None

    async def renew(self, tokens: Mapping[str, int]) -> set[str]:
        """Renew all leases at once.

        Returns the engines whose lease is lost; they must be dropped immediately.
        """
        settings = self._client.settings
        pairs = [part for engine_id, token in tokens.items() for part in (engine_id, token)]
        held = await self._client.run(
            scripts.RENEW,
            [self._keys.leases, self._keys.scope],
            self.replica_id,
            int(settings.lease_s * 1000),
            int(settings.control_ttl_s * 1000),
            *pairs,
        )
        return {engine_id for engine_id, still in zip(tokens, held, strict=True) if not still}

    async def release(self, engine_id: str, token: int) -> bool:
        """Release a lease, so that another replica can acquire it; False if it was no longer held."""
        keys = [self._keys.leases]
        return bool(await self._client.run(scripts.RELEASE, keys, engine_id, token))

    async def holders(self) -> dict[str, Lease]:
        """Return every lease of the model, expired ones included."""
        return await holders(self._client, self._keys)


_LEASE = re.compile(r"(\d{1,20})\|(\d{1,20})\|(.*)", re.ASCII | re.DOTALL)


async def holders(client: Client, keys: ScopeKeys) -> dict[str, Lease]:
    """Return every lease of a model, expired ones included. Raises ``IndexUnavailable``."""
    found = await client.command("HGETALL", keys.leases)
    return parse_leases(found, await client.command("TIME", key=keys.leases))


def parse_leases(fields: Mapping[bytes, bytes], now: Sequence[bytes | int]) -> dict[str, Lease]:
    """Parse leases from the fields of their hash, and the server's clock (``TIME``). A field that no replica
    wrote counts as no lease."""
    now_ms = int(now[0]) * 1000 + int(now[1]) // 1000
    leases: dict[str, Lease] = {}
    for engine_id, text in fields.items():
        found = _LEASE.fullmatch(text.decode(errors="replace"))
        if found is not None:
            token, expires_ms, holder = found.groups()
            lease = Lease(holder, int(token), (int(expires_ms) - now_ms) / 1000)
            leases[engine_id.decode(errors="replace")] = lease
    return leases


_log = structlog.get_logger()


class LeaseStats(msgspec.Struct):
    """Counters for metrics; ``held``, ``wanted`` and ``replicas`` are current."""

    held: Annotated[int, "kvatlas_lease_held"] = 0
    """Engines whose events this router writes to the shared index."""
    wanted: Annotated[int, "kvatlas_lease_wanted"] = 0
    """Engines with events that this router knows, regardless of which router follows them."""
    replicas: Annotated[int, "kvatlas_lease_replicas"] = 0
    """Routers that share the index, this one included."""
    taken: Annotated[int, "kvatlas_lease_taken_total"] = 0
    """Leases taken."""
    given: Annotated[int, "kvatlas_lease_given_total"] = 0
    """Leases released to another router."""
    lost: Annotated[int, "kvatlas_lease_lost_total"] = 0
    """Leases that another replica took, or whose writes the server refused."""
    won_back: Annotated[int, "kvatlas_lease_won_back_total"] = 0
    """Leases lost and regained."""
    failed_ticks: Annotated[int, "kvatlas_lease_failed_ticks_total"] = 0
    """Rounds of renewing leases that ended in a fault of the router, which is in its log."""


class Held(NamedTuple):
    """One lease. ``until_s`` on this replica's clock: before it no other replica can hold it."""

    model: str
    token: int
    until_s: float


class LeaseCandidate(NamedTuple):
    """An engine this replica is willing to follow."""

    engine: EngineAddress
    model: str


class ModelLeases(NamedTuple):
    """The leases of one model, and the replicas that share them."""

    leases: Leases
    membership: Membership


class LeaseManager:
    def __init__(
        self,
        me: str,
        leases_of: Callable[[str], ModelLeases],
        *,
        on_acquired: Callable[[LeaseCandidate, int, bool], Awaitable[None]],
        on_ended: Callable[[str, str], None],
        lease_s: float,
        renew_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Create a manager without leases.

        Args:

          leases_of: Returns a model's leases, always the same object.

          on_acquired: ``(candidate, token, again)``; takes over as writer at the server, then follows the
              feed, which runs already if ``again``.

          on_ended: ``(model, engine_id)``; the lease is lost or about to be released: write nothing more
              and forget the engine.
        """
        self.stats = LeaseStats()
        self.held: dict[str, Held] = {}
        self.others_alive = False
        self._me = me
        self._leases_of = leases_of
        self._on_acquired, self._on_ended = on_acquired, on_ended
        self._lease_s = lease_s
        self._renew_s = renew_s
        self._clock = clock
        self._candidates: dict[str, LeaseCandidate] = {}
        self._free_since: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._failing = False
        self._leaving = False
        self._releasing = asyncio.Lock()
        self._unreleased: dict[str, Held] = {}  # leases ended here and not yet released at the server

    def add_candidate(self, engine: EngineAddress, model: str) -> None:
        """Follow this engine of ``model`` if its lease can be acquired.

        One known at other addresses, or for another model, is dropped first.
        """
        if not self.is_candidate(engine, model):
            self.remove_candidate(engine.engine_id)
            self._candidates[engine.engine_id] = LeaseCandidate(engine, model)
            self._wake.set()

    def is_candidate(self, engine: EngineAddress, model: str) -> bool:
        """Whether this engine is a candidate, at these addresses and for this model."""
        return self._candidates.get(engine.engine_id) == (engine, model)

    def remove_candidate(self, engine_id: str) -> None:
        """Stop following this engine; its lease expires by itself."""
        self._candidates.pop(engine_id, None)
        self._free_since.pop(engine_id, None)
        held = self.held.pop(engine_id, None)
        if held is not None:
            self._on_ended(held.model, engine_id)

    def follows(self, engine_id: str) -> bool:
        """Whether the feed runs here; it may run elsewhere too if the lease expired unnoticed."""
        return engine_id in self.held

    def holds_exclusively(self, engine_id: str) -> bool:
        """Whether no other replica can be following this engine now."""
        held = self.held.get(engine_id)
        return held is not None and self._clock() < held.until_s

    def lost(self, engine_id: str) -> None:
        """Handle a write that the server refused: another replica has the engine."""
        held = self.held.pop(engine_id, None)
        if held is not None:
            self.stats.lost += 1
            _log.warning("lease lost", engine=engine_id, token=held.token)
            self._on_ended(held.model, engine_id)
            self._wake.set()

    async def run(self) -> None:
        """Run one round after another, until cancelled."""
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
                    _log.warning("leases cannot be renewed", problem=describe_error(error))
                self._failing = True
            except IndexRefused as error:
                self.stats.failed_ticks += 1
                if not self._failing:
                    _log.error("the shared index refuses this replica", why=str(error))
                self._failing = True
            except Exception:  # noqa: BLE001  # a bug must not end the feeds of this replica for good
                self.stats.failed_ticks += 1
                _log.exception("lease keeping failed")
            self.stats.held, self.stats.wanted = len(self.held), len(self._candidates)
            await self._pause()

    async def release_all(self) -> None:
        """Release every lease and acquire none afterwards, for a replica that shuts down.

        A second caller waits for the first one, and continues if that was cancelled.
        """
        self._leaving = True
        async with self._releasing:
            while self.held:
                engine_id, held = self.held.popitem()
                self._unreleased[engine_id] = held
                self._on_ended(held.model, engine_id)
            while self._unreleased:
                engine_id, held = next(iter(self._unreleased.items()))
                await self._leases_of(held.model).leases.release(engine_id, held.token)
                del self._unreleased[engine_id]
            for model in {candidate.model for candidate in self._candidates.values()}:
                await self._leases_of(model).membership.leave()

    async def _pause(self) -> None:
        """Wait for the next round; ends early if something changed and the server is reachable."""
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
        for model in sorted({candidate.model for candidate in self._candidates.values()}):
            model_leases = self._leases_of(model)
            await self._renew(model, model_leases)
            held = sum(held.model == model for held in self.held.values())
            engines = [
                candidate.engine for candidate in self._candidates.values() if candidate.model == model
            ]
            live = await model_leases.membership.report(engines, held)
            alive = max(alive, len(live))
            await self._apply_assignment(model_leases, live, await self._holders(model_leases, engines))
        self.stats.replicas, self.others_alive = alive, alive > 1

    async def _apply_assignment(
        self, model_leases: ModelLeases, live: Mapping[str, Member], holder_of: Mapping[str, str | None]
    ) -> None:
        now = self._clock()
        for engine_id, holder in holder_of.items():
            if holder is None:
                self._free_since.setdefault(engine_id, now)
            else:
                self._free_since.pop(engine_id, None)
        plan = plan_assignment(
            self._me,
            holder_of,
            live,
            free_s={engine_id: now - since for engine_id, since in self._free_since.items()},
            patience_s=self._lease_s,
        )
        for engine_id in plan.acquire:
            await self._acquire(model_leases, engine_id)
        if plan.release is not None:
            await self._release(model_leases, plan.release)

    async def _holders(
        self, model_leases: ModelLeases, engines: list[EngineAddress]
    ) -> dict[str, str | None]:
        """Return the holder of each engine. A lease from before this replica's restart counts as free."""
        leases = await model_leases.leases.holders()
        found: dict[str, str | None] = {}
        for engine_id in [engine.engine_id for engine in engines]:
            lease = leases.get(engine_id)
            holder = lease.holder if lease is not None and lease.held and lease.holder != self._me else None
            found[engine_id] = self._me if engine_id in self.held else holder
        return found

    async def _renew(self, model: str, model_leases: ModelLeases) -> None:
        """Renew held leases; expired and free ones are acquired again."""
        held = {engine_id: held for engine_id, held in self.held.items() if held.model == model}
        if not held:
            return
        asked_s = self._clock()
        lost = await model_leases.leases.renew({engine_id: one.token for engine_id, one in held.items()})
        for engine_id, one in held.items():
            if self.held.get(engine_id) is not one:
                continue
            if engine_id not in lost:
                self.held[engine_id] = one._replace(until_s=asked_s + self._lease_s)
            elif not await self._reacquire(model_leases, engine_id, one):
                self.lost(engine_id)

    async def _reacquire(self, model_leases: ModelLeases, engine_id: str, held: Held) -> bool:
        asked_s = self._clock()
        candidate = self._candidates[engine_id]
        token = await model_leases.leases.acquire(engine_id, above=held.token)
        if token is None:
            return False
        if self.held.get(engine_id) is not held:
            await model_leases.leases.release(engine_id, token)
            return False
        self.held[engine_id] = Held(held.model, token, asked_s + self._lease_s)
        self.stats.won_back += 1
        _log.info("lease regained", engine=engine_id, token=token)
        await self._take_over(model_leases, candidate, token, again=True)
        return True

    async def _acquire(self, model_leases: ModelLeases, engine_id: str) -> None:
        candidate, asked_s = self._candidates.get(engine_id), self._clock()
        if candidate is None or engine_id in self.held or self._leaving:
            return
        token = await model_leases.leases.acquire(engine_id)
        if token is None:
            return
        if self._candidates.get(engine_id) != candidate or self._leaving:
            await model_leases.leases.release(engine_id, token)
            return
        self.held[engine_id] = Held(candidate.model, token, asked_s + self._lease_s)
        try:
            if not await self._take_over(model_leases, candidate, token, again=False):
                return
        except BaseException:
            if self.held.pop(engine_id, None) is not None:
                self._on_ended(candidate.model, engine_id)
            raise
        self.stats.taken += 1
        self._free_since.pop(engine_id, None)
        _log.info("lease taken", engine=engine_id, token=token)

    async def _take_over(
        self, model_leases: ModelLeases, candidate: LeaseCandidate, token: int, *, again: bool
    ) -> bool:
        """Follow the engine; False if its lease ended here meanwhile."""
        engine_id = candidate.engine.engine_id
        held = self.held[engine_id]
        await self._on_acquired(candidate, token, again)
        if self.held.get(engine_id) is held:
            return True
        # What ended the lease ran before the engine was followed, so it is ended again.
        self._on_ended(candidate.model, engine_id)
        await model_leases.leases.release(engine_id, token)
        return False

    async def _release(self, model_leases: ModelLeases, engine_id: str) -> None:
        held = self.held.pop(engine_id, None)
        if held is None:  # lost since the plan was computed
            return
        self._on_ended(held.model, engine_id)
        self.stats.given += 1
        _log.info("lease released", engine=engine_id, token=held.token)
        await model_leases.leases.release(engine_id, held.token)
