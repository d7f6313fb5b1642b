"""This replica's part in a shared index: leases, mirrored feeds, look-ups and load reports.

One per router. It owns the connections (one client for writing, one for look-ups) and a ``MirroredIndex``
per model, which the feeds write to. Always true: a feed runs only while its engine's lease is held here;
nothing in here ends the router, whatever the server does.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import structlog

from router.feeds.base import FeedState
from router.feeds.manager import Followers
from router.fleet.identity import EngineAddress
from router.index.engine import EngineResidency
from router.index.models import Scopes
from router.index.seats import EngineHit, Seat
from router.placement.load import OthersLoad
from router.replication.gossip.inflight import GossipedInflight
from router.replication.gossip.load import LoadGossip
from router.replication.gossip.stream import InflightStream
from router.replication.leases.lease_manager import LeaseCandidate, LeaseManager, ModelLeases
from router.replication.leases.leases import Leases
from router.replication.leases.membership import Membership
from router.replication.lookup import IndexLookup
from router.replication.reader import SharedReader
from router.replication.redis.client import Client, connect
from router.replication.redis.errors import IndexUnavailable
from router.replication.schema.keys import ScopeKeys
from router.replication.schema.registry import EngineFacts, Registry
from router.replication.settings import IndexSettings
from router.replication.writer.dirty import MirrorStats
from router.replication.writer.mirror import MirroredIndex

_log = structlog.get_logger()
_DESCRIBE_S = 0.02
"""How soon other replicas hear of a feed's new state or an engine's new layout."""
_WATCH_S = 0.5
_LEAVE_S_MAX = 2.0
_LOAD_KEPT_S = 60
_AFTER_FAULT_S = 0.5


class _Scope(NamedTuple):
    """What one model has of the shared index."""

    mirror: MirroredIndex
    desk: ModelLeases
    keys: ScopeKeys


class SharedIndex:
    """See the module. ``attach`` before ``run``; ``sight`` is what the planner asks."""

    def __init__(
        self,
        settings: IndexSettings,
        own_load: Callable[[float], dict[str, OthersLoad]],
        *,
        clock: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.replica = settings.replica or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(2)}"
        self._client, self._looking = connect(settings), connect(settings)
        self._stream = InflightStream(self._client)
        self._clock = clock
        self._started = secrets.randbits(40)
        self._scopes: dict[str, _Scope] = {}
        self._followers: Followers | None = None
        self._residency: Scopes | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._reader: SharedReader | None = None
        self._told: dict[str, EngineFacts] = {}
        self.exchange = LoadGossip(self.replica, own_load, started=self._started)
        self.keeper = LeaseManager(
            self.replica,
            lambda model: self.scope(model).desk,
            self,
            lease_s=settings.lease_s,
            renew_s=settings.renew_s,
            clock=clock,
        )
        self.sight = IndexLookup(
            self.reader,
            self.keeper,
            self.exchange,
            clock=clock,
            hear=lambda flights: self.inflight.hear(flights, clock()),
        )
        self.inflight = GossipedInflight(
            self.replica, self._started, self._tell_flight, is_local=self.keeper.follows, clock=clock
        )

    def attach(self, followers: Followers, residency: Scopes) -> None:
        """Whom to start and stop with the leases, and what to tell of."""
        self._followers, self._residency = followers, residency

    def scope(self, model: str) -> _Scope:
        """What a model has of the shared index, made on first use."""
        found = self._scopes.get(model)
        if found is None:
            keys = ScopeKeys(self.settings.namespace, model)
            roll = Membership(
                self._client.command,
                keys.replicas,
                self.replica,
                started=self._started,
                lease_s=self.settings.lease_s,
                clock=self._clock,
            )
            mirror = MirroredIndex(self._client, model, on_lost=self.keeper.lost)
            desk = ModelLeases(Leases(self._client, model, self.replica), roll)
            found = self._scopes[model] = _Scope(mirror, desk, keys)
            if self._tasks is not None:
                self._tasks.create_task(_kept_up(mirror.run), name=f"mirror {model}")
        return found

    def reader(self) -> SharedReader:
        """The one that looks; made in the running loop."""
        if self._reader is None:
            self._reader = SharedReader(self._looking)
        return self._reader

    def index_of(self, model: str) -> MirroredIndex:
        """The index that the feeds of a model's engines write to."""
        return self.scope(model).mirror

    # -- the engines ----------------------------------------------------------------------------------

    def follows(self, engine: EngineAddress, model: str) -> bool:
        """See ``Following``: here or elsewhere."""
        return self.keeper.wants(engine, model)

    def follow(self, engine: EngineAddress, model: str, tasks: asyncio.TaskGroup) -> None:
        """See ``Following``: here, if the lease can be had."""
        del tasks  # feeds come and go with their leases
        self.sight.assign(engine.engine_id, model)
        self.keeper.want(engine, model)

    def stop(self, engine_id: str) -> None:
        """See ``Following``."""
        self.keeper.unwant(engine_id)
        self.sight.remove(engine_id)

    def follower(self, engine_id: str) -> str | None:
        """The replica that follows an engine, as last heard; None where nobody does."""
        if self.keeper.follows(engine_id):
            return self.replica
        known = self.sight.known(engine_id)
        return None if known is None else known.holder or None

    def stop_all(self) -> None:
        """See ``Following``. Leases are given back by ``close``."""
        for engine_id in list(self.keeper.held):
            self.keeper.unwant(engine_id)

    def mirror_stats(self) -> dict[str, MirrorStats]:
        """Counters of the writers, by model."""
        return {model: scope.mirror.counters for model, scope in self._scopes.items()}

    @property
    def problem(self) -> str:
        """Why the shared index cannot be used now; "" while it can."""
        if self._looking.last_error:
            return self._looking.last_error
        return self.sight.problem

    # -- what comes and goes with a lease (``Estate``) --------------------------------------------------

    async def enter(self, wanted: LeaseCandidate, token: int, *, again: bool) -> None:
        """See ``Estate``."""
        engine_id = wanted.engine.engine_id
        await self.scope(wanted.model).mirror.take_over(engine_id, token)
        self._told.pop(engine_id, None)
        if not again and self._followers is not None and self._tasks is not None:
            self._followers.follow(wanted.engine, wanted.model, self._tasks)

    def leave(self, model: str, engine_id: str) -> None:
        """See ``Estate``."""
        self._told.pop(engine_id, None)
        self.scope(model).mirror.drop(engine_id)
        if self._followers is not None:
            self._followers.stop(engine_id)

    # -- background -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep everything going until cancelled."""
        await self._client.start()
        await self._looking.start()
        async with asyncio.TaskGroup() as self._tasks:
            for model, scope in self._scopes.items():
                self._tasks.create_task(_kept_up(scope.mirror.run), name=f"mirror {model}")
            for work in (self.keeper.run, self._describe, self._watch, self._tell_load, self._stream.run):
                self._tasks.create_task(_kept_up(work), name=f"shared index: {work.__name__}")

    async def retire(self) -> None:
        """Give the leases away, so that others take over at once; what they know is looked up then."""
        try:
            async with asyncio.timeout(_LEAVE_S_MAX):
                await self.keeper.leave()
        except (IndexUnavailable, TimeoutError) as error:
            _log.warning("leases not released", problem=str(error))

    async def close(self) -> None:
        """Retire, and hang up."""
        await self.retire()
        try:
            async with asyncio.timeout(_LEAVE_S_MAX):
                for scope in self._scopes.values():
                    await self._client.command("HDEL", scope.keys.load, self.replica)
        except (IndexUnavailable, TimeoutError) as error:
            _log.warning("in-flight load not withdrawn", problem=str(error))
        await self._client.close()
        await self._looking.close()

    async def _describe(self) -> None:
        """Tell the others of each engine followed here what changed."""
        while True:
            for engine_id, held in list(self.keeper.held.items()):
                self._describe_engine(engine_id, held.model)
            await asyncio.sleep(_DESCRIBE_S)

    def _describe_engine(self, engine_id: str, model: str) -> None:
        if self._residency is None or self._followers is None:
            return
        engine, feed = self._residency.engine(engine_id), self._followers.stats.get(engine_id)
        if engine is None or feed is None:
            return
        seat = self._residency.scope(model).residency(engine_id).seat()
        facts = engine_facts(engine, seat, feed.state, feed.missing_batches)
        mirror, told = self.scope(model).mirror, self._told.get(engine_id)
        if facts != told:
            caught_up = told is not None and told.feed_state == facts.feed_state
            if facts.feed_state == FeedState.READY and not caught_up and not mirror.written(engine_id):
                return  # not before all that was replayed is there to be found
            self._told[engine_id] = facts
            mirror.describe(engine_id, facts)

    async def _watch(self) -> None:
        """Look now and then also while no requests come, so that what is said of engines stays true."""
        while True:
            await self.sight.refresh()
            await asyncio.sleep(_WATCH_S)

    def _tell_flight(self, engine_id: str, entry: bytes) -> bool:
        """Put one entry on its way to the other replicas, if there are any; nobody waits for the answer."""
        model = self.sight.model_of(engine_id)
        if model is None or not self.keeper.others_alive or self._client.last_error:
            return False
        return self._stream.put(self.scope(model).keys.flights, entry)

    async def _tell_load(self) -> None:
        while True:
            try:
                await self._tell_load_once()
                await asyncio.sleep(self.settings.load_interval_s)
            except IndexUnavailable:
                await asyncio.sleep(_AFTER_FAULT_S)

    async def _tell_load_once(self) -> None:
        now = self._clock()
        field = self.exchange.field(now)
        if field is None:
            return
        for scope in self._scopes.values():
            await self._client.command("HSET", scope.keys.load, self.replica, field)
            await self._client.command("EXPIRE", scope.keys.load, _LOAD_KEPT_S)
        self.exchange.wrote(field, now)


