"""This replica's part in a shared index: leases, mirrored feeds, lookups and load reports.

One per router. It owns the connections (one client for writing, one for lookups) and a ``MirroredIndex`` per
model, which the feeds write to. With ``share = "load"`` there are no blocks, and one scope for all models: a
task receives load and prompts in flight, the router's own feeds and index do the rest, and the one lease says
which replica acts for all. Invariants: a feed runs only while its engine's lease is held here, unless only
load is shared; no failure in here ends the router.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

import structlog

from kvatlas.router.admission.gate import KeyGate
from kvatlas.router.feeds.manager import FeedManager
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.index.model_indexes import ModelIndexes
from kvatlas.router.placement.engine import NO_PEER_SNAPSHOT
from kvatlas.router.placement.inflight import InflightPrompt
from kvatlas.router.placement.others import OthersLoad
from kvatlas.router.replication.descriptions import Descriptions
from kvatlas.router.replication.gossip import GossipedInflight, GossipStats
from kvatlas.router.replication.keys import ScopeKeys, limits_key
from kvatlas.router.replication.leases import LeaseCandidate, LeaseManager, Leases, ModelLeases
from kvatlas.router.replication.limits import SharedLimits
from kvatlas.router.replication.load_gossip import LOAD_INTERVAL_S, LoadGossip
from kvatlas.router.replication.lookup_fallback import IndexLookup
from kvatlas.router.replication.members import Membership
from kvatlas.router.replication.mirror import MirroredIndex
from kvatlas.router.replication.pending import MirrorStats
from kvatlas.router.replication.reader import SharedReader
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.redis_connection import IndexUnavailable, pack
from kvatlas.router.replication.registry import Registry
from kvatlas.router.replication.settings import IndexSettings

_log = structlog.get_logger()
# Delay in seconds until a feed's new state or an engine's new layout is published to other replicas.
_DESCRIBE_S = 0.02
_REFRESH_S = 0.5
# Bound of each step of the shutdown: a server that hangs must not delay the end of the process.
_SHUTDOWN_S_MAX = 2.0
# Seconds until Redis deletes the load of replicas that are all gone.
_LOAD_TTL_S = 60
_RESTART_PAUSE_S = 0.5
# Where only load is shared: the scope of all models, what its one lease is of, seconds that a read waits for
# prompts in flight, and its pause, in which several come together. No model has this name, and an empty one
# would be no hash tag in a Cluster.
FLEET_SCOPE = "*"
_FLEET = EngineAddress("fleet")
RECEIVE_WAIT_S = 0.05
RECEIVE_PAUSE_S = 0.003
# Streams of prompts in flight: entries that wait here and that Redis keeps, seconds kept, seconds of a send.
_STREAM_WAITING_MAX = 4096
_STREAM_ENTRIES_KEPT = 1024
_STREAM_KEPT_S = 60
_STREAM_SEND_S = 0.5


class _Scope(NamedTuple):
    """The shared index of one model."""

    mirror: MirroredIndex
    leases: ModelLeases
    keys: ScopeKeys


class InflightStream:
    """Appends entries to the streams of prompts in flight, without blocking the caller.

    Invariant: entries of one stream are sent in order and immediately, as another replica may be about to
    place a prompt with the same prefix; entries that cannot be sent are dropped, as replicas expire prompts
    themselves.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._waiting: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue(_STREAM_WAITING_MAX)

    def put(self, key: bytes, entry: bytes) -> bool:
        """Queue an entry for the stream at ``key``; False if the queue is full."""
        try:
            self._waiting.put_nowait((key, entry))
        except asyncio.QueueFull:
            return False
        return True

    async def run(self) -> None:
        """Send queued entries until cancelled, without waiting for replies."""
        while True:
            key, entry = await self._waiting.get()
            add = pack("XADD", key, "MAXLEN", "~", _STREAM_ENTRIES_KEPT, "*", "f", entry)
            with suppress(IndexUnavailable):
                connection = self._client.pipelined(key)
                await connection.send(add + pack("EXPIRE", key, _STREAM_KEPT_S), 2, _STREAM_SEND_S)


