"""Which engines exist, what they serve, and whether they answer: the fleet as last seen.

Pure bookkeeping; ``poller.py`` feeds it. A server with several data-parallel ranks is one engine per rank
here, since each rank has its own cache. Always true: every engine id occurs once; an engine that was never
seen up serves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar, cast

import msgspec

from router.fleet.desired import DesiredFleet
from router.fleet.identity import EngineAddress
from router.fleet.statement import EngineStatement


class ModelCard(msgspec.Struct, frozen=True):
    """One entry of an engine's ``GET /v1/models``; ``parent`` names the base model of a LoRA."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    object: str = "model"
    created: int = 0
    """vLLM says when it was asked: no part of what the card is."""
    owned_by: str = "vllm"

    def same_as(self, other: ModelCard) -> bool:
        return msgspec.structs.replace(self, created=other.created) == other


class EngineStatus:
    """One engine as last seen. ``problem`` says why it is not up, ``kv_usage`` is the share of its KV blocks
    in use as its metrics say (0..1). What every request asks for is worked out when it changes."""

    __slots__ = (
        *("_asleep", "_fleet_changed", "_held", "_models", "_silent", "_up", "answers", "base_model"),
        *("engine", "engine_id"),
        *("emptied", "kv_usage", "pool_blocks", "problem", "server_info", "started", "stated", "transfers"),
        "version",
    )

    def __init__(self, engine: EngineAddress, *, fleet_changed: Callable[[], None] = lambda: None) -> None:
        self.engine = engine
        self.engine_id = engine.engine_id
        self.base_model: str | None = None
        """The model whose cache the engine holds: the first card that is not a LoRA."""
        self.problem = "not contacted yet"
        self.kv_usage: float | None = None
        self.pool_blocks: int | None = None
        """Blocks of its KV pool, as its metrics say."""
        self.stated: EngineStatement | None = None
        """What its metrics state of its set-up."""
        self.server_info: EngineStatement | None = None
        """The same from ``/server_info``, where that is enabled."""
        self.version: str | None = None
        """What it runs, as ``GET /version`` says; asked of engines with a role only."""
        self.started: float | None = None
        """When its API process began, as its metrics say: seconds since the epoch."""
        self.transfers: dict[str, float] = {}
        """Transfers of KV that went wrong, as its metrics count them."""
        self.answers = 0
        """Answers to clients that it began or ended: signs of life between two polls."""
        self.emptied: float | None = None
        """Calls of its server that emptied its cache, as its metrics count them; None: not known yet."""
        self._up = False
        self._silent = False
        self._held = ""
        self._asleep = False
        self._models: tuple[ModelCard, ...] = ()
        self._fleet_changed = fleet_changed

    @property
    def up(self) -> bool:
        return self._up

    @up.setter
    def up(self, up: bool) -> None:
        if up != self._up:
            self._up = up
            self._fleet_changed()

    @property
    def silent(self) -> bool:
        """It is down since polls timed out, and for no other reason: it may be busy only."""
        return self._silent

    @silent.setter
    def silent(self, silent: bool) -> None:
        if silent != self._silent:
            self._silent = silent
            self._fleet_changed()

    @property
    def overdue(self) -> bool:
        """Requests wait for it longer than expected: it should be polled now."""
        return False

    @property
    def held(self) -> str:
        """Why it gets no new requests although it may be up; "": it gets them."""
        return self._held

    @held.setter
    def held(self, why: str) -> None:
        if why != self._held:
            self._held = why
            self._fleet_changed()

    @property
    def asleep(self) -> bool:
        """It says that it sleeps: it holds nothing and can answer nothing."""
        return self._asleep

    @asleep.setter
    def asleep(self, asleep: bool) -> None:
        if asleep != self._asleep:
            self._asleep = asleep
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

    def close(self) -> None:
        """It left the fleet: whatever was kept of it goes. Called once, by the fleet."""


E = TypeVar("E", bound=EngineStatus)
E_co = TypeVar("E_co", bound=EngineStatus, covariant=True)


class EngineFactory(Protocol[E_co]):
    """Makes the fleet's object of an engine: an ``EngineStatus``, or more than that."""

    def __call__(self, engine: EngineAddress, /, *, fleet_changed: Callable[[], None]) -> E_co: ...


class Reassigned(msgspec.Struct):
    """What an assignment changed, by base URL and by engine id."""

    new: list[str] = []
    """Servers that came."""
    dropped: list[str] = []
    """Servers that left, or that are others now at the same address."""
    touched: list[str] = []
    """Servers whose engines were given other addresses."""
    moved: list[str] = []
    """Ids of engines with new addresses."""
    gone: list[str] = []
    """Ids of engines that left."""


