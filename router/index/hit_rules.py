"""Hit rules: from presence rows to the number of tokens each engine would take from its cache.

vLLM's scheduler searches group by group until no group shrinks the hit. Here the same number is found
differently: a boundary is *valid* for a spec class if the class could resume there, and the hit is the
largest aligned boundary below the prompt's last token that is valid in every class (if the search order
matters, vLLM's own loop is executed: ``fixed_point``). All engines of a 64-bit word are evaluated at once,
boundaries as array rows. ``_valid`` has the rules per class, which are checked against vLLM 0.32's scheduler
on recorded traces and random mixes.

With look-ahead hashes (vLLM 0.33) the EAGLE flags have no effect. Pure functions; N hashes cost O(N) numpy
operations per class, independent of the number of engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kvatlas.publisher.groups import Family, SpecClass
from kvatlas.router.index.base import WORD_BITS, Plane, Rows, Words
from kvatlas.router.index.learn.layout import CacheLayout
from kvatlas.router.index.places import GPU
from kvatlas.router.index.run_ends import ALL, Ends, RunClass, RunReads, run_ends
from kvatlas.router.index.search_order import (
    ClassTable,
    dropping_window,
    fixed_point,
    inside_full,
    longest,
    order_matters,
)

ALL_WORD = np.uint64(ALL)


class WordHits:
    """Hits of the 64 engines of one word, in tokens: ``hit_ends``, and the full-attention prefixes
    ``shared_prefix_ends``; ``hit`` and ``shared_prefix`` are the same by bit."""

    __slots__ = ("by_class", "hit_ends", "shared_prefix_ends")

    def __init__(self, hit_ends: Ends, shared_prefix_ends: Ends, by_class: list[list[int]]) -> None:
        self.hit_ends = hit_ends
        self.shared_prefix_ends = shared_prefix_ends
        # Largest boundary valid in each spec class alone (in the layout's order), by bit.
        self.by_class = by_class

    @property
    def hit(self) -> list[int]:
        return _by_bit(self.hit_ends)

    @property
    def shared_prefix(self) -> list[int]:
        return _by_bit(self.shared_prefix_ends)


def end_of(ends: Ends, bit: int) -> int:
    """Return the tokens of one engine."""
    for end, bits in ends:
        if bits >> bit & 1:
            return end
    return 0


class _ClassPlan(NamedTuple):
    """The part of a spec class that does not depend on the prompt."""

    spec_class: SpecClass
    family: Family
    block_size: int
    planes: tuple[Plane, ...]
    eagle: int
    inside: bool
    """Whether hits may end inside a block: its blocks are longer than the alignment."""


class _Plan(NamedTuple):
    """The part of a layout that does not depend on the prompt; computed once."""

    classes: tuple[_ClassPlan, ...]
    full: tuple[int, ...]
    """Indices of the full-attention classes."""
    order_matters: bool
    by_runs: tuple[RunClass, ...] | None
    """Classes for the run-length evaluation; None if it cannot handle the layout."""


@lru_cache(maxsize=256)
def _plan(layout: CacheLayout, *, loading: bool) -> _Plan:
    classes = tuple(
        _ClassPlan(
            c,
            c.family,
            c.block_size,
            tuple(Plane(GPU, idx) for idx in c.group_idxs),
            int(c.spec.is_eagle and not layout.lookahead),
            c.block_size > layout.alignment,
        )
        for c in layout.classes
    )
    full = tuple(number for number, c in enumerate(classes) if c.family is Family.FULL)
    in_turn = order_matters(layout, loading=loading)
    return _Plan(classes, full, in_turn, None if in_turn else _run_classes(classes, layout))


def _run_classes(classes: tuple[_ClassPlan, ...], layout: CacheLayout) -> tuple[RunClass, ...] | None:
    found: list[RunClass] = []
    for spec_class, family, block_size, planes, eagle, _ in classes:
        alike = block_size == layout.hash_block_size == layout.alignment
        if not alike or eagle or family not in {Family.FULL, Family.WINDOW}:
            return None
        found.append(RunClass(planes, 0 if family is Family.FULL else _blocks_needed(spec_class, 0)))
    return tuple(found)


def evaluate(
    rows: Rows,
    layout: CacheLayout,
    num_tokens: int,
    *,
    word: int = 0,
    loading: bool = False,
    detail: bool = False,
) -> WordHits:
    """Return the GPU hits of every engine of ``word`` for a prompt of ``num_tokens`` tokens.

    ``loading``: if a hit ends inside a block, that block must be stored under the hash at its end; the engine
    can find a longer part in its pool, but a load has only the hash. ``by_class`` is empty without
    ``detail``."""
    plan, alignment = _plan(layout, loading=loading), layout.alignment
    boundaries = _boundaries(rows, layout, num_tokens)
    if rows.runs is not None and plan.by_runs is not None and not detail:
        its = RunReads(plan.by_runs, rows.runs.columns, (word,))
        return WordHits(*run_ends(rows.runs, its, boundaries, alignment), [])
    valid = [_valid(rows, layout, c, num_tokens, boundaries, word, loading=loading) for c in plan.classes]
    if plan.order_matters:
        tables = [_table(rows, layout, c, v, word) for c, v in zip(plan.classes, valid, strict=True)]
        hit = _ends_of([boundary * alignment for boundary in fixed_point(tables, boundaries)])
    else:
        hit = _largest(_joint(valid, boundaries), alignment)
    shared_prefix = (
        _largest(_joint([valid[i] for i in plan.full], boundaries), alignment) if plan.full else hit
    )
    by_class = [_by_bit(_largest(v, alignment)) for v in valid] if detail else []
    return WordHits(hit, shared_prefix, by_class)


class FleetRule:
    """Hit rules of one layout for the engines of some words; kept for many prompts."""

    __slots__ = ("_columns", "_layout", "_plan", "_reads", "_words")

    def __init__(self, layout: CacheLayout, words: Sequence[int]) -> None:
        self._layout = layout
        self._words = words
        self._plan = _plan(layout, loading=False)
        # The columns that _reads was made for.
        self._columns: Mapping[tuple[Plane, int], int] | None = None
        self._reads = RunReads((), {}, ())

    def ends(self, rows: Rows, num_tokens: int) -> tuple[Ends, Ends]:
        """Return ``hit_ends`` and ``shared_prefix_ends`` of the GPU hits that ``evaluate`` computes, with the
        bits of all words in turn."""
        runs, classes, layout = rows.runs, self._plan.by_runs, self._layout
        if runs is None or classes is None:
            hits = [evaluate(rows, layout, num_tokens, word=word) for word in self._words]
            return _joined([one.hit_ends for one in hits]), _joined([one.shared_prefix_ends for one in hits])
        if runs.columns is not self._columns:
            self._columns, self._reads = runs.columns, RunReads(classes, runs.columns, self._words)
        return run_ends(runs, self._reads, _boundaries(rows, layout, num_tokens), layout.alignment)


def _boundaries(rows: Rows, layout: CacheLayout, num_tokens: int) -> int:
    """Return the number of boundaries at which a hit can end: every hit is clipped here."""
    # ``KVCacheManager.get_computed_blocks`` (v1/core/kv_cache_manager.py, vLLM 0.32) searches up to
    # num_tokens - 1. A chunk's start is a hit without any block, but none of a block without a hash.
    tokens, hashed = num_tokens - layout.computed_tokens, rows.num_hashes * layout.hash_block_size
    tokens = tokens if tokens < hashed else hashed  # noqa: FURB136
    return tokens // layout.alignment if tokens > 0 else 0


def _joined(words: list[Ends]) -> Ends:
    """Return the ends of several words as those of one."""
    if len(words) == 1:
        return words[0]
    joint: dict[int, int] = {}
    for at, ends in enumerate(words):
        for end, bits in ends:
            joint[end] = joint.get(end, 0) | bits << WORD_BITS * at
    return sorted(joint.items(), reverse=True)


def _valid(
    rows: Rows,
    layout: CacheLayout,
    plan: _ClassPlan,
    num_tokens: int,
    boundaries: int,
    word: int,
    *,
    loading: bool,
) -> Words:
    """Return for boundaries 1..``boundaries`` (in alignment units) the engines for which this class is
    valid there."""
    # One branch per ``find_longest_cache_hit`` of v1/core/single_type_kv_cache_manager.py (vLLM 0.32).
    units = _class_presence(rows, plan, word)
    spec_class, family, block_size, _, eagle, inside = plan
    unit = layout.hash_block_size
    last = (num_tokens - 1) // unit
    if eagle and layout.single_group:
        units = units[:last]
    # A hit may end inside a block if a part of it up to the boundary or beyond is present (for loads:
    # exactly to it). EAGLE: one hash block more.
    if inside and family is Family.FULL:
        held = _full_inside(units[: last + eagle], block_size // unit, loading=loading)
        return _at(held, 1, boundaries, shift=eagle)
    if inside and family is Family.MAMBA:
        return _at(units, 1, boundaries)
    blocks, step = units[block_size // unit - 1 :: block_size // unit], layout.alignment // block_size
    match family:
        # Every block before the boundary. EAGLE: and the block behind it, which is dropped.
        case Family.FULL:
            return _at(np.bitwise_and.accumulate(blocks), step, boundaries, shift=eagle)
        # The last ceil((w - 1) / block) blocks, or all back to block 0. EAGLE: and the block behind.
        case Family.WINDOW:
            return _at(_window(blocks, _blocks_needed(spec_class, eagle)), step, boundaries, shift=eagle)
        # Every block from the start of the boundary's chunk; attention does not reach before it.
        case Family.CHUNKED:
            return _chunked(blocks, spec_class, step, boundaries)
        # Mamba: only the state at the boundary itself; it sums up all tokens before.
        case _:
            return _at(blocks, step, boundaries)


def _class_presence(rows: Rows, plan: _ClassPlan, word: int) -> Words:
    """Return per hash block the engines that hold it in every group of the class."""
    # A block is a hit only if every group of the class holds it: ``BlockPool.get_cached_block`` returns None
    # if any group misses it (v1/core/block_pool.py, vLLM 0.32).
    presence: Words | None = None
    for plane in plan.planes:
        held = rows.columns.get((plane, word))
        if held is None:
            return np.zeros(rows.num_hashes, np.uint64)
        presence = held if presence is None else presence & held
    if presence is None:
        raise AssertionError("a spec class has at least one group")
    return presence


def _joint(valid: list[Words], boundaries: int) -> Words:
    """Return per boundary the engines for which it is valid in all of these classes."""
    joint = valid[0] if valid else np.zeros(boundaries, np.uint64)
    for of_class in valid[1:]:
        joint = joint & of_class
    return joint


def _at(ends: Words, step: int, boundaries: int, shift: int = 0) -> Words:
    """Select the block ends ``shift`` blocks past each boundary; ``ends[i]`` refers to the end of block i."""
    found = ends[step - 1 + shift :: step][:boundaries]
    if len(found) == boundaries:
        return found
    picked = np.zeros(boundaries, np.uint64)
    picked[: len(found)] = found
    return picked


def _full_inside(units: Words, per_block: int, *, loading: bool) -> Words:
    """Evaluate full attention if a hit may end inside a block.

    Per hash block: the engines that hold all blocks before it, and it or (except for loads) a longer part of
    its block."""
    # A longer block counts only up to the prompt's end.
    per_block = min(per_block, max(len(units), 1))
    blocks = -(-len(units) // per_block)
    grid = np.zeros((blocks, per_block), np.uint64)
    grid.reshape(-1)[: len(units)] = units
    before = np.concatenate((np.full(1, ALL_WORD), np.bitwise_and.accumulate(grid[:, -1])))[:blocks]
    longer: Words = grid if loading else np.bitwise_or.accumulate(grid[:, ::-1], axis=1)[:, ::-1]
    inside: Words = (longer & before[:, None]).reshape(-1)[: len(units)]
    return inside


def _table(rows: Rows, layout: CacheLayout, plan: _ClassPlan, valid: Words, word: int) -> ClassTable:
    """Return the longest prefixes of one class by limit; ``valid`` is the result of ``_valid``."""
    spec_class = plan.spec_class
    if plan.inside and plan.family is Family.FULL:
        units, per_block = _class_presence(rows, plan, word), plan.block_size // layout.hash_block_size
        found = inside_full(units, len(valid), per_block=per_block, drops=bool(plan.eagle))
        return ClassTable(plan.family, found)
    if spec_class.family is not Family.WINDOW or not spec_class.spec.is_eagle:
        plain = longest(valid)
        return ClassTable(spec_class.family, plain, plain if spec_class.spec.is_eagle else None)
    per_block, boundaries = spec_class.block_size // layout.hash_block_size, len(valid)
    blocks = _class_presence(rows, plan, word)[per_block - 1 :: per_block]
    step, needed = layout.alignment // spec_class.block_size, _blocks_needed(spec_class, 1)
    whole = _window(blocks, needed).copy()
    whole[: needed - 1] = 0
    dropping = dropping_window(
        _at(whole, step, boundaries, shift=1),
        _at(np.bitwise_and.accumulate(blocks), step, boundaries, shift=1),
        blocks_per_boundary=step,
    )
    plain = longest(_at(_window(blocks, _blocks_needed(spec_class, 0)), step, boundaries))
    return ClassTable(spec_class.family, plain, dropping)


def _blocks_needed(spec_class: SpecClass, eagle: int) -> int:
    """Number of contiguous blocks that hold all but the newest token of a window; with EAGLE one block
    more."""
    window = spec_class.spec.sliding_window
    if window is None:
        raise ValueError(f"{spec_class.label}: sliding window size unknown; configure windows for this model")
    return max(1, -(-(window - 1) // spec_class.block_size) + eagle)


def _window(blocks: Words, needed: int) -> Words:
    """Return per block end whether the last ``needed`` blocks, or all blocks back to block 0, are present
    (by doubling)."""
    run, length = blocks, 1
    while length < needed:
        stride = min(length, needed - length)
        longer = run.copy()
        np.bitwise_and(run[stride:], run[:-stride], out=longer[stride:])
        run = longer
        length += stride
    return run


def _chunked(blocks: Words, spec_class: SpecClass, step: int, boundaries: int) -> Words:
    """Return per boundary whether every block from the start of its chunk is present; a chunk's start
    needs none."""
    chunk = spec_class.spec.attention_chunk_size
    if chunk is None:
        raise ValueError(f"{spec_class.label}: attention_chunk_size unknown; configure it for this model")
    per_chunk = chunk // spec_class.block_size
    grid = np.zeros((-(-len(blocks) // per_chunk), per_chunk), np.uint64)
    grid.reshape(-1)[: len(blocks)] = blocks
    valid = _at(np.bitwise_and.accumulate(grid, axis=1).reshape(-1)[: len(blocks)], step, boundaries)
    tokens = np.arange(1, boundaries + 1) * step * spec_class.block_size
    valid[tokens % chunk == 0] = ALL_WORD
    return valid


def _largest(valid: Words, alignment: int) -> Ends:
    """Return the last boundary at which each bit is set."""
    if not len(valid):
        return []
    seen = np.bitwise_or.accumulate(valid[::-1])
    new = seen.copy()
    new[1:] ^= seen[:-1]
    grows = new.nonzero()[0]
    last = len(valid) * alignment
    return [
        (last - back * alignment, bits)
        for back, bits in zip(grows.tolist(), new[grows].tolist(), strict=True)
    ]


def _by_bit(ends: Ends) -> list[int]:
    tokens = [0] * WORD_BITS
    for end, bits in ends:
        left = bits
        while left:
            bit = left.bit_length() - 1
            tokens[bit] = end
            left ^= 1 << bit
    return tokens


def _ends_of(tokens: list[int]) -> Ends:
    ends: dict[int, int] = {}
    for bit, end in enumerate(tokens):
        if end:
            ends[end] = ends.get(end, 0) | 1 << bit
    return list(ends.items())
