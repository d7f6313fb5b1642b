"""Exchange of in-flight load, so that two replicas do not both select the one idle engine. One hash in the
index with one field per replica, read with every lookup. A replica writes when its load has changed, at
most every 50 ms, and repeats a load that is not empty as a heartbeat; recent work and use of links, which
end by themselves, are included in both. A replica's load counts no longer than ``silence_s`` after its last
heartbeat; its own field is never counted; a field that cannot be decoded, or has values out of bounds,
counts as empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated

import msgspec

from kvatlas.router.placement.others import OthersLoad
from kvatlas.router.replication.gossip import GossipStats, HeartbeatMonitor
from kvatlas.router.replication.messages import VERSION, PeerMessages, Unread

SILENCE_S = 2.0
REPEAT_S = 0.5
# Minimum pause in seconds between two reports of a replica's load.
LOAD_INTERVAL_S = 0.05


_ENGINES_MAX = 16_384
_EngineId = Annotated[str, msgspec.Meta(max_length=4096)]


class ReplicaLoad(msgspec.Struct, array_like=True, tag=VERSION):
    """One replica's field. ``beat`` grows with each write."""

    beat: int
    engines: Annotated[dict[_EngineId, OthersLoad], msgspec.Meta(max_length=_ENGINES_MAX)]


class LoadGossip:
    """Encodes this replica's field and sums those of the others. Pure.

    ``stats`` counts unusable fields of others.
    """

    def __init__(
        self,
        me: str,
        own: Callable[[float], dict[str, OthersLoad]],
        *,
        started: int,
        silence_s: float = SILENCE_S,
        stats: Unread | None = None,
    ) -> None:
        self._messages = PeerMessages(ReplicaLoad, GossipStats() if stats is None else stats)
        self._me = me
        self._own = own
        self._beat = started
        self._heartbeats = HeartbeatMonitor(silence_s)
        self._sent: dict[str, OthersLoad] = {}
        self._sent_s = float("-inf")
        # With the time at which these bytes came.
        self._decoded: dict[str, tuple[bytes, ReplicaLoad | None, float]] = {}

    def field(self, now: float) -> bytes | None:
        """Return the field to write now; None if nothing has changed and no heartbeat is due."""
        load = self._own(now)
        due = bool(load) and now - self._sent_s >= REPEAT_S
        if not due and _in_flight_alike(load, self._sent):
            return None
        return msgspec.msgpack.encode(ReplicaLoad(self._beat + 1, load))

    def sent(self, field: bytes, now: float) -> None:
        own = self._messages.read(field)
        if own is not None:
            self._beat, self._sent, self._sent_s = own.beat, own.engines, now

    def others(self, fields: Mapping[str, bytes], now: float) -> dict[str, OthersLoad]:
        """Return the load of all other live replicas together, by engine."""
        total: dict[str, OthersLoad] = {}
        for remote, age_s in self._alive(fields, now):
            for engine_id, told in remote.engines.items():
                known, load = total.get(engine_id), told.aged(age_s)
                total[engine_id] = load if known is None else known.plus(load)
        if len(self._decoded) > len(fields):
            self._decoded = {name: kept for name, kept in self._decoded.items() if name in fields}
            self._heartbeats.keep_only(fields.keys())
        return total

    def _alive(self, fields: Mapping[str, bytes], now: float) -> Iterator[tuple[ReplicaLoad, float]]:
        """Yield the valid and recently written fields of other replicas, and the seconds since they came."""
        for name, value in fields.items():
            if name == self._me:
                continue
            remote, came_s = self._decode(name, value, now)
            if remote is not None and self._heartbeats.beat(name, remote.beat, now):
                yield remote, now - came_s

    def _decode(self, name: str, value: bytes, now: float) -> tuple[ReplicaLoad | None, float]:
        """Decode a field, and return the time at which it came; equal bytes are decoded once."""
        known = self._decoded.get(name)
        if known is not None and known[0] == value:
            return known[1:]
        remote = self._messages.read(value)
        self._decoded[name] = value, remote, now
        return remote, now


def _in_flight_alike(load: Mapping[str, OthersLoad], sent: Mapping[str, OthersLoad]) -> bool:
    """Whether both have the same in flight at the same engines."""
    if load.keys() != sent.keys():
        return False
    return all(one.in_flight == sent[engine_id].in_flight for engine_id, one in load.items())
