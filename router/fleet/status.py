"""State of the fleet: which engines exist, what they serve, and whether they answer.

Pure bookkeeping, updated by ``poller.py``. A server with several data-parallel ranks is one engine per rank,
since each rank has its own cache. Invariants: every engine id occurs once; an engine that was never up serves
nothing.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Final, Generic, Literal, NamedTuple, Protocol, TypeVar, cast

import msgspec

from router.fleet.desired import DesiredFleet
from router.fleet.identity import EngineAddress
from router.fleet.statement import EngineStatement, metrics_statement

# API server of vLLM that tokenizes requests: each gives other tokens for some bodies.
Frontend = Literal["python", "rust"]


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
        """Return the frontend, by the owner that ``vllm-rs`` states (vLLM 0.33, observed)."""
        return "rust" if self.owned_by == "vllm-frontend-rs" else "python"


class EngineStatus:
    """Last known state of one engine. ``problem``: why it is not up; ``kv_usage``: share of its KV blocks in
    use according to its metrics (0..1). Values that every request needs are computed when they change."""

    __slots__ = (
        *("_asleep", "_fleet_changed", "_held", "_models", "_silent", "_up", "answers", "base_model"),
        *("engine", "engine_id"),
        *("emptied", "kv_usage", "pool_blocks", "problem", "server_info", "started", "stated", "transfers"),
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
        # Its set-up according to its metrics.
        self.stated: EngineStatement | None = None
        # Its set-up according to ``/server_info``, if that is enabled.
        self.server_info: EngineStatement | None = None
        # Its version, from ``GET /version``; only queried for engines with a role.
        self.version: str | None = None
        # Start of its API process in seconds since the epoch, from its metrics.
        self.started: float | None = None
        # Failed KV transfers, as counted by its metrics.
        self.transfers: dict[str, float] = {}
        # Responses to clients that it started or finished: signs of life between two polls.
        self.answers = 0
        # Server calls that emptied its cache, as counted by its metrics; None: not known yet.
        self.emptied: float | None = None
        self._up = False
        self._silent = False
        self._held = ""
        self._asleep = False
        self._models: tuple[ModelCard, ...] = ()
        self._fleet_changed = fleet_changed

    @property
    def frontend(self) -> Frontend:
        """Return its frontend, from the first of its model cards."""
        return self._models[0].frontend if self._models else "python"

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
        """Whether it is down only because polls timed out: it may just be busy."""
        return self._silent

    @silent.setter
    def silent(self, silent: bool) -> None:
        if silent != self._silent:
            self._silent = silent
            self._fleet_changed()

    @property
    def overdue(self) -> bool:
        """Whether requests wait for it longer than expected: it should be polled now."""
        return False

    @property
    def held(self) -> str:
        """Why it gets no new requests even if it is up; "": it gets them."""
        return self._held

    @held.setter
    def held(self, why: str) -> None:
        if why != self._held:
            self._held = why
            self._fleet_changed()

    @property
    def asleep(self) -> bool:
        """Whether it reports that it sleeps: its cache is empty and it cannot answer."""
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
        self._configured: dict[str, EngineAddress] = {engine.engine_id: engine for engine in engines}
        self._holds: dict[str, str] = {}
        self._identities: dict[str, str] = {}
        self._ready: dict[str | None, list[E]] = {}
        self._frontends: dict[str | None, tuple[Frontend, ...]] = {}
        self._adapters: frozenset[str] | None = None
        self._roles: bool | None = None
        # Changes whenever an answer of this class may have changed.
        self.changes = 0
        self._status: dict[str, E] = {n: self._new(engine) for n, engine in self._configured.items()}

    def __iter__(self) -> Iterator[E]:
        return iter(self._status.values())

    def __len__(self) -> int:
        return len(self._status)

    def get(self, engine_id: str) -> E | None:
        """The engine's status, or None if there is no such engine."""
        return self._status.get(engine_id)

    def ranks(self, base_url: str) -> list[E]:
        """Return the engines of one server."""
        return [status for status in self._status.values() if status.engine.base_url == base_url]

    def configured(self, base_url: str) -> list[EngineAddress]:
        """Return the engines of one server as configured, regardless of what it reported since."""
        return [engine for engine in self._configured.values() if engine.base_url == base_url]

    def replace(self, base_url: str, engines: Sequence[EngineAddress]) -> tuple[list[str], list[str]]:
        """Set the engines of this server. Returns the ids with new addresses, and the removed ones."""
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
        """Replace the fleet; the known state of remaining engines is kept."""
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
        """Return the engines that answer, are awake, not held, and serve ``model`` (None: any), in a stable
        order; do not modify the result. If none of them responds to clients, silent engines are included."""
        found = self._ready.get(model)
        if found is None:
            free = [s for s in self._status.values() if not s.held and not s.asleep and s.models]
            serving = [status for status in free if model is None or status.serves(model)]
            found = [status for status in serving if status.up]
            if not any(status.engine.answers for status in found):
                found = [status for status in serving if status.up or status.silent]
            if found:  # do not store unknown names: they come from clients and are unbounded in number
                self._ready[model] = found
        return found

    def frontends(self, model: str | None) -> tuple[Frontend, ...]:
        """Return the distinct frontends of the ready engines of ``model``; Python's first."""
        found = self._frontends.get(model)
        if found is None:
            ready = self.ready(model)
            found = tuple(sorted({status.frontend for status in ready}))
            if ready:
                self._frontends[model] = found
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
        self._frontends.clear()
        self.changes += 1

    @property
    def has_roles(self) -> bool:
        """Whether any engine computes prompts for others, or fetches what they computed."""
        if self._roles is None:
            self._roles = any(status.engine.role is not None for status in self._status.values())
        return self._roles

    def knows(self, model: str) -> bool:
        """Whether any engine, up or down, was ever seen to serve ``model``."""
        return any(status.serves(model) for status in self._status.values())

    def model_cards(self) -> list[ModelCard]:
        """Return the models of ready engines: one card per id, with the smallest ``max_model_len``."""
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


