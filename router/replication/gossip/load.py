"""Exchanges in-flight load between replicas, so that two of them do not both pick the one idle engine.

One hash in the index, one field per replica, read with every look-up. A replica writes when its load has
changed, at most every ``load_interval_s``, and repeats a load that is not empty as a heartbeat; recent work,
which decays by itself, is written with either. Always true: a replica's load counts no longer than
``silence_s`` after its last heartbeat; its own field is never counted; a field that cannot be decoded, or has
values out of bounds, counts as empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated

import msgspec

from router.placement.load.others import OthersLoad
from router.replication.leases.heartbeat import HeartbeatMonitor

SILENCE_S = 2.0
REPEAT_S = 0.5


_ENGINES_MAX = 16_384
_EngineId = Annotated[str, msgspec.Meta(max_length=4096)]


class ReplicaLoad(msgspec.Struct, array_like=True):
    """One replica's field. ``beat`` grows with each write."""

    beat: int
    engines: Annotated[dict[_EngineId, OthersLoad], msgspec.Meta(max_length=_ENGINES_MAX)]


_DECODE = msgspec.msgpack.Decoder(ReplicaLoad)


class LoadGossip:
    """Encodes this replica's field and adds up those of the others. Pure.

    ``refused`` is called for each field of others that cannot be used."""

    def __init__(
        self,
        me: str,
        own: Callable[[float], dict[str, OthersLoad]],
        *,
        started: int,
        silence_s: float = SILENCE_S,
        refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._refused = refused
        self._me = me
        self._own = own
        self._beat = started
        self._heartbeats = HeartbeatMonitor(silence_s)
        self._sent: dict[str, OthersLoad] = {}
        self._sent_s = float("-inf")
        self._decoded: dict[str, tuple[bytes, ReplicaLoad | None]] = {}

    def field(self, now: float) -> bytes | None:
        """What to write now; None while nothing has changed and no heartbeat is due."""
        load = self._own(now)
        due = bool(load) and now - self._sent_s >= REPEAT_S
        if not due and _in_flight_alike(load, self._sent):
            return None
        return msgspec.msgpack.encode(ReplicaLoad(self._beat + 1, load))

    def sent(self, field: bytes, now: float) -> None:
        """``field`` has been written."""
        remote = _DECODE.decode(field)
        self._beat, self._sent, self._sent_s = remote.beat, remote.engines, now

    def others(self, fields: Mapping[str, bytes], now: float) -> dict[str, OthersLoad]:
        """What all other live replicas together have in flight, by engine."""
        total: dict[str, OthersLoad] = {}
        for remote in self._alive(fields, now):
            for engine_id, load in remote.engines.items():
                known = total.get(engine_id)
                total[engine_id] = load if known is None else known.plus(load)
        if len(self._decoded) > len(fields):
            self._decoded = {name: kept for name, kept in self._decoded.items() if name in fields}
            self._heartbeats.keep_only(fields.keys())
        return total

    def _alive(self, fields: Mapping[str, bytes], now: float) -> Iterator[ReplicaLoad]:
        """The fields of other replicas that can be read, and have been written lately."""
        for name, value in fields.items():
            remote = None if name == self._me else self._decode(name, value)
            if remote is not None and self._heartbeats.beat(name, remote.beat, now):
                yield remote

    def _decode(self, name: str, value: bytes) -> ReplicaLoad | None:
        """A field decoded; the same bytes are decoded once."""
        known = self._decoded.get(name)
        if known is not None and known[0] == value:
            return known[1]
        try:
            remote = _DECODE.decode(value)
        except msgspec.DecodeError:
            remote = None
            self._refused()
        self._decoded[name] = value, remote
        return remote


def _in_flight_alike(load: Mapping[str, OthersLoad], sent: Mapping[str, OthersLoad]) -> bool:
    """Whether the same is in flight at the same engines."""
    if load.keys() != sent.keys():
        return False
    return all(one.in_flight == sent[engine_id].in_flight for engine_id, one in load.items())
