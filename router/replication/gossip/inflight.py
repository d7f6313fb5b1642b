"""Exchanges prompts in flight between replicas, so that all know what an engine will soon hold.

Every replica appends the events of its own prompts (sent, first token seen, ended, failed) to a stream in the
index, and reads new entries with each look-up. Other replicas' prompts are kept in the same tree as its own
(``InflightPrefixes``). The batches of engines that another replica follows are not seen here: the blocks of a
computed prompt count as coming for the whole grace period there. Two prompts with the same prefix that reach
two replicas within one round trip do not see each other; the later one hits more than was predicted.
Always true: publishing never waits and never fails a request; another replica's prompt whose end was not
published counts no longer than ``_AGE_S_MAX``; entries of others are not published again.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple, cast

import msgspec

from publisher.events import BlockHash
from router.placement.inflight import InflightPrefixes, InflightPrompt

_BLOCKS_MAX = 8192
"""Hash blocks published of one prompt, 8 bytes each: the longest prefix that others can match."""
_OTHERS_MAX = 8192
_AGE_S_MAX = 60.0


class InflightEvent(IntEnum):
    """What happened to a prompt in flight."""

    SENT = 0
    PREFILLED = 1
    ENDED = 2
    FAILED = 3


class GossipEntry(msgspec.Struct, array_like=True, omit_defaults=True):
    """One entry of the stream; (``replica``, ``started``, ``number``) identifies the prompt."""

    replica: str
    started: int
    number: int
    event: InflightEvent
    engine_id: str = ""
    keeps: tuple[int, ...] = ()
    hashes: bytes = b""
    """8 bytes each, little endian."""


class GossipStats(msgspec.Struct):
    """Counters for metrics; ``others`` is current."""

    told: int = 0
    """Prompts in flight reported to other routers."""
    untold: int = 0
    """Prompts in flight not reported because the index was unavailable."""
    heard: int = 0
    """Prompts in flight reported by other routers."""
    others: int = 0
    """Gauge: other routers' prompts under way."""
    expired: int = 0
    """Other routers' prompts whose end was not reported in time."""
    malformed: int = 0
    """Messages of other routers that could not be decoded, or had values out of bounds."""


class _RemotePrompt(NamedTuple):
    prompt: InflightPrompt
    since_s: float


_DECODE = msgspec.msgpack.Decoder(GossipEntry)


def _little_endian(hashes: array[int]) -> array[int]:
    """Between this machine's order of bytes and the entries'.

    Arrays, since of what is heard only a few places are ever looked at.
    """
    if sys.byteorder == "big":
        hashes.byteswap()
    return hashes


class GossipedInflight(InflightPrefixes):
    """Prompts in flight that publishes this replica's own and receives those of the others.

    ``publish`` takes (engine id, entry) and gives False if it could not be sent; ``served`` is called with
    each prompt that another replica has an answer to. ``publishes_prefills`` False: all follow every engine
    themselves, and hear of a prompt's blocks from there; until its end it is only counted as coming too.
    """

    def __init__(
        self,
        me: str,
        started: int,
        publish: Callable[[str, bytes], bool],
        *,
        served: Callable[[InflightPrompt], None] = lambda prompt: None,
        publishes_prefills: bool = True,
    ) -> None:
        super().__init__()
        self.gossip_stats = GossipStats()
        self._served = served
        self._publishes_prefills = publishes_prefills
        self._me = me
        self._started = started
        self._publish = publish
        self._number = 0
        self._own: dict[InflightPrompt, int] = {}
        self._remote: OrderedDict[tuple[str, int, int], _RemotePrompt] = OrderedDict()

    def add(
        self, engine_id: str, hashes: Sequence[BlockHash], now: float, keeps: Sequence[int] = ()
    ) -> InflightPrompt:
        prompt = super().add(engine_id, hashes, now, keeps)
        self._number += 1
        packed = _little_endian(array("Q", hashes[:_BLOCKS_MAX])).tobytes()
        entry = GossipEntry(
            self._me, self._started, self._number, InflightEvent.SENT, engine_id, prompt.keeps, packed
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
            try:
                entry = _DECODE.decode(encoded)
                if (entry.replica, entry.started) != (self._me, self._started):
                    self._apply(entry, now)
            except (msgspec.DecodeError, ValueError):
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
        self.gossip_stats.others = len(self._remote)

    def lost(self, replica: str) -> None:
        """A replica ended, and its requests with it."""
        for name in [name for name in self._remote if name[0] == replica]:
            super().drop(self._remote.pop(name).prompt)
        self.gossip_stats.others = len(self._remote)

    def _apply(self, entry: GossipEntry, now: float) -> None:
        self.gossip_stats.heard += 1
        name = (entry.replica, entry.started, entry.number)
        if entry.event is InflightEvent.SENT:
            hashes = _little_endian(array("Q", entry.hashes))
            keeps = sorted({end for end in entry.keeps if end > 0})
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

    def _publish_event(self, prompt: InflightPrompt, event: InflightEvent) -> None:
        """Publish an event of an own prompt that was published before; ``ENDED`` and ``FAILED`` are the
        last."""
        number = self._own.get(prompt)
        if number is None:
            return
        if event is not InflightEvent.PREFILLED:
            del self._own[prompt]
        self._send(prompt.engine_id, GossipEntry(self._me, self._started, number, event))

    def _send(self, engine_id: str, entry: GossipEntry) -> bool:
        sent = self._publish(engine_id, msgspec.msgpack.encode(entry))
        self.gossip_stats.told += sent
        self.gossip_stats.untold += not sent
        return sent
