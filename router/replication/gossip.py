"""Exchange of prompts in flight and load between replicas.

Every replica appends the events of its own prompts (sent, first token seen, ended, failed) to a stream in the
index, and reads new entries with each lookup. Other replicas' prompts are kept in the same tree as its own
(``InflightPrefixes``). KV event batches of engines followed by another replica are not available here: the
blocks of a computed prompt count as pending for the whole grace period. Two prompts with the same prefix that
reach two replicas within one round trip do not see each other; the later one hits more than predicted.
Invariants: publishing never waits and never fails a request; another replica's prompt whose end was not
published counts no longer than ``_AGE_S_MAX``; entries of others are not published again.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import IntEnum
from typing import Annotated, NamedTuple, cast

import msgspec

from kvatlas.publisher.events import BlockHash
from kvatlas.router.placement.inflight import InflightPrefixes, InflightPrompt, Kept, kept_ranges
from kvatlas.router.proxy.deaths import DIGEST_BYTES
from kvatlas.router.replication.messages import VERSION, PeerMessages

# Maximum number of hash blocks published per prompt, 8 bytes each: the longest prefix that others can match.
_BLOCKS_MAX = 8192
_OTHERS_MAX = 8192
# Ranges of kept ends per prompt of another replica, of which the last count; own prompts have at most eight.
_RANGES_MAX = 16
_AGE_S_MAX = 60.0


class HeartbeatMonitor:
    """Liveness of replicas that keep writing a number, without comparing two machines' clocks.

    Every replica increases the number in its record; a reader notes, by its own clock, when the number last
    changed. Invariant: a writer that stopped counts as dead ``limit_s`` after the reader first saw its last
    number; a record seen for the first time counts as alive for that long.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seen: dict[str, tuple[int, float]] = {}

    def beat(self, name: str, number: int, now: float) -> bool:
        """Record the number that ``name`` shows at ``now``; returns whether it is alive."""
        seen = self._seen.get(name)
        if seen is None or seen[0] != number:
            self._seen[name] = number, now
            return True
        return now - seen[1] <= self._limit_s

    def silent_s(self, name: str, now: float) -> float:
        """Return the seconds since its number last changed; 0 for an unknown name."""
        seen = self._seen.get(name)
        return 0.0 if seen is None else now - seen[1]

    def keep_only(self, names: Collection[str]) -> None:
        for name in self._seen.keys() - set(names):
            del self._seen[name]


class InflightEvent(IntEnum):
    """Event of a prompt in flight."""

    SENT = 0
    PREFILLED = 1
    ENDED = 2
    FAILED = 3
    DIED = 4
    """Its engine died with it. Of a request rather than a prompt: ``hashes`` is the digest of its body."""


class GossipEntry(msgspec.Struct, array_like=True, omit_defaults=True, tag=VERSION):
    """One entry of the stream; (``replica``, ``started``, ``number``) identifies the prompt."""

    replica: str
    started: int
    number: int
    event: InflightEvent
    engine_id: str = ""
    keeps: tuple[int | tuple[int, int, int], ...] = ()
    """Ends of the prefixes that the engine keeps, in hash blocks: one, or (first, beyond the last, step)."""
    hashes: bytes = b""
    """8 bytes each, little endian."""
    probed: bytes = b""
    """Outcome of a probe of the engine, in an entry ``ENDED`` of no prompt, which older routers skip."""