class Fleet(Generic[E]):
    """All engines, each one object from when it comes until it leaves (``close``)."""

    def __init__(self, engines: Iterable[EngineAddress] = (), make: EngineFactory[E] | None = None) -> None:
        self._make = make if make is not None else cast("EngineFactory[E]", EngineStatus)
        self._configured: dict[str, EngineAddress] = {engine.engine_id: engine for engine in engines}
        self._holds: dict[str, str] = {}
        self._identities: dict[str, str] = {}
        self._ready: dict[str | None, list[E]] = {}
        self._adapters: frozenset[str] | None = None
        self._roles: bool | None = None
        self.changes = 0
        """How often anything of what is asked here may have changed."""
        self._status: dict[str, E] = {n: self._new(engine) for n, engine in self._configured.items()}

    def __iter__(self) -> Iterator[E]:
        return iter(self._status.values())

    def __len__(self) -> int:
        return len(self._status)

    def get(self, engine_id: str) -> E | None:
        """The engine's status, or None if there is no such engine."""
        return self._status.get(engine_id)

    def ranks(self, base_url: str) -> list[E]:
        """The engines of one server."""
        return [status for status in self._status.values() if status.engine.base_url == base_url]

    def configured(self, base_url: str) -> list[EngineAddress]:
        """The engines of one server as they were given, whatever it said of itself since."""
        return [engine for engine in self._configured.values() if engine.base_url == base_url]

    def replace(self, base_url: str, engines: Sequence[EngineAddress]) -> tuple[list[str], list[str]]:
        """What this server's engines are from now on. Returns the ids with new addresses, and those gone."""
        wanted = {engine.engine_id: engine for engine in engines}
        gone: list[str] = [s.engine_id for s in self.ranks(base_url) if s.engine_id not in wanted]
        for engine_id in gone:
            self._status.pop(engine_id).close()
        changed: list[str] = []
        for engine_id, engine in wanted.items():
            status = self._status.get(engine_id)
            if status is None:
                status = self._status[engine_id] = self._new(engine)
            elif status.engine != engine:
                status.engine = engine
                changed.append(engine_id)
        self._changed()
        return changed, gone

    def assign(self, wanted: DesiredFleet) -> Reassigned:
        """These engines make the fleet from now on; what is known of those that stay is kept."""
        given, had = _by_server(wanted.engines), _by_server(self._configured.values())
        self._configured = {engine.engine_id: engine for engine in wanted.engines}
        changes = Reassigned()
        for base_url in had:
            other = self._identities.get(base_url), wanted.identities.get(base_url)
            if base_url not in given or (all(other) and other[0] != other[1]):
                changes.dropped.append(base_url)
                changes.gone += self.replace(base_url, ())[1]
        for base_url, engines in given.items():
            if base_url not in had or base_url in changes.dropped:
                changes.new.append(base_url)
                self.replace(base_url, engines)
            elif engines != had[base_url]:
                changes.touched.append(base_url)
                moved, gone = self.replace(base_url, engines)
                changes.moved += moved
                changes.gone += gone
        self._holds = wanted.holds
        self._identities = {url: self._identities.get(url, "") for url in given} | wanted.identities
        for status in self._status.values():
            status.held = self._why_held(status.engine)
        return changes

    def _why_held(self, engine: EngineAddress) -> str:
        return self._holds.get(engine.engine_id) or self._holds.get(engine.base_url, "")

    def ready(self, model: str | None) -> list[E]:
        """Engines that answer, are awake, not held, and serve ``model`` (None: any), in a stable order; not
        to be changed. Where none of them gives answers to clients, those that are silent as well."""
        found = self._ready.get(model)
        if found is None:
            free = [s for s in self._status.values() if not s.held and not s.asleep and s.models]
            serving = [status for status in free if model is None or status.serves(model)]
            found = [status for status in serving if status.up]
            if not any(status.engine.answers for status in found):
                found = [status for status in serving if status.up or status.silent]
            if found:  # a name nobody serves is the client's, and there is no end of those
                self._ready[model] = found
        return found

    def _new(self, engine: EngineAddress) -> E:
        status = self._make(engine, fleet_changed=self._changed)
        status.held = self._why_held(engine)
        return status

    def is_adapter(self, model: str) -> bool:
        """Whether any engine serves ``model`` as a LoRA of another one."""
        if self._adapters is None:
            self._adapters = frozenset(
                card.id for status in self._status.values() for card in status.models if card.parent
            )
        return model in self._adapters

    def _changed(self) -> None:
        self._ready.clear()
        self._adapters = None
        self._roles = None
        self.changes += 1

    @property
    def has_roles(self) -> bool:
        """Whether any engine computes prompts for others, or fetches what they computed."""
        if self._roles is None:
            self._roles = any(status.engine.role is not None for status in self._status.values())
        return self._roles

    def knows(self, model: str) -> bool:
        """Whether any engine, also one that is down now, was ever seen to serve ``model``."""
        return any(status.serves(model) for status in self._status.values())

    def model_cards(self) -> list[ModelCard]:
        """Models served by engines that are ready: one card per id, the smallest ``max_model_len`` of all."""
        cards: dict[str, ModelCard] = {}
        usable = self.ready(None)
        silent = [s for s in self._status.values() if s.silent and s not in usable]
        usable = usable + [s for s in silent if any(s in self.ready(card.id) for card in s.models)]
        for card in (card for status in usable for card in status.models):
            known = cards.get(card.id)
            lengths = [
                c.max_model_len for c in (card, known) if c is not None and c.max_model_len is not None
            ]
            cards[card.id] = msgspec.structs.replace(known or card, max_model_len=min(lengths, default=None))
        return list(cards.values())


def _by_server(engines: Iterable[EngineAddress]) -> dict[str, list[EngineAddress]]:
    found: dict[str, list[EngineAddress]] = {}
    for engine in engines:
        found.setdefault(engine.base_url, []).append(engine)
    return found
