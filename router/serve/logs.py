"""Where log lines go, and in what form."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from typing import Any, TextIO, cast

import structlog


class LogSink(io.TextIOBase):
    """Where log lines go. Whoever reads them may go away: that costs lines, never the work that is logged."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out = out

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # a broken pipe, a full disk, a closed file
            self._out.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._out.flush()


def configure_logging(level: str, log_format: str, worker: int | None = None) -> None:
    """Log lines to stderr: coloured for people on a terminal, JSON for machines. ``worker``: its number is in
    every line."""

    def by_worker(_logger: Any, _method: str, line: Any) -> Any:
        return line if worker is None else {**line, "worker": worker}

    renderer: Any = structlog.processors.JSONRenderer()
    if log_format == "console":
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[
            by_worker,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", LogSink(sys.stderr))),
    )