class GossipStats(msgspec.Struct):
    """Counters for metrics; ``current`` may fall."""

    sent: Annotated[int, "kvatlas_peer_inflight_sent_total"] = 0
    """Prompts in flight reported to other routers."""
    dropped: Annotated[int, "kvatlas_peer_inflight_dropped_total"] = 0
    """Prompts in flight not reported because the index was unavailable."""
    received: Annotated[int, "kvatlas_peer_inflight_received_total"] = 0
    """Prompts in flight reported by other routers."""
    current: Annotated[int, "kvatlas_peer_inflight_current"] = 0
    """Other routers' prompts under way."""
    expired: Annotated[int, "kvatlas_peer_inflight_expired_total"] = 0
    """Other routers' prompts whose end was not reported in time."""
    malformed: Annotated[int, "kvatlas_peer_inflight_malformed_total"] = 0
    """Messages of other routers that could not be decoded, or had values out of bounds."""
    other_version: Annotated[int, "kvatlas_peer_inflight_other_version_total"] = 0
    """Messages of routers of another version that this one ignored."""


class _RemotePrompt(NamedTuple):
    prompt: InflightPrompt
    since_s: float


def _little_endian(hashes: array[int]) -> array[int]:
    """Convert between native and little-endian byte order.

    The result stays an array, since only a few of its elements are ever read.
    """
    if sys.byteorder == "big":
        hashes.byteswap()
    return hashes


