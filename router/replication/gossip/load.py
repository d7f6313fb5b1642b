"""Exchanges in-flight load between replicas, so that two of them do not both pick the one idle engine.

One hash in the index, one field per replica, read with every look-up. A replica writes when its load has
changed, at once but at most every ``interval_s``, and repeats what is not nothing so that others see it live.
Always true: what a replica told counts no longer than ``silence_s`` after it stopped telling; its own field
is never counted; a field that cannot be read counts as nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from router.placement.load import OthersLoad
from router.replication.leases.heartbeat import Heartbeat

SILENCE_S = 2.0
REPEAT_S = 0.5


class ReplicaLoad(msgspec.Struct, array_like=True):
    """One replica's field. ``beat`` grows with each writing."""

    beat: int
    engines: dict[str, OthersLoad]


_DECODE = msgspec.msgpack.Decoder(ReplicaLoad)


class LoadGossip:
    """Pure: makes the own field, and adds up those of the others."""

    def __init__(
        self,
        me: str,
        own: Callable[[float], dict[str, OthersLoad]],
        *,
        started: int,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._me = me
        self._own = own
        self._beat = started
        self._pulse = Heartbeat(silence_s)
        self._told: dict[str, OthersLoad] = {}
        self._told_s = float("-inf")
        self._decoded: dict[str, tuple[bytes, ReplicaLoad | None]] = {}

    def field(self, now: float) -> bytes | None:
        """What to write now; None while the others need hear nothing new."""
        load = self._own(now)
        if load == self._told and not (load and now - self._told_s >= REPEAT_S):
            return None
        return msgspec.msgpack.encode(ReplicaLoad(self._beat + 1, load))

    def wrote(self, field: bytes, now: float) -> None:
        """``field`` has been written."""
        told = _DECODE.decode(field)
        self._beat, self._told, self._told_s = told.beat, told.engines, now

    def others(self, fields: Mapping[str, bytes], now: float) -> dict[str, OthersLoad]:
        """What all other live replicas together have in flight, by engine."""
        total: dict[str, OthersLoad] = {}
        for name, value in fields.items():
            if name == self._me:
                continue
            told = self._decode(name, value)
            if told is None or not self._pulse.beat(name, told.beat, now):
                continue
            for engine_id, load in told.engines.items():
                known = total.get(engine_id)
                total[engine_id] = load if known is None else known.plus(load)
        if len(self._decoded) > len(fields):
            self._decoded = {name: kept for name, kept in self._decoded.items() if name in fields}
            self._pulse.keep_only(fields.keys())
        return total

    def _decode(self, name: str, value: bytes) -> ReplicaLoad | None:
        """A field decoded; the same bytes are decoded once."""
        known = self._decoded.get(name)
        if known is not None and known[0] == value:
            return known[1]
        try:
            told = _DECODE.decode(value)
        except msgspec.DecodeError:
            told = None
        self._decoded[name] = value, told
        return told
