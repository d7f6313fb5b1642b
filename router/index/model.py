"""Predicted hits of a prompt on every engine: hashed once per scheme, looked up once, 64 engines at a time.

``FleetResidency`` is the sink of all feeds and the one place that answers "who holds how much of this".
Always true: an engine whose scheme or layout is not known yet is answered with mode ``unknown`` and no hit,
never with a guess. What is known of the model from an engine that left or restarted is taken over until the
engine's own events speak; that cannot over-predict, since hashes of another scheme match nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeVar

import msgspec

from publisher.block_hash import HashScheme, PromptExtras
from publisher.events import BlockHash, DecodedBatch
from router.index.base import Index, IndexStats, Rows, Slot
from router.index.engine import EngineResidency
from router.index.learn.hash_scheme import Detection
from router.index.learn.layout import CacheLayout, ModelFacts
from router.index.learn.prefixes import LearnedKeys
from router.index.media import CPU, GPU, STORAGE
from router.index.rules.hits import WordHits, evaluate
from router.index.rules.offload import Reach, loaded, reach, usable
from router.index.store.memory import MemoryIndex

Mode = Literal["native", "learned", "assumed", "unknown"]
_T = TypeVar("_T")


class HashedPrompt(Protocol):
    """A prompt whose block hashes can be had under any scheme (``router.prompts.Prompt``)."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def extras(self) -> PromptExtras: ...

    def hashes(self, scheme: HashScheme) -> Sequence[BlockHash]: ...


class ClassHit(msgspec.Struct, frozen=True):
    """Largest boundary valid in one spec class alone, in tokens.

    ``hit_tokens`` counts blocks on the GPU; ``by_medium`` says how far the class would get from the joint GPU
    hit on, with CPU, and with CPU and STORAGE, of the connector that gets furthest.
    """

    spec_class: str
    hit_tokens: int
    by_medium: dict[str, int]


class EngineHit(msgspec.Struct, frozen=True):
    """What one engine would take from its cache for a prompt; tokens.

    ``hit_tokens`` counts blocks on the GPU, ``cpu_tokens`` and ``storage_tokens`` what a connector would load
    beyond them (``offload.py``). ``trunk_tokens`` is the full-attention prefix. ``by_class`` is filled when
    detail is asked.
    """

    engine_id: str
    mode: Mode
    hit_tokens: int = 0
    cpu_tokens: int = 0
    storage_tokens: int = 0
    trunk_tokens: int = 0
    alignment: int = 1
    """A hit is a multiple of this."""
    by_class: tuple[ClassHit, ...] = ()
    why_unknown: str = ""
    stale: bool = False
    """Nobody keeps this engine's residency up to date at the moment: to be shown, not to be counted on."""

    @property
    def offloaded_tokens(self) -> int:
        """The hit with all that would be loaded: never less than ``hit_tokens``."""
        return self.hit_tokens + self.cpu_tokens + self.storage_tokens


