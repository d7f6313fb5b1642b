"""State of the fleet: which engines exist, what they serve, and whether they answer.

Pure bookkeeping, updated by ``poller.py``. A server with several data-parallel ranks is one engine per rank,
since each rank has its own cache. Invariants: every engine id occurs once; an engine that was never up serves
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Final, Generic, Literal, NamedTuple, Protocol, TypeVar, cast

import msgspec

from kvatlas.router.fleet.engine_metrics import SleepState
from kvatlas.router.fleet.engines import NOT_READY, DesiredFleet, EngineAddress, EngineKind
from kvatlas.router.fleet.salt_proof import DROPPED_BY_SGLANG, SaltProof, first_guess
from kvatlas.router.fleet.statement import EngineStatement
from kvatlas.router.fleet.versions import Version, parse_version

# API server that tokenizes requests, vLLM's or SGLang's: each gives other tokens for some bodies.
Frontend = Literal["python", "rust", "sglang"]
# The first vLLM with ``return_token_ids``.
_SAYS_IDS: Final[Version] = (0, 10, 2)


class ModelCard(msgspec.Struct, frozen=True):
    """One entry of an engine's ``GET /v1/models``; ``parent`` names the base model of a LoRA."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    object: str = "model"
    created: int = 0
    """vLLM sets this to the time of the request, so it is not compared."""
    owned_by: str = "vllm"

    def same_as(self, other: ModelCard) -> bool:
        return msgspec.structs.replace(self, created=other.created) == other

    @property
    def frontend(self) -> Frontend:
        """Return the frontend by the stated owner: of ``vllm-rs`` (vLLM 0.33, observed), or of SGLang
        (srt/entrypoints/openai/protocol.py, 0.5.23)."""
        if self.owned_by == "sglang":
            return "sglang"
        return "rust" if self.owned_by == "vllm-frontend-rs" else "python"


def kind_of(
    engine: EngineAddress | None, stated: EngineStatement | None, models: Sequence[ModelCard]
) -> EngineKind:
    """Return the software of an engine: as configured, else as stated by ``/server_info`` or its models."""
    if engine is not None and engine.kind is not None:
        return engine.kind
    if stated is not None:
        return stated.kind
    return "sglang" if models and models[0].frontend == "sglang" else "vllm"


@lru_cache(maxsize=4096)
def _names(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(names)


class ModelLengths(NamedTuple):
    """Context lengths of the engines that serve a model, in tokens: prompt and answer together."""

    shortest: float
    longest: float
    of: dict[str, float]
    """By engine id; infinite where an engine does not say."""


_T = TypeVar("_T")


class _Noted(Generic[_T]):
    """An attribute of ``EngineStatus``, whose changes the fleet notes. ``comes_and_goes``: it tells whether
    the engine can be asked now, and nothing of what it is."""

    def __init__(self, *, comes_and_goes: bool) -> None:
        self._comes_and_goes = comes_and_goes

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, status: EngineStatus, owner: type) -> _T:
        value: _T = getattr(status, self._name)
        return value

    def __set__(self, status: EngineStatus, value: _T) -> None:
        if value != getattr(status, self._name):
            setattr(status, self._name, value)
            if self._comes_and_goes:
                status.usable_changed()
            else:
                status.fleet_changed()


