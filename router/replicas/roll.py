"""The roll of live replicas: each one signs it every tick, with the engines it would follow.

One hash in the scope of each model, one field per replica. Always true: a replica that stopped signing is off
the roll after the lease time, and its field is deleted by whoever notices ten times later; the whole hash
goes by itself when nobody signs any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from router.replicas.division import Member
from router.replicas.pulse import Pulse

_DELETE_AFTER_LEASES = 10
_HASH_LEASES = 100


class _Signature(msgspec.Struct, array_like=True):
    """``beat`` grows with each signing; ``started`` tells two lives of one replica apart."""

    started: int
    beat: int
    held: int
    wants: list[str]


_DECODE = msgspec.msgpack.Decoder(_Signature)


class Command(Protocol):
    """Carries out one command at the server, see ``router.index.shared.connect.Client.command``."""

    async def __call__(self, *args: bytes | str | int) -> Any: ...


class Roll:
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
        self._pulse = Pulse(lease_s)

    async def sign(self, me: Member) -> dict[str, Member]:
        """Sign, and read who is alive; this one is among them."""
        self._beat += 1
        own = msgspec.msgpack.encode(_Signature(self._started, self._beat, me.held, sorted(me.wants)))
        await self._command("HSET", self._key, self._me, own)
        await self._command("PEXPIRE", self._key, round(self._lease_s * _HASH_LEASES * 1000))
        flat = await self._command("HGETALL", self._key)
        return await self._alive(dict(zip(flat[::2], flat[1::2], strict=True)), me)

    async def leave(self) -> None:
        """Strike this replica off."""
        await self._command("HDEL", self._key, self._me)

    async def _alive(self, fields: dict[bytes, bytes], me: Member) -> dict[str, Member]:
        now = self._clock()
        live = {self._me: me}
        dead = []
        for field, value in fields.items():
            name = field.decode(errors="replace")
            if name == self._me:
                continue
            try:
                signature = _DECODE.decode(value)
            except msgspec.DecodeError:
                dead.append(field)
                continue
            if self._pulse.beat(name, hash((signature.started, signature.beat)), now):
                live[name] = Member(frozenset(signature.wants), signature.held)
            elif self._pulse.silent_s(name, now) > _DELETE_AFTER_LEASES * self._lease_s:
                dead.append(field)
        self._pulse.keep_only([field.decode(errors="replace") for field in fields])
        if dead:
            await self._command("HDEL", self._key, *dead)
        return live