class SharedIndex:
    """Shared index of a router. Call ``attach`` before ``run`` if blocks are shared; placement uses
    ``lookup`` then, else ``peers``. ``served`` is called with prompts that engines computed for others.
    """

    def __init__(
        self,
        settings: IndexSettings,
        own_load: Callable[[float], dict[str, OthersLoad]],
        *,
        served: Callable[[InflightPrompt], None] = lambda prompt: None,
        clock: Callable[[], float],
    ) -> None:
        self.settings, self.shares_blocks = settings, settings.shares_blocks
        self.peers = NO_PEER_SNAPSHOT
        """Other replicas' state as last received, where only load is shared."""
        self.replica = settings.replica or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(2)}"
        self._write_client, self._lookup_client = Client(settings), Client(settings)
        self._stream = InflightStream(self._write_client)
        self._clock = clock
        self._started = secrets.randbits(40)
        self._scopes: dict[str, _Scope] = {}
        self._feeds: FeedManager | None = None
        self._residency: ModelIndexes | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._reader: SharedReader | None = None
        # Tenants' usage across replicas, if tenants have limits.
        self.limits: SharedLimits | None = None
        self._descriptions = Descriptions()
        stats = GossipStats()
        self.load_gossip = LoadGossip(self.replica, own_load, started=self._started, stats=stats)
        self.lease_manager = LeaseManager(
            self.replica,
            lambda model: self.scope(model).leases,
            on_acquired=self._lease_acquired,
            on_ended=self._lease_ended,
            lease_s=settings.lease_s,
            renew_s=settings.renewal_s,
            clock=clock,
        )
        self.lookup = IndexLookup(
            self.reader,
            self.lease_manager,
            self.load_gossip,
            clock=clock,
            receive_inflight=lambda entries: self.inflight.receive(entries, clock()),
        )
        self.inflight = GossipedInflight(
            self.replica,
            self._started,
            self._publish_inflight,
            served=served,
            publishes_prefills=self.shares_blocks,
            stats=stats,
        )

    def attach(self, feeds: FeedManager, residency: ModelIndexes) -> None:
        """Set the feeds that start and stop with the leases, and the residency to describe to other
        replicas.
        """
        self._feeds, self._residency = feeds, residency
        self.lookup.own_rows = lambda model, hashes: residency.scope(model).index.lookup(hashes)

    def share_limits(self, gate: KeyGate, group: str) -> None:
        """Apply the limits of tenants to all replicas together.

        ``group``: equal for workers of one parent, which exchange usage directly.
        """
        self.limits = SharedLimits(
            self._write_client,
            limits_key(self.settings.namespace),
            self.replica,
            time.time_ns() // 1_000_000,
            gate,
            clock=self._clock,
            group=group,
        )

    def scope(self, model: str) -> _Scope:
        """Return the shared index of a model, created on first use."""
        found = self._scopes.get(model)
        if found is None:
            keys = ScopeKeys(self.settings.namespace, model)
            membership = Membership(
                self._write_client.command,
                keys.replicas,
                self.replica,
                started=self._started,
                lease_s=self.settings.lease_s,
                clock=self._clock,
            )
            mirror = MirroredIndex(self._write_client, model, on_lost=self.lease_manager.lost)
            leases = ModelLeases(Leases(self._write_client, model, self.replica), membership)
            found = self._scopes[model] = _Scope(mirror, leases, keys)
            if self._tasks is not None and self.shares_blocks:
                self._tasks.create_task(_restarting(mirror.run), name=f"mirror {model}")
        return found

    def reader(self) -> SharedReader:
        """Return the reader, created in the running event loop."""
        if self._reader is None:
            self._reader = SharedReader(self._lookup_client)
        return self._reader

    def index_of(self, model: str) -> MirroredIndex:
        """Return the index that the feeds of a model's engines write to."""
        return self.scope(model).mirror

    # -- the engines ----------------------------------------------------------------------------------

    def follows(self, engine: EngineAddress, model: str) -> bool:
        return self.lease_manager.is_candidate(engine, model)

    def follow(self, engine: EngineAddress, model: str, tasks: asyncio.TaskGroup) -> None:
        """Follow the engine here, if the lease can be acquired."""
        # Feeds start and stop with their leases.
        del tasks
        self.lookup.assign(engine.engine_id, model)
        self.lease_manager.add_candidate(engine, model)

    def stop(self, engine_id: str) -> None:
        self.lease_manager.remove_candidate(engine_id)
        self.lookup.remove(engine_id)

    def follower(self, engine_id: str) -> str | None:
        """Return the replica that follows an engine, as of the last lookup; None if none does."""
        if self.lease_manager.follows(engine_id):
            return self.replica
        known = self.lookup.known(engine_id)
        return None if known is None else known.holder or None

    def stop_all(self) -> None:
        """Stop all feeds. ``close`` releases the leases."""
        for engine_id in list(self.lease_manager.held):
            self.lease_manager.remove_candidate(engine_id)

    def mirror_stats(self) -> dict[str, MirrorStats]:
        """The writers' counters, by model."""
        return {m: scope.mirror.counters for m, scope in self._scopes.items() if self.shares_blocks}

    def leads(self, first: str | None) -> bool | None:
        """Whether this replica acts for all: it follows the ``first`` engine, or where no blocks are shared
        has the fleet's lease. None: no lease decides that."""
        decides = first if self.shares_blocks else _FLEET.engine_id
        return None if decides is None else self.lease_manager.follows(decides)

    @property
    def problem(self) -> str:
        """Why the shared index cannot be used now; "" while it can."""
        if self._lookup_client.last_error:
            return self._lookup_client.last_error
        return self.lookup.problem

    # -- leases -----------------------------------------------------------------------------------------

    async def _lease_acquired(self, candidate: LeaseCandidate, token: int, again: bool) -> None:
        """Take over as writer, and start the feed unless it runs already."""
        if not self.shares_blocks:
            return
        engine_id = candidate.engine.engine_id
        await self.scope(candidate.model).mirror.take_over(engine_id, token)
        self._descriptions.forget(engine_id)
        if not again and self._feeds is not None and self._tasks is not None:
            self._feeds.follow(candidate.engine, candidate.model, self._tasks)

    def _lease_ended(self, model: str, engine_id: str) -> None:
        """Stop writing and stop the feed."""
        self._descriptions.forget(engine_id)
        self.scope(model).mirror.drop(engine_id)
        if self._feeds is not None:
            self._feeds.stop(engine_id)

    # -- background -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run all tasks until cancelled."""
        await self._write_client.start()
        await self._lookup_client.start()
        async with asyncio.TaskGroup() as self._tasks:
            works = [self.lease_manager.run, self._report_load, self._stream.run]
            if self.shares_blocks:
                works += [self._describe_engines, self._refresh_periodically]
                works += [scope.mirror.run for scope in self._scopes.values()]
            else:
                works.append(self._receive)
            for work in works:
                self._tasks.create_task(_restarting(work), name=f"shared index: {work.__name__}")
            if self.limits is not None:
                self._tasks.create_task(_restarting(self.limits.run), name="shared index: limits")

    async def release_leases(self) -> None:
        """Release the leases, so that others take over immediately; engines are looked up from then on.

        May be called more than once.
        """
        try:
            async with asyncio.timeout(_SHUTDOWN_S_MAX):
                await self.lease_manager.release_all()
        except (IndexUnavailable, TimeoutError) as error:
            _log.warning("leases not released", problem=str(error))

    async def close(self) -> None:
        """Release the leases and close the connections."""
        await self.release_leases()
        try:
            async with asyncio.timeout(_SHUTDOWN_S_MAX):
                for scope in self._scopes.values():
                    await self._write_client.command("HDEL", scope.keys.load, self.replica)
                if self.limits is not None:
                    await self.limits.withdraw()
        except (IndexUnavailable, TimeoutError) as error:
            _log.warning("in-flight load not withdrawn", problem=str(error))
        try:
            async with asyncio.timeout(_SHUTDOWN_S_MAX):
                await self._write_client.close()
                await self._lookup_client.close()
        except TimeoutError:
            _log.warning("connections to the shared index not closed in time")

    async def _describe_engines(self) -> None:
        """Publish changed descriptions of the engines followed here."""
        while True:
            if self._residency is not None and self._feeds is not None:
                for engine_id, held in list(self.lease_manager.held.items()):
                    model, mirror = held.model, self.scope(held.model).mirror
                    self._descriptions.renew(engine_id, model, mirror, self._residency, self._feeds)
            await asyncio.sleep(_DESCRIBE_S)

    async def _refresh_periodically(self) -> None:
        """Read the registry also without requests, so that explain and metrics stay current."""
        while True:
            await self.lookup.refresh()
            await asyncio.sleep(_REFRESH_S)

    async def _receive(self) -> None:
        """Receive what other replicas send: decisions use what came last, and wait for nothing."""
        await self._write_client.start(self.settings.connect_timeout_s)
        self.lease_manager.add_candidate(_FLEET, FLEET_SCOPE)
        while True:
            self.peers = await self.lookup.receive(FLEET_SCOPE, RECEIVE_WAIT_S)
            idle = not self.lease_manager.others_alive or self.lookup.problem
            await asyncio.sleep(_REFRESH_S if idle else RECEIVE_PAUSE_S)

    def _publish_inflight(self, engine_id: str, entry: bytes) -> bool:
        """Queue one entry for the other replicas, if there are any."""
        model = self.lookup.model_of(engine_id) if self.shares_blocks else FLEET_SCOPE
        if model is None or not self.lease_manager.others_alive or self._write_client.last_error:
            return False
        return self._stream.put(self.scope(model).keys.inflight, entry)

    async def _report_load(self) -> None:
        while True:
            try:
                await self._report_load_once()
                await asyncio.sleep(LOAD_INTERVAL_S)
            except IndexUnavailable:
                await asyncio.sleep(_RESTART_PAUSE_S)

    async def _report_load_once(self) -> None:
        now = self._clock()
        field = self.load_gossip.field(now)
        if field is None:
            return
        for scope in self._scopes.values():
            await self._write_client.command("HSET", scope.keys.load, self.replica, field)
            await self._write_client.command("EXPIRE", scope.keys.load, _LOAD_TTL_S)
        self.load_gossip.sent(field, now)


async def _restarting(work: Callable[[], Awaitable[None]]) -> None:
    """Run ``work`` until cancelled and restart it after a failure: a bug must not end the router."""
    while True:
        try:
            await work()
        except Exception:  # noqa: BLE001  # a bug must not end the router
            _log.exception("task of the shared index failed, restarting it")
        await asyncio.sleep(_RESTART_PAUSE_S)


async def check_index(settings: IndexSettings, model: str = "") -> str:
    """Return why the index cannot be used; "" if it can. Raises ``IndexRefused`` for another schema."""
    client: Client = Client(settings)
    try:
        if not await client.start(2 * settings.connect_timeout_s):
            return client.last_error or "no connection in time"
        await Registry(client, model).check()
    except IndexUnavailable as error:
        return str(error)
    finally:
        await client.close()
    return ""
