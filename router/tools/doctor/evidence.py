"""Evidence about engines, servers and routers that the checks of the doctor read."""

from __future__ import annotations

from typing import Any

import msgspec

from kvatlas.router.config.schema import Config, ModelConfig
from kvatlas.router.fleet.engine_probe import EngineProbe, ProbeRequest
from kvatlas.router.fleet.engines import EngineAddress, EngineKind
from kvatlas.router.fleet.salt_proof import SaltProof
from kvatlas.router.fleet.statement import EngineStatement
from kvatlas.router.fleet.status import Frontend, ModelCard, kind_of
from kvatlas.router.fleet.versions import Version, parse_version
from kvatlas.router.index.engine import EngineResidency
from kvatlas.router.observe.findings import Finding
from kvatlas.router.openai.apis import COMPLETION
from kvatlas.router.prompts.hub import TokenizerProblem
from kvatlas.router.prompts.model_config import ModelConfigFile
from kvatlas.router.tools.doctor.engine_gauges import EngineGauges
from kvatlas.router.tools.doctor.event_counts import EventCounts
from kvatlas.router.tools.doctor.http import HttpAnswer
from kvatlas.router.tools.doctor.listener import Observation, ReplayState


class EventSource(msgspec.Struct):
    """One rank's entry of an engine's ``GET /kv_event_sources``."""

    enable_kv_cache_events: bool = True
    publisher: str | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: int | None = None


class ServerEvidence(msgspec.Struct):
    """The HTTP side of one server, shared by its data-parallel ranks."""

    health: HttpAnswer
    models_answer: HttpAnswer
    version_answer: HttpAnswer
    sources_answer: HttpAnswer
    metrics_answer: HttpAnswer
    models: tuple[ModelCard, ...] = ()
    version_text: str = ""
    sources: dict[str, EventSource | None] | None = None
    """None if there was no response, or it was not understood."""
    is_router: bool = False
    """Whether it answers as a kvatlas router does."""
    server_info: EngineStatement | None = None
    """Statement of ``/server_info``, if it is enabled."""

    @property
    def version(self) -> Version | None:
        return parse_version(self.version_text)


class PromptParity(msgspec.Struct, frozen=True):
    """One prompt tokenized here and by the engine. ``differs_at`` None: equal, or not comparable."""

    name: str
    local_tokens: int | None = None
    engine_tokens: int | None = None
    differs_at: int | None = None
    local_problem: str = ""
    engine_problem: str = ""

    @property
    def compared(self) -> bool:
        return not (self.local_problem or self.engine_problem)


class ProbeEvidence(msgspec.Struct):
    """The probe of one engine: what it has shown, and its requests by API."""

    found: EngineProbe
    requests: dict[str, list[ProbeRequest]] = {}
    salts: SaltProof = msgspec.field(default_factory=SaltProof)
    problem: str = ""

    @property
    def completions(self) -> list[ProbeRequest]:
        """Requests of the API that every engine of a language model has."""
        return self.requests.get(COMPLETION, [])


class EngineEvidence(msgspec.Struct):
    """One engine (one data-parallel rank)."""

    engine: EngineAddress
    """With the event endpoints named by the server, if none were configured."""
    server: ServerEvidence
    model_config: ModelConfig
    lora_paths: dict[str, str]
    gauges: EngineGauges
    sockets: Observation | None = None
    event_counts: EventCounts = msgspec.field(default_factory=EventCounts)
    residency: EngineResidency | None = None
    parity: list[PromptParity] = []
    tokenizer: str = ""
    """Source of the tokenizer: a directory, or a repository and its commit; "": none is available here."""
    model_file: ModelConfigFile = ModelConfigFile()
    """Content of the ``config.json`` beside the tokenizer."""
    tokenizer_problem: TokenizerProblem | None = None
    """Why the tokenizer named by the engine or the configuration is not available here."""
    tokenized_by: str | None = None
    """Library that tokenizes here, and why a faster one is not used."""
    time_zone: str | None = None
    """Time zone of the date in prompts rendered here; None: prompts contain no date."""
    unreadable: str | None = None
    """Why chats of this model cannot be rendered here, and the remedy."""
    probe: ProbeEvidence | None = None
    removals: dict[str, int] = {}
    """Copies of GPU blocks by effect of events:

    ``stored``, ``removed``, ``unknown`` (removed without a store).
    """
    router_tokenizers: dict[str, str] | None = None
    """Library by configured model in a running router; None if no router was queried, or it does not report
    it.
    """
    sources_ignored: bool = False
    """Whether event endpoints were configured, so that the server's own were not used."""

    @property
    def engine_id(self) -> str:
        return self.engine.engine_id

    @property
    def event_endpoint(self) -> str | None:
        """Endpoint of this rank according to the engine; None if it does not name one."""
        sources = self.server.sources or {}
        source = sources.get(str(self.engine.dp_rank or 0)) if len(sources) > 1 else None
        only = next(iter(sources.values()), None) if len(sources) == 1 else source
        return None if only is None else only.endpoint

    @property
    def history_complete(self) -> bool:
        """Whether every batch since the engine's start was received."""
        seen = self.sockets
        if seen is None or seen.replay_state is not ReplayState.COMPLETE or seen.missing:
            return False
        return not seen.restarts and not seen.first_seq

    @property
    def base_model(self) -> str | None:
        return next((card.id for card in self.server.models if card.parent is None), None)

    @property
    def kind(self) -> EngineKind:
        """Its software."""
        return kind_of(self.engine, self.server.server_info, self.server.models)

    @property
    def frontend(self) -> Frontend:
        if self.kind == "sglang":
            return "sglang"
        return self.server.models[0].frontend if self.server.models else "python"


class RouterEvidence(msgspec.Struct):
    """A running router's own view; ``engines`` by engine id, None if the response is not understood."""

    url: str
    ready: HttpAnswer
    engines_answer: HttpAnswer
    metrics_answer: HttpAnswer
    version_text: str = ""
    engines: dict[str, dict[str, Any]] | None = None
    sources: dict[str, dict[str, Any]] | None = None
    """Sources of its engines; None if it does not report them."""
    tokenizers: dict[str, str] | None = None
    """Library that tokenizes, by configured model; None if it does not report them."""
    problems: list[Finding] = []
    """Its own list of what is wrong now."""


class Evidence(msgspec.Struct):
    """Evidence about all engines and the router."""

    config: Config
    engines: list[EngineEvidence]
    router: RouterEvidence | None = None
    probed: bool = False
    seconds: float = 0.0