class EngineStatus:
    """Last known state of one engine. ``problem``: why it is not up; ``kv_usage``: share of its KV blocks in
    use according to its metrics (0..1). Values that every request needs are computed when they change."""

    __slots__ = (
        "_asleep",
        "_held",
        "_lengths",
        "_models",
        "_server_info",
        "_silent",
        "_up",
        "adapters",
        "answers",
        "base_model",
        "ends_s",
        "engine",
        "engine_id",
        "fleet_changed",
        "kv_usage",
        "obeys_hints",
        "pool_blocks",
        "problem",
        "salt_proof",
        "served",
        "sleep",
        "started",
        "stated",
        "transfers",
        "unreachable",
        "usable_changed",
        "version",
    )

    def __init__(self, engine: EngineAddress, *, fleet_changed: Callable[[], None] = lambda: None) -> None:
        self.engine = engine
        self.engine_id = engine.engine_id
        # Model whose cache the engine holds: the first card that is not a LoRA.
        self.base_model: str | None = None
        self.problem = "not contacted yet"
        self.kv_usage: float | None = None
        # Number of blocks of its KV pool, from its metrics.
        self.pool_blocks: int | None = None
        # Whether its connector obeys retention hints, according to its metrics.
        self.obeys_hints = False
        # Its set-up according to its metrics.
        self.stated: EngineStatement | None = None
        self._server_info: EngineStatement | None = None
        # Its version, from ``GET /version``; only queried for engines with a role, and where engines pull or
        # streams go on from others.
        self.version: str | None = None
        # Start of its API process in seconds since the epoch, from its metrics.
        self.started: float | None = None
        # Failed KV transfers, as counted by its metrics.
        self.transfers: dict[str, float] = {}
        # Responses to clients that it started or finished: signs of life between two polls.
        self.answers = 0
        # APIs that keep prompts with different salts apart; None: not tried.
        self.salt_proof: SaltProof | None = None
        # Its sleep mode, by its metrics; None: not known yet.
        self.sleep: SleepState | None = None
        # Whether the last poll got no answer at all.
        self.unreachable = False
        self._up = False
        self._silent = False
        # Unix time by which its streams must have ended, while it is held and that is known.
        self.ends_s: float | None = None
        self._held = ""
        self._asleep = False
        self._models: tuple[ModelCard, ...] = ()
        # Names of all its models, and of its adapters; engines with the same ones share these objects.
        self.served = self.adapters = _names(())
        # Context lengths by model; None: of the base model.
        self._lengths: dict[str | None, float] = {}
        # Called after each change that the fleet notes.
        self.fleet_changed = self.usable_changed = fleet_changed

    @property
    def frontend(self) -> Frontend:
        """Return its frontend: SGLang's, or vLLM's by the first of its model cards."""
        if self.kind == "sglang":
            return "sglang"
        return "rust" if self._models and self._models[0].frontend == "rust" else "python"

    @property
    def kind(self) -> EngineKind:
        """Return its software."""
        return kind_of(self.engine, self._server_info, self._models)

    @property
    def says_ids(self) -> bool:
        """Whether it is known to say the ids of the tokens of a stream: vLLM since 0.10.2 behind its Python
        frontend. The Rust frontend (0.33) has other events, and SGLang none; either may refuse the field."""
        if self.frontend != "python" or self.version is None:
            return False
        version = parse_version(self.version)
        return version is not None and version >= _SAYS_IDS

    server_info: _Noted[EngineStatement | None] = _Noted(comes_and_goes=False)
    """Its set-up according to ``/server_info``, if it serves that."""
    up: _Noted[bool] = _Noted(comes_and_goes=True)
    silent: _Noted[bool] = _Noted(comes_and_goes=True)
    """Whether it is down only because polls timed out: it may just be busy."""
    held: _Noted[str] = _Noted(comes_and_goes=True)
    """Why it gets no new requests even if it is up; "": it gets them."""
    asleep: _Noted[bool] = _Noted(comes_and_goes=True)
    """Whether it reports that it sleeps, so that it cannot answer."""

    @property
    def overdue(self) -> bool:
        """Whether requests wait for it longer than expected: it should be polled now."""
        return False

    @property
    def models(self) -> tuple[ModelCard, ...]:
        return self._models

    @models.setter
    def models(self, models: tuple[ModelCard, ...]) -> None:
        self._models = models
        self.base_model = next((card.id for card in models if card.parent is None), None)
        # The first card with a length counts.
        self._lengths = {}
        for card in models:
            if card.max_model_len is not None and card.max_model_len > 0:
                self._lengths.setdefault(card.id, card.max_model_len)
                if card.parent is None:
                    self._lengths.setdefault(None, card.max_model_len)
        self.served = _names(tuple([card.id for card in models]))
        self.adapters = _names(tuple([card.id for card in models if card.parent is not None]))
        self.fleet_changed()

    @property
    def publishes_events(self) -> bool:
        return self.engine.events is not None

    def serves(self, model: str) -> bool:
        return model in self.served

    def context_tokens(self, model: str | None) -> float:
        """Return the context length for a model or adapter (None: its base model); infinite if unknown."""
        # vLLM's cards of adapters have none: theirs is that of the base model.
        return self._lengths.get(model, self._lengths.get(None, math.inf))

    def close(self) -> None:
        """Release its state when it leaves the fleet. Called once, by the fleet."""


