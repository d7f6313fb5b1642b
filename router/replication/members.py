"""Live replicas: each writes a heartbeat every round, with the engines it can follow. One hash per model, one
field per replica. A replica that stopped writing counts as dead after the lease time, and another replica
deletes its field after ten lease times; the hash expires when it is no longer written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.replication.assignment import Member
from kvatlas.router.replication.gossip import HeartbeatMonitor

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
