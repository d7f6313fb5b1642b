"""The query for each engine (hash scheme, layout, position in the rows), and its hit from the rows.

Engines whose hashes and groups are known from their own events share a ``QueryPlan``, which is valid until
one of them changes: a decision then computes their hits in one step per layout and 64 engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from publisher.block_hash import HashScheme
from router.index.base import CPU, GPU, STORAGE, Rows, Slot
from router.index.hit_rules import Ends, WordHits, WordRule, evaluate
from router.index.learn.layout import CacheLayout
from router.index.learn.root_events import LearnedKeys
from router.index.offloaded import Extent, held_alone, loaded, tier_extents, usable

Mode = Literal["native", "learned", "assumed", "shadow", "unknown"]


class ClassHit(msgspec.Struct, frozen=True):
    """Largest boundary valid in one spec class alone, in tokens.

    ``hit_tokens`` counts blocks on the GPU; ``by_medium`` gives the extent of the class from the joint GPU
    hit on, with CPU, and with CPU and STORAGE, for the connector that reaches furthest.
    """

    spec_class: str
    hit_tokens: int
    by_medium: dict[str, int]


class EngineHit(msgspec.Struct, frozen=True, gc=False):
    """Number of tokens that one engine would take from its caches for a prompt.

    ``hit_tokens`` counts blocks on the GPU, ``cpu_tokens`` and ``storage_tokens`` what a connector would load
    beyond them (``offloaded.py``). ``shared_prefix_tokens`` is the full-attention prefix. ``by_class`` is
    filled only with ``detail``.
    """

    mode: Mode
    hit_tokens: int = 0
    cpu_tokens: int = 0
    storage_tokens: int = 0
    shared_prefix_tokens: int = 0
    alignment: int = 1
    """Hits are multiples of this, in tokens."""
    by_class: tuple[ClassHit, ...] = ()
    why_unknown: str = ""
    replay_tokens: int = 0
    """Tokens of the hit that the engine recomputes."""
    stale: bool = False
    """Whether this engine's residency is currently not kept up to date: for display, not for decisions."""

    @property
    def offloaded_tokens(self) -> int:
        """The hit including all tokens that would be loaded: never less than ``hit_tokens``."""
        return self.hit_tokens + self.cpu_tokens + self.storage_tokens


class EngineQuery(NamedTuple):
    """Everything a prediction needs of one engine."""

    engine_id: str
    scheme: HashScheme
    layout: CacheLayout
    slot: Slot
    learned: LearnedKeys | None = None
    stores: frozenset[str] = frozenset()
    """Shared stores it loads from."""
    mode: Mode = "native"
    proven: bool = True
    """Whether its scheme is known from its own events."""

    @property
    def settled(self) -> bool:
        """Whether the next prompt cannot change this query."""
        return self.proven and self.learned is None and self.slot is not NOWHERE


# Slot of an engine that stored nothing yet: no column has this word, so its rows are empty.
NOWHERE = Slot(-1, 0)


class _PlanRow:
    """Queries with equal layout, word and mode, whose hits are computed together."""

    __slots__ = ("_bits", "_by_bit", "_engine_ids", "_mode", "_nothing", "_rule", "layout", "queries", "word")

    def __init__(self, queries: list[EngineQuery]) -> None:
        first = queries[0]
        self.layout, self.word, self._mode = first.layout, first.slot.word, first.mode
        self.queries = queries
        self._rule = WordRule(self.layout, self.word)
        self._nothing = EngineHit(
            self._mode, alignment=self.layout.alignment, replay_tokens=self.layout.replay_tokens
        )
        self._engine_ids = [query.engine_id for query in queries]
        self._by_bit = {query.slot.bit: query.engine_id for query in queries}
        self._bits = sum([1 << bit for bit in self._by_bit])

    def hits(self, rows: Rows, num_tokens: int) -> dict[str, EngineHit]:
        """Return hits on GPUs. Engines with equal extent share one object."""
        hit_ends, shared_prefix_ends = self._rule.ends(rows, num_tokens)
        answers = dict.fromkeys(self._engine_ids, self._nothing)
        left = self._bits
        for shared_prefix, bits in shared_prefix_ends:
            reached = bits & left
            if reached:
                left ^= reached
                self._enter(answers, hit_ends, shared_prefix, reached)
        # Some families have hits without a full-attention prefix.
        if left:
            self._enter(answers, hit_ends, 0, left)
        return answers

    def _enter(self, answers: dict[str, EngineHit], hit_ends: Ends, shared_prefix: int, left: int) -> None:
        """Enter the hits of engines with the same full-attention prefix."""
        for end, bits in hit_ends:
            alike = bits & left
            if alike:
                left ^= alike
                self._share(answers, alike, end, shared_prefix)
        if shared_prefix and left:
            self._share(answers, left, 0, shared_prefix)

    def _share(self, answers: dict[str, EngineHit], alike: int, end: int, shared_prefix: int) -> None:
        layout, by_bit = self.layout, self._by_bit
        end = end if end > layout.replay_tokens else 0
        hit = EngineHit(
            self._mode, end, 0, 0, shared_prefix, layout.alignment, replay_tokens=layout.replay_tokens
        )
        while alike:
            bit = alike.bit_length() - 1
            answers[by_bit[bit]] = hit
            alike ^= 1 << bit


