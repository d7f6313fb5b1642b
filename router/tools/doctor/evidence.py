"""Everything the doctor found out, for the checks to read: plain data, no sockets."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from router.config.schema import Config, ModelConfig
from router.fleet.identity import EngineAddress
from router.fleet.statement import EngineStatement
from router.fleet.status import ModelCard
from router.index.engine import EngineResidency
from router.prompts.origin.model_config import ModelConfigFile
from router.prompts.origin.problem import TokenizerProblem
from router.tools.doctor.gather.http import EngineGauges, HttpAnswer
from router.tools.doctor.gather.listener import EventCounts
from router.tools.doctor.gather.observation import Observation, ReplayComparison, ReplayState
from router.tools.doctor.gather.stores import StoredOf

# What each vLLM release before the current ones lacks for exact routing.


Version = tuple[int, int]

EVENT_SOURCES_SINCE: Version = (0, 31)
FIXED_SEED_SINCE: Version = (0, 29)
MAP_ENCODING_SINCE: Version = (0, 24)
NEWEST_KNOWN: Version = (0, 33)


class MissingFeature(msgspec.Struct, frozen=True):
    """Something that releases before ``since`` lack; ``severe`` where predictions suffer without a remedy."""

    since: Version
    what: str
    remedy: str
    severe: bool


LACKS = (
    MissingFeature(
        (0, 20),
        "events do not name the KV cache group, so models with several groups cannot be predicted",
        "upgrade to 0.24 or later, or serve single-group models only",
        severe=True,
    ),
    MissingFeature(
        (0, 22),
        "events do not tell kind and window of a group",
        "upgrade, or set models.NAME.kinds and models.NAME.windows",
        severe=True,
    ),
    MissingFeature(
        MAP_ENCODING_SINCE,
        "events are arrays; with unequal block sizes large blocks are hashed in another way",
        "upgrade, or serve models whose groups have equal block sizes",
        severe=False,
    ),
    MissingFeature(
        FIXED_SEED_SINCE,
        "the hash seed is random unless PYTHONHASHSEED is set",
        "set the same PYTHONHASHSEED for all engines and name it in models.NAME.hash_seeds",
        severe=False,
    ),
    MissingFeature(
        EVENT_SOURCES_SINCE,
        "no /kv_event_sources, and LoRA and salt keys are hashed in the old way",
        "give events= and replay= with each --engine",
        severe=False,
    ),
)


def parse_version(text: str) -> Version | None:
    """(major, minor) of a version such as ``0.32.0+cpu``; None where there is none."""
    found = re.match(r"v?(\d{1,4})\.(\d{1,4})(?:\.|$|[^\d])", text)
    return None if found is None else (int(found[1]), int(found[2]))


def lacks(version: Version) -> list[MissingFeature]:
    """What this release lacks."""
    return [lack for lack in LACKS if version < lack.since]


class EventSource(msgspec.Struct):
    """One rank's entry of an engine's ``GET /kv_event_sources``."""

    enable_kv_cache_events: bool = True
    publisher: str | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: int | None = None


class ServerEvidence(msgspec.Struct):
    """The HTTP side of one server; its data-parallel ranks share it."""

    health: HttpAnswer
    models_answer: HttpAnswer
    version_answer: HttpAnswer
    sources_answer: HttpAnswer
    metrics_answer: HttpAnswer
    models: tuple[ModelCard, ...] = ()
    version_text: str = ""
    sources: dict[str, EventSource | None] | None = None
    """None where the answer is not understood or there was none."""
    server_info: EngineStatement | None = None
    """Statement of ``/server_info``, where it is enabled."""

    @property
    def version(self) -> Version | None:
        return parse_version(self.version_text)


class PromptParity(msgspec.Struct, frozen=True):
    """One prompt tokenized here and by the engine. ``differs_at`` None: the same, or not comparable."""

    name: str
    local_tokens: int | None = None
    engine_tokens: int | None = None
    differs_at: int | None = None
    local_problem: str = ""
    engine_problem: str = ""

    @property
    def compared(self) -> bool:
        return not (self.local_problem or self.engine_problem)


class ProbeRequest(msgspec.Struct, frozen=True):
    """One request sent by ``--probe``; tokens. None: not known, or not reported."""

    status: str
    """Empty if it was answered."""
    predicted: int | None = None
    mode: str = ""
    why_unknown: str = ""
    cached: int | None = None
    prompt_tokens: int | None = None
    """As computed here, or by the engine's endpoint."""
    reported_prompt_tokens: int | None = None
    events_came: bool = False
    """Whether an event arrived after it within the time allowed."""

    @property
    def lengths_differ(self) -> bool:
        """Whether the engine counts other tokens than are counted here."""
        known = None not in {self.prompt_tokens, self.reported_prompt_tokens}
        return known and self.prompt_tokens != self.reported_prompt_tokens


