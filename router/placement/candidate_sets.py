"""Lists of engines with what their prompts are looked up by: models, frontends and hash schemes.

Most requests have the same eligible engines, so what follows from a list is kept until it changes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import msgspec

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.router.fleet.status import Fleet, Frontend
from kvatlas.router.index.learn.layout import CacheLayout
from kvatlas.router.index.model_indexes import ModelIndexes
from kvatlas.router.index.search_order import hits_behind
from kvatlas.router.placement.engine import Engine


class CandidateSet(msgspec.Struct):
    """Some engines: their frontends with their hash schemes, the first engine's first, and the ids of those
    that publish events, by model and frontend. ``guessed``: some have shadows; ``dropping``: schemes of those
    that may prove a hit by a block behind the last token but one."""

    schemes: list[tuple[Frontend, HashScheme]] = []
    by_model: dict[tuple[str, Frontend], list[str]] = {}
    guessed: bool = False
    dropping: set[HashScheme] = set()


NO_CANDIDATES = CandidateSet()


class CandidateSets:
    """Candidate sets of one fleet. Hash schemes are known from ``scopes``, or from other replicas.

    A list of most engines of a model is looked up with the set of all of them: what an engine has that is not
    in the list is found and left aside. So a retry, a breaker, or an engine that goes down or is drained
    makes no new set, and the index no new plan, of nearly all engines.
    """

    def __init__(self, fleet: Fleet[Engine], scopes: ModelIndexes) -> None:
        self._fleet = fleet
        self._scopes = scopes
        self._changes = -1, -1
        self._last = _KeptSet([], NO_CANDIDATES)
        self._whole: dict[str, _KeptSet | None] = {}
        """By model, of all its engines; None: not made yet."""

    def get(self, engines: Sequence[Engine]) -> CandidateSet:
        """Return a set that has these engines, and perhaps others; it must not be changed."""
        changes = self._fleet.setups, self._scopes.changes
        if changes != self._changes:
            self._changes = changes
            self._whole.clear()
            self._last = _KeptSet([], NO_CANDIDATES)
        last = self._last
        if engines is last.listed and not last.passing:
            return last.found
        model = engines[0].base_model if engines else None
        if model is not None:
            serving = self._fleet.serving(model)
            if 2 * len(engines) >= len(serving):
                kept = self._whole.get(model)
                if kept is None or not kept.holds:
                    kept = self._whole[model] = _KeptSet(serving, candidate_set(serving))
                if kept.engines.issuperset(engines):
                    self._last = kept.listing(engines)
                    return kept.found
        if self._last.listed != engines or not self._last.holds:
            self._last = _KeptSet(engines, candidate_set(engines))
        return self._last.found


class _KeptSet:
    """A set of these engines."""

    def __init__(self, engines: Sequence[Engine], found: CandidateSet) -> None:
        self.listed = engines
        self.engines = frozenset(engines)
        self.found = found
        # Schemes that may change without a change of fleet and scopes.
        self.passing = [(one, one.scheme) for one in engines if one.lasting_scheme is None]

    @property
    def holds(self) -> bool:
        """Whether no engine has another scheme by now."""
        return not self.passing or all(engine.scheme == scheme for engine, scheme in self.passing)

    def listing(self, engines: Sequence[Engine]) -> _KeptSet:
        """Return the same set for a list of some of them."""
        found = copy.copy(self)
        found.listed = engines
        return found


def candidate_set(engines: Sequence[Engine]) -> CandidateSet:
    """Build the set."""
    found = CandidateSet()
    hashed: dict[tuple[Frontend, HashScheme], None] = {}
    layouts: dict[tuple[CacheLayout, HashScheme], None] = {}
    for engine in engines:
        frontend, scheme, model = engine.frontend, engine.scheme, engine.base_model
        hashed[frontend, scheme] = None
        layout = engine.layout
        if layout is not None:
            layouts[layout, scheme] = None
        if engine.shadow is not None:
            found.guessed = True
        if model is not None and engine.publishes_events:
            found.by_model.setdefault((model, frontend), []).append(engine.engine_id)
    found.schemes.extend(hashed)
    found.dropping.update([scheme for layout, scheme in layouts if hits_behind(layout)])
    return found