class PlanRows:
    """Queries of one hash scheme, arranged for ``hits``."""

    __slots__ = ("_rows",)

    def __init__(self, queries: list[EngineQuery]) -> None:
        rows: dict[tuple[int, int, Mode, str], list[EngineQuery]] = {}
        for query in queries:
            word = query.slot.word
            # Engines with equal layouts share the layout object; engines without a slot share a bit too.
            key = id(query.layout), word, query.mode, query.engine_id if word < 0 else ""
            rows.setdefault(key, []).append(query)
        self._rows = [_PlanRow(alike) for alike in rows.values()]

    def hits(self, found: Rows, num_tokens: int, *, detail: bool) -> dict[str, EngineHit]:
        """Return the hit of each query from the rows of its scheme's hashes; ``detail``: by spec class
        too.
        """
        answers: dict[str, EngineHit] = {}
        for row in self._rows:
            if detail or not found.only_gpu:
                gpu = evaluate(found, row.layout, num_tokens, word=row.word, detail=detail)
                extents = tier_extents(found, row.layout, num_tokens, row.word, gpu, detail=detail)
                for query in row.queries:
                    answers[query.engine_id] = _loading(query, gpu, extents, detail=detail)
            else:
                hits = row.hits(found, num_tokens)
                answers = {**answers, **hits} if answers else hits
        return answers

    def held_alone(self, found: Rows, num_tokens: int) -> dict[str, int]:
        """Return the tokens that the host memory of each engine holds by itself; without those of none."""
        held: dict[str, int] = {}
        for row in self._rows:
            alone = held_alone(found, row.layout, num_tokens, row.word)
            if any(alone):
                held |= {query.engine_id: alone[query.slot.bit] for query in row.queries}
        return held


class QueryPlan(NamedTuple):
    """A set of engines of a model: those whose queries are settled, and the ids of the others."""

    settled: dict[HashScheme, PlanRows]
    unsettled: tuple[str, ...]


def query_hits(
    rows: Rows, num_tokens: int, queries: list[EngineQuery], *, detail: bool
) -> dict[str, EngineHit]:
    """Return the hit of each query, all of one hash scheme, from the rows of that scheme's hashes."""
    return PlanRows(queries).hits(rows, num_tokens, detail=detail)


def _loading(query: EngineQuery, gpu: WordHits, extents: tuple[Extent, ...], *, detail: bool) -> EngineHit:
    """Return one engine's hit if connectors hold blocks too, or details by class are requested."""
    layout, bit = query.layout, query.slot.bit
    hit, its = gpu.hit[bit], usable(extents, query.stores)
    by_medium = loaded(its, bit, hit, first=layout.first_connector_loads)
    if hit + sum(by_medium.values()) <= layout.replay_tokens:
        hit, by_medium = 0, {}
    return EngineHit(
        query.mode,
        hit,
        by_medium.get(CPU, 0),
        by_medium.get(STORAGE, 0),
        gpu.shared_prefix[bit],
        layout.alignment,
        _class_hits(layout, gpu, its, bit) if detail else (),
        replay_tokens=layout.replay_tokens,
    )


def _class_hits(
    layout: CacheLayout, on_gpu: WordHits, extents: Sequence[Extent], bit: int
) -> tuple[ClassHit, ...]:
    """Return the hit of every class alone, for one engine; used by explanations only."""
    hits = []
    for number, spec_class in enumerate(layout.classes):
        tokens = on_gpu.by_class[number][bit]
        furthest = {GPU: tokens}
        for medium in (CPU, STORAGE):
            there = [each.by_class[number][bit] for r in extents for name, each in r.layers if name == medium]
            furthest[medium] = tokens = max([tokens, *there])
        hits.append(ClassHit(spec_class.label, furthest[GPU], furthest))
    return tuple(hits)