class ProbeEvidence(msgspec.Struct):
    """The probe of one engine: a new prompt, and a longer one that begins with it."""

    requests: list[ProbeRequest] = []
    problem: str = ""


class LoadRequest(msgspec.Struct, frozen=True):
    """One request of the load, and the blocks that the engine stored for it."""

    kind: str
    request: ProbeRequest
    stored: StoredOf | None = None
    """None where prompt, hash scheme or groups are not known."""


class LoadEvidence(msgspec.Struct):
    """A small generated load on one engine, request by request in the order they were sent."""

    requests: list[LoadRequest] = msgspec.field(default_factory=list)
    uncompared: int = 0
    """Requests sent at once, whose hits depend on each other."""
    uncompared_cached_tokens: int = 0
    """As their answers reported."""
    filled_tokens: int = 0
    """Prompt tokens sent to fill the pool; 0: it is too large, or its size is not known."""
    evicted: bool = False
    """Whether that made the engine remove blocks."""
    out_of_time: bool = False
    problem: str = ""
    replay: ReplayComparison | None = None
    before: EngineGauges = EngineGauges()
    after: EngineGauges = EngineGauges()

    @property
    def sent(self) -> int:
        """All requests of the load."""
        return len(self.requests) + self.uncompared


class EngineEvidence(msgspec.Struct):
    """One engine (one data-parallel rank)."""

    engine: EngineAddress
    """With the event endpoints the server told, where none were configured."""
    server: ServerEvidence
    model_config: ModelConfig
    lora_paths: dict[str, str]
    gauges: EngineGauges
    sockets: Observation | None = None
    tally: EventCounts = msgspec.field(default_factory=EventCounts)
    residency: EngineResidency | None = None
    parity: list[PromptParity] = []
    tokenizer: str = ""
    """Where the tokenizer is from: a directory, or a repository and its commit; "": none is here."""
    model_file: ModelConfigFile = ModelConfigFile()
    """What the ``config.json`` beside it says."""
    tokenizer_problem: TokenizerProblem | None = None
    """Why the one that the engine or the configuration names is not here."""
    tokenized_by: str | None = None
    """The library that tokenizes here, and why not a faster one."""
    time_zone: str | None = None
    """That of the date in prompts made here; None: no date is in them."""
    unreadable: str | None = None
    """Why chats of this model cannot be rendered here, and what to do about it."""
    probe: ProbeEvidence | None = None
    expected_model: str = ""
    """The served name asked for by the user; empty: any."""
    load: LoadEvidence | None = None
    """None: no load was sent."""
    removals: dict[str, int] = {}
    """Copies of GPU blocks, by what events did: ``stored``, ``removed``, ``unknown`` (removed without a
    store)."""
    router_tokenizers: dict[str, str] | None = None
    """Of a running router: the library by configured model; None where no router was asked, or it does not
    say."""
    sources_ignored: bool = False
    """Whether event endpoints were configured, so that the server's own were not used."""

    @property
    def engine_id(self) -> str:
        return self.engine.engine_id

    @property
    def event_endpoint(self) -> str | None:
        """Of this rank, as the engine itself names it; None where it does not."""
        sources = self.server.sources or {}
        source = sources.get(str(self.engine.dp_rank or 0)) if len(sources) > 1 else None
        only = next(iter(sources.values()), None) if len(sources) == 1 else source
        return None if only is None else only.endpoint

    @property
    def history_complete(self) -> bool:
        """Whether every batch since the engine's start was heard."""
        seen = self.sockets
        if seen is None or seen.replay_state is not ReplayState.COMPLETE or seen.missing:
            return False
        return not seen.restarts and not seen.first_seq

    @property
    def base_model(self) -> str | None:
        return next((card.id for card in self.server.models if card.parent is None), None)


class RouterEvidence(msgspec.Struct):
    """A running router's own view; ``engines`` by engine id, None where the answer is not understood."""

    url: str
    ready: HttpAnswer
    engines_answer: HttpAnswer
    receipts_answer: HttpAnswer
    metrics_answer: HttpAnswer
    version_text: str = ""
    engines: dict[str, dict[str, Any]] | None = None
    sources: dict[str, dict[str, Any]] | None = None
    """Where its engines come from; None where it does not say."""
    tokenizers: dict[str, str] | None = None
    """The library that tokenizes, by configured model; None where it does not say."""


class Evidence(msgspec.Struct):
    """All of it."""

    config: Config
    engines: list[EngineEvidence]
    router: RouterEvidence | None = None
    probed: bool = False
    seconds: float = 0.0
