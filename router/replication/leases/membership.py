"""The live replicas: each writes a heartbeat every tick, with the engines it can follow.

One hash in the scope of each model, one field per replica. Always true: a replica that stopped signing is off
the roll after the lease time, and its field is deleted by whoever notices ten times later; the whole hash
goes by itself when nobody signs any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from router.fleet.identity import EngineAddress
from router.replication.leases.assignment import Member
from router.replication.leases.heartbeat import Heartbeat

_DELETE_AFTER_LEASES = 10
_HASH_LEASES = 100


class Signature(msgspec.Struct, array_like=True):
    """``beat`` grows with each signing; ``started`` tells two lives of one replica apart."""

    started: int
    beat: int
    held: int
    """How many engines of this scope the replica follows."""
    wants: list[EngineAddress]

    def member(self) -> Member:
        """What the division looks at."""
        return Member(frozenset(engine.engine_id for engine in self.wants), self.held)


_DECODE = msgspec.msgpack.Decoder(Signature)


def read_roll(fields: Mapping[bytes, bytes]) -> dict[str, Signature | None]:
    """Replica -> signature from the fields of the hash; None where it cannot be read."""
    roll: dict[str, Signature | None] = {}
    for field, value in fields.items():
        try:
            roll[field.decode(errors="replace")] = _DECODE.decode(value)
        except msgspec.DecodeError:
            roll[field.decode(errors="replace")] = None
    return roll


class Command(Protocol):
    """Carries out one command at the server, see ``router.replication.redis.client.Client.command``."""

    async def __call__(self, *args: bytes | str | int) -> Any: ...


class Membership:
    """One scope's roll, kept at ``key``; ``started`` is a number no earlier life of this replica had."""

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
        self._pulse = Heartbeat(lease_s)

    async def sign(self, wants: Sequence[EngineAddress], held: int) -> dict[str, Member]:
        """Sign, and read who is alive; this one is among them."""
        self._beat += 1
        own = Signature(self._started, self._beat, held, list(wants))
        await self._command("HSET", self._key, self._me, msgspec.msgpack.encode(own))
        await self._command("PEXPIRE", self._key, round(self._lease_s * _HASH_LEASES * 1000))
        roll = read_roll(await self._command("HGETALL", self._key))
        roll[self._me] = own
        live, dead = self._divide(roll)
        if dead:
            await self._command("HDEL", self._key, *dead)
        return live

    async def leave(self) -> None:
        """Strike this replica off."""
        await self._command("HDEL", self._key, self._me)

    def _divide(self, roll: dict[str, Signature | None]) -> tuple[dict[str, Member], list[str]]:
        """The live, and the names to strike off."""
        now = self._clock()
        live, dead = {}, []
        for name, signature in roll.items():
            if signature is None:
                dead.append(name)
            elif self._pulse.beat(name, hash((signature.started, signature.beat)), now):
                live[name] = signature.member()
            elif self._pulse.silent_s(name, now) > _DELETE_AFTER_LEASES * self._lease_s:
                dead.append(name)
        self._pulse.keep_only(roll.keys())
        return live, dead