E = TypeVar("E", bound=EngineStatus)
E_co = TypeVar("E_co", bound=EngineStatus, covariant=True)


class EngineFactory(Protocol[E_co]):
    """Makes the fleet's object of an engine: an ``EngineStatus`` or a subclass."""

    def __call__(self, engine: EngineAddress, /, *, fleet_changed: Callable[[], None]) -> E_co: ...


class Reassigned(msgspec.Struct):
    """Changes made by an assignment, by base URL and by engine id."""

    new: list[str] = []
    """Servers that joined."""
    dropped: list[str] = []
    """Servers that left, or were replaced by others at the same address."""
    touched: list[str] = []
    """Servers whose engines have new addresses."""
    moved: list[str] = []
    """Ids of engines with new addresses."""
    gone: list[str] = []
    """Ids of engines that left."""


class Fleet(Generic[E]):
    """All engines; each is one object from joining to leaving (``close``)."""

    def __init__(self, engines: Iterable[EngineAddress] = (), make: EngineFactory[E] | None = None) -> None:
        self._make = make if make is not None else cast("EngineFactory[E]", EngineStatus)
        self._configured = _by_server(engines)
        self._holds: dict[str, str] = {}
        self._ends_s: dict[str, float] = {}
        self._identities: dict[str, str] = {}
        self._serving: dict[str | None, list[E]] = {}
        """Engines by a model that they serve; models of the same engines share one list."""
        self._of_alike: dict[tuple[int, ...], list[E]] = {}
        self._names: dict[int, frozenset[str]] | None = None
        self._up: set[E] = set()
        """Engines that can be asked now."""
        self._up_or_silent: set[E] = set()
        self._ready: dict[int, list[E]] = {}
        """By the identity of a list in ``_serving``."""
        self._empty: list[E] = []
        self._frontends: dict[str | None, tuple[Frontend, ...]] = {}
        self.lengths_of: dict[str | None, ModelLengths] = {}
        """Results of ``lengths``, until something changes."""
        self._adapters: frozenset[str] | None = None
        self._known: frozenset[str] | None = None
        self._cards: list[ModelCard] | None = None
        # Changes whenever an answer of this class may have changed.
        self.changes = 0
        # The same without engines that only come up, go down, fall asleep or are held.
        self.setups = 0
        self._status: dict[str, E] = {}
        self._servers: dict[str, list[E]] = {}
        for base_url, listed in self._configured.items():
            self._replace(base_url, listed)
        self.has_roles = self._any_role()
        """Whether any engine computes prompts for others, or fetches what they computed."""
        self.needs_salt_proofs = False
        """Caches are isolated: no API of an engine is used for that before it is tried."""

    def __iter__(self) -> Iterator[E]:
        return iter(self._status.values())

    def __len__(self) -> int:
        return len(self._status)

    def __contains__(self, engine_id: object) -> bool:
        return engine_id in self._status

    def get(self, engine_id: str) -> E | None:
        return self._status.get(engine_id)

    def base_url(self, engine_id: str) -> str | None:
        """Implement ``WatchedFleet``."""
        status = self._status.get(engine_id)
        return None if status is None else status.engine.base_url

    def leaves(self, engine_id: str) -> bool:
        """Implement ``WatchedFleet``."""
        status = self._status.get(engine_id)
        return status is None or status.asleep or status.held not in ("", NOT_READY)

    def ranks(self, base_url: str) -> list[E]:
        """Return the engines of one server; do not modify the result."""
        return self._servers.get(base_url, [])

    def configured(self, base_url: str) -> list[EngineAddress]:
        """Return the engines of one server as configured, regardless of what it reported since."""
        return self._configured.get(base_url, [])

    def replace(self, base_url: str, engines: Sequence[EngineAddress]) -> tuple[list[str], list[str]]:
        """Set the engines of this server. Returns the ids with new addresses, and the removed ones."""
        found = self._replace(base_url, engines)
        self.has_roles = self._any_role()
        self._changed()
        return found

    def _replace(self, base_url: str, engines: Sequence[EngineAddress]) -> tuple[list[str], list[str]]:
        wanted = {engine.engine_id: engine for engine in engines}
        gone: list[str] = [s.engine_id for s in self.ranks(base_url) if s.engine_id not in wanted]
        left = [self._status.pop(engine_id) for engine_id in gone]
        if left:
            self._up.difference_update(left)
            self._up_or_silent.difference_update(left)
            self._changed()  # requests that move away from one must not find another one that has left
        for one in left:
            one.usable_changed = self._usable_changed
            one.close()
        changed: list[str] = []
        for engine_id, engine in wanted.items():
            status = self._status.get(engine_id)
            if status is None:
                status = self._status[engine_id] = self._new(engine)
            elif status.engine != engine:
                status.engine = engine
                changed.append(engine_id)
        if wanted:
            self._servers[base_url] = [self._status[engine_id] for engine_id in wanted]
        else:
            self._servers.pop(base_url, None)
        return changed, gone

    def assign(self, wanted: DesiredFleet) -> Reassigned:
        """Replace the fleet; the known state of remaining engines is kept."""
        given, had = _by_server(wanted.engines), self._configured
        self._configured = given
        changes = Reassigned()
        for base_url in had:
            other = self._identities.get(base_url), wanted.identities.get(base_url)
            if base_url not in given or (all(other) and other[0] != other[1]):
                changes.dropped.append(base_url)
                changes.gone += self._replace(base_url, ())[1]
        for base_url, engines in given.items():
            if base_url not in had or base_url in changes.dropped:
                changes.new.append(base_url)
                self._replace(base_url, engines)
            elif engines != had[base_url]:
                changes.touched.append(base_url)
                moved, gone = self._replace(base_url, engines)
                changes.moved += moved
                changes.gone += gone
        self.has_roles = self._any_role()
        self._changed()
        self._holds, self._ends_s = wanted.holds, wanted.ends_s
        self._identities = {url: self._identities.get(url, "") for url in given} | wanted.identities
        for status in self._status.values():
            self._hold(status)
        return changes

    def _hold(self, status: E) -> None:
        """Set why an engine gets no new requests, and until when those that it has must have ended."""
        names = status.engine_id, status.engine.base_url
        status.held = next((why for name in names if (why := self._holds.get(name, ""))), "")
        status.ends_s = min((self._ends_s[name] for name in names if name in self._ends_s), default=None)

    def why_unsalted(self, engine: EngineStatus, path: str) -> str:
        """Why prompts of this API cannot be isolated at an engine, to be read behind the path; "": they
        can."""
        if engine.salt_proof is not None:
            return engine.salt_proof.why_not(path)
        if self.needs_salt_proofs:
            return "is not tried yet"
        return "" if path in first_guess(engine.kind) else DROPPED_BY_SGLANG

    def ready(self, model: str | None) -> list[E]:
        """Return the engines that answer, are awake, not held, and serve ``model`` (None: any), in a stable
        order; do not modify the result. If none of them responds to clients, silent engines are included."""
        serving = self._serving.get(model) or self.serving(model)
        found = self._ready.get(id(serving))
        if found is None:
            found = list(filter(self._up.__contains__, serving))
            if not any(status.engine.answers for status in found):
                found = list(filter(self._up_or_silent.__contains__, serving))
            self._ready[id(serving)] = found
        return found

    def serving(self, model: str | None) -> list[E]:
        """Return the engines that serve ``model`` (None: any), whether they answer or not, in the fleet's
        order; do not modify the result."""
        found = self._serving.get(model)
        if found is None:
            # Names come from clients: one that no engine has costs no look at every engine, and is not kept.
            if model is not None and not self.knows(model):
                return self._empty
            # Adapters that the same engines have, which is usual, share one list, and so all that follows.
            alike = tuple(
                [key for key, names in self._served().items() if model in names or (model is None and names)]
            )
            found = self._of_alike.get(alike)
            if found is None:
                keys = set(alike)
                found = [one for one in self._status.values() if id(one.served) in keys]
                self._of_alike[alike] = found
            self._serving[model] = found
        return found

    def _served(self) -> dict[int, frozenset[str]]:
        """Sets of names, by identity: engines with the same names share one."""
        if self._names is None:
            self._names = {id(one.served): one.served for one in self._status.values()}
        return self._names

    def _note_usable(self, status: E) -> None:
        """Note that this engine came up, went down, fell asleep, or is held; or no longer."""
        for engines, usable in ((self._up, status.up), (self._up_or_silent, status.up or status.silent)):
            if usable and not status.held and not status.asleep:
                engines.add(status)
            else:
                engines.discard(status)
        self._usable_changed()

    def frontends(self, model: str | None) -> tuple[Frontend, ...]:
        """Return the distinct frontends of the ready engines of ``model``; Python's first."""
        found = self._frontends.get(model)
        if found is None:
            ready = self.ready(model)
            found = tuple(sorted({status.frontend for status in ready}))
            if ready:
                self._frontends[model] = found
        return found

    def lengths(self, model: str | None) -> ModelLengths:
        """Return the context lengths of all engines, up or down, that serve ``model`` (None: any)."""
        found = self.lengths_of.get(model)
        if found is None:
            of: dict[str, float] = {
                status.engine_id: status.context_tokens(model) for status in self.serving(model)
            }
            known = of.values()
            found = ModelLengths(min(known, default=math.inf), max(known, default=math.inf), of)
            if of:
                self.lengths_of[model] = found
        return found

    def _new(self, engine: EngineAddress) -> E:
        status = self._make(engine, fleet_changed=self._changed)
        status.usable_changed = partial(self._note_usable, status)
        self._hold(status)
        return status

    def is_adapter(self, model: str) -> bool:
        """Whether any engine serves ``model`` as a LoRA of another one."""
        return model in self.adapters

    @property
    def adapters(self) -> frozenset[str]:
        """LoRA adapters that any engine serves, up or down."""
        if self._adapters is None:
            self._adapters = _union([status.adapters for status in self._status.values()])
        return self._adapters

    def _changed(self) -> None:
        self._serving.clear()
        self._of_alike.clear()
        self.lengths_of.clear()
        self._names = self._adapters = self._known = None
        self.setups += 1
        self._usable_changed()

    def _usable_changed(self) -> None:
        self._ready.clear()
        self._cards = None
        self._frontends.clear()
        self.changes += 1

    def _any_role(self) -> bool:
        return any(status.engine.role is not None for status in self._status.values())

    def knows(self, model: str) -> bool:
        """Whether any engine, up or down, was ever seen to serve ``model``."""
        if self._known is None:
            self._known = frozenset[str]().union(*self._served().values())
        return model in self._known

    def model_cards(self) -> list[ModelCard]:
        """Return the models of ready engines: one card per id, with the smallest ``max_model_len``."""
        if self._cards is None:
            self._cards = self._join_cards()
        return self._cards

    def _join_cards(self) -> list[ModelCard]:
        usable = self.ready(None)
        known = {id(status) for status in usable}
        silent = [one for one in self._status.values() if one.silent and id(one) not in known]
        if silent:
            # Of models that no engine answers for.
            used = {id(one) for name in _union([one.served for one in silent]) for one in self.ready(name)}
            usable = usable + [one for one in silent if id(one) in used]
        cards: dict[str, ModelCard] = {}
        lengths: dict[str, int | None] = {}
        for status in usable:
            for card in status.models:
                length, least = card.max_model_len, lengths.get(card.id)
                cards.setdefault(card.id, card)
                lengths[card.id] = (
                    length if least is None or (length is not None and length < least) else least
                )
        return [msgspec.structs.replace(card, max_model_len=lengths[name]) for name, card in cards.items()]


def _union(names: Iterable[frozenset[str]]) -> frozenset[str]:
    # Engines with the same names share one set.
    return frozenset().union(*{id(one): one for one in names}.values())


def _by_server(engines: Iterable[EngineAddress]) -> dict[str, list[EngineAddress]]:
    found: dict[str, list[EngineAddress]] = {}
    for engine in engines:
        found.setdefault(engine.base_url, []).append(engine)
    return found
