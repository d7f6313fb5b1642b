"""One residency per model. Equal block hashes mean equal prefixes only within one model, so every base model
has a ``FleetResidency`` of its own. An engine belongs to at most one model; when it returns with another
model, its earlier residency is discarded.
"""

from __future__ import annotations

from collections.abc import Callable

from kvatlas.publisher.events import DecodedBatch
from kvatlas.router.index.base import Index
from kvatlas.router.index.engine import EngineResidency
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.model import FleetResidency, Residency


class ModelIndexes:
    """Base model -> residency of the engines that serve it; the sink of all feeds."""

    def __init__(
        self,
        facts_of: Callable[[str], ModelFacts],
        index_of: Callable[[str], Index] | None = None,
        *,
        applied: Callable[[str], None] = lambda engine_id: None,
        made: Callable[[str, Index], None] = lambda model, index: None,
    ) -> None:
        """Create an empty mapping.

        Args:

          index_of: Creates the index of a model; without it every model has one in memory.

          applied: Called with the engine's id after each batch and each snapshot.

          made: Called with each model's new index.
        """
        self._facts_of = facts_of
        self._index_of = index_of
        self._applied = applied
        self._made = made
        self._by_model: dict[str, FleetResidency] = {}
        self._model_of: dict[str, str] = {}
        self._slices = 0
        # Number of possible changes of knowledge about engines' hashes and groups.
        self.changes = 0

    def assign(self, engine_id: str, base_model: str) -> Residency:
        """Record the model that the engine serves from now on. Returns the engine's residency."""
        if self._model_of.get(engine_id) != base_model:
            self.remove(engine_id)
            self._model_of[engine_id] = base_model
        return self.scope(base_model).residency(engine_id)

    def scope(self, base_model: str) -> FleetResidency:
        """Return the residency of one model, created on first use."""
        found = self._by_model.get(base_model)
        if found is None:
            found = self._by_model[base_model] = self._new_scope(base_model)
        return found

    def _new_scope(self, base_model: str) -> FleetResidency:
        index = None if self._index_of is None else self._index_of(base_model)
        made = FleetResidency(self._facts_of(base_model), index, changed=self._changed)
        self._made(base_model, made.index)
        return made

    def _changed(self) -> None:
        self.changes += 1

    def models(self) -> dict[str, FleetResidency]:
        return self._by_model

    def engine(self, engine_id: str) -> EngineResidency | None:
        """Return the writer of one engine; None before it was assigned."""
        model = self._model_of.get(engine_id)
        return None if model is None else self.scope(model).engine(engine_id)

    def apply(self, engine_id: str, batch: DecodedBatch) -> None:
        """Feed sink: apply one batch, in order. An engine that was never assigned has no feed."""
        self.scope(self._model_of[engine_id]).apply(engine_id, batch)
        self._applied(engine_id)

    def forget(self, engine_id: str) -> None:
        """Feed sink: the engine restarted."""
        if engine_id in self._model_of:
            self.scope(self._model_of[engine_id]).forget(engine_id)

    def stage(self, engine_id: str, batch: DecodedBatch) -> None:
        """Feed sink: apply a piece of a snapshot."""
        self.scope(self._model_of[engine_id]).stage(engine_id, batch)

    def adopt(self, engine_id: str) -> None:
        """Feed sink: the snapshot is complete and replaces the residency."""
        self.scope(self._model_of[engine_id]).adopt(engine_id)
        self._applied(engine_id)

    def unstage(self, engine_id: str) -> None:
        """Feed sink: the snapshot failed."""
        if engine_id in self._model_of:
            self.scope(self._model_of[engine_id]).unstage(engine_id)

    def age(self, now_s: float) -> None:
        """Expire shared-store blocks older than the TTL.

        Call it periodically with a monotonic time in seconds.
        """
        for scope in self._by_model.values():
            scope.age(now_s)

    def check_integrity(self) -> list[str]:
        """Recount every index; returns one sentence per contradiction."""
        return [problem for scope in self._by_model.values() for problem in scope.check_integrity()]

    def remove(self, engine_id: str) -> None:
        """Remove an engine that left, or serves another model now."""
        model = self._model_of.pop(engine_id, None)
        if model is not None:
            self.scope(model).remove(engine_id)

    def relearn(self, base_model: str) -> None:
        """Discard a model whose facts changed: its engines must be assigned again."""
        for engine_id in [one for one, model in self._model_of.items() if model == base_model]:
            self.remove(engine_id)
        self._by_model.pop(base_model, None)

    def advance_detection(self) -> bool:
        """Run one slice of one running seed search, round robin; True while any is left."""
        searching = [engine for scope in self._by_model.values() for engine in scope.searching()]
        if not searching:
            return False
        self._slices += 1
        searching[self._slices % len(searching)].advance_detection()
        return True

    def refill(self, now_s: float) -> None:
        """Refill the learning budgets; call it several times a second with a monotonic time."""
        for scope in self._by_model.values():
            scope.refill(now_s)
