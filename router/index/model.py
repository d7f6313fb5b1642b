"""Predicted hits of a prompt on every engine: hashed once per scheme, looked up once, 64 engines at a time.

``FleetResidency`` is the sink of all feeds and answers which engine holds how much of a prompt. Invariant: an
engine with unknown scheme or layout gets mode ``unknown`` and no hit, never a guess. Knowledge about the
model from an engine that left or restarted is used until the engine's own events replace it; that cannot
over-predict, since hashes of a wrong scheme match nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from kvatlas.publisher.block_hash import HashScheme, PromptExtras
from kvatlas.publisher.events import BlockHash, DecodedBatch
from kvatlas.router.index.base import Index, IndexStats, Rows
from kvatlas.router.index.engine import EngineResidency
from kvatlas.router.index.learn.hash_scheme import Detection
from kvatlas.router.index.learn.layout import CacheLayout, ModelFacts
from kvatlas.router.index.learn.learned_keys import LearnedKeys
from kvatlas.router.index.memory import MemoryIndex
from kvatlas.router.index.places import GPU
from kvatlas.router.index.query_plan import (
    NOWHERE,
    EngineHit,
    EngineQuery,
    Holders,
    Mode,
    PlanRows,
    PromptHits,
    QueryPlan,
    query_hits,
)

_NO_EVENTS = EngineHit("unknown", why_unknown="no events yet")
# Maximum number of cached engine sets; a model has few: all engines, and all but one that failed.
_PLANS_MAX = 16


# Blocks of about 16 tokens; the oldest ones are forgotten.
_MISSED_MAX = 4096


class HashedPrompt(Protocol):
    """A prompt whose block hashes can be computed under any scheme (``kvatlas.router.prompts.Prompt``)."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def extras(self) -> PromptExtras: ...

    def hashes(self, scheme: HashScheme) -> Sequence[BlockHash]: ...


