"""Counts of the last minutes per interval, in a ring of fixed size.

Counters elsewhere only grow. ``HistoryLog`` receives them every ``EVERY_S`` seconds and keeps the
differences, so requests cost nothing extra. Intervals are numbered by the monotonic clock, which all
processes of a machine share: histories of several workers are added up interval by interval. Pure and
bounded.
"""

from __future__ import annotations

import math
import os
import secrets
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Self

import msgspec

from publisher.block_hash import PromptExtras
from publisher.events import BlockHash

EVERY_S = 5.0
# Five minutes.
INTERVALS_MAX = 60


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one engine, or of all. ``requests``: ended requests; ``errors``: those answered with a status
    of 500 or above, or cut by the engine; ``unavailable``: those answered with 503. Engines reported
    ``hit_tokens`` of ``prompt_tokens`` as cached; ``exact`` of ``compared`` predictions were right."""

    requests: int = 0
    errors: int = 0
    unavailable: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    exact: int = 0
    compared: int = 0

    def since(self, before: Counts) -> Counts:
        """The difference; the whole count if a counter fell, because the engine left and came back."""
        was, now = msgspec.structs.asdict(before), msgspec.structs.asdict(self)
        if any(now[name] < was[name] for name in was):
            return self
        return Counts(**{name: now[name] - was[name] for name in was})


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """Values at one moment: requests in the proxy, engines, and engines that are up."""

    active: int = 0
    engines: int = 0
    engines_up: int = 0


class HistoryInterval(Counts, frozen=True, kw_only=True):
    """Counts of one interval. ``slot``: its number, which grows by one every ``every_s``; ``seconds``: its
    length, shorter for the current one. ``active``, ``engines`` and ``engines_up`` are values at its end."""

    slot: int
    seconds: float
    active: int
    engines: int
    engines_up: int

    def joined(self, other: Self) -> Self:
        """Merge with another worker's interval: counts are added; gauges that all workers share take the
        maximum."""
        one, two = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        added = {name: one[name] + two[name] for name in (*Counts.__struct_fields__, "active")}
        largest = {name: max(one[name], two[name]) for name in ("seconds", "engines", "engines_up")}
        return msgspec.structs.replace(self, **added, **largest)


class RecentHistory(msgspec.Struct, frozen=True):
    """Intervals of the last five minutes, oldest first; the last one is the current one. ``at_s``: time of
    the data, Unix time."""

    at_s: float
    every_s: float
    intervals: list[HistoryInterval]

    def joined(self, others: Iterable[RecentHistory]) -> RecentHistory:
        """Merge with the histories of sibling workers."""
        by_slot: dict[int, HistoryInterval] = {}
        for history in (self, *others):
            for interval in history.intervals:
                known = by_slot.get(interval.slot)
                by_slot[interval.slot] = interval if known is None else known.joined(interval)
        return RecentHistory(self.at_s, self.every_s, [by_slot[slot] for slot in sorted(by_slot)])


class HistoryLog:
    """History of one process, which started at ``now`` (monotonic seconds) with all counters at zero."""

    def __init__(self, now: float) -> None:
        self._ring: deque[HistoryInterval] = deque(maxlen=INTERVALS_MAX)
        self._before: Mapping[str, Counts] = {}
        self._begun_s = now

    def add(self, now: float, counts: Mapping[str, Counts], gauges: Gauges) -> float:
        """End the current interval if it is over; ``counts`` are by engine. Returns the seconds until the
        next end."""
        if int(now // EVERY_S) != int(self._begun_s // EVERY_S):
            self._ring.append(self._present(now, counts, gauges))
            self._before, self._begun_s = counts, now
        return EVERY_S - now % EVERY_S

    def recent_history(
        self, now: float, counts: Mapping[str, Counts], gauges: Gauges, *, unix_s: float
    ) -> RecentHistory:
        """Return the history at ``now``, which is ``unix_s`` in Unix time."""
        oldest = int(now // EVERY_S) - INTERVALS_MAX
        kept = [interval for interval in self._ring if interval.slot >= oldest]
        return RecentHistory(unix_s, EVERY_S, [*kept, self._present(now, counts, gauges)])

    def _present(self, now: float, counts: Mapping[str, Counts], gauges: Gauges) -> HistoryInterval:
        nothing, sums = Counts(), dict.fromkeys(Counts.__struct_fields__, 0)
        for engine, one in counts.items():
            for name, count in msgspec.structs.asdict(one.since(self._before.get(engine, nothing))).items():
                sums[name] += count
        return HistoryInterval(
            **sums,
            **msgspec.structs.asdict(gauges),
            slot=int(self._begun_s // EVERY_S),
            seconds=now - self._begun_s,
        )


# Most frequent prompt prefixes: a bounded tree of block hashes with decaying counts.
#
# Of one prompt in ``EVERY``, the hashes at ``FIRST_TOKENS`` tokens, twice that, four times, ... enter the
# tree, each below the previous one. Hashes reveal no text. Invariants: at most ``NODES_MAX`` nodes, the least
# recently used one is evicted first; a count halves every ``HALF_LIFE_S``.


EVERY = 4
FIRST_TOKENS = 256
NODES_MAX = 4096
HALF_LIFE_S = 600.0


class HotPrefix(msgspec.Struct, gc=False):
    """One prefix. ``parent``: hash of the next shorter one; ``rate`` decays."""

    tokens: int
    parent: BlockHash | None
    model: str
    rate: float
    seen_s: float

    def current_rate(self, now: float) -> float:
        """Return the current rate, in prompts of the last minutes."""
        return self.rate * math.exp2((self.seen_s - now) / HALF_LIFE_S)


class HotPrefixes:
    """The tree of one router; ``now`` is monotonic seconds."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[BlockHash, HotPrefix] = OrderedDict()
        self._turn = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, model: str, hashes: Sequence[BlockHash], block_tokens: int, now: float) -> None:
        """Count a placed prompt with these block hashes."""
        self._turn += 1
        if self._turn % EVERY:
            return
        parent: BlockHash | None = None
        blocks = max(1, FIRST_TOKENS // block_tokens)
        while blocks <= len(hashes):
            node_hash = hashes[blocks - 1]
            node = self._nodes.get(node_hash)
            if node is None:
                self._nodes[node_hash] = HotPrefix(blocks * block_tokens, parent, model, EVERY, now)
            else:
                node.rate, node.seen_s = node.current_rate(now) + EVERY, now
                self._nodes.move_to_end(node_hash)
            parent, blocks = node_hash, blocks * 2
        while len(self._nodes) > NODES_MAX:
            self._nodes.popitem(last=False)

    def longest(self, hashes: Sequence[BlockHash], block_tokens: int, above_tokens: int = 0) -> int:
        """Return the tokens of the longest prefix in the tree that a prompt of these block hashes has.

        Returns 0 if it is not longer than ``above_tokens``.
        """
        found, blocks = 0, max(1, FIRST_TOKENS // block_tokens)
        while blocks * block_tokens <= above_tokens:
            blocks *= 2
        while blocks <= len(hashes) and hashes[blocks - 1] in self._nodes:
            found, blocks = blocks * block_tokens, blocks * 2
        return found

    def hottest(self, count: int, now: float) -> list[tuple[BlockHash, HotPrefix]]:
        """Return the ``count`` prefixes with the highest rates and their ancestors; parents first."""
        ranked = sorted(self._nodes, key=lambda key: -self._nodes[key].current_rate(now))[:count]
        wanted: dict[BlockHash, HotPrefix] = {}
        for key in ranked:
            at: BlockHash | None = key
            while at is not None and at not in wanted and (node := self._nodes.get(at)) is not None:
                wanted[at] = node
                at = node.parent
        return sorted(wanted.items(), key=lambda pair: pair[1].tokens)


# Ids of prompt prefixes that reveal no text, for usage records.
#
# A prompt is cut into units of ``UNIT_TOKENS`` tokens; each gets one id, the last one for the rest. An id is
# a keyed hash (BLAKE2b) of everything up to the end of its unit: tokens, adapter, cache salt, images. The key
# is made once per installation and stays there, so equal prompts have equal ids here and unrelated ids
# elsewhere, and texts cannot be guessed without the key. Two prompts share an id exactly if their prefixes up
# to it are equal, except by chance (ids have 53 bits, which every JSON reader keeps).


UNIT_TOKENS = 512
KEY_BYTES = 32
_ID_BITS = 53
_encoder = msgspec.msgpack.Encoder()


def read_key(path: Path) -> bytes:
    """Read the key of this installation; it is made on first use, readable by its owner only. Raises
    ``OSError``."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _key_of(path)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(KEY_BYTES) + "\n")
    return _key_of(path)


def _key_of(path: Path) -> bytes:
    text = path.read_text(encoding="ascii", errors="replace").strip()
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise OSError(
            f"{path}: {KEY_BYTES} bytes in hexadecimal expected; remove the file to have a new key made"
        )
    return key


def prefix_ids(tokens: array[int], model: str, extras: PromptExtras, key: bytes) -> list[int]:
    """Return one id per unit of the prompt."""
    state = blake2b(
        _encoder.encode([model, extras.lora_name, extras.lora_path, extras.cache_salt]),
        key=key,
        digest_size=16,
    ).digest()
    ids = []
    view = memoryview(tokens)
    for start in range(0, len(tokens), UNIT_TOKENS):
        unit = blake2b(state, key=key, digest_size=16)
        unit.update(view[start : start + UNIT_TOKENS])
        for item in extras.multimodal:
            if start <= item.offset < start + UNIT_TOKENS:  # the prefix before it is the same without it
                unit.update(_encoder.encode([item.identifier, item.offset]))
        state = unit.digest()
        ids.append(int.from_bytes(state[:8], "big") >> (64 - _ID_BITS))
    return ids
