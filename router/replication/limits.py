"""Tenant limits across replicas: each replica reports its tenants' usage and reads that of the others.

One hash in the shared index, one field per replica, written and read every ``EXCHANGE_S`` beside the
requests, which never wait for it: a request is admitted by the local state. So replicas together admit at
most what each of them can admit within ``EXCHANGE_S`` and two round trips more than a limit allows. The
arithmetic is in ``kvatlas.router.admission.others_use``.

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
from kvatlas.router.admission.use_reports import UseReports
from kvatlas.router.replication.gossip import HeartbeatMonitor
from kvatlas.router.replication.master import Script, ScriptCall
from kvatlas.router.replication.messages import VERSION, PeerMessages
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.redis_connection import IndexUnavailable

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
    other_version: Annotated[int, "kvatlas_limits_other_version_total"] = 0
    """Messages of replicas of another version that this one ignored."""
    refused: Annotated[int, "kvatlas_limits_refused_total"] = 0
    """Values of other replicas that were refused: totals that fell, more refunded than charged, more than one
    period's worth, or too many replicas."""
    omitted: Annotated[int, "kvatlas_limits_omitted_total"] = 0
    """Tenants left for the next message to other replicas, as there were too many for one."""


class UseMessage(msgspec.Struct, array_like=True, tag=VERSION):
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


class OtherReplicas:
    """The fields of other replicas, as last read. Pure; ``now`` is monotonic seconds."""

    def __init__(self, name: str, gate: KeyGate, group: str = "") -> None:
        self.stats = LimitStats()
        self._name = name
        self._group = group
        self._uses = OthersUse(gate, self._refused)
        self._messages = PeerMessages(UseMessage, self.stats)
        # Of fields: they outlive their replica.
        self._changes = HeartbeatMonitor(GONE_S)

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
        self._changes.keep_only(fields.keys())
        return [
            name
            for name, field in fields.items()
            if not self._changes.beat(name, hash(field), now) and name != self._name
        ]

    def age(self, now: float) -> None:
        """Expire usage, since the server may not have responded for some time."""
        self._uses.age(now)

    def _read(self, field: bytes) -> Uses | None:
        if len(field) > _FIELD_BYTES_MAX:
            self.stats.malformed += 1
            return None
        message = self._messages.read(field)
        return None if message is None or (self._group and message.group == self._group) else message.uses

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
        self._reports = UseReports(life, gate.uses, TENANTS_MAX)
        self._clock = clock
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
        uses = self._reports.next(all_tenants=True)
        self.stats.omitted = self._reports.omitted
        return msgspec.msgpack.encode(UseMessage(self._group, uses))


def _fields(reply: object) -> dict[str, bytes]:
    flat = reply if isinstance(reply, list) else []
    return {name.decode("utf-8", "replace"): field for name, field in zip(flat[::2], flat[1::2], strict=True)}
