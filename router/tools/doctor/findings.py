"""Evidence that the doctor collects, and findings that its checks draw from it.

Evidence is plain data, without sockets. A finding is an observation, its cause and a remedy. Checks are shown
in the order in which they are registered; each is a function from evidence to results and uses no network. A
check that raises becomes a finding itself, so that a malformed response affects only that check.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import msgspec

from kvatlas.router.config.schema import Config, ModelConfig
from kvatlas.router.fleet.engines import EngineAddress, EngineKind
from kvatlas.router.fleet.statement import EngineStatement
from kvatlas.router.fleet.status import Frontend, ModelCard, kind_of
from kvatlas.router.index.engine import EngineResidency
from kvatlas.router.observe.findings import BAD, Finding, Severity
from kvatlas.router.prompts.hub import TokenizerProblem
from kvatlas.router.prompts.model_config import ModelConfigFile
from kvatlas.router.tools.doctor.http import EngineGauges, HttpAnswer
from kvatlas.router.tools.doctor.listener import EventCounts, Observation, ReplayState

# Features needed for exact routing that older vLLM releases lack.


Version = tuple[int, int]

EVENT_SOURCES_SINCE: Version = (0, 31)
FIXED_SEED_SINCE: Version = (0, 29)
MAP_ENCODING_SINCE: Version = (0, 24)
NEWEST_KNOWN: Version = (0, 33)


class MissingFeature(msgspec.Struct, frozen=True):
    """A feature missing before release ``since``; ``severe`` if predictions suffer without the remedy."""

    since: Version
    description: str
    remedy: str
    severe: bool


MISSING_FEATURES = (
    MissingFeature(
        (0, 20),
        "events do not name the KV cache group, so models with several groups cannot be predicted",
        "upgrade to 0.24 or later, or serve single-group models only",
        severe=True,
    ),
    MissingFeature(
        (0, 22),
        "events do not carry kind and window of a group",
        "upgrade, or set models.NAME.kinds and models.NAME.windows",
        severe=True,
    ),
    MissingFeature(
        MAP_ENCODING_SINCE,
        "events are arrays; with unequal block sizes large blocks are hashed differently",
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
    """Parse (major, minor) of a version such as ``0.32.0+cpu``; None if there is none."""
    found = re.match(r"v?(\d{1,4})\.(\d{1,4})(?:\.|$|[^\d])", text)
    return None if found is None else (int(found[1]), int(found[2]))


def missing_features(version: Version) -> list[MissingFeature]:
    """Return the features that this release lacks."""
    return [lack for lack in MISSING_FEATURES if version < lack.since]


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


class ProbeRequest(msgspec.Struct, frozen=True):
    """One request sent by ``--probe``; counts in tokens. None: unknown, or not reported."""

    status: str
    """Empty if the request succeeded."""
    predicted: int | None = None
    mode: str = ""
    why_unknown: str = ""
    cached: int | None = None
    prompt_tokens: int | None = None
    """Counted here, or by the engine's endpoint."""
    reported_prompt_tokens: int | None = None
    events_came: bool = False
    """Whether an event arrived after the request within the time limit."""

    @property
    def lengths_differ(self) -> bool:
        """Whether the engine counts a different number of tokens."""
        known = None not in {self.prompt_tokens, self.reported_prompt_tokens}
        return known and self.prompt_tokens != self.reported_prompt_tokens


class ProbeEvidence(msgspec.Struct):
    """The probe of one engine: a random prompt, and a longer one that begins with it."""

    requests: list[ProbeRequest] = []
    salted: ProbeRequest | None = None
    """The longer prompt with a ``cache_salt``; None if it would not hit without one either."""
    unsalted: dict[str, str] = {}
    """Other APIs whose ``cache_salt`` is not proven to keep prompts apart: path -> why."""
    problem: str = ""


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
    receipts_answer: HttpAnswer
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


# Findings, and the results of checks.


# Subject of findings about several engines together.
FLEET = "fleet"


class CheckResult(msgspec.Struct, frozen=True):
    """Result of a check; the registry adds the check's id and subject, if not given here.

    Raises ``ValueError`` for a problem without cause or remedy.
    """

    severity: Severity
    seen: str
    cause: str = ""
    remedy: str = ""
    subject: str = ""
    check: str = ""
    since_s: float | None = None

    def __post_init__(self) -> None:
        if self.severity in BAD and not (self.cause and self.remedy):
            raise ValueError(f"{self.seen}: a problem needs a cause and a remedy")


ok = partial(CheckResult, Severity.OK)
# Nothing is wrong, or it could not be determined.
info = partial(CheckResult, Severity.INFO)
warning = partial(CheckResult, Severity.WARNING)
error = partial(CheckResult, Severity.ERROR)


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 0, or 1 if there is a warning or an error."""
    return int(any(f.severity in BAD for f in findings))


Check = Callable[[Any], Iterator[CheckResult]]

# First part of a check's id, in display order; those from ``_FLEET_AREAS`` on are about the fleet.
_AREAS = ("http", "clock", "events", "cache", "tokens", "probe", "fleet", "router")
_FLEET_AREAS = frozenset({"fleet", "router"})

_CHECKS: dict[str, Check] = {}


def check(name: str) -> Callable[[Check], Check]:
    """Register a check: of an engine, or by the first part of its id of all engines or of the router."""

    def register(work: Check) -> Check:
        _CHECKS[name] = work
        return work

    return register


def names() -> list[str]:
    """Ids of all checks."""
    return list(_CHECKS)


def run_checks(seen: Evidence) -> list[Finding]:
    """Run every check: engine by engine, then on the fleet."""
    ordered = sorted(_CHECKS.items(), key=lambda entry: _AREAS.index(entry[0].partition(".")[0]))
    subjects: list[tuple[str, EngineEvidence | Evidence]] = [(one.engine_id, one) for one in seen.engines]
    return [
        finding
        for subject, evidence in [*subjects, (FLEET, seen)]
        for name, work in ordered
        if _of_fleet(name) == (evidence is seen) and _applies(name, evidence)
        for finding in _run(name, subject, work(evidence))
    ]


def _applies(name: str, evidence: EngineEvidence | Evidence) -> bool:
    """Whether a check makes sense: a router answers like an engine, and is none."""
    router = isinstance(evidence, EngineEvidence) and evidence.server.is_router
    return not router or name == "http.version"


def _of_fleet(name: str) -> bool:
    return name.partition(".")[0] in _FLEET_AREAS


def _run(name: str, subject: str, results: Iterator[CheckResult]) -> list[Finding]:
    found: list[Finding] = []
    try:
        for one in results:
            found.append(  # noqa: PERF401  results before a failure count
                Finding(
                    one.check or name,
                    one.severity,
                    one.subject or subject,
                    one.seen,
                    one.cause,
                    one.remedy,
                    one.since_s,
                )
            )
    except Exception as problem:  # noqa: BLE001  a failing check must not hide the results of others
        found.append(
            Finding(
                name,
                Severity.ERROR,
                subject,
                f"the check itself failed: {type(problem).__name__}: {problem}"[:300],
                "a response in a form this check does not know",
                "please report it with the output of --json",
            )
        )
    return found
