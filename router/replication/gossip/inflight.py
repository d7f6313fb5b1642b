"""Exchanges prompts in flight between replicas, so that all know what an engine will soon hold.

A stream in the index: every replica appends what happens to its own prompts (sent, first token seen, ended,
failed), and reads what is new with each look-up. What others sent is kept in the same book as one's own
(``InflightPrefixes``). At engines that another replica follows, what a prompt leaves counts as coming for
``_INDEX_LAG_S`` more, until the index must have it. Two siblings that reach two replicas within one round
trip do not see each other; the later one then hits more than was predicted. Always true: telling waits for
nobody and fails nothing; what a replica told of a prompt and never ended counts no longer than
``_AGE_S_MAX``; nothing told is told again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import msgspec
import numpy as np

from publisher.events import BlockHash
from router.placement.inflight import Common, InflightPrefixes, InflightPrompt

_BLOCKS_MAX = 8192
"""Hash blocks told of one prompt, 8 bytes each: the longest prefix that others can match."""
_OTHERS_MAX = 8192
_AGE_S_MAX = 60.0
_INDEX_LAG_S = 0.05
"""Time for what an engine published to be read from the index, by way of the replica that follows it."""


class Happened(IntEnum):
    """What a replica tells of one of its prompts."""

    SENT = 0
    PREFILLED = 1
    ENDED = 2
    FAILED = 3


class GossipEntry(msgspec.Struct, array_like=True, omit_defaults=True):
    """One entry of the stream; ``number`` names the prompt among those of its replica's life ``started``."""

    replica: str
    started: int
    number: int
    what: Happened
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
    """Messages of other routers that could not be decoded."""


class _Flight(NamedTuple):
    prompt: InflightPrompt
    since_s: float


_DECODE = msgspec.msgpack.Decoder(GossipEntry)


class GossipedInflight(InflightPrefixes):
    """A book of prompts in flight that tells of its own and hears of others'.

    ``tell`` takes (engine id, entry) and gives False if it could not be sent; ``is_local`` says whether this
    replica follows an engine itself; ``served`` hears of each prompt that another replica has an answer to.
    """

    def __init__(
        self,
        me: str,
        started: int,
        tell: Callable[[str, bytes], bool],
        *,
        is_local: Callable[[str], bool],
        clock: Callable[[], float],
        served: Callable[[InflightPrompt], None] = lambda prompt: None,
    ) -> None:
        super().__init__()
        self.flights = GossipStats()
        self._served = served
        self._me = me
        self._started = started
        self._tell = tell
        self._is_local = is_local
        self._clock = clock
        self._lagging: deque[tuple[float, InflightPrompt]] = deque()
        self._number = 0
        self._own: dict[InflightPrompt, int] = {}
        self._others: OrderedDict[tuple[str, int, int], _Flight] = OrderedDict()

    def add(
        self, engine_id: str, hashes: Sequence[BlockHash], now: float, keeps: Sequence[int] = ()
    ) -> InflightPrompt:
        prompt = super().add(engine_id, hashes, now, keeps)
        self._number += 1
        packed = np.array(hashes[:_BLOCKS_MAX], "<u8").tobytes()
        told = GossipEntry(
            self._me, self._started, self._number, Happened.SENT, engine_id, prompt.keeps, packed
        )
        if prompt.kept and self._send(engine_id, told):
            self._own[prompt] = self._number
        return prompt

    def prefilled(self, prompt: InflightPrompt) -> None:
        if not prompt.keeps:
            return
        self._happened(prompt, Happened.PREFILLED)
        if self._is_local(prompt.engine_id):
            super().prefilled(prompt)
        else:
            self._lagging.append((self._clock() + _INDEX_LAG_S, prompt))

    def end(self, prompt: InflightPrompt, now: float) -> None:
        self._happened(prompt, Happened.ENDED)
        super().end(prompt, now)

    def drop(self, prompt: InflightPrompt) -> None:
        self._happened(prompt, Happened.FAILED)
        super().drop(prompt)

    def common(self, hashes: Sequence[BlockHash], now: float) -> Common:
        while self._lagging and self._lagging[0][0] <= now:
            super().prefilled(self._lagging.popleft()[1])
        return super().common(hashes, now)

    def hear(self, entries: Iterable[bytes], now: float) -> None:
        """Take in what the stream had that is new."""
        for entry in entries:
            try:
                told = _DECODE.decode(entry)
                if (told.replica, told.started) != (self._me, self._started):
                    self._hear(told, now)
            except (msgspec.DecodeError, ValueError):
                self.flights.malformed += 1
        while self._others:
            flight = next(iter(self._others.values()))
            if now - flight.since_s < _AGE_S_MAX and len(self._others) <= _OTHERS_MAX:
                break
            self.flights.expired += 1
            self._others.popitem(last=False)
            super().drop(flight.prompt)
        self.flights.others = len(self._others)

    def lost(self, replica: str) -> None:
        """A replica ended: so did its requests."""
        for name in [name for name in self._others if name[0] == replica]:
            super().drop(self._others.pop(name).prompt)
        self.flights.others = len(self._others)

    def _hear(self, told: GossipEntry, now: float) -> None:
        self.flights.heard += 1
        name = (told.replica, told.started, told.number)
        if told.what is Happened.SENT:
            hashes = [BlockHash(value) for value in np.frombuffer(told.hashes, "<u8").tolist()]
            self._others[name] = _Flight(super().add(told.engine_id, hashes, now, told.keeps), now)
            return
        flight = self._others.get(name)
        if flight is None:
            return
        if told.what is Happened.PREFILLED:
            self.prefilled(flight.prompt)
            return
        del self._others[name]
        if told.what is Happened.ENDED:
            self._served(flight.prompt)
            super().end(flight.prompt, now)
        else:
            super().drop(flight.prompt)

    def _happened(self, prompt: InflightPrompt, what: Happened) -> None:
        """Tell it of an own prompt that others know of; the last thing told of it ends that."""
        number = self._own.get(prompt)
        if number is None:
            return
        if what is not Happened.PREFILLED:
            del self._own[prompt]
        self._send(prompt.engine_id, GossipEntry(self._me, self._started, number, what))

    def _send(self, engine_id: str, told: GossipEntry) -> bool:
        sent = self._tell(engine_id, msgspec.msgpack.encode(told))
        self.flights.told += sent
        self.flights.untold += not sent
        return sent
