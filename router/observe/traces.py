"""OpenTelemetry spans of sampled requests, by the official SDK (the extra ``otel``).

One span per request, with children for reading the prompt, deciding, and each engine request, whose span
becomes the parent of the engine's own (W3C ``traceparent``). A request that is not sampled costs one random
number, and its fields pass unchanged. Invariants: spans carry ids, counts and times, no text; spans that the
collector does not accept in time are dropped and counted, and never delay a request.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from kvatlas import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

Fields = tuple[tuple[bytes, bytes], ...]
TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
_PARENT = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1
_TEXT_MAX = 200
_QUEUE_MAX = 4096
FLUSH_MS = 2000


class TraceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """OpenTelemetry traces, off by default. They need the extra `otel` (in a checkout: `python -m pip install
    '.[otel]'`). The SDK's own variables apply for the rest, e.g. ``OTEL_EXPORTER_OTLP_HEADERS`` and
    ``OTEL_RESOURCE_ATTRIBUTES``."""

    endpoint: str = ""
    """OTLP/HTTP address of the collector, e.g. `http://collector:4318`. Set it to switch traces on."""
    sample_ratio: float = 0.01
    """Share of requests without a ``traceparent`` that are traced; the others are traced if that says so.
    Raise it for a fleet with few requests."""
    service_name: str = "kvatlas"
    """``service.name`` of the spans. Set it to tell several routers apart."""

    def __post_init__(self) -> None:
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint: {self.endpoint!r} is no http://HOST:PORT")
        if not 0 <= self.sample_ratio <= 1:
            raise ValueError(f"sample_ratio = {self.sample_ratio}: expected 0 to 1")

    @property
    def resource(self) -> dict[str, str]:
        """OpenTelemetry's attributes of this process."""
        return {"service.name": self.service_name, "service.version": __version__}

    def url(self, signal: str) -> str:
        """Address of the collector for ``traces`` or ``logs`` (OTLP/HTTP)."""
        return f"{self.endpoint.rstrip('/')}/v1/{signal}"


class TracesNotInstalledError(ValueError):
    """The SDK is not installed."""


class TraceStats(msgspec.Struct):
    """Counters for metrics."""

    requests: Annotated[int, "kvatlas_traces_requests_total"] = 0
    """Traced requests."""
    spans: Annotated[int, "kvatlas_traces_spans_total"] = 0
    """Created spans."""
    spans_exported: Annotated[int, "kvatlas_traces_spans_exported_total"] = 0
    """Spans accepted by the collector."""
    export_failures: Annotated[int, "kvatlas_traces_export_failures_total"] = 0
    """Spans not accepted by the collector."""

    def count_exported(self, spans: int, taken: bool) -> None:
        """Count one batch."""
        if taken:
            self.spans_exported += spans
        else:
            self.export_failures += spans