class FleetResidency:
    """Residency of all engines of one model; implements the feeds' sink."""

    def __init__(self, facts: ModelFacts, index: Index | None = None) -> None:
        self.facts = facts
        self.index: Index = index if index is not None else MemoryIndex()
        self._engines: dict[str, EngineResidency] = {}
        self._staged: dict[str, EngineResidency] = {}
        self._layouts: dict[CacheLayout, CacheLayout] = {}
        self._seats: dict[str, tuple[int, Seat]] = {}
        self._remembered: tuple[HashScheme, CacheLayout] | None = None

    def engine(self, engine_id: str) -> EngineResidency:
        """The writer of one engine, made on first use."""
        found = self._engines.get(engine_id)
        if found is None:
            found = EngineResidency(engine_id, self.index, self.facts, self._known_schemes, self._layouts)
            self._engines[engine_id] = found
        return found

    def apply(self, engine_id: str, batch: DecodedBatch) -> None:
        """One batch of one engine, in the order of its sequence numbers."""
        self.engine(engine_id).apply(batch)

    def forget(self, engine_id: str) -> None:
        """The engine restarted, or left: nothing of it counts any more."""
        engine = self._engines.get(engine_id)
        if engine is not None:
            if engine.detection is Detection.NATIVE and engine.scheme and engine.layout:
                self._remembered = engine.scheme, engine.layout
            engine.forget()

    def stage(self, engine_id: str, batch: DecodedBatch) -> None:
        """A piece of a snapshot of the engine, in order; no prediction sees it before ``adopt``."""
        staged = self._staged.get(engine_id)
        if staged is None:
            staged = self._staged[engine_id] = self.engine(engine_id).successor()
        staged.apply(batch)

    def adopt(self, engine_id: str) -> None:
        """What was staged is all that the engine holds, from now on; nothing staged: it holds nothing."""
        old = self.engine(engine_id)
        staged = self._staged.pop(engine_id, None) or old.successor()
        staged.supersede(old)
        self._engines[engine_id] = staged
        self._seats.pop(engine_id, None)

    def unstage(self, engine_id: str) -> None:
        """The snapshot broke off: what was staged never was."""
        staged = self._staged.pop(engine_id, None)
        if staged is not None:
            self.index.forget(staged.engine_id)

    def remove(self, engine_id: str) -> None:
        """The engine left the fleet for good."""
        self.forget(engine_id)
        self.unstage(engine_id)
        self._engines.pop(engine_id, None)
        self._seats.pop(engine_id, None)

    def stats(self) -> IndexStats:
        return self.index.stats()

    def searching(self) -> list[EngineResidency]:
        """Engines whose seed search wants more slices."""
        return [e for e in self._engines.values() if e.detection is Detection.SEARCHING]

    def age(self, now_s: float) -> None:
        """Expire shared-store blocks older than the TTL."""
        for engine in self._engines.values():
            engine.age(now_s)

    def predict(
        self,
        prompt: HashedPrompt,
        engine_ids: Iterable[str],
        *,
        detail: bool = False,
        elsewhere: Mapping[HashScheme, Rows] | None = None,
    ) -> dict[str, EngineHit]:
        """Hits of ``prompt`` on each engine. One look-up per hash scheme, whatever the number of engines.

        ``elsewhere``: what other replicas know of shared stores, by hash scheme (``shared_part``).
        """
        answers: dict[str, EngineHit] = {}
        native: dict[HashScheme, list[Seat]] = {}
        for engine_id in engine_ids:
            seat = self.seat(engine_id)
            if (isinstance(seat, EngineHit) or not seat.proven) and self._offer(engine_id, prompt):
                seat = self.seat(engine_id)
            if isinstance(seat, EngineHit):
                answers[engine_id] = seat
            elif seat.learned is not None:
                rows = self.index.lookup(seat.learned.translate(prompt.hashes(seat.scheme)))
                answers |= seat_hits(rows, prompt.num_tokens, [seat], detail=detail)
            else:
                native.setdefault(seat.scheme, []).append(seat)
        for scheme, seats in native.items():
            rows = self.index.lookup(prompt.hashes(scheme))
            told = None if elsewhere is None else elsewhere.get(scheme)
            if told is not None and told.num_hashes == rows.num_hashes:
                rows = Rows(rows.num_hashes, rows.columns | told.columns)
            self._confirm(rows, seats)
            answers |= seat_hits(rows, prompt.num_tokens, seats, detail=detail)
        return answers

    def _offer(self, engine_id: str, prompt: HashedPrompt) -> bool:
        """Show the prompt to an engine whose scheme is not proven; whether that changed anything."""
        engine = self._engines.get(engine_id)
        if engine is None or engine.detection is not Detection.WAITING:
            return False
        return engine.offer(prompt.token_ids, prompt.extras)

    def _confirm(self, rows: Rows, seats: list[Seat]) -> None:
        """What an engine holds of a prompt proves the scheme it was hashed by."""
        for seat in seats:
            if not seat.proven and rows.holds(GPU, seat.slot):
                self._engines[seat.engine_id].confirm(seat.scheme)

    def seat(self, engine_id: str) -> Seat | EngineHit:
        """All a prediction needs of one engine, or the answer that nothing can be predicted and why."""
        engine = self._engines.get(engine_id)
        if engine is None:
            return EngineHit(engine_id, "unknown", why_unknown="no events yet")
        cached = self._seats.get(engine_id)
        if cached is not None and cached[0] == engine.revision:
            return cached[1]
        scheme, layout = engine.scheme, engine.layout
        mode: Mode = "native" if engine.learned is None else "learned"
        if self._remembered is not None and engine.detection is Detection.WAITING:
            scheme, layout = _assumed(*self._remembered, layout)
        elif layout is None and self.facts.shared_stores:
            scheme, layout = self._alike()
        if scheme is None and engine.assumed is not None:
            scheme, layout, mode = engine.assumed, engine.layout, "assumed"
        if scheme is None or layout is None:
            return EngineHit(engine_id, "unknown", why_unknown=_why_unknown(engine))
        if layout.missing_facts:
            why = f"configure {', '.join(layout.missing_facts)} for this model"
            return EngineHit(engine_id, "unknown", why_unknown=why)
        slot = self.index.slot(engine_id)
        proven = engine.detection is not Detection.WAITING
        place = slot or NOWHERE
        seat = Seat(engine_id, scheme, layout, place, engine.learned, engine.stores, mode, proven=proven)
        if slot is not None:
            self._seats[engine_id] = engine.revision, seat
        return seat

    def _alike(self) -> tuple[HashScheme | None, CacheLayout | None]:
        """What another engine of the model has: a new one that loads from the same store is expected to be
        like it. Its GPU is known to be empty, so nothing but what it would load rests on that."""
        for engine in self._engines.values():
            if engine.detection is Detection.NATIVE and engine.layout is not None:
                return engine.scheme, engine.layout
        return None, None

    def _known_schemes(self) -> list[HashScheme]:
        """Schemes other engines of this fleet were found to use: the likeliest for a new one."""
        schemes = [e.scheme for e in self._engines.values() if e.detection is Detection.NATIVE]
        if self._remembered is not None:
            schemes.append(self._remembered[0])
        return list(dict.fromkeys(scheme for scheme in schemes if scheme is not None))


