"""Which engines exist, what they serve, and whether they answer: the fleet as last seen.

Pure bookkeeping; ``poller.py`` feeds it. A server with several data-parallel ranks is one engine per rank
here, since each rank has its own cache. Always true: every engine id occurs once; an engine that was never
seen up serves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from router.fleet.engine import Engine


class ModelCard(msgspec.Struct, frozen=True):
    """One entry of an engine's ``GET /v1/models``; ``parent`` names the base model of a LoRA."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    object: str = "model"
    created: int = 0
    owned_by: str = "vllm"


class EngineStatus:
    """One engine as last seen. ``problem`` says why it is not up, ``kv_usage`` is the share of its KV blocks
    in use as its metrics say (0..1). What every request asks for is worked out when it changes."""

    __slots__ = (
        *("_draining", "_fleet_changed", "_models", "_up", "base_model", "engine", "engine_id"),
        *("kv_usage", "pool_blocks", "problem"),
    )

    def __init__(self, engine: Engine, *, fleet_changed: Callable[[], None] = lambda: None) -> None:
        self.engine = engine
        self.engine_id = engine.engine_id
        self.base_model: str | None = None
        """The model whose cache the engine holds: the first card that is not a LoRA."""
        self.problem = "not contacted yet"
        self.kv_usage: float | None = None
        self.pool_blocks: int | None = None
        """Blocks of its KV pool, as its metrics say."""
        self._up = False
        self._draining = False
        self._models: tuple[ModelCard, ...] = ()
        self._fleet_changed = fleet_changed

    @property
    def up(self) -> bool:
        return self._up

    @up.setter
    def up(self, up: bool) -> None:
        self._up = up
        self._fleet_changed()

    @property
    def draining(self) -> bool:
        return self._draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self._draining = draining
        self._fleet_changed()

    @property
    def models(self) -> tuple[ModelCard, ...]:
        return self._models

    @models.setter
    def models(self, models: tuple[ModelCard, ...]) -> None:
        self._models = models
        self.base_model = next((card.id for card in models if card.parent is None), None)
        self._fleet_changed()

    @property
    def publishes_events(self) -> bool:
        return self.engine.events is not None

    def serves(self, model: str) -> bool:
        return any(card.id == model for card in self._models)


class Fleet:
    """All engines."""

    def __init__(self, engines: Iterable[Engine] = ()) -> None:
        self._configured = {engine.engine_id: engine for engine in engines}
        self._ready: dict[str | None, list[EngineStatus]] = {}
        self._status = {name: self._new(engine) for name, engine in self._configured.items()}

    def __iter__(self) -> Iterator[EngineStatus]:
        return iter(self._status.values())

    def __len__(self) -> int:
        return len(self._status)

    def get(self, engine_id: str) -> EngineStatus | None:
        """The engine's status, or None if there is no such engine."""
        return self._status.get(engine_id)

    def ranks(self, base_url: str) -> list[EngineStatus]:
        """The engines of one server."""
        return [status for status in self._status.values() if status.engine.base_url == base_url]

    def configured(self, base_url: str) -> list[Engine]:
        """The engines of one server as they were given, whatever it said of itself since."""
        return [engine for engine in self._configured.values() if engine.base_url == base_url]

    def replace(self, base_url: str, engines: Sequence[Engine]) -> tuple[list[str], list[str]]:
        """What this server's engines are from now on. Returns the ids with new addresses, and those gone."""
        wanted = {engine.engine_id: engine for engine in engines}
        gone = [s.engine_id for s in self.ranks(base_url) if s.engine_id not in wanted]
        for engine_id in gone:
            del self._status[engine_id]
        changed = []
        for engine_id, engine in wanted.items():
            status = self._status.setdefault(engine_id, self._new(engine))
            if status.engine != engine:
                status.engine = engine
                changed.append(engine_id)
        self._ready.clear()
        return changed, gone

    def ready(self, model: str | None) -> list[EngineStatus]:
        """Engines that answer and serve ``model`` (None: any), in a stable order; not to be changed."""
        found = self._ready.get(model)
        if found is None:
            up = [status for status in self._status.values() if status.up and not status.draining]
            found = [status for status in up if model is None or status.serves(model)]
            if found:  # a name nobody serves is the client's, and there is no end of those
                self._ready[model] = found
        return found

    def _new(self, engine: Engine) -> EngineStatus:
        return EngineStatus(engine, fleet_changed=self._ready.clear)

    def knows(self, model: str) -> bool:
        """Whether any engine, also one that is down now, was ever seen to serve ``model``."""
        return any(status.serves(model) for status in self._status.values())

    def model_cards(self) -> list[ModelCard]:
        """Models served by engines that are up: one card per id, the smallest ``max_model_len`` of all."""
        cards: dict[str, ModelCard] = {}
        for card in (card for status in self.ready(None) for card in status.models):
            known = cards.get(card.id)
            lengths = [
                c.max_model_len for c in (card, known) if c is not None and c.max_model_len is not None
            ]
            cards[card.id] = msgspec.structs.replace(known or card, max_model_len=min(lengths, default=None))
        return list(cards.values())