async def _kept_up(work: Callable[[], Awaitable[None]]) -> None:
    """``work`` until cancelled, begun again whatever ends it: a fault of ours must not end the router."""
    while True:
        try:
            await work()
        except Exception:  # noqa: BLE001  # see above
            _log.exception("task of the shared index failed, restarting it")
        await asyncio.sleep(_AFTER_FAULT_S)


async def check_index(settings: IndexSettings, model: str = "") -> str:
    """ "" if the index can be used, else what the trouble is. Raises ``IndexRefused`` for another schema."""
    client: Client = connect(settings)
    try:
        if not await client.start(2 * settings.connect_timeout_s):
            return client.last_error or "no connection in time"
        await Registry(client, model).check()
    except IndexUnavailable as error:
        return str(error)
    finally:
        await client.close()
    return ""


def engine_facts(
    engine: EngineResidency, seat: Seat | EngineHit, feed_state: FeedState, missing: int
) -> EngineFacts:
    """What the other replicas need to predict this engine, or why they cannot."""
    state = str(feed_state)
    if isinstance(seat, Seat) and seat.mode == "assumed":
        why = "hash scheme not proven yet, only assumed"
        return EngineFacts(engine.layout, None, "unknown", why, state, missing)
    if isinstance(seat, Seat):
        if seat.learned is not None:
            return EngineFacts(mode="learned", feed_state=state, missing_batches=missing)
        stores = tuple(sorted(seat.stores))
        return EngineFacts(seat.layout, seat.scheme, "native", "", state, missing, stores)
    empty = engine.layout is None and feed_state is FeedState.READY and not engine.facts.has_chunks
    mode = "empty" if empty else "unknown"
    return EngineFacts(engine.layout, None, mode, seat.why_unknown, state, missing)