# Reads an engine's Prometheus page: its load, and the size of its pool.
#
# Pure functions over the page's bytes; invalid numbers are omitted.


# Larger gauges are invalid; using them would overflow the cost of the engine.
_GAUGE_MAX = 1e9
# Patterns begin with letters, which ``re`` finds ten times as fast as ``^`` (22 instead of 275 us in vLLM
# 0.32's page of 58 KB), and stay within a line; ``_samples_of`` keeps the matches at the start of one.
_GAUGE = re.compile(
    rb"vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)(?:\{([^}\n]*)\})?[ \t]+(\S+)"
)
_TRANSFERS = re.compile(
    rb"vllm:nixl_(num_failed_transfers|num_failed_notifications|num_kv_expired_reqs|"
    rb"num_notifications_after_expiry)(?:_total)?(?:\{([^}\n]*)\})?[ \t]+(\S+)"
)
_POOL = re.compile(rb"vllm:cache_config_info\{([^}\n]*)\}")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_DRAFTS = re.compile(rb"vllm:spec_decode_num_drafts(?:_total)?(?:\{([^}\n]*)\})?[ \t]+(\S*)")
_ZEROS = frozenset({b"0", b"0.0"})
_POOL_BLOCKS = re.compile(rb'num_gpu_blocks="(\d{1,12})"')
_AWAKE = re.compile(rb'vllm:engine_sleep_state\{([^}\n]*sleep_state="awake"[^}\n]*)\}[ \t]+(\S+)')
_STARTED = re.compile(rb"process_start_time_seconds[ \t]+(\S+)")
_EMPTIED = re.compile(
    rb"vllm:sleep_mode_operation_duration_seconds_count"
    rb'\{[^}\n]*operation="(?:sleep|release_kv_cache_memory)"[^}\n]*\}[ \t]+(\S+)'
)
_NEWLINE = ord("\n")
_RANK = re.compile(rb'engine="(\d{1,6})"')


def _samples_of(pattern: re.Pattern[bytes], text: bytes) -> Iterator[re.Match[bytes]]:
    """Yield matches at the start of a line: elsewhere they are help texts, types or label values."""
    for match in pattern.finditer(text):
        if not match.start() or text[match.start() - 1] == _NEWLINE:
            yield match


def read_pool_blocks(text: bytes, dp_rank: int | None) -> int | None:
    """Return the number of blocks of the KV pool of one rank, or of the largest; None if the page lacks
    it."""
    sizes = []
    for match in _samples_of(_POOL, text):
        rank, blocks = _RANK.search(match[1]), _POOL_BLOCKS.search(match[1])
        if blocks is not None and (dp_rank is None or rank is None or int(rank[1]) == dp_rank):
            sizes.append(int(blocks[1]))
    return max(sizes, default=None)


def read_statement(text: bytes, dp_rank: int | None) -> EngineStatement | None:
    """Return the set-up of this rank as stated by the page; None if it states nothing."""
    rows = [match for match in _samples_of(_POOL, text) if _is_of(match[1], dp_rank)]
    labels = dict(_LABEL.findall(rows[0][1].decode("utf-8", "replace"))) if rows else {}
    drafts = any(
        _is_of(match[1] or b"", dp_rank) and (labels or match[2] not in _ZEROS)
        for match in _samples_of(_DRAFTS, text)
    )
    return metrics_statement(labels, drafts=drafts)


def _is_of(labels: bytes, dp_rank: int | None) -> bool:
    rank = _RANK.search(labels)
    return dp_rank is None or rank is None or int(rank[1]) == dp_rank


def read_asleep(text: bytes, dp_rank: int | None) -> bool:
    """Whether this rank, or any rank, reports that it sleeps (vLLM's sleep mode, which drops the cache)."""
    for match in _samples_of(_AWAKE, text):
        rank = _RANK.search(match[1])
        if dp_rank is None or rank is None or int(rank[1]) == dp_rank:
            try:
                if float(match[2]) == 0:
                    return True
            except ValueError:
                continue
    return False