def _assumed(
    scheme: HashScheme, remembered: CacheLayout, own: CacheLayout | None
) -> tuple[HashScheme | None, CacheLayout]:
    """What to predict with until the engine's scheme is detected; no scheme where its groups contradict."""
    if own is None or set(own.groups) <= set(remembered.groups):
        return scheme, remembered
    alike = own.hash_block_size == scheme.hash_block_size and own.lookahead == scheme.lookahead
    return (scheme if alike else None), own


class Seat(NamedTuple):
    """All that a prediction needs of one engine."""

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


NOWHERE = Slot(-1, 0)
"""A word no column has: the rows of an engine that stored nothing yet are empty."""


def seat_hits(rows: Rows, num_tokens: int, seats: list[Seat], *, detail: bool) -> dict[str, EngineHit]:
    """The hit of each seat, all of one hash scheme, from the rows of that scheme's hashes."""
    offload = any(plane.medium != GPU for plane, _ in rows.columns)
    on_gpu = _per_word(lambda layout, word: evaluate(rows, layout, num_tokens, word=word, detail=detail))
    outside = _per_word(
        lambda layout, word: reach(rows, layout, num_tokens, word, on_gpu(layout, word), detail=detail)
    )
    answers: dict[str, EngineHit] = {}
    for engine_id, _, layout, (word, bit), _, stores, mode, _ in seats:
        gpu = on_gpu(layout, word)
        hit, cpu, storage = gpu.hit[bit], 0, 0
        more: tuple[Reach, ...] = ()
        if offload:
            more = usable(outside(layout, word), stores)
            by_medium = loaded(more, bit, hit, first=layout.first_connector_loads)
            cpu, storage = by_medium.get(CPU, 0), by_medium.get(STORAGE, 0)
        by_class = _class_hits(layout, gpu, more, bit) if detail else ()
        answers[engine_id] = EngineHit(
            engine_id, mode, hit, cpu, storage, gpu.trunk[bit], layout.alignment, by_class
        )
    return answers


def _class_hits(
    layout: CacheLayout, on_gpu: WordHits, reaches: Sequence[Reach], bit: int
) -> tuple[ClassHit, ...]:
    """Every class by itself, for one engine; only explanations ask for it."""
    hits = []
    for number, spec_class in enumerate(layout.classes):
        tokens = on_gpu.by_class[number][bit]
        furthest = {GPU: tokens}
        for medium in (CPU, STORAGE):
            there = [each.by_class[number][bit] for r in reaches for name, each in r.layers if name == medium]
            furthest[medium] = tokens = max([tokens, *there])
        hits.append(ClassHit(spec_class.label, furthest[GPU], furthest))
    return tuple(hits)


def _per_word(compute: Callable[[CacheLayout, int], _T]) -> Callable[[CacheLayout, int], _T]:
    """``compute`` once per (layout object, word): engines laid out alike share the object."""
    done: dict[tuple[int, int], _T] = {}

    def once(layout: CacheLayout, word: int) -> _T:
        key = (id(layout), word)
        if key not in done:
            done[key] = compute(layout, word)
        return done[key]

    return once


def _why_unknown(engine: EngineResidency) -> str:
    if engine.layout is None:
        return "no stored blocks seen yet"
    return f"hash scheme not detected yet ({engine.detection})"
