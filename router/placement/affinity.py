"""Which engine similar texts went to: used instead of hits when a prompt has no token ids.

A text is known by the chained hashes of its chunks (each key covers the whole text up to its chunk's end),
so the deepest known key is the longest prefix seen before. The map keeps, per key, the engines that got it
last. Its tokens are an estimate, bytes / 4, and enter the same cost as real hits do: an engine that got all
of a conversation is preferred only as long as its queue is not longer than what the cache saves.

Bounded: at most ``keys_max`` keys, the longest unused go first, and ``engines_max`` engines per key. It is
not told what engines evict; that is why real or shadow hits replace it wherever token ids exist.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

BYTES_PER_TOKEN = 4
"""Usual for English text with vocabularies of 32k-256k tokens."""


class AffinitySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds; a key takes about 200 bytes."""

    keys_max: int = 100_000
    engines_max: int = 4


class AffinityStats(msgspec.Struct):
    """Counters for metrics."""

    lookups: int = 0
    """Requests placed by the text of their prompt because its tokens were not known."""
    matched: int = 0
    """Those of them whose text began like an earlier one."""
    evicted: int = 0
    """Texts forgotten because there were too many."""


class AffinityMap:
    """Text-prefix keys -> the engines that got them, most recent last."""

    def __init__(self, settings: AffinitySettings | None = None) -> None:
        self.settings = settings or AffinitySettings()
        self.stats = AffinityStats()
        self._engines: OrderedDict[int, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engines)

    def match(self, keys: Sequence[int]) -> dict[str, int]:
        """For each engine that got a prefix of this text: how many leading chunks of it."""
        self.stats.lookups += 1
        found: dict[str, int] = {}
        for count, key in enumerate(keys, start=1):
            engines = self._engines.get(key)
            if engines is None:
                break
            for engine_id in engines:
                found[engine_id] = count
        self.stats.matched += bool(found)
        return found

    def record(self, keys: Sequence[int], engine_id: str) -> None:
        """This text went to this engine."""
        known, most = self._engines, self.settings.engines_max
        for key in reversed(keys):  # the shortest prefix is touched last, so chains are cut at their deep end
            engines = known.get(key, ())
            if not engines or engines[-1] != engine_id:
                others = tuple(other for other in engines if other != engine_id)
                known[key] = (*others[-(most - 1) :], engine_id) if most > 1 else (engine_id,)
            known.move_to_end(key)
        while len(known) > self.settings.keys_max:
            known.popitem(last=False)
            self.stats.evicted += 1

    def forget(self, engine_id: str) -> None:
        """The engine restarted or left."""
        for key, engines in list(self._engines.items()):
            if engine_id in engines:
                left = tuple(other for other in engines if other != engine_id)
                if left:
                    self._engines[key] = left
                else:
                    del self._engines[key]


def text_tokens(num_chunks: int, chunk_bytes: int) -> int:
    """Estimated tokens of ``num_chunks`` text chunks."""
    return num_chunks * chunk_bytes // BYTES_PER_TOKEN