class Residency:
    """Residency of one engine of a model: the sink of its feed, and everything a prediction needs of it."""

    __slots__ = ("_model", "_query", "_staged", "engine_id", "writer")

    def __init__(self, model: FleetResidency, engine_id: str, writer: EngineResidency) -> None:
        self.engine_id = engine_id
        # Current knowledge; replaced by another object when a snapshot is adopted.
        self.writer = writer
        self._model = model
        self._staged: EngineResidency | None = None
        self._query: EngineQuery | None = None
        writer.changed = self._changed

    def apply(self, batch: DecodedBatch) -> None:
        """Apply one batch, in the order of the sequence numbers."""
        self.writer.apply(batch)

    def forget(self) -> None:
        """Discard everything: the engine restarted or left."""
        self._model.remember(self.writer)
        self.writer.forget()

    def stage(self, batch: DecodedBatch) -> None:
        """Apply a piece of a snapshot, in order; predictions do not see it before ``adopt``."""
        if self._staged is None:
            self._staged = self.writer.successor()
        self._staged.apply(batch)

    def adopt(self) -> None:
        """Replace the residency by the staged content; without staged content the engine holds nothing."""
        staged, self._staged = self._staged or self.writer.successor(), None
        staged.supersede(self.writer)
        self.writer = staged
        staged.changed = self._changed
        self._changed()

    def unstage(self) -> None:
        """Discard the staged content: the snapshot failed."""
        if self._staged is not None:
            self._model.index.forget(self._staged.engine_id)
            self._staged = None

    def close(self) -> None:
        """Remove the engine from the model: it left the fleet, or serves another model now."""
        self.forget()
        self.unstage()
        self._model.left(self)

    def holds(self, block: BlockHash) -> bool:
        """Whether the engine's GPU holds this block, in any group."""
        return self._model.index.holds(self.engine_id, GPU, block)

    def not_delivered(
        self, hashes: Sequence[BlockHash], hit_tokens: int, unit_tokens: int, *, asked_s: float, now: float
    ) -> None:
        """Learn from a receipt: the engine, asked at ``asked_s``, took ``hit_tokens`` of a prompt; storage
        should have had more. ``hashes``: of the prompt, one per ``unit_tokens``."""
        layout = self.writer.layout
        if layout is not None:
            step = layout.alignment * layout.blocks_per_chunk
            end = (hit_tokens // step + 1) * step
            self._model.missed(self, hashes[hit_tokens // unit_tokens : end // unit_tokens], asked_s, now)

    def query(self) -> EngineQuery | EngineHit:
        """Return everything a prediction needs of the engine, or a hit with the reason why nothing can be
        predicted.
        """
        if self._query is not None:
            return self._query
        found = self._model.find_query(self.writer)
        if isinstance(found, EngineQuery) and found.slot is not NOWHERE:
            self._query = found
        return found

    def _changed(self) -> None:
        self._query = None
        self._model.invalidate()


class FleetResidency:
    """Residency of all engines of one model; implements the feeds' sink.

    ``changed`` is called whenever knowledge about an engine's hashes or groups may have changed.
    """

    def __init__(
        self, facts: ModelFacts, index: Index | None = None, *, changed: Callable[[], None] = lambda: None
    ) -> None:
        self.facts = facts
        self._on_change = changed
        self.index: Index = index if index is not None else MemoryIndex()
        self._engines: dict[str, Residency] = {}
        self._layouts: dict[CacheLayout, CacheLayout] = {}
        self._plans: dict[tuple[str, ...], QueryPlan] = {}
        self._missed: OrderedDict[BlockHash, float] = OrderedDict()
        """Blocks that storage did not deliver once, and when that was known."""
        self._remembered: tuple[HashScheme, CacheLayout] | None = None
        self._remembered_mode: Mode = "native"

    def residency(self, engine_id: str) -> Residency:
        """Return the residency of one engine, created on first use."""
        found = self._engines.get(engine_id)
        if found is None:
            writer = EngineResidency(engine_id, self.index, self.facts, self._known_schemes, self._layouts)
            found = self._engines[engine_id] = Residency(self, engine_id, writer)
            self.invalidate()
        return found

    def engine(self, engine_id: str) -> EngineResidency:
        """Return the writer of one engine, created on first use."""
        return self.residency(engine_id).writer

    def apply(self, engine_id: str, batch: DecodedBatch) -> None:
        """Apply one batch of one engine, in the order of its sequence numbers."""
        self.residency(engine_id).apply(batch)

    def forget(self, engine_id: str) -> None:
        """Discard everything of an engine that restarted or left; ignored for an unknown engine."""
        if engine_id in self._engines:
            self._engines[engine_id].forget()

    def stage(self, engine_id: str, batch: DecodedBatch) -> None:
        """Apply a piece of a snapshot; predictions do not see it before ``adopt``."""
        self.residency(engine_id).stage(batch)

    def adopt(self, engine_id: str) -> None:
        """Replace the engine's residency by the staged content."""
        self.residency(engine_id).adopt()

    def unstage(self, engine_id: str) -> None:
        """Discard the staged content."""
        self.residency(engine_id).unstage()

    def remove(self, engine_id: str) -> None:
        """Remove an engine that left the fleet."""
        if engine_id in self._engines:
            self._engines[engine_id].close()

    def remember(self, writer: EngineResidency) -> None:
        """Keep an engine's scheme and layout, for engines without own knowledge."""
        if writer.detection is Detection.NATIVE and writer.scheme and writer.layout:
            self._remembered, self._remembered_mode = (writer.scheme, writer.layout), "native"
            return
        proven = self._remembered is not None and self._remembered_mode == "native"
        if writer.assumed and writer.layout and not proven:
            self._remembered, self._remembered_mode = (writer.assumed, writer.layout), "assumed"

    def left(self, engine: Residency) -> None:
        """Remove the engine: it no longer serves this model."""
        if self._engines.get(engine.engine_id) is engine:
            del self._engines[engine.engine_id]
            self.invalidate()

    def stats(self) -> IndexStats:
        return self.index.stats()

    def check_integrity(self) -> list[str]:
        """Recount the index and the cached values of each engine; returns one sentence per contradiction."""
        kept = [problem for one in self._engines.values() for problem in one.writer.check_integrity()]
        return self.index.check_integrity() + kept

    def searching(self) -> list[EngineResidency]:
        """Engines whose seed search is not finished."""
        return [e.writer for e in self._engines.values() if e.writer.searching]

    def missed(self, engine: Residency, blocks: Sequence[BlockHash], asked_s: float, now: float) -> None:
        """Storage did not deliver these to an engine. What a request misses that was asked after the first
        miss is forgotten: an engine that computed it would have stored it again by then, and said so."""
        again = [block for block in blocks if self._missed.get(block, now) < asked_s]
        for block in again:
            del self._missed[block]
        for one in self._engines.values() if again else ():
            one.writer.lost(again, shared_only=one is not engine)
        for block in blocks if not again else ():
            self._missed.setdefault(block, now)
        while len(self._missed) > _MISSED_MAX:
            self._missed.popitem(last=False)

    def refill(self, now_s: float) -> None:
        """Refill the learning budgets of the engines."""
        for engine in self._engines.values():
            engine.writer.budget.refill(now_s)

    def age(self, now_s: float) -> None:
        """Expire shared-store blocks older than the TTL."""
        for engine in self._engines.values():
            engine.writer.age(now_s)

    def predict(
        self,
        prompt: HashedPrompt,
        engine_ids: Iterable[str],
        *,
        detail: bool = False,
        elsewhere: Mapping[HashScheme, Rows] | None = None,
    ) -> dict[str, EngineHit]:
        """Return ``hits`` by engine."""
        return self.hits(prompt, engine_ids, detail=detail, elsewhere=elsewhere).by_engine()

    def hits(
        self,
        prompt: HashedPrompt,
        engine_ids: Iterable[str],
        *,
        detail: bool = False,
        elsewhere: Mapping[HashScheme, Rows] | None = None,
    ) -> PromptHits:
        """Return the hits of ``prompt`` on these engines, with one lookup per hash scheme.

        ``elsewhere``: rows of shared stores known to other replicas, by hash scheme (``shared_part``).
        """
        plan = self._plan_of(tuple(engine_ids))
        alike: list[Holders] = []
        single: dict[str, EngineHit] = {}
        open_queries: dict[HashScheme, list[EngineQuery]] = {}
        for engine_id in plan.unsettled:
            query = self._offered(engine_id, prompt)
            if isinstance(query, EngineHit):
                single[engine_id] = query
            elif query.learned is not None:
                rows = self._learned_rows(prompt, query.scheme, query.learned)
                single |= query_hits(rows, prompt.num_tokens, [query], detail=detail)
            else:
                open_queries.setdefault(query.scheme, []).append(query)
        for scheme, settled in plan.settled.items():
            rows = self._rows(prompt, scheme, elsewhere)
            together, apart = settled.hits(rows, prompt.num_tokens, detail=detail)
            alike = alike + together if alike else together
            single |= apart
            if open_queries and scheme in open_queries:
                single |= self._unproven_hits(rows, prompt, open_queries.pop(scheme), detail=detail)
        for scheme, queries in open_queries.items():
            rows = self._rows(prompt, scheme, elsewhere)
            single |= self._unproven_hits(rows, prompt, queries, detail=detail)
        return PromptHits(alike, single, plan.nothing)

    def held_alone(self, prompt: HashedPrompt, engine_ids: Iterable[str]) -> dict[str, int]:
        """Return the tokens of ``prompt`` that the host memory of each engine holds by itself in every group,
        for engines whose hashes and groups are known from their own events."""
        held: dict[str, int] = {}
        for scheme, settled in self._plan_of(tuple(engine_ids)).settled.items():
            rows = self.index.lookup(prompt.hashes(scheme))
            if not rows.only_gpu:
                held |= settled.held_alone(rows, prompt.num_tokens)
        return held

    def _plan_of(self, engine_ids: tuple[str, ...]) -> QueryPlan:
        found = self._plans.get(engine_ids)
        if found is not None:
            return found
        settled: dict[HashScheme, list[EngineQuery]] = {}
        unsettled: list[str] = []
        for engine_id in engine_ids:
            engine = self._engines.get(engine_id)
            query = None if engine is None else engine.query()
            if isinstance(query, EngineQuery) and query.settled:
                settled.setdefault(query.scheme, []).append(query)
            else:
                unsettled.append(engine_id)
        rows = {scheme: PlanRows(queries) for scheme, queries in settled.items()}
        if len(self._plans) >= _PLANS_MAX:
            self._plans.clear()
        nothing: dict[str, EngineHit] = {}
        for row in rows.values():
            nothing |= row.nothing
        found = self._plans[engine_ids] = QueryPlan(rows, tuple(unsettled), nothing)
        return found

    def invalidate(self) -> None:
        """Invalidate cached query plans after any engine change."""
        self._plans.clear()
        self._on_change()

    def _offered(self, engine_id: str, prompt: HashedPrompt) -> EngineQuery | EngineHit:
        """Return the query of an engine that may detect its hash scheme in this prompt."""
        engine = self._engines.get(engine_id)
        if engine is None:
            return _NO_EVENTS
        query, writer = engine.query(), engine.writer
        unproven = isinstance(query, EngineHit) or not query.proven
        offers = unproven and writer.detection is Detection.WAITING
        if offers and writer.offer(prompt.token_ids, prompt.extras):
            return engine.query()
        return query

    def _rows(
        self, prompt: HashedPrompt, scheme: HashScheme, elsewhere: Mapping[HashScheme, Rows] | None
    ) -> Rows:
        rows = self.index.lookup(prompt.hashes(scheme))
        told = None if elsewhere is None else elsewhere.get(scheme)
        if told is not None and told.num_hashes == rows.num_hashes:
            rows = Rows(rows.num_hashes, rows.columns | told.columns)
        return rows

    def _unproven_hits(
        self, rows: Rows, prompt: HashedPrompt, queries: list[EngineQuery], *, detail: bool
    ) -> dict[str, EngineHit]:
        """Return hits with possibly unproven schemes: a held block of the prompt proves the scheme it was
        hashed with. Without one, prefixes learned from the engine's own events count.
        """
        hits = query_hits(rows, prompt.num_tokens, queries, detail=detail)
        for query in queries:
            if query.proven:
                continue
            writer = self._engines[query.engine_id].writer
            scheme, layout, learned = writer.learned_scheme, writer.layout, writer.learned
            if rows.holds(GPU, query.slot):
                writer.confirm(query.scheme)
            elif scheme is not None and layout is not None and learned is not None:
                own = query._replace(scheme=scheme, layout=layout, mode="learned")
                known = self._learned_rows(prompt, scheme, learned)
                if known.holds(GPU, query.slot):
                    hits |= query_hits(known, prompt.num_tokens, [own], detail=detail)
        return hits

    def _learned_rows(self, prompt: HashedPrompt, scheme: HashScheme, learned: LearnedKeys) -> Rows:
        return self.index.lookup(learned.translate(prompt.hashes(scheme)))

    def find_query(self, engine: EngineResidency) -> EngineQuery | EngineHit:
        """Return the query of an engine, or a hit with the reason why nothing can be predicted."""
        scheme, layout, learned = engine.scheme, engine.layout, engine.learned
        mode: Mode = "native" if learned is None else "learned"
        if engine.unproven and (likely := self._likely(engine)) is not None:
            scheme, layout, mode = likely
            learned = None
        if scheme is None or layout is None:
            return EngineHit("unknown", why_unknown="no stored blocks seen yet")
        if layout.missing_facts:
            why = f"configure {', '.join(layout.missing_facts)} for this model"
            return EngineHit("unknown", why_unknown=why)
        slot = self.index.slot(engine.engine_id)
        place, proven = slot or NOWHERE, not engine.unproven
        return EngineQuery(
            engine.engine_id, scheme, layout, place, learned, engine.stores, mode, proven=proven
        )

    def _likely(self, engine: EngineResidency) -> tuple[HashScheme, CacheLayout, Mode] | None:
        """Return the likeliest scheme of an engine without a proven one, the layout to use it with, and the
        mode; None if nothing suggests one."""
        layout, remembered = engine.layout, self._remembered
        scheme: HashScheme | None = None
        mode = self._remembered_mode
        doubted = engine.doubted and mode == "assumed"
        if remembered is not None and engine.fits(remembered[0]) and not doubted:
            scheme, layout = _assumed(*remembered, layout)
        elif layout is None and engine.stores:
            mode = "native"
            scheme, layout = self._alike(engine)
        if scheme is None:
            scheme, layout, mode = engine.assumed, engine.layout, "assumed"
        return None if scheme is None or layout is None else (scheme, layout, mode)

    def _alike(self, new: EngineResidency) -> tuple[HashScheme | None, CacheLayout | None]:
        """Return scheme and layout of another engine of the model, expected for a new one that loads from
        the same store.

        The new engine's GPU is known to be empty, so only predicted loads depend on it.
        """
        for engine in self._engines.values():
            writer = engine.writer
            if writer.detection is Detection.NATIVE and writer.layout is not None and new.fits(writer.scheme):
                return writer.scheme, writer.layout
        return None, None

    @property
    def known_scheme(self) -> HashScheme | None:
        """A scheme that was found for engines of this model."""
        return next(iter(self._known_schemes()), None)

    def _known_schemes(self) -> list[HashScheme]:
        """Schemes found for other engines of this fleet: the most likely ones for a new engine."""
        writers = [e.writer for e in self._engines.values()]
        schemes = [w.scheme for w in writers if w.detection is Detection.NATIVE]
        if self._remembered is not None and self._remembered_mode == "native":
            schemes.append(self._remembered[0])
        return list(dict.fromkeys(scheme for scheme in schemes if scheme is not None))


def _assumed(
    scheme: HashScheme, remembered: CacheLayout, own: CacheLayout | None
) -> tuple[HashScheme | None, CacheLayout]:
    """Return the scheme and layout to predict with until the engine's scheme is detected.

    No scheme if its groups contradict the assumption.
    """
    if own is None or set(own.groups) <= set(remembered.groups):
        return scheme, remembered
    alike = own.hash_block_size == scheme.hash_block_size and own.lookahead == scheme.lookahead
    return (scheme if alike else None), own
