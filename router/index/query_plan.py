"""The query for each engine (hash scheme, layout, position in the rows), and its hit from the rows.

Engines whose hashes and groups are known from their own events share a ``QueryPlan``, which is valid until
one of them changes: a decision then computes their hits in one step per layout, and gets those with equal
hits together (``Holders``), so that an engine that holds nothing takes no step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Literal, NamedTuple

import msgspec

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.router.index.base import WORD_BITS, Rows, Slot
from kvatlas.router.index.hit_rules import FleetRule, WordHits, end_of, evaluate
from kvatlas.router.index.learn.layout import CacheLayout
from kvatlas.router.index.learn.learned_keys import LearnedKeys
from kvatlas.router.index.offloaded import Extent, held_alone, loaded, tier_extents, usable
from kvatlas.router.index.places import CPU, GPU, STORAGE
from kvatlas.router.index.run_ends import Ends

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


class Holders(NamedTuple):
    """Engines with the same hit."""

    hit: EngineHit
    engine_ids: tuple[str, ...]


# Sets of engines with equal hits: the prompts of some minutes have a few hundred.
_SETS_MAX: Final = 1024


# The constructor of a named tuple is a Python function: this is called for each set of engines and prompt.
_HOLDERS: Callable[[tuple[EngineHit, tuple[str, ...]]], Holders] = partial(tuple.__new__, Holders)
# Engines whose hit, or full-attention prefix, has no tokens.
_REST: Final = (0, -1)


class _PlanRow:
    """Queries with equal layout and mode, whose hits are computed together."""

    __slots__ = ("_bits", "_by_bit", "_mode", "_rule", "_sets", "_stores", "by_word", "layout", "nothing")

    def __init__(self, queries: list[EngineQuery]) -> None:
        self.layout, self._mode = queries[0].layout, queries[0].mode
        self.by_word: dict[int, list[EngineQuery]] = {}
        for query in queries:
            self.by_word.setdefault(query.slot.word, []).append(query)
        self._rule = FleetRule(self.layout, tuple(self.by_word))
        self.nothing = EngineHit(
            self._mode, alignment=self.layout.alignment, replay_tokens=self.layout.replay_tokens
        )
        self._by_bit = {
            WORD_BITS * at + query.slot.bit: query.engine_id
            for at, alike in enumerate(self.by_word.values())
            for query in alike
        }
        self._bits = sum([1 << bit for bit in self._by_bit])
        # Engines of each word by the shared stores that they load from: bits, and one of them.
        self._stores: list[dict[frozenset[str], int]] = []
        for alike in self.by_word.values():
            stores: dict[frozenset[str], int] = {}
            for query in alike:
                stores[query.stores] = stores.get(query.stores, 0) | 1 << query.slot.bit
            self._stores.append(stores)
        self._sets: dict[int, tuple[str, ...]] = {}

    def holders(self, rows: Rows, num_tokens: int) -> list[Holders]:
        """Return the engines with hits on GPUs, by extent."""
        hit_ends, shared_prefix_ends = self._rule.ends(rows, num_tokens)
        found: list[Holders] = []
        if not hit_ends and not shared_prefix_ends:
            return found
        mode, alignment, replay = self._mode, self.nothing.alignment, self.nothing.replay_tokens
        sets, left = self._sets, self._bits
        ends = (*hit_ends, _REST)
        # Some families have hits without a full-attention prefix.
        for shared_prefix, bits in (*shared_prefix_ends, _REST):
            reached = bits & left
            left ^= reached
            for end, ended in ends:
                if not reached:
                    break
                alike = ended & reached
                if not alike or not (end or shared_prefix):
                    continue
                reached ^= alike
                hit = EngineHit(
                    mode, end if end > replay else 0, 0, 0, shared_prefix, alignment, (), "", replay
                )
                found.append(_HOLDERS((hit, sets.get(alike) or self._names(alike))))
        return found

    def loading(self, rows: Rows, num_tokens: int) -> list[Holders]:
        """Return the engines with hits on GPUs or in the memory of connectors, by their hits."""
        found: dict[EngineHit, int] = {}
        for at, (word, stores) in enumerate(zip(self.by_word, self._stores, strict=True)):
            gpu = evaluate(rows, self.layout, num_tokens, word=word)
            extents = tier_extents(rows, self.layout, num_tokens, word, gpu)
            layers = [hits.hit_ends for extent in extents for _, hits in extent.layers]
            for used, bits in stores.items():
                # Engines with the same tiers whose blocks end alike in each of them.
                for alike in _split(bits, [gpu.hit_ends, gpu.shared_prefix_ends, *layers]):
                    bit = alike.bit_length() - 1
                    hit = _loading(self._mode, self.layout, bit, gpu, usable(extents, used))
                    found[hit] = found.get(hit, 0) | alike << WORD_BITS * at
        found.pop(self.nothing, None)
        return [_HOLDERS((hit, self._sets.get(bits) or self._names(bits))) for hit, bits in found.items()]

    def _names(self, bits: int) -> tuple[str, ...]:
        if len(self._sets) >= _SETS_MAX:
            self._sets.clear()
        names = tuple([name for bit, name in self._by_bit.items() if bits >> bit & 1])
        self._sets[bits] = names
        return names


def _split(bits: int, by_ends: Sequence[Ends]) -> list[int]:
    """Split a set of engines into those that end together in all of these."""
    found = [bits]
    for ends in by_ends:
        ended = 0
        for _, there in ends:
            ended |= there
        found = [part & there for part in found for there in (*(there for _, there in ends), ~ended)]
        found = [part for part in found if part]
    return found


class PlanRows:
    """Queries of one hash scheme, arranged for ``hits``."""

    __slots__ = ("_rows",)

    def __init__(self, queries: list[EngineQuery]) -> None:
        rows: dict[tuple[int, Mode, str], list[EngineQuery]] = {}
        for query in queries:
            # Engines with equal layouts share the layout object; engines without a slot share a bit too.
            key = id(query.layout), query.mode, query.engine_id if query.slot.word < 0 else ""
            rows.setdefault(key, []).append(query)
        self._rows = [_PlanRow(alike) for alike in rows.values()]

    def hits(
        self, found: Rows, num_tokens: int, *, detail: bool
    ) -> tuple[list[Holders], dict[str, EngineHit]]:
        """Return the hits from the rows of the scheme's hashes: of engines with equal ones, and of single
        engines. Engines in neither hold nothing; ``detail``: all are single, with hits by spec class."""
        alike: list[Holders] = []
        single: dict[str, EngineHit] = {}
        for row in self._rows:
            if found.only_gpu and not detail:
                alike += row.holders(found, num_tokens)
            elif not detail:
                alike += row.loading(found, num_tokens)
            else:
                for word, queries in row.by_word.items():
                    layout = row.layout
                    gpu = evaluate(found, layout, num_tokens, word=word, detail=True)
                    extents = tier_extents(found, layout, num_tokens, word, gpu, detail=True)
                    for query in queries:
                        its, bit = usable(extents, query.stores), query.slot.bit
                        hit = _loading(query.mode, layout, bit, gpu, its)
                        by_class = _class_hits(layout, gpu, its, bit)
                        single[query.engine_id] = msgspec.structs.replace(hit, by_class=by_class)
        return alike, single

    @property
    def nothing(self) -> dict[str, EngineHit]:
        """Answer of each query for a prompt of which the engine holds nothing."""
        return {
            query.engine_id: row.nothing
            for row in self._rows
            for queries in row.by_word.values()
            for query in queries
        }

    def held_alone(self, found: Rows, num_tokens: int) -> dict[str, int]:
        """Return the tokens that the host memory of each engine holds by itself; without those of none."""
        held: dict[str, int] = {}
        for row in self._rows:
            for word, queries in row.by_word.items():
                alone = held_alone(found, row.layout, num_tokens, word)
                if any(alone):
                    held |= {query.engine_id: alone[query.slot.bit] for query in queries}
        return held


class QueryPlan(NamedTuple):
    """A set of engines of a model: those whose queries are settled, the ids of the others, and the answers of
    the settled ones for a prompt of which they hold nothing."""

    settled: dict[HashScheme, PlanRows]
    unsettled: tuple[str, ...]
    nothing: Mapping[str, EngineHit]


class PromptHits(msgspec.Struct, gc=False):
    """Hits of one prompt on the engines of a model: ``alike`` where several have the same, ``single`` of
    other engines. An engine in neither has the hit in ``nothing``, of no tokens."""

    alike: Sequence[Holders] = ()
    single: Mapping[str, EngineHit] = {}
    nothing: Mapping[str, EngineHit] = {}

    def by_engine(self) -> dict[str, EngineHit]:
        """Return the hit of each engine."""
        found = {**self.nothing, **self.single}
        for hit, engine_ids in self.alike:
            found.update(dict.fromkeys(engine_ids, hit))
        return found


def query_hits(
    rows: Rows, num_tokens: int, queries: list[EngineQuery], *, detail: bool
) -> dict[str, EngineHit]:
    """Return the hit of each query, all of one hash scheme, from the rows of that scheme's hashes."""
    plan = PlanRows(queries)
    return PromptHits(*plan.hits(rows, num_tokens, detail=detail), plan.nothing).by_engine()


def _loading(
    mode: Mode, layout: CacheLayout, bit: int, gpu: WordHits, extents: tuple[Extent, ...]
) -> EngineHit:
    """Return the hit of one engine, whose connectors hold blocks too. ``extents``: of its tiers."""
    hit = end_of(gpu.hit_ends, bit)
    by_medium = loaded(extents, bit, hit, first=layout.first_connector_loads)
    if sum(by_medium.values()) < layout.load_tokens_min:
        by_medium = {}
    if hit + sum(by_medium.values()) <= layout.replay_tokens:
        hit, by_medium = 0, {}
    return EngineHit(
        mode,
        hit,
        by_medium.get(CPU, 0),
        by_medium.get(STORAGE, 0),
        end_of(gpu.shared_prefix_ends, bit),
        layout.alignment,
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
