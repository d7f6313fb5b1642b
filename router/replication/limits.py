"""Limits of tenants hold for all replicas together: each tells what its tenants use, and hears the others.

One hash in the shared index, one field per replica, written and read every ``EXCHANGE_S`` beside the
requests, which never wait for it: a request is let in by what is known here. So together replicas let in at
most what each of them can let in within ``EXCHANGE_S`` and two round trips more than a limit says. Totals are
exchanged, not amounts, so that nothing counts twice and a lost message costs nothing.

Always true: without the server every replica goes by its own counters, which is counted; a replica that has
not been heard for ``SILENCE_S`` uses nothing, and what it uses until it is heard again is never charged in a
lump: then, as with one never heard before, no more is left here than there. Siblings of one machine tell each
other by themselves and are skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from router.admission.gate import KeyGate
from router.admission.tenants import Spent, Use
from router.replication.redis.client import Client
from router.replication.redis.errors import IndexUnavailable
from router.replication.redis.master import Script, ScriptCall

EXCHANGE_S = 0.1
SILENCE_S = 5.0
GONE_S = 60.0
"""A field that has not changed for so long is taken out, by whoever sees it."""
_KEPT_S = 120
TENANTS_MAX = 4096


class LimitStats(msgspec.Struct):
    """Counters for metrics."""

    exchanges: int = 0
    """Times that what tenants use was exchanged with other replicas."""
    failures: dict[str, int] = msgspec.field(default_factory=dict)
    """Exchanges that failed, by reason: until the next one limits count what is used at this replica."""
    malformed: int = 0
    """Messages of other replicas that could not be decoded."""
    left_out: int = 0
    """Tenants that other replicas were not told of, as there were too many at once."""


class UseMessage(msgspec.Struct, array_like=True):
    """What one replica says. ``life`` differs after each start, ``beat`` in each message; ``crew`` is the
    same for workers of one parent."""

    life: int
    beat: int
    crew: str
    uses: dict[str, Use]


_EXCHANGE = Script(
    """
    redis.call("HSET", KEYS[1], ARGV[1], ARGV[2])
    redis.call("EXPIRE", KEYS[1], ARGV[3])
    for i = 4, #ARGV do redis.call("HDEL", KEYS[1], ARGV[i]) end
    return redis.call("HGETALL", KEYS[1])
    """
)
_NOTHING = Use(0, 0, 0)
_DECODE = msgspec.msgpack.Decoder(UseMessage)


class _Heard(NamedTuple):
    life: int
    beat: int
    at_s: float


class OthersUse:
    """What other replicas said, and what of it the gate has been told. Pure; ``now`` is monotonic seconds."""

    def __init__(self, name: str, gate: KeyGate, crew: str = "") -> None:
        self.stats = LimitStats()
        self._name = name
        self._gate = gate
        self._crew = crew
        self._last: dict[str, _Heard] = {}
        self._known: dict[str, dict[str, Use]] = {}
        """Totals by replica and tenant, as the gate has been told."""

    def hear(self, fields: Mapping[str, bytes], now: float) -> list[str]:
        """Every replica's field. Returns those of replicas that are gone for good."""
        self.age(now)
        gone = []
        for name, field in fields.items():
            if name == self._name:
                continue
            try:
                message = _DECODE.decode(field)
            except msgspec.MsgspecError:
                self.stats.malformed += 1
                continue
            if self._crew and message.crew == self._crew:
                continue
            last = self._last.get(name)
            if last is not None and (last.life, last.beat) == (message.life, message.beat):
                if now - last.at_s > GONE_S:
                    gone.append(name)
                continue
            if last is not None and last.life != message.life:
                self._forget(name)
            self._last[name] = _Heard(message.life, message.beat, now)
            self._take(name, message.uses)
        return gone

    def age(self, now: float) -> None:
        """Nobody may have been heard for some time. A field that is missing tells nothing: the server may
        have lost it."""
        for name, last in list(self._last.items()):
            if now - last.at_s > SILENCE_S:
                self._forget(name)
            if now - last.at_s > 2 * GONE_S:
                del self._last[name]

    def _take(self, name: str, uses: Mapping[str, Use]) -> None:
        """A tenant that a replica had not named had used nothing there, if the replica is known."""
        first = name not in self._known
        known = self._known.setdefault(name, {})
        for tenant, use in uses.items():
            before = known.get(tenant, _NOTHING)
            if first:
                self._gate.level(tenant, use)
                before = use
            known[tenant] = use
            more = Spent(
                use.requests - before.requests, use.uncached_tokens - before.uncached_tokens, use.active
            )
            self._gate.spent_elsewhere(name, {tenant: more})

    def _forget(self, name: str) -> None:
        if self._known.pop(name, None) is not None:
            self._gate.forget_other(name)


class SharedLimits:
    """The exchange. ``name`` is this replica's, ``key`` where all replicas meet."""

    def __init__(
        self,
        client: Client,
        key: bytes,
        name: str,
        life: int,
        gate: KeyGate,
        *,
        clock: Callable[[], float],
        crew: str = "",
    ) -> None:
        self._client = client
        self._key = key
        self._name = name
        self._life = life
        self._gate = gate
        self._clock = clock
        self._beat = 0
        self._gone: list[str] = []
        self._crew = crew
        self._others = OthersUse(name, gate, crew)

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
        """Once; a server that does not answer is counted."""
        call = ScriptCall(_EXCHANGE, [self._key], [self._name, self._message(), _KEPT_S, *self._gone])
        try:
            reply = (await self._client.batch([call]))[0]
            if isinstance(reply, Exception):
                raise reply
            self._gone = self._others.hear(_fields(reply), self._clock())
        except IndexUnavailable as error:
            self.stats.failures[error.reason] = self.stats.failures.get(error.reason, 0) + 1
            self._others.age(self._clock())
            return
        self.stats.exchanges += 1

    async def withdraw(self) -> None:
        """This replica ends. Raises ``IndexUnavailable``."""
        await self._client.command("HDEL", self._key, self._name)

    def _message(self) -> bytes:
        self._beat += 1
        uses = self._gate.uses()
        if len(uses) > TENANTS_MAX:
            self.stats.left_out += len(uses) - TENANTS_MAX
            uses = dict(list(uses.items())[:TENANTS_MAX])
        return msgspec.msgpack.encode(UseMessage(self._life, self._beat, self._crew, uses))


def _fields(reply: object) -> dict[str, bytes]:
    flat = reply if isinstance(reply, list) else []
    return {name.decode("utf-8", "replace"): field for name, field in zip(flat[::2], flat[1::2], strict=True)}
