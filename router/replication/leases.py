"""One writer per engine: leases with monotonic fencing tokens, stored and timed by the server.

An acquired lease has a token higher than every one before it. Writes carry the token and the server compares
it (``scripts.WRITE``), so a writer whose lease expired unnoticed cannot write. Invariant: at any time at most
one token of an engine passes the fence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import xxhash

from router.fleet.identity import EngineAddress
from router.replication import scripts
from router.replication.codec import ScopeKeys
from router.replication.gossip import HeartbeatMonitor
from router.replication.redis.client import Client


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


async def holders(client: Client, keys: ScopeKeys) -> dict[str, Lease]:
    """Return every lease of a model, expired ones included. Raises ``IndexUnavailable``."""
    found = await client.command("HGETALL", keys.leases)
    return parse_leases(found, await client.command("TIME", key=keys.leases))


def parse_leases(fields: Mapping[bytes, bytes], now: Sequence[bytes | int]) -> dict[str, Lease]:
    """Parse leases from the fields of their hash, and the server's clock (``TIME``)."""
    now_ms = int(now[0]) * 1000 + int(now[1]) // 1000
    leases: dict[str, Lease] = {}
    for engine_id, text in fields.items():
        token, expires_ms, holder = text.decode().split("|", 2)
        leases[engine_id.decode()] = Lease(holder, int(token), (int(expires_ms) - now_ms) / 1000)
    return leases


# Assignment of engines to replicas: each replica computes it from state that all replicas share. There is no
# coordinator. Engines without holder are assigned, one after the other, to the live replica that can follow
# the engine and holds fewest; every replica computes the same assignment and acquires its own part, and if
# their views differ the lease decides. A replica that holds at least two more than another releases one that
# the other can follow, one at a time. Pure functions. An engine that a live replica can follow eventually
# gets a holder, even if views differ (after ``patience_s`` any replica acquires it); without external changes
# the assignment becomes stable.


class Member(msgspec.Struct, frozen=True):
    """A live replica: the engines it can follow, and the number it follows."""

    wants: Collection[str]
    held: int = 0


class Assignment(msgspec.Struct, frozen=True):
    """Actions of one round: ids of the leases to acquire, and the one to release."""

    acquire: tuple[str, ...] = ()
    release: str | None = None


def plan_assignment(
    me: str,
    holder_of: Mapping[str, str | None],
    members: Mapping[str, Member],
    *,
    free_s: Mapping[str, float],
    patience_s: float,
) -> Assignment:
    """Return the leases that replica ``me`` has to acquire and to release.

    Args:

      holder_of: The engines this replica can follow, and the holder of each.

      members: All live replicas, this one included.

      free_s: Seconds since each engine has been without holder.
    """
    free = sorted(engine for engine, holder in holder_of.items() if holder is None)
    assigned = _assign_free(free, members)
    acquire = tuple(e for e in free if assigned.get(e) == me or free_s.get(e, 0.0) >= patience_s)
    mine = [engine for engine, holder in holder_of.items() if holder == me]
    return Assignment(acquire, None if acquire else _to_release(me, mine, members))


def _assign_free(free: list[str], members: Mapping[str, Member]) -> dict[str, str]:
    """Return engine without holder -> replica that has to acquire it."""
    held = {replica: member.held for replica, member in members.items()}
    assigned = {}
    for engine in free:
        who = [replica for replica, member in members.items() if engine in member.wants]
        if who:
            taker = min(who, key=lambda replica: (held[replica], _weight(replica, engine)))
            held[taker] += 1
            assigned[engine] = taker
    return assigned


def _to_release(me: str, mine: list[str], members: Mapping[str, Member]) -> str | None:
    """Return one of ``mine`` that a replica with at least two fewer can follow; None if there is none."""
    less_loaded = [
        member for replica, member in members.items() if replica != me and member.held + 2 <= len(mine)
    ]
    for engine in sorted(mine, key=lambda engine: _weight(me, engine)):
        if any(engine in member.wants for member in less_loaded):
            return engine
    return None


def _weight(replica: str, engine: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{replica}\n{engine}".encode())


# Live replicas: each writes a heartbeat every round, with the engines it can follow. One hash per model, one
# field per replica. A replica that stopped writing counts as dead after the lease time, and another replica
# deletes its field after ten lease times; the hash expires when it is no longer written.


_DELETE_AFTER_LEASES = 10
_HASH_LEASES = 100


class MemberRecord(msgspec.Struct, array_like=True):
    """One replica's field. ``beat`` grows with each report; ``started`` differs after a restart."""

    started: int
    beat: int
    held: int
    """Number of engines of this scope the replica follows."""
    wants: list[EngineAddress]

    def member(self) -> Member:
        """Return the input of the assignment."""
        return Member(frozenset(engine.engine_id for engine in self.wants), self.held)


_DECODE = msgspec.msgpack.Decoder(MemberRecord)


def decode_members(fields: Mapping[bytes, bytes]) -> dict[str, MemberRecord | None]:
    """Decode replica -> record from the fields of the hash; None for an invalid field."""
    records: dict[str, MemberRecord | None] = {}
    for field, value in fields.items():
        try:
            records[field.decode(errors="replace")] = _DECODE.decode(value)
        except msgspec.DecodeError:
            records[field.decode(errors="replace")] = None
    return records


class Command(Protocol):
    """Runs one command at the server (``Client.command``)."""

    async def __call__(self, *args: bytes | str | int) -> Any: ...


class Membership:
    """The live replicas of one model, in the hash ``key``; ``started`` is a new number for each start."""

    def __init__(
        self,
        command: Command,
        key: bytes,
        me: str,
        *,
        started: int,
        lease_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._command = command
        self._key = key
        self._me = me
        self._started = started
        self._lease_s = lease_s
        self._clock = clock
        self._beat = 0
        self._heartbeats = HeartbeatMonitor(lease_s)

    async def report(self, wants: Sequence[EngineAddress], held: int) -> dict[str, Member]:
        """Write this replica's heartbeat and return the live replicas, this one included."""
        self._beat += 1
        own = MemberRecord(self._started, self._beat, held, list(wants))
        await self._command("HSET", self._key, self._me, msgspec.msgpack.encode(own))
        await self._command("PEXPIRE", self._key, round(self._lease_s * _HASH_LEASES * 1000))
        records = decode_members(await self._command("HGETALL", self._key))
        records[self._me] = own
        live, dead = self._split(records)
        if dead:
            await self._command("HDEL", self._key, *dead)
        return live

    async def leave(self) -> None:
        """Delete this replica's field."""
        await self._command("HDEL", self._key, self._me)

    def _split(self, records: dict[str, MemberRecord | None]) -> tuple[dict[str, Member], list[str]]:
        """Return the live replicas, and the names whose fields have to be deleted."""
        now = self._clock()
        live, dead = {}, []
        for name, record in records.items():
            if record is None:
                dead.append(name)
            elif self._heartbeats.beat(name, hash((record.started, record.beat)), now):
                live[name] = record.member()
            elif self._heartbeats.silent_s(name, now) > _DELETE_AFTER_LEASES * self._lease_s:
                dead.append(name)
        self._heartbeats.keep_only(records.keys())
        return live, dead
