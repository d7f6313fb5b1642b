"""Destination and format of log lines."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from itertools import islice
from typing import Any, TextIO, cast

import structlog

_CHARS_MAX = 1000
_TRACE_CHARS_MAX = 20_000
_ITEMS_MAX = 32
_DEPTH_MAX = 3


class LogSink(io.TextIOBase):
    """Destination of log lines. If its reader disappears, lines are lost, but the process continues."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out = out

    def write(self, text: str) -> int:
        # A broken pipe, a full disk, a closed file.
        with contextlib.suppress(OSError, ValueError):
            self._out.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._out.flush()


def cut_values(_logger: Any, _method: str, line: Any) -> Any:
    """Shorten the values of a line: names and errors from clients, engines, gateways and Redis are
    unbounded."""
    for key, value in line.items():
        chars_max = _TRACE_CHARS_MAX if key in ("traceback", "exception") else _CHARS_MAX
        line[key] = _cut(value, chars_max, _DEPTH_MAX)
    return line


def _cut(value: Any, chars_max: int, depth: int) -> Any:
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= 64 else "a number of more than 64 bits"
    if isinstance(value, bytes | bytearray | memoryview):
        value = bytes(value[: chars_max + 1]).decode(errors="replace")
    if isinstance(value, dict | list | tuple | set | frozenset):
        if not depth:
            return "..."
        left = max(0, len(value) - _ITEMS_MAX)
        items = list(islice(value.items() if isinstance(value, dict) else value, _ITEMS_MAX))
        if isinstance(value, dict):
            cut = {_cut(k, chars_max, depth - 1): _cut(v, chars_max, depth - 1) for k, v in items}
            return cut | ({"...": f"{left} more"} if left else {})
        return [_cut(item, chars_max, depth - 1) for item in items] + ([f"... {left} more"] if left else [])
    text = str(value)
    if len(text) <= chars_max:
        return value
    return f"{text[:chars_max]}... ({len(text)} characters)"


def configure_logging(level: str, log_format: str, worker: int | None = None) -> None:
    """Configure logging to stderr: coloured text on a terminal, JSON for log collectors. ``worker``: a number
    added to every line."""

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
            cut_values,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", LogSink(sys.stderr))),
    )
