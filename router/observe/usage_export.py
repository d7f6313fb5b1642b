"""The usage record over OTLP: each line a log record, by the official SDK (the extra ``otel``).

Called in the writer's thread; the SDK batches and sends in a thread of its own. Always true: a collector that
does not answer holds up neither requests nor files; what it does not take is dropped and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from router import __version__
from router.observe.traces import TraceSettings

if TYPE_CHECKING:
    from opentelemetry.sdk._logs import ReadableLogRecord
    from opentelemetry.sdk._logs.export import LogRecordExporter

EVENT_NAME = "kvatlas.usage"
_LEFT_OUT = frozenset({"arrived_s", "hash_ids", "hashed_tokens"})
"""The time is the log record's own; prefix hashes are for simulations."""
_QUEUE_MAX = 8192
_FLUSH_MS = 2000


class UsageExportStats(msgspec.Struct):
    """Counters for metrics."""

    records: int = 0
    """Lines given to the exporter."""
    exported: int = 0
    """Lines that the collector took."""
    failures: int = 0
    """Lines that the collector did not take."""


class UsageExport:
    """Sends lines until ``close``. ``exporter`` is for tests."""

    def __init__(
        self, settings: TraceSettings, stats: UsageExportStats, *, exporter: LogRecordExporter | None = None
    ) -> None:
        from opentelemetry.sdk._logs import LoggerProvider  # noqa: PLC0415  # an extra
        from opentelemetry.sdk._logs.export import BatchLogRecordProcessor  # noqa: PLC0415
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415

        self._stats = stats
        named = {"service.name": settings.service_name, "service.version": __version__}
        self._provider = LoggerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        counted = _counting(exporter or _exporter(settings), stats)
        self._provider.add_log_record_processor(BatchLogRecordProcessor(counted, max_queue_size=_QUEUE_MAX))
        self._logger = self._provider.get_logger("kvatlas", __version__)

    def send(self, line: msgspec.Struct, arrived_s: float) -> None:
        """Queue one line; of a full queue the SDK drops the oldest."""
        self._stats.records += 1
        self._logger.emit(
            timestamp=int(1e9 * arrived_s),
            event_name=EVENT_NAME,
            attributes={
                f"{EVENT_NAME}.{name}": value
                for name, value in msgspec.structs.asdict(line).items()
                if value is not None and name not in _LEFT_OUT
            },
        )

    def close(self) -> None:
        """Send what is left, for two seconds at most."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()


def _exporter(settings: TraceSettings) -> LogRecordExporter:
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter  # noqa: PLC0415

    return OTLPLogExporter(endpoint=f"{settings.endpoint.rstrip('/')}/v1/logs", timeout=5)


def _counting(exporter: LogRecordExporter, stats: UsageExportStats) -> LogRecordExporter:
    """The same exporter, whose results are counted."""
    from opentelemetry.sdk._logs.export import LogRecordExportResult  # noqa: PLC0415

    export = exporter.export

    def counted(batch: Sequence[ReadableLogRecord]) -> Any:
        result = export(batch)
        if result is LogRecordExportResult.SUCCESS:
            stats.exported += len(batch)
        else:
            stats.failures += len(batch)
        return result

    exporter.export = counted  # type: ignore[method-assign]
    return exporter
