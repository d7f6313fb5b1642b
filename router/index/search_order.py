"""The engine's own search, where its order matters.

The search order matters for some models with EAGLE on sliding-window groups, and for models with several
kinds of full-attention blocks inside which a hit may end. In all other layouts the largest boundary valid in
every class equals the result of vLLM's search. A window class with the EAGLE flag looks one block further and
drops it. This breaks the equality in three ways. First, if its blocks are smaller than the alignment, a run
that reaches block 0 but does not cover the whole window loses a whole alignment unit. Second, if a second
class drops a block too, a prefix shortened by that class is not required to have a block after it again.
Third, a window of one token needs only the block it drops, but also the block before when it is looked up
again (full attention with one other class is looked up once, without repetition). Moreover, where hits may
end inside a full-attention block, vLLM finds a longer part of a block only up to the prefix left by the class
before, so of several such classes only the first follows the rule. Therefore the loop is executed there, for
64 engines at once: each class answers "the longest prefix of at most L" from a table over L. Its boundaries
are numbered in alignment units; tables have a row per limit 0..boundaries and a column per engine. Source:
``HybridKVCacheCoordinator.find_longest_cache_hit`` and ``SlidingWindowManager`` of vLLM 0.32.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvatlas.publisher.groups import Family
from kvatlas.router.index.base import WORD_BITS, Words
from kvatlas.router.index.learn.layout import CacheLayout

Table = npt.NDArray[np.intp]

_ENGINES = np.arange(WORD_BITS)


class ClassTable(NamedTuple):
    """One class: its longest prefix for every limit, and the same when it must drop a block after it."""

    family: Family
    plain: Table
    dropping: Table | None = None


def order_matters(layout: CacheLayout, *, loading: bool = False) -> bool:
    """Whether hits of this layout (``loading``: hits that a connector would load) need the loop."""
    full = [c for c in layout.classes if c.family is Family.FULL]
    if not loading and any(c.block_size > layout.alignment for c in full[1:]):
        return True
    dropping = [c for c in layout.classes if c.spec.is_eagle and c.family is not Family.FULL]
    windows = [c for c in dropping if c.family is Family.WINDOW]
    if not windows or layout.lookahead:
        return False
    once = layout.single_group or _asked_once([c.family for c in layout.classes])
    unread = not once and any((c.spec.sliding_window or 0) < 2 for c in windows)
    return unread or len(dropping) > 1 or windows[0].block_size != layout.alignment


def hits_behind(layout: CacheLayout) -> bool:
    """Whether the block that a lookup drops for EAGLE may lie behind the last token but one: several groups
    are looked up, and blocks are proven by the ones after them (``HybridKVCacheCoordinator``, vLLM 0.32)."""
    return bool(layout.dropped_tokens) and not layout.single_group and not order_matters(layout)


def _asked_once(families: list[Family]) -> bool:
    """Whether vLLM's search ends after one pass: full attention first, and one other class."""
    return len(families) == 2 and families[0] is Family.FULL


def longest(valid: Words) -> Table:
    """Return the last valid boundary for each limit; ``valid[i]`` refers to boundary i + 1."""
    as_bytes = valid.astype("<u8").view(np.uint8).reshape(-1, WORD_BITS // 8)
    bits = np.unpackbits(as_bytes, axis=1, bitorder="little")
    table = np.zeros((len(valid) + 1, WORD_BITS), np.intp)
    table[1:] = bits * np.arange(1, len(valid) + 1)[:, None]
    found: Table = np.maximum.accumulate(table, axis=0)
    return found


def dropping_window(windows: Words, from_start: Words, *, blocks_per_boundary: int) -> Table:
    """Return the table of a window class that drops a block.

    Args:

      windows: Engines that hold the whole window up to and including the block after each boundary.

      from_start: Engines that hold the run from block 0 up to and including that block."""
    table = longest(windows)
    limits = np.arange(len(windows) + 1)[:, None]
    reached = np.minimum(limits, longest(from_start)[-1])
    lost = 1 if blocks_per_boundary > 1 else 0
    best: Table = np.maximum(table, np.maximum(reached - lost, 0))
    return best


def inside_full(units: Words, boundaries: int, *, per_block: int, drops: bool) -> Table:
    """Return the table of full attention if a hit may end inside a block.

    The prefix consists of whole blocks up to the limit, then the longest part of the next block, stored under
    any of its hashes (one per row of ``units``). A class that drops looks one hash further."""
    held = longest(units)
    run = longest(np.bitwise_and.accumulate(units[per_block - 1 :: per_block]))[-1]
    limits = np.minimum(np.arange(boundaries + 1) + drops, len(units))[:, None]
    whole = np.minimum(run, limits // per_block) * per_block
    last = held[np.minimum(limits, whole + per_block - 1), _ENGINES]
    found: Table = np.maximum(whole, last)
    return np.maximum(found - 1, 0) if drops else found


def fixed_point(classes: list[ClassTable], boundaries: int) -> list[int]:
    """Return the boundary at which each engine's search ends: classes in turn shorten the prefix until
    none does."""
    limit = np.full(WORD_BITS, boundaries, np.intp)
    one_pass = _asked_once([c.family for c in classes])
    dropped = np.zeros((len(classes), WORD_BITS), bool)
    full: dict[int, npt.NDArray[np.intp]] = {}
    for turn in itertools.count():
        length = limit
        for number, (family, plain, dropping) in enumerate(classes):
            if family is Family.FULL:
                length = np.minimum(length, full.setdefault(number, plain[length, _ENGINES]))
                continue
            found = plain[length, _ENGINES]
            shorter = found < length
            if dropping is not None:
                drops = ~dropped[number]
                found = np.where(drops, dropping[length, _ENGINES], found)
                shorter = ~drops & (found < length)
                dropped[number] = True
            dropped[:, shorter] = False
            length = found
        # vLLM's first limit is the last token, which is always beyond the prefix of a class that drops.
        if one_pass or (turn and np.array_equal(length, limit)):
            break
        limit = length
    return [int(boundary) for boundary in length]
