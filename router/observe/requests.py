"""Outcome of each proxied request: counts and times for the metrics page, the sessions they belong to, and an
optional log line.

A ``RequestRecord`` accompanies the request and collects its events; ``end`` counts it once. Series are
bounded: a model has its own only after an engine that serves it was found, up to ``MODELS_MAX``; engines are
those of the fleet; statuses are HTTP's.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
import structlog

from kvatlas.publisher.events import BlockHash
from kvatlas.router.observe.books import Books
from kvatlas.router.observe.histogram import Histogram
from kvatlas.router.observe.log_throttle import LogThrottle
from kvatlas.router.observe.traces import RequestTrace, Traces
from kvatlas.router.openai.apis import CHAT, COMPLETION, MESSAGES, RESPONSES
from kvatlas.router.openai.request import Session, Usage
from kvatlas.router.openai.sessions import session_name

Fields = list[tuple[bytes, bytes]]
_log = structlog.get_logger()
MODELS_MAX = 256
OTHER = "other"
# Labels instead of the status: the client left before the end; the engine cut the response; a gateway
# forwarded the answer without showing it.
GONE, BROKEN, UNSEEN = "client_gone", "broken_stream", "unseen"
ENDED_KEPT = 4096
# Length of a request id in receipts and pages: clients choose it.
REQUEST_ID_CHARS_MAX = 256
# Tokens per event of a stream: the share of what is known of it that stays with each further stream, the
# difference from 1 that openings and ends of short answers make, and bounds against reports that are wrong.
_PACE_KEPT, _PACE_NOISE = 0.9, 0.1
_PACE_MIN, _PACE_MAX = 0.25, 16.0
# OpenTelemetry's names of what these paths do (semantic conventions 0.66).
_OPERATIONS = {
    CHAT: "chat",
    MESSAGES: "chat",
    RESPONSES: "chat",
    COMPLETION: "text_completion",
    "/v1/embeddings": "embeddings",
}
Certainty = Literal["measured", "counted", "estimated"]
"""How sure a number of tokens is: the engine's report; what passed; a prediction."""
_TEXT_MAX = 200
_TELL_EVERY_S = 5.0
_FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_BETWEEN_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1.0,
    2.5,
    5.0,
)
_OVERHEAD_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


class ModelTimes:
    """Histograms of one model's completions, seconds."""

    __slots__ = ("between", "first_token", "overhead", "whole")

    def __init__(self) -> None:
        self.first_token = Histogram(_FIRST_TOKEN_S)
        self.whole = Histogram(_WHOLE_S)
        self.between = Histogram(_BETWEEN_S)
        self.overhead = Histogram(_OVERHEAD_S)


SESSIONS_MAX = 1024
TURNS_MAX = 16
BLOCKS_MAX = 1 << 20
# Of one session on one engine: 262,144 tokens in blocks of 16.
SESSION_BLOCKS_MAX = 1 << 14
_NAMES_MAX = 64


class SessionStats(msgspec.Struct):
    """Counters for metrics."""

    dropped: Annotated[int, "kvatlas_sessions_dropped_total"] = 0
    """Sessions that the ops port shows no more, since newer ones took their place."""
    blocks_dropped: Annotated[int, "kvatlas_session_blocks_dropped_total"] = 0
    """Blocks stored for a session that no longer count as held for it, since the router keeps a bounded
    number."""


class SessionTurns(msgspec.Struct, gc=False):
    """Requests of one session that reached an engine; sums over those whose engine reported its hit."""

    latest: deque[RequestRecord] = msgspec.field(default_factory=lambda: deque(maxlen=TURNS_MAX))
    count: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    names: dict[str, None] = {}
    """Ids by which engines may know it: its own, and those of its sub-agents."""