def read_started(text: bytes) -> float | None:
    """Return the start of the process behind this page, in seconds since the epoch (prometheus_client's
    ``ProcessCollector``); None if the page lacks it."""
    match = next(_samples_of(_STARTED, text), None)
    try:
        started = math.nan if match is None else float(match[1])
    except ValueError:
        return None
    return started if 0 < started < math.inf else None


def read_emptied(text: bytes) -> float:
    """Return how often ``/sleep`` or ``/release_kv_cache_memory`` was called at this server; each call
    empties the cache of all its ranks (vLLM 0.32, entrypoints/serve/dev/sleep/metrics.py)."""
    calls = 0.0
    for match in _samples_of(_EMPTIED, text):
        try:
            number = float(match[1])
        except ValueError:
            continue
        calls += number if 0 <= number <= _GAUGE_MAX else 0.0
    return calls


def read_transfers(text: bytes, dp_rank: int | None) -> dict[str, float]:
    """Return NIXL's counters of failed transfers, by its names without prefix; only those of one rank if
    ``dp_rank`` is given. Counters that were never incremented are absent."""
    found: dict[str, float] = {}
    for name, value in _samples(_TRANSFERS, text, dp_rank):
        if value < math.inf:
            short = name.removeprefix("num_")
            found[short] = found.get(short, 0.0) + value
    return found


def read_gauges(text: bytes, dp_rank: int | None) -> dict[str, float]:
    """Return vLLM's gauges of a metrics page; only those of one rank if ``dp_rank`` is given.

    Requests are summed over models and ranks; of the usage (0..1) the maximum is taken. Invalid values (NaN,
    negative, infinite) are omitted.
    """
    gauges: dict[str, float] = {}
    for name, value in _samples(_GAUGE, text, dp_rank):
        if value <= _GAUGE_MAX:
            known = gauges.get(name, 0.0)
            gauges[name] = max(known, value) if name == "kv_cache_usage_perc" else known + value
    return gauges


def _samples(pattern: re.Pattern[bytes], text: bytes, dp_rank: int | None) -> Iterator[tuple[str, float]]:
    """Yield name and value of each sample of this rank, or of all: numbers that are not negative."""
    for match in _samples_of(pattern, text):
        rank = _RANK.search(match[2] or b"")
        if dp_rank is not None and rank is not None and int(rank[1]) != dp_rank:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if value >= 0:  # NaN is not
            yield match[1].decode(), value


# Engine and tenant of each response of the Responses API. Follow-ups, GET and cancel must go to that engine,
# and are allowed only to the tenant that made the response.
#
# Learned from responses made through this router, and looked up at others that may know (``sources``: sibling
# workers, a shared index). Bounded: the oldest are dropped first, and an engine's responses are dropped when
# it leaves. Invariant: a response stays with the tenant that it was first seen with.


RESPONSES_MAX: Final = 100_000
_ID_CHARS_MAX: Final = 128


class HeldResponse(NamedTuple):
    """A response's engine, and the tenant whose key made it; "" without client keys."""

    engine_id: str
    tenant: str = ""


class ResponseHolders:
    """Response id -> engine id and tenant."""

    def __init__(self, responses_max: int = RESPONSES_MAX) -> None:
        self._max = responses_max
        self._held: OrderedDict[str, HeldResponse] = OrderedDict()
        # Queried in turn for unknown responses; they end in time and raise nothing.
        self.sources: list[Callable[[str], Awaitable[HeldResponse | None]]] = []
        # Called for each response recorded here.
        self.listeners: list[Callable[[str, HeldResponse], None]] = []

    def __len__(self) -> int:
        return len(self._held)

    def record(self, response_id: str, engine_id: str, tenant: str = "") -> None:
        """Record that this engine made this response. Ids longer than any engine makes are ignored."""
        held = HeldResponse(engine_id, tenant)
        if self.learn(response_id, held):
            for listener in self.listeners:
                listener(response_id, held)

    def learn(self, response_id: str, held: HeldResponse) -> bool:
        """Record a response reported by another worker or replica. False if it already has another tenant."""
        known = self._held.get(response_id)
        if len(response_id) > _ID_CHARS_MAX or (known is not None and known.tenant != held.tenant):
            return False
        self._held[response_id] = held
        self._held.move_to_end(response_id)
        if len(self._held) > self._max:
            self._held.popitem(last=False)
        return True

    def known(self, response_id: str) -> HeldResponse | None:
        """Look a response up in this process only."""
        return self._held.get(response_id)

    def holder(self, response_id: str | None) -> str | None:
        """Return the engine that made it, if known in this process."""
        held = None if response_id is None else self._held.get(response_id)
        return None if held is None else held.engine_id

    async def find(self, response_id: str) -> HeldResponse | None:
        """Look a response up in this process, then at ``sources``."""
        if response_id in self._held or len(response_id) > _ID_CHARS_MAX:
            return self._held.get(response_id)
        for source in self.sources:
            held = await source(response_id)
            if held is not None:
                self.learn(response_id, held)
                return self._held.get(response_id)
        return None

    def forget(self, engine_id: str) -> None:
        """Drop the responses of an engine that left."""
        for response_id in [r for r, held in self._held.items() if held.engine_id == engine_id]:
            del self._held[response_id]