class Traces:
    """Begins traces of sampled requests. ``exporter`` is for tests. Raises ``TracesNotInstalledError``."""

    def __init__(
        self,
        settings: TraceSettings,
        *,
        exporter: SpanExporter | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.stats = TraceStats()
        self._ratio = settings.sample_ratio
        self._chance = chance
        self._tracer, self._shutdown = _open(settings, exporter, self.stats)

    def begin(self, fields: Sequence[tuple[bytes, bytes]], method: str, path: str) -> RequestTrace | None:
        """Begin a trace of a request with these header fields; None if it is not traced."""
        parent = next((value for name, value in fields if name == TRACEPARENT), None)
        known = None if parent is None else _PARENT.fullmatch(parent)
        sampled = self._chance() < self._ratio if known is None else int(known[3], 16) & _SAMPLED
        if not sampled:
            return None
        self.stats.requests += 1
        state = next((value for name, value in fields if name == TRACESTATE), b"")
        return RequestTrace(self._tracer, self.stats, known, state, f"{method} {path}"[:_TEXT_MAX])

    def close(self) -> None:
        """Send the remaining spans, for at most two seconds. Blocks: call it in a thread."""
        self._shutdown()


class RequestTrace:
    """Spans of one request. Phases follow each other; the next one ends the previous one."""

    def __init__(
        self,
        tracer: Tracer,
        stats: TraceStats,
        parent: re.Match[bytes] | None,
        state: bytes,
        name: str,
    ) -> None:
        from opentelemetry import trace  # noqa: PLC0415  # an extra

        self._trace = trace
        self._tracer = tracer
        self._stats = stats
        self._state = state
        context = None
        if parent is not None:
            remote = trace.SpanContext(
                int(parent[1], 16), int(parent[2], 16), is_remote=True, trace_flags=trace.TraceFlags(_SAMPLED)
            )
            context = trace.set_span_in_context(trace.NonRecordingSpan(remote))
        self._root = self._start(name, context, trace.SpanKind.SERVER)
        self._within = trace.set_span_in_context(self._root)
        self._now: Span | None = None

    def phase(self, name: str) -> None:
        """Begin a phase."""
        self._end_phase()
        self._now = self._start(name, self._within, self._trace.SpanKind.INTERNAL)

    def asks(self, engine_id: str, facts: dict[str, Any]) -> Fields:
        """Begin the span of an engine request, with these attributes. Returns the fields that make the
        engine's spans its children."""
        self._end_phase()
        self._now = self._start("upstream", self._within, self._trace.SpanKind.CLIENT)
        self._now.set_attribute("kvatlas.engine", engine_id)
        self._set(self._now, facts)
        made = self._now.get_span_context()
        field = b"00-%032x-%016x-%02x" % (made.trace_id, made.span_id, _SAMPLED)
        state = ((TRACESTATE, self._state),) if self._state else ()
        return ((TRACEPARENT, field), *state)

    def learned(self, facts: dict[str, Any]) -> None:
        """Add attributes to the current span."""
        if self._now is not None:
            self._set(self._now, facts)

    def first_token(self) -> None:
        """Mark the first token."""
        if self._now is not None:
            self._now.add_event("first token")

    def end(self, facts: dict[str, Any], *, failed: str = "") -> None:
        """End all spans of the request."""
        self._end_phase()
        self._set(self._root, facts)
        if failed:
            self._root.set_status(self._trace.StatusCode.ERROR, failed)
        self._root.end()

    def _start(self, name: str, context: Any, kind: Any) -> Span:
        self._stats.spans += 1
        return self._tracer.start_span(name, context=context, kind=kind)

    def _end_phase(self) -> None:
        if self._now is not None:
            self._now.end()
            self._now = None

    @staticmethod
    def _set(span: Span, facts: dict[str, Any]) -> None:
        for name, value in facts.items():
            if value is not None:
                span.set_attribute(name, value[:_TEXT_MAX] if isinstance(value, str) else value)


def _open(
    settings: TraceSettings, exporter: SpanExporter | None, stats: TraceStats
) -> tuple[Tracer, Callable[[], None]]:
    try:
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415  # an extra
        from opentelemetry.sdk.trace import TracerProvider, sampling  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult  # noqa: PLC0415
    except ImportError:
        raise TracesNotInstalledError(
            "traces.endpoint: OpenTelemetry is not installed; in a checkout: python -m pip install '.[otel]'"
        ) from None
    provider = TracerProvider(
        resource=Resource.create(settings.resource),
        sampler=sampling.ALWAYS_ON,  # sampling is decided before
        shutdown_on_exit=False,
    )
    batches = BatchSpanProcessor(
        counting(exporter or _exporter(settings), SpanExportResult.SUCCESS, stats.count_exported),
        max_queue_size=_QUEUE_MAX,
    )
    provider.add_span_processor(batches)

    def shutdown() -> None:
        provider.force_flush(FLUSH_MS)
        provider.shutdown()

    return provider.get_tracer("kvatlas", __version__), shutdown


def _exporter(settings: TraceSettings) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    except ImportError:
        raise TracesNotInstalledError(
            "traces.endpoint: the OTLP exporter is not installed; in a checkout: "
            "python -m pip install '.[otel]'"
        ) from None
    return OTLPSpanExporter(endpoint=settings.url("traces"), timeout=5)


def counting(exporter: Any, succeeded: object, count: Callable[[int, bool], None]) -> Any:
    """Wrap an exporter of the SDK; ``count`` gets the length of each batch, and whether it was accepted."""
    export = exporter.export

    def counted(batch: Sequence[Any]) -> Any:
        result = export(batch)
        count(len(batch), result is succeeded)
        return result

    exporter.export = counted
    return exporter
