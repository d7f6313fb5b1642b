"""Hit rules: from presence rows to the number of tokens each engine would take from its cache.

vLLM's scheduler searches group by group until no group shrinks the hit. Here the same number is found
differently: a boundary is *valid* for a spec class if the class could resume there, and the hit is the
largest aligned boundary below the prompt's last token that is valid in every class (if the search order
matters, vLLM's own loop is executed: ``fixed_point``). All engines of a 64-bit word are evaluated at once,
boundaries as array rows. ``_valid`` has the rules per class, which are checked against vLLM 0.32's scheduler
on recorded traces and random mixes.

With look-ahead hashes (vLLM 0.33) the EAGLE flags have no effect. Pure functions; N hashes cost O(N) numpy
operations per class, independent of the number of engines.

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
``HybridKVCacheCoordinator.find_longest_cache_hit`` and ``SlidingWindowManager`` of vLLM 0.32."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvatlas.publisher.groups import Family, SpecClass
from kvatlas.router.index.base import GPU, WORD_BITS, Plane, Rows, Runs, Words
from kvatlas.router.index.learn.layout import CacheLayout

# Run-length evaluation. Prompts share long prefixes, so a lookup of hundreds of blocks returns only a few
# different rows. If every class has the block size of the hashes, hits can only end where a run ends: inside
# a run, a boundary is valid if the one before it is. So one integer step per run gives the same result as the
# array evaluation below, which handles the rest: EAGLE, several block sizes, chunks, states, many runs
# (compared in tests/router/index/rules/test_runs.py).


# Tokens, and the engines (bits of a word) whose prefix ends there, longest first; engines without a prefix
# are left out.
Ends = list[tuple[int, int]]
_ALL = (1 << WORD_BITS) - 1


class RunClass(NamedTuple):
    """A spec class whose blocks have the hash block size: its planes, and the number of blocks required
    before a boundary (0: all)."""

    planes: tuple[Plane, ...]
    needed: int


# Rows whose engines are kept.
_ROWS_READ_MAX: Final = 4096


class RunReads:
    """How some classes are read from the rows of an index: full attention, if the layout has it, then each
    window, with the number of blocks that it needs."""

    __slots__ = ("_columns", "full", "known", "needed")

    def __init__(
        self, classes: Sequence[RunClass], columns: Mapping[tuple[Plane, int], int], words: Sequence[int]
    ) -> None:
        """Find how the engines of ``words`` are read: the lowest 64 bits are those of the first word."""
        full = [plane for planes, needed in classes if not needed for plane in planes]
        windows = [(planes, needed) for planes, needed in classes if needed]
        self.full = bool(full)
        self.needed = [needed for _, needed in windows]
        shifts = [(word, WORD_BITS * at) for at, word in enumerate(words)]
        # Nothing was ever stored where a column is missing.
        self._columns = [
            [
                [(columns[one, word], shift) for word, shift in shifts if (one, word) in columns]
                for one in planes
            ]
            for planes in (full, *(planes for planes, _ in windows))
        ]
        # Rows stay the same objects for many prompts.
        self.known: dict[int, tuple[Sequence[int], tuple[int, ...]]] = {}

    def read(self, row: Sequence[int]) -> tuple[Sequence[int], tuple[int, ...]]:
        """Return the row, and per class the engines that hold a block in every plane of it."""
        # One integer of all words: Python's are as long as needed, and steps cost more than bits.
        by_class: list[int] = []
        for planes in self._columns:
            held = -1
            for places in planes:
                bits = 0
                for column, shift in places:
                    bits |= row[column] << shift
                held &= bits
            by_class.append(held)
        if len(self.known) >= _ROWS_READ_MAX:
            self.known.clear()
        found = self.known[id(row)] = row, tuple(by_class)
        return found


def run_ends(runs: Runs, its: RunReads, boundaries: int, unit: int) -> tuple[Ends, Ends]:
    """Return the ends of hits and of full-attention prefixes, longest first.

    Boundaries 1..``boundaries`` are ``unit`` tokens apart."""
    # Plain loops instead of numpy: this runs once per request over few elements.
    starts, known = runs.starts, its.known
    held = [(known.get(id(row)) or its.read(row))[1] for row in runs.rows]
    # Per run, up to the last one in which a hit can end: the engines that hold everything up to its end.
    shared_prefixes: list[int] = []
    shared_prefix = -1
    for start, by_class in zip(starts, held, strict=True):
        shared_prefix &= by_class[0]
        if not shared_prefix or start >= boundaries:
            break
        shared_prefixes.append(shared_prefix)
    hits: Ends = []
    shared_prefix_ends: Ends = []
    found = reached = 0
    end = boundaries if len(shared_prefixes) == len(starts) else starts[len(shared_prefixes)]
    end = end if end < boundaries else boundaries  # noqa: FURB136
    for number in range(len(shared_prefixes) - 1, -1, -1):
        shared_prefix = shared_prefixes[number]
        # A longer shared prefix has fewer engines.
        if shared_prefix != reached:
            shared_prefix_ends.append((end * unit, shared_prefix ^ reached))
            reached = shared_prefix
        valid = shared_prefix ^ found
        for window, needed in enumerate(its.needed, 1):
            at, first = number, end - needed
            while valid:
                valid &= held[at][window]
                if starts[at] <= first or not at:
                    break
                at -= 1
        if valid:
            hits.append((end * unit, valid))
            found |= valid
            if found == shared_prefixes[0]:
                break
        end = starts[number]
    return hits, shared_prefix_ends if its.full else hits


ALL_WORD = np.uint64(_ALL)


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