class SessionLedger:
    """Sessions of one router: the latest turns of each, and the blocks that engines stored for it, by the
    session id in their events (``BlockStored.session_id``, vLLM 0.32 and 0.33).

    Events name no tenant, so blocks are kept by id alone; who shows them decides whose they are. Invariants:
    at most ``SESSIONS_MAX`` sessions and ``BLOCKS_MAX`` block hashes, 8 bytes each; the least recently used
    session is dropped first."""

    def __init__(self) -> None:
        self.stats = SessionStats()
        self.sessions: OrderedDict[tuple[str, str], SessionTurns] = OrderedDict()
        """By tenant and session, the latest one last."""
        self._blocks: OrderedDict[str, dict[str, array[int]]] = OrderedDict()
        """Session id in events -> engine -> block hashes, the latest last."""
        self._names: dict[str, set[str]] = {}
        """Engine -> session ids of ``_blocks``."""
        self._num_blocks = 0

    def ended(self, record: RequestRecord, session: Session) -> None:
        """Add an ended request that reached an engine."""
        key = record.tenant, session.id
        turns = self.sessions.setdefault(key, SessionTurns(names={session.id: None}))
        self.sessions.move_to_end(key)
        turns.latest.append(record)
        turns.count += 1
        if session.agent and len(turns.names) < _NAMES_MAX:
            turns.names[session.agent] = None
        usage = record.usage
        if usage is not None and usage.cached_tokens is not None:
            turns.prompt_tokens += usage.prompt_tokens
            turns.cached_tokens += usage.cached_tokens
        if len(self.sessions) > SESSIONS_MAX:
            self.sessions.popitem(last=False)
            self.stats.dropped += 1

    def stored(self, engine_id: str, session_id: str, hashes: Sequence[BlockHash]) -> None:
        """Note that an engine stored these blocks for a request of this session."""
        name = session_name(session_id.encode(errors="replace"))
        by_engine = self._blocks.setdefault(name, {})
        self._blocks.move_to_end(name)
        kept = by_engine.get(engine_id)
        if kept is None:
            kept = by_engine[engine_id] = array("Q")
            self._names.setdefault(engine_id, set()).add(name)
        kept.extend(hashes)
        self._num_blocks += len(hashes)
        if (excess := len(kept) - SESSION_BLOCKS_MAX) > 0:
            del kept[:excess]
            self._dropped(excess)
        while len(self._blocks) > SESSIONS_MAX or self._num_blocks > BLOCKS_MAX:
            oldest, left = self._blocks.popitem(last=False)
            for engine in left:
                self._names[engine].discard(oldest)
            self._dropped(sum(map(len, left.values())))

    def _dropped(self, count: int) -> None:
        self._num_blocks -= count
        self.stats.blocks_dropped += count

    def blocks(self, name: str) -> dict[str, array[int]]:
        """Block hashes stored for a session, by engine; some may be held no more, or be listed twice."""
        return self._blocks.get(name, {})

    def forget(self, engine_id: str) -> None:
        """Drop the blocks of an engine that left the fleet."""
        for name in self._names.pop(engine_id, ()):
            self._num_blocks -= len(self._blocks[name].pop(engine_id))


class RequestTracker:
    """All requests of one router. ``here``: whether an engine is in the fleet. ``log``: write a line for
    each."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        here: Callable[[str], bool] = lambda _: True,
        log: bool = False,
        traces: Traces | None = None,
        sessions: SessionLedger | None = None,
        books: Books | None = None,
    ) -> None:
        self.clock = clock
        self.books = Books() if books is None else books
        self._sessions = sessions or SessionLedger()
        self.log = log
        self.traces = traces
        self.on_end: Callable[[RequestRecord, float], None] | None = None
        """Called once with every ended request, and the time."""
        self._counts: dict[tuple[str, str, str], int] = {}
        self._counted: dict[str, list[tuple[str, str, str]]] = {}
        """Keys of ``_counts`` by engine."""
        self.times_by_model: dict[str, ModelTimes] = {}
        """As far as they are counted (``models``)."""
        self.live: dict[RequestRecord, None] = {}
        """Requests in progress."""
        self._ended: deque[RequestRecord] = deque(maxlen=ENDED_KEPT)
        self._paces: dict[str, tuple[float, float]] = {}
        """Tokens that an engine reported of its latest streams, and their events with tokens."""
        self._here = here
        self._seldom = LogThrottle(_TELL_EVERY_S)

    @property
    def counts(self) -> dict[tuple[str, str, str], int]:
        """(model, engine, status) -> number of ended requests."""
        self.books.settle()
        return self._counts

    @property
    def models(self) -> dict[str, ModelTimes]:
        """Histograms by model label."""
        self.books.settle()
        return self.times_by_model

    @property
    def ended(self) -> deque[RequestRecord]:
        """Latest ended requests, oldest first."""
        self.books.settle()
        return self._ended

    @property
    def sessions(self) -> SessionLedger:
        """Sessions of ended requests."""
        self.books.settle()
        return self._sessions

    def begin(self, method: str, path: str) -> RequestRecord:
        """Begin a record when a request's head has been read."""
        now = self.clock()
        record = RequestRecord(self, method, path, now, now)
        self.live[record] = None
        return record

    def trace(self, record: RequestRecord, fields: Fields) -> None:
        """Trace this request, with these header fields, if it is sampled."""
        if self.traces is not None:
            record.trace = self.traces.begin(fields, record.method, record.path)
            if record.trace is not None:
                record.trace.phase("read body")

    def label(self, model: str | None) -> str:
        """The label of a model that an engine serves."""
        name = model or ""
        if name in self.times_by_model or len(self.times_by_model) < MODELS_MAX:
            return name
        return OTHER

    def times(self, label: str) -> ModelTimes:
        """The histograms of a label."""
        found = self.times_by_model.get(label)
        if found is None:
            found = self.times_by_model[label] = ModelTimes()
        return found

    def end(self, record: RequestRecord) -> None:
        """Log an ended request, and have it counted soon."""
        self.live.pop(record, None)
        record.ended_s = now = self.clock()
        if record.trace is not None:
            outcome = record.outcome
            failed = outcome if outcome[0] == "5" or record.broken else ""
            record.trace.end(record.facts(), failed=failed)
        if self.log:
            _log.info("request", **record.log_fields(now))
        record.retire()
        if self.on_end is not None:
            self.on_end(record, now)
        self.books.add(self._settle, record, now)

    def _settle(self, record: RequestRecord, now: float) -> None:
        engine = record.engine if record.engine and self._here(record.engine) else ""
        outcome, times = record.outcome, record.times
        key = record.label, engine, outcome
        count = self._counts.get(key, 0)
        if not count:
            self._counted.setdefault(engine, []).append(key)
        self._counts[key] = count + 1
        if times is not None:
            times.overhead.observe(record.overhead_s)
            if outcome[0] == "2":
                times.whole.observe(now - record.arrived_s)
        if record.usage is not None and record.streamed_tokens and engine:
            tokens, events = self._paces.get(engine, (0.0, 0.0))
            self._paces[engine] = (
                _PACE_KEPT * tokens + record.usage.completion_tokens,
                _PACE_KEPT * events + record.streamed_tokens,
            )
        record.placement_facts = _no_facts
        self._ended.append(record)
        if record.session is not None and record.engine:
            self._sessions.ended(record, record.session)

    def tokens_per_event(self, engine_id: str) -> float:
        """By the latest streams of an engine that reported both; exactly 1 where most events have one."""
        tokens, events = self._paces.get(engine_id, (0.0, 0.0))
        pace = tokens / events if events else 1.0
        return min(max(pace, _PACE_MIN), _PACE_MAX) if abs(pace - 1.0) > _PACE_NOISE else 1.0

    def forget(self, engine_id: str) -> None:
        """Drop the counts of an engine that left the fleet."""
        self.books.settle()
        self._paces.pop(engine_id, None)
        for key in self._counted.pop(engine_id, ()):
            del self._counts[key]

    def warn(self, event: str, record: RequestRecord, about: str, **more: Any) -> None:
        """Log a warning, rate-limited for each event and ``about``."""
        unsaid = self._seldom.due(f"{event} {about}", self.clock())
        if unsaid is not None:
            more |= {"unsaid": unsaid} if unsaid else {}
            _log.warning(
                event, **more, model=record.model[:_TEXT_MAX], request_id=record.request_id[:_TEXT_MAX]
            )


