"""This replica's part in what several share: leases, load reports, prompts in flight, and limits.

One per router; it owns the connections (one client for writing, one for lookups). What else is shared is a
subclass: who holds which block (``shared_blocks``), or nothing (``shared_load``). Invariant: no failure in
here ends the router.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

import structlog

from kvatlas.router.admission.gate import KeyGate
from kvatlas.router.placement.engine import NO_PEER_SNAPSHOT, PeerSnapshot
from kvatlas.router.placement.inflight import InflightPrompt
from kvatlas.router.placement.others import OthersLoad
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
from kvatlas.router.replication.stored_proofs import StoredProofs

_log = structlog.get_logger()
# Bound of each step of the shutdown: a server that hangs must not delay the end of the process.
_SHUTDOWN_S_MAX = 2.0
# Seconds until Redis deletes the load of replicas that are all gone.
_LOAD_TTL_S = 60
_RESTART_PAUSE_S = 0.5
REFRESH_S = 0.5
"""Between readings of what other replicas write, without requests."""

# Streams of prompts in flight: entries that wait here and that Redis keeps, seconds kept, seconds of a send.
_STREAM_WAITING_MAX = 4096
_STREAM_ENTRIES_KEPT = 1024
_STREAM_KEPT_S = 60
_STREAM_SEND_S = 0.5


Work = Callable[[], Coroutine[Any, Any, None]]


class LeaseScope(NamedTuple):
    """Of one model, or of all."""

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


class SharedState(ABC):
    """State that a router shares, in one of two ways. ``served`` is called with prompts that engines computed
    for others."""

    peers: PeerSnapshot = NO_PEER_SNAPSHOT
    """Other replicas' state as last received, where it does not come with look-ups."""
    shares_blocks: ClassVar[bool]

    def __init__(
        self,
        settings: IndexSettings,
        own_load: Callable[[float], dict[str, OthersLoad]],
        *,
        served: Callable[[InflightPrompt], None] = lambda prompt: None,
        clock: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.replica = settings.replica or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(2)}"
        self._write_client, self._lookup_client = Client(settings), Client(settings)
        self._stream = InflightStream(self._write_client)
        self.salt_proofs = StoredProofs(self._write_client, settings.namespace, self.replica)
        self._clock = clock
        self._started = secrets.randbits(40)
        self._scopes: dict[str, LeaseScope] = {}
        # By model, where blocks are shared.
        self._mirrors: dict[str, MirroredIndex] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._reader: SharedReader | None = None
        # Tenants' usage across replicas, if tenants have limits.
        self.limits: SharedLimits | None = None
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

    @property
    def mirror_stats(self) -> dict[str, MirrorStats]:
        """The writers' counters, by model."""
        return {model: mirror.counters for model, mirror in self._mirrors.items()}

    @abstractmethod
    def leads(self, first: str | None) -> bool | None:
        """Whether this replica acts for all; ``first``: of its engines. None: no lease decides that."""

    @abstractmethod
    def _works(self) -> Iterable[Work]:
        """Tasks beside those of all."""

    @abstractmethod
    def _scope_of(self, engine_id: str) -> str | None:
        """Scope of prompts in flight at an engine; None while it is unknown."""

    async def _lease_acquired(self, candidate: LeaseCandidate, token: int, again: bool) -> None:  # noqa: B027
        """An engine's lease is held here from now on; ``again``: it was before."""

    def _lease_ended(self, model: str, engine_id: str) -> None:  # noqa: B027
        """An engine's lease is no longer held here."""

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

    def scope(self, name: str) -> LeaseScope:
        """Return a scope, created on first use."""
        found = self._scopes.get(name)
        if found is None:
            keys = ScopeKeys(self.settings.namespace, name)
            membership = Membership(
                self._write_client.command,
                keys.replicas,
                self.replica,
                started=self._started,
                lease_s=self.settings.lease_s,
                clock=self._clock,
            )
            leases = ModelLeases(Leases(self._write_client, name, self.replica), membership)
            found = self._scopes[name] = LeaseScope(leases, keys)
        return found

    def reader(self) -> SharedReader:
        """Return the reader, created in the running event loop."""
        if self._reader is None:
            self._reader = SharedReader(self._lookup_client)
        return self._reader

    def follower(self, engine_id: str) -> str | None:
        """Return the replica that follows an engine, as of the last lookup; None if none does."""
        if self.lease_manager.follows(engine_id):
            return self.replica
        known = self.lookup.known(engine_id)
        return None if known is None else known.holder or None

    @property
    def problem(self) -> str:
        """Why the shared index cannot be used now; "" while it can."""
        if self._lookup_client.last_error:
            return self._lookup_client.last_error
        return self.lookup.problem

    async def run(self) -> None:
        """Run all tasks until cancelled."""
        await self._write_client.start()
        await self._lookup_client.start()
        async with asyncio.TaskGroup() as self._tasks:
            works = [self.lease_manager.run, self._report_load, self._stream.run, *self._works()]
            if self.limits is not None:
                works.append(self.limits.run)
            for work in works:
                self._tasks.create_task(restarting(work), name=f"shared state: {work.__qualname__}")

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

    def _publish_inflight(self, engine_id: str, entry: bytes) -> bool:
        """Queue one entry for the other replicas, if there are any."""
        scope = self._scope_of(engine_id)
        if scope is None or not self.lease_manager.others_alive or self._write_client.last_error:
            return False
        return self._stream.put(self.scope(scope).keys.inflight, entry)

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


async def restarting(work: Work) -> None:
    """Run ``work`` until cancelled and restart it after a failure: a bug must not end the router."""
    while True:
        try:
            await work()
        except Exception:  # noqa: BLE001  # a bug must not end the router
            _log.exception("task of the shared index failed, restarting it")
        await asyncio.sleep(_RESTART_PAUSE_S)


async def check_index(settings: IndexSettings) -> str:
    """Return why the index cannot be used; "" if it can. Raises ``IndexRefused`` for another schema."""
    client: Client = Client(settings)
    try:
        if not await client.start(2 * settings.connect_timeout_s):
            return client.last_error or "no connection in time"
        await Registry(client, "").check()
    except IndexUnavailable as error:
        return str(error)
    finally:
        await client.close()
    return ""
