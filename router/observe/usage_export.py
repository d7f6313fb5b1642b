"""The usage record over OTLP: each line a log record, by the official SDK (the extra ``otel``).

Called in the writer's thread; the SDK batches and sends in a thread of its own. Invariants: a collector
that does not answer holds up neither requests nor files; what it does not take is dropped and counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from kvatlas import __version__
from kvatlas.router.observe.traces import FLUSH_MS, TraceSettings, counting

if TYPE_CHECKING:
    from opentelemetry.sdk._logs.export import LogRecordExporter

EVENT_NAME = "kvatlas.usage"
# The time is the log record's own; prefix hashes are for simulations.
_LEFT_OUT = frozenset({"arrived_s", "hash_ids", "start_ids", "hashed_tokens"})
_QUEUE_MAX = 8192


class UsageExportStats(msgspec.Struct):
    """Counters for metrics."""

    records: Annotated[int, "kvatlas_usage_export_records_total"] = 0
    """Lines given to the exporter."""
    exported: Annotated[int, "kvatlas_usage_export_exported_total"] = 0
    """Lines that the collector took."""
    failures: Annotated[int, "kvatlas_usage_export_failures_total"] = 0
    """Lines that the collector did not take."""

    def count_exported(self, lines: int, taken: bool) -> None:
        """Count one batch."""
        if taken:
            self.exported += lines
        else:
            self.failures += lines


class UsageExport:
    """Sends lines until ``close``. ``exporter`` is for tests."""

    def __init__(
        self, settings: TraceSettings, stats: UsageExportStats, *, exporter: LogRecordExporter | None = None
    ) -> None:
        from opentelemetry.sdk._logs import LoggerProvider  # noqa: PLC0415  # an extra
        from opentelemetry.sdk._logs.export import (  # noqa: PLC0415
            BatchLogRecordProcessor,
            LogRecordExportResult,
        )
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415

        self._stats = stats
        self._provider = LoggerProvider(resource=Resource.create(settings.resource), shutdown_on_exit=False)
        counted = counting(
            exporter or _exporter(settings), LogRecordExportResult.SUCCESS, stats.count_exported
        )
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
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()


def _exporter(settings: TraceSettings) -> LogRecordExporter:
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter  # noqa: PLC0415

    return OTLPLogExporter(endpoint=settings.url("logs"), timeout=5)
