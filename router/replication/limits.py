"""Tenant limits across replicas: each replica reports its tenants' usage and reads that of the others.

One hash in the shared index, one field per replica, written and read every ``EXCHANGE_S`` beside the
requests, which never wait for it: a request is admitted by the local state. So replicas together admit at
most what each of them can admit within ``EXCHANGE_S`` and two round trips more than a limit allows. The
arithmetic is in ``kvatlas.router.admission.tenants``.

Invariants: without the server every replica uses its own counters, which is counted; a replica whose field is
absent or unchanged for ``SILENCE_S`` has no active requests. Content of the server is untrusted: it can make
a tenant wait for no more than one period's worth. Workers of one parent exchange usage directly and are
skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec

from kvatlas.router.admission.gate import KeyGate
from kvatlas.router.admission.others_use import TENANTS_MAX, OthersUse, Uses
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.redis_connection import IndexUnavailable, Script, ScriptCall

# Together replicas exceed a limit by what is admitted in this time and two round trips (docs/tenants.md).
EXCHANGE_S = 0.1
# A field unchanged for this many seconds is deleted by the next replica that reads it.
GONE_S = 60.0
# Seconds until Redis deletes the key if no replica writes it; must exceed ``GONE_S``.
_KEPT_S = 120
# Size limit of a field; larger than any replica writes.
_FIELD_BYTES_MAX = 1 << 20


class LimitStats(msgspec.Struct):
    """Counters for metrics."""

    exchanges: Annotated[int, "kvatlas_limits_exchanges_total"] = 0
    """Times that what tenants use was exchanged with other replicas."""
    failures: Annotated[dict[str, int], "kvatlas_limits_failures_total{reason}"] = msgspec.field(
        default_factory=dict
    )
    """Exchanges that failed, by reason: until the next one limits count what is used at this replica."""
    malformed: Annotated[int, "kvatlas_limits_malformed_total"] = 0
    """Messages of other replicas that could not be decoded, or had values out of bounds."""
    refused: Annotated[int, "kvatlas_limits_refused_total"] = 0
    """Values of other replicas that were refused: totals that fell, more refunded than charged, more than one
    period's worth, or too many replicas."""
    omitted: Annotated[int, "kvatlas_limits_omitted_total"] = 0
    """Tenants left for the next message to other replicas, as there were too many for one."""


class UseMessage(msgspec.Struct, array_like=True):
    """One replica's field; ``group`` is equal for workers of one parent."""

    group: Annotated[str, msgspec.Meta(max_length=256)]
    uses: Uses


_EXCHANGE = Script(
    """
    redis.call("HSET", KEYS[1], ARGV[1], ARGV[2])
    redis.call("EXPIRE", KEYS[1], ARGV[3])
    for i = 4, #ARGV do redis.call("HDEL", KEYS[1], ARGV[i]) end
    return redis.call("HGETALL", KEYS[1])
    """
)
_DECODE = msgspec.msgpack.Decoder(UseMessage)


class OtherReplicas:
    """The fields of other replicas, as last read. Pure; ``now`` is monotonic seconds."""

    def __init__(self, name: str, gate: KeyGate, group: str = "") -> None:
        self.stats = LimitStats()
        self._name = name
        self._group = group
        self._uses = OthersUse(gate, self._refused)
        self._fields: dict[str, tuple[int, float]] = {}

    def receive(self, fields: Mapping[str, bytes], now: float) -> list[str]:
        """Process every replica's field; a replica without one has ended. Returns the stale fields to
        delete.
        """
        received: dict[str, Uses] = {}
        for name, field in fields.items():
            uses = None if name == self._name else self._read(field)
            if uses is not None:
                received[name] = uses
        self.age(now)
        self._uses.keep(received.keys())
        for name, uses in received.items():
            self._uses.receive(name, uses, now)
        self._fields = {name: self._since(name, field, now) for name, field in fields.items()}
        return [
            name for name, (_, at_s) in self._fields.items() if now - at_s > GONE_S and name != self._name
        ]

    def age(self, now: float) -> None:
        """Expire usage, since the server may not have responded for some time."""
        self._uses.age(now)

    def _since(self, name: str, field: bytes, now: float) -> tuple[int, float]:
        """Return the field's hash, and since when it is unchanged."""
        last, new = self._fields.get(name), hash(field)
        return last if last is not None and last[0] == new else (new, now)

    def _read(self, field: bytes) -> Uses | None:
        try:
            if len(field) > _FIELD_BYTES_MAX:
                raise msgspec.ValidationError("too long")
            message = _DECODE.decode(field)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self.stats.malformed += 1
            return None
        return None if self._group and message.group == self._group else message.uses

    def _refused(self) -> None:
        self.stats.refused += 1


class SharedLimits:
    """Periodic exchange of usage. ``name`` is this replica's, ``key`` the hash shared by all replicas."""

    def __init__(
        self,
        client: Client,
        key: bytes,
        name: str,
        life: int,
        gate: KeyGate,
        *,
        clock: Callable[[], float],
        group: str = "",
    ) -> None:
        self._client = client
        self._key = key
        self._name = name
        self._life = life
        self._gate = gate
        self._clock = clock
        self._beat = 0
        self._gone: list[str] = []
        self._group = group
        self._others = OtherReplicas(name, gate, group)

    @property
    def stats(self) -> LimitStats:
        """Counters for metrics."""
        return self._others.stats

    async def run(self) -> None:
        """Exchange until cancelled."""
        while True:
            await self.exchange()
            await asyncio.sleep(EXCHANGE_S)

    async def exchange(self) -> None:
        """Exchange once; a server that does not respond is counted."""
        call = ScriptCall(_EXCHANGE, [self._key], [self._name, self._message(), _KEPT_S, *self._gone])
        try:
            reply = (await self._client.batch([call]))[0]
            if isinstance(reply, Exception):
                raise reply
            self._gone = self._others.receive(_fields(reply), self._clock())
        except IndexUnavailable as error:
            self.stats.failures[error.reason] = self.stats.failures.get(error.reason, 0) + 1
            self._others.age(self._clock())
            return
        self.stats.exchanges += 1

    async def withdraw(self) -> None:
        """Delete this replica's field at its end. Raises ``IndexUnavailable``."""
        await self._client.command("HDEL", self._key, self._name)

    def _message(self) -> bytes:
        self._beat += 1
        uses = self._gate.uses()
        whole = len(uses) <= TENANTS_MAX
        if not whole:  # round robin
            self.stats.omitted += len(uses) - TENANTS_MAX
            names = list(uses)
            start = self._beat * TENANTS_MAX % len(names)
            uses = {name: uses[name] for name in (names[start:] + names[:start])[:TENANTS_MAX]}
        return msgspec.msgpack.encode(UseMessage(self._group, Uses(self._life, self._beat, whole, uses)))


def _fields(reply: object) -> dict[str, bytes]:
    flat = reply if isinstance(reply, list) else []
    return {name.decode("utf-8", "replace"): field for name, field in zip(flat[::2], flat[1::2], strict=True)}