def _no_facts() -> None:
    return None


class RequestRecord(msgspec.Struct, eq=False):
    """One request in progress. ``completion``: its times count."""

    tracker: RequestTracker
    method: str
    path: str
    arrived_s: float
    read_s: float
    """Time at which it had been received completely."""
    model: str = ""
    request_id: str = ""
    label: str = ""
    tenant: str = ""
    """Tenant of its key, if clients have keys."""
    key_id: str = ""
    """Its key: the first digits of its SHA-256."""
    session: Session | None = None
    charged_tokens: int | None = None
    """Prompt tokens charged to its tenant."""
    streams: bool = False
    engine: str = ""
    attempts: int = 0
    continued_from: str = ""
    """The engine whose stream broke, where another one went on with it."""
    recomputed_tokens: int = 0
    """Tokens that this one computed again for that, not billed."""
    status: int = 0
    gone: bool = False
    explained: bool = False
    """The reason of its refusal is in the log already."""
    broken: bool = False
    unseen: bool = False
    bytes_in: int = 0
    bytes_out: int = 0
    waited_s: float = 0.0
    overhead_s: float = 0.0
    """From its last byte until its first engine was asked, without ``waited_s``."""
    asked_s: float | None = None
    """Time at which the latest engine was asked."""
    first_s: float | None = None
    last_s: float = 0.0
    ended_s: float | None = None
    usage: Usage | None = None
    streamed_tokens: int = 0
    """Events with tokens that were passed on of a stream."""
    tokens_per_event: float = 1.0
    """In streams of this engine."""
    times: ModelTimes | None = None
    trace: RequestTrace | None = None
    why: Callable[[], dict[str, Any]] = dict
    """Reasons for the chosen engine, as attributes of a trace."""
    placement_facts: Callable[[], Any] = _no_facts
    """Facts known when it was placed (``PlacementFacts``), until it ended."""

    def placed(self, engine_id: str, *, completion: bool, waited_s: float = 0.0) -> None:
        """Note that an engine is asked; the request waited for it in the queue."""
        self.engine = engine_id
        self.attempts += 1
        self.waited_s += waited_s
        self.asked_s = self.tracker.clock()
        if self.attempts == 1:
            tracker, model = self.tracker, self.model
            times = tracker.times_by_model.get(model)
            self.label = model if times is not None else tracker.label(model)
            times = times or tracker.times(self.label)
            if completion:
                self.times = times
                self.overhead_s = self.asked_s - self.read_s - waited_s

    def piece(self) -> None:
        """Note a piece of a successful stream; the first one carries the first token."""
        times = self.times
        if times is None:
            return
        now = self.tracker.clock()
        if self.first_s is None:
            self.first_s = now
            self.tokens_per_event = self.tracker.tokens_per_event(self.engine)
            times.first_token.observe(now - self.arrived_s)
            if self.trace is not None:
                self.trace.first_token()
        else:
            times.between.observe(now - self.last_s)
        self.last_s = now

    @property
    def outcome(self) -> str:
        """The label ``status``."""
        if self.broken:
            return BROKEN
        if self.unseen:
            return UNSEEN
        if self.gone or not self.status:
            return GONE
        return str(self.status)

    @property
    def served(self) -> bool:
        """Whether an engine may have computed it: it answered with success, the answer passed unseen, or the
        client left while one was at work."""
        if self.gone and not self.status:
            return bool(self.engine)
        return self.unseen or 200 <= self.status < 300

    @property
    def generated_tokens(self) -> int | None:
        """Tokens that were generated: as the engine reported, else those that were seen; None: unknown."""
        if self.usage is not None:
            return self.usage.completion_tokens
        return round(self.streamed_tokens * self.tokens_per_event) or None

    @property
    def generated_is(self) -> Certainty | None:
        """How sure ``generated_tokens`` are."""
        if self.usage is not None:
            return "measured"
        if not self.streamed_tokens:
            return None
        return "counted" if self.tokens_per_event == 1.0 else "estimated"

    def retire(self) -> None:
        """Reduce an ended request to what is kept: no prompt, and bounded texts of clients."""
        self.why = dict
        self.trace = None
        self.path, self.model = self.path[:_TEXT_MAX], self.model[:_TEXT_MAX]
        self.request_id = self.request_id[:REQUEST_ID_CHARS_MAX]

    def facts(self) -> dict[str, Any]:
        """Attributes of its span, with OpenTelemetry's names if there are some."""
        usage = self.usage
        first_s = None if self.first_s is None else round(self.first_s - self.arrived_s, 6)
        return {
            "http.request.method": self.method,
            "http.response.status_code": self.status or None,
            "gen_ai.operation.name": _OPERATIONS.get(self.path),
            "gen_ai.request.model": self.model or None,
            "gen_ai.request.stream": self.streams or None,
            "gen_ai.response.time_to_first_chunk": first_s,
            "gen_ai.usage.cache_read.input_tokens": None if usage is None else usage.cached_tokens,
            "gen_ai.usage.input_tokens": None if usage is None else usage.prompt_tokens,
            "gen_ai.usage.output_tokens": None if usage is None else usage.completion_tokens,
            "error.type": self.outcome if self.status >= 500 or self.broken else None,
            "kvatlas.hit_tokens": None if usage is None else usage.cached_tokens,
            "kvatlas.outcome": self.outcome,
            "kvatlas.tenant": self.tenant or None,
            "gen_ai.conversation.id": None if self.session is None else self.session.id,
            "gen_ai.agent.id": None if self.session is None else self.session.agent or None,
            "kvatlas.request_id": self.request_id,
        }

    def session_fields(self) -> dict[str, str]:
        """Session and sub-agent of the request, if its client names them."""
        session = self.session
        if session is None:
            return {}
        return {"session": session.id, "agent": session.agent} if session.agent else {"session": session.id}

    def log_fields(self, now: float) -> dict[str, Any]:
        """The fields of the log line."""
        first, usage = self.first_s, self.usage
        return {
            "method": self.method,
            "path": self.path[:_TEXT_MAX],
            "model": self.model[:_TEXT_MAX],
            **({"tenant": self.tenant} if self.tenant else {}),
            **self.session_fields(),
            "engine": self.engine,
            "status": self.status,
            "outcome": self.outcome,
            "attempts": self.attempts,
            **({"continued_from": self.continued_from} if self.continued_from else {}),
            **({"waited_s": round(self.waited_s, 6)} if self.waited_s else {}),
            "request_bytes": self.bytes_in,
            "answer_bytes": self.bytes_out,
            "first_token_s": None if first is None else round(first - self.arrived_s, 6),
            "duration_s": round(now - self.arrived_s, 6),
            "prompt_tokens": None if usage is None else usage.prompt_tokens,
            "cached_tokens": None if usage is None else usage.cached_tokens,
            "completion_tokens": None if usage is None else usage.completion_tokens,
            "request_id": self.request_id[:_TEXT_MAX],
        }