def _range(told: int | tuple[int, int, int], num_blocks: int) -> range:
    """Return what another replica told of ends within its prompt. Raises ``ValueError`` if it is none."""
    first, stop, step = (told, told + 1, 1) if isinstance(told, int) else told
    if step < 1:
        raise ValueError(f"a range of kept ends with a step of {step}")
    return range(first + -(-max(0, 1 - first) // step) * step, min(stop, num_blocks + 1), step)


class GossipedInflight(InflightPrefixes):
    """Prompts in flight: publishes those of this replica and receives those of the others.

    Args:

      publish: Takes (engine id, entry); returns False if it could not be sent.

      served: Called with each prompt that another replica has a response to.

      publishes_prefills: False if all replicas follow every engine themselves and see a prompt's blocks
          in its events; until its end it then counts only as pending.
    """

    def __init__(
        self,
        me: str,
        started: int,
        publish: Callable[[str, bytes], bool],
        *,
        served: Callable[[InflightPrompt], None] = lambda prompt: None,
        publishes_prefills: bool = True,
        stats: GossipStats | None = None,
    ) -> None:
        super().__init__()
        self.gossip_stats = GossipStats() if stats is None else stats
        self._entries = PeerMessages(GossipEntry, self.gossip_stats)
        self._served = served
        self._publishes_prefills = publishes_prefills
        self._me = me
        self._started = started
        self._publish = publish
        self._number = 0
        self.died: Callable[[str, bytes], None] = lambda engine_id, digest: None
        """Called with the engine and the digest of each death that another replica reports."""
        self.probed: Callable[[str, bytes], None] = lambda engine_id, told: None
        """Called with the engine and the outcome of each probe that another replica reports. Raises
        ``ValueError`` if it cannot be read."""
        self._own: dict[InflightPrompt, int] = {}
        self._remote: OrderedDict[tuple[str, int, int], _RemotePrompt] = OrderedDict()

    def add(
        self,
        engine_id: str,
        hashes: Sequence[BlockHash],
        now: float,
        keeps: Kept = (),
        rank: float = 0.0,
    ) -> InflightPrompt:
        prompt = super().add(engine_id, hashes, now, keeps, rank)
        self._number += 1
        packed = _little_endian(array("Q", hashes[:_BLOCKS_MAX])).tobytes()
        told = tuple([s[0] if len(s) == 1 else (s.start, s.stop, s.step) for s in prompt.keeps])
        entry = GossipEntry(
            self._me, self._started, self._number, InflightEvent.SENT, engine_id, told, packed
        )
        if prompt.kept and self._send(engine_id, entry):
            self._own[prompt] = self._number
        return prompt

    def prefilled(self, prompt: InflightPrompt, now: float) -> None:
        if self._publishes_prefills and prompt.keeps and not prompt.computed:
            self._publish_event(prompt, InflightEvent.PREFILLED)
        super().prefilled(prompt, now)

    def end(self, prompt: InflightPrompt, now: float) -> None:
        self._publish_event(prompt, InflightEvent.ENDED)
        super().end(prompt, now)

    def drop(self, prompt: InflightPrompt) -> None:
        self._publish_event(prompt, InflightEvent.FAILED)
        super().drop(prompt)

    def receive(self, entries: Iterable[bytes], now: float) -> None:
        """Apply new entries of the stream."""
        for encoded in entries:
            entry = self._entries.read(encoded)
            if entry is None or (entry.replica, entry.started) == (self._me, self._started):
                continue
            try:
                self._apply(entry, now)
            except ValueError:
                self.gossip_stats.malformed += 1
        self._expire_others(now)

    def expire(self, now: float) -> None:
        self._expire_others(now)
        super().expire(now)

    def _expire_others(self, now: float) -> None:
        while self._remote:
            remote = next(iter(self._remote.values()))
            if now - remote.since_s < _AGE_S_MAX and len(self._remote) <= _OTHERS_MAX:
                break
            self.gossip_stats.expired += 1
            self._remote.popitem(last=False)
            super().drop(remote.prompt)
        self.gossip_stats.current = len(self._remote)

    def lost(self, replica: str) -> None:
        """Drop the requests of a replica that ended."""
        for name in [name for name in self._remote if name[0] == replica]:
            super().drop(self._remote.pop(name).prompt)
        self.gossip_stats.current = len(self._remote)

    def _apply(self, entry: GossipEntry, now: float) -> None:
        self.gossip_stats.received += 1
        name = (entry.replica, entry.started, entry.number)
        if entry.event is InflightEvent.DIED:
            if len(entry.hashes) != DIGEST_BYTES:
                raise ValueError("no digest")
            self.died(entry.engine_id, entry.hashes)
            return
        if entry.probed:
            self.probed(entry.engine_id, entry.probed)
            return
        if entry.event is InflightEvent.SENT:
            hashes = _little_endian(array("Q", entry.hashes))
            keeps = kept_ranges(_range(told, len(hashes)) for told in entry.keeps[-_RANGES_MAX:])
            prompt = super().add(entry.engine_id, cast("Sequence[BlockHash]", hashes), now, keeps)
            self._remote[name] = _RemotePrompt(prompt, now)
            return
        remote = self._remote.get(name)
        if remote is None:
            return
        if entry.event is InflightEvent.PREFILLED:
            self.prefilled(remote.prompt, now)
            return
        del self._remote[name]
        if entry.event is InflightEvent.ENDED:
            self._served(remote.prompt)
            super().end(remote.prompt, now)
        else:
            super().drop(remote.prompt)

    def publish_death(self, engine_id: str, digest: bytes) -> None:
        """Tell the others that an engine died with a request of this digest."""
        self._number += 1
        entry = GossipEntry(
            self._me, self._started, self._number, InflightEvent.DIED, engine_id, hashes=digest
        )
        self._send(engine_id, entry)

    def publish_probe(self, engine_id: str, told: bytes) -> None:
        """Tell the others the outcome of a probe."""
        self._number += 1
        entry = GossipEntry(
            self._me, self._started, self._number, InflightEvent.ENDED, engine_id, probed=told
        )
        self._send(engine_id, entry)

    def _publish_event(self, prompt: InflightPrompt, event: InflightEvent) -> None:
        """Publish an event of an own prompt that was published before; ``ENDED`` and ``FAILED`` are final."""
        number = self._own.get(prompt)
        if number is None:
            return
        if event is not InflightEvent.PREFILLED:
            del self._own[prompt]
        self._send(prompt.engine_id, GossipEntry(self._me, self._started, number, event))

    def _send(self, engine_id: str, entry: GossipEntry) -> bool:
        sent = self._publish(engine_id, msgspec.msgpack.encode(entry))
        self.gossip_stats.sent += sent
        self.gossip_stats.dropped += not sent
        return sent
