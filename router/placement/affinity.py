"""Text affinity: engines that received similar texts, for prompts without token ids.

A text is known by the chained hashes of its chunks (each key covers the whole text up to its chunk's end), so
the deepest known key is the longest known prefix. The map keeps, per key, the engines that received it last.
Its tokens are an estimate, bytes / 4, and enter the same cost as real hits: an engine that received all of a
conversation is preferred only while its queue is shorter than the time its cache saves.

Bounded: at most ``keys_max`` keys, the least recently used are evicted first, and ``engines_max`` engines per
key. Evictions by engines are not seen; therefore real or shadow hits replace this wherever token ids exist.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated

import msgspec

from kvatlas.router.fleet.marks import EngineMark, EngineMarks

# Typical for English text with vocabularies of 32k-256k tokens.
BYTES_PER_TOKEN = 4


class AffinitySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds; a key takes about 200 bytes."""

    keys_max: int = 100_000
    engines_max: int = 4


class AffinityStats(msgspec.Struct):
    """Counters for metrics."""

    lookups: Annotated[int, "kvatlas_affinity_lookups_total"] = 0
    """Requests placed by the text of their prompt because its tokens were unknown."""
    matched: Annotated[int, "kvatlas_affinity_matched_total"] = 0
    """Of these, requests whose text began like an earlier one."""
    evicted: Annotated[int, "kvatlas_affinity_evicted_total"] = 0
    """Texts evicted because there were too many."""


class AffinityMap:
    """Text-prefix keys -> the engines that received them, most recent last."""

    def __init__(self, settings: AffinitySettings | None = None) -> None:
        self.settings = settings or AffinitySettings()
        self.stats = AffinityStats()
        self._marks = EngineMarks()
        self._engines: OrderedDict[int, tuple[EngineMark, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engines)

    def match(self, keys: Sequence[int]) -> dict[str, int]:
        """For each engine that received a prefix of this text: the number of leading chunks."""
        self.stats.lookups += 1
        found: dict[str, int] = {}
        for count, key in enumerate(keys, start=1):
            engines = self._engines.get(key)
            if engines is None:
                break
            for mark in engines:
                if mark.here:
                    found[mark.engine_id] = count
        self.stats.matched += bool(found)
        return found

    def record(self, keys: Sequence[int], engine_id: str) -> None:
        """Note that this text went to this engine."""
        known, most, mark = self._engines, self.settings.engines_max, self._marks.of(engine_id)
        # touch the shortest prefix last, so that chains are evicted at their deep end
        for key in reversed(keys):
            engines = known.get(key, ())
            if not engines or engines[-1] is not mark:
                others = tuple([other for other in engines if other.here and other is not mark])
                known[key] = (*others[-(most - 1) :], mark) if most > 1 else (mark,)
            known.move_to_end(key)
        while len(known) > self.settings.keys_max:
            known.popitem(last=False)
            self.stats.evicted += 1

    def forget(self, engine_id: str) -> None:
        """Drop an engine that restarted or left."""
        self._marks.forget(engine_id)


def text_tokens(num_chunks: int, chunk_bytes: int) -> int:
    """Estimated tokens of ``num_chunks`` text chunks."""
    return num_chunks * chunk_bytes // BYTES_PER_TOKEN
