"""``kvatlas record``: resolve sources, record until stopped, print a summary."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
from rich.console import Console
from rich.live import Live
from rich.table import Table

from kvatlas.router.config.errors import ConfigError
from kvatlas.router.config.load import parse_engine
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.statement import SERVER_INFO, event_sources, server_info_statement, sglang_engines
from kvatlas.router.tools.capture_writer import CaptureWriter
from kvatlas.router.tools.event_order import RecordStats
from kvatlas.router.tools.ops_client import ask, make_table, output_console, stop_signals
from kvatlas.router.tools.recorder import RecordSource, SourceRecorder, record
from kvatlas.router.tools.trace_file import RecordingError

_ASK_TIMEOUT_S = 5.0
_ANSWER_BYTES_MAX = 1 << 20
_OPTIONS = {"events", "replay", "topic", "source"}


class RecordOptions(msgspec.Struct, frozen=True):
    """Options of a recording."""

    path: Path
    seconds: float | None = None
    rotate_mb: float | None = None
    max_mb: float | None = None
    redact: bool = False


def run_record(engines: Sequence[str], options: RecordOptions, *, as_json: bool) -> int:
    """Returns 0 if all was recorded, 1 if frames were lost or an engine unreachable, 2 for bad input."""
    try:
        sources = resolve(engines)
        _check(options)
        writer = CaptureWriter(
            options.path,
            rotate_bytes=None if options.rotate_mb is None else int(options.rotate_mb * (1 << 20)),
            total_bytes_max=None if options.max_mb is None else int(options.max_mb * (1 << 20)),
            redacted=options.redact,
        )
    except (RecordingError, ConfigError) as error:
        print(f"kvatlas record: {error}", file=sys.stderr)
        return 2
    recorders = [SourceRecorder(source, writer) for source in sources]
    problem = ""
    try:
        asyncio.run(_record(recorders, writer, options, quiet=as_json))
    except* zmq.ZMQError as group:
        problem = str(group.exceptions[0])
    finally:
        writer.close()
    if problem:
        print(f"kvatlas record: invalid address to record from: {problem}", file=sys.stderr)
        return 2
    summary = _summary(recorders, writer)
    if as_json:
        print(msgspec.json.encode(summary).decode())
    else:
        output_console().print(_table([recorder.stats for recorder in recorders], writer))
        print(_describe(writer, options))
    return 0 if summary["complete"] else 1


def resolve(engines: Sequence[str]) -> list[RecordSource]:
    """Resolve ``--engine`` to streams. Raises ``ConfigError`` for an invalid one, or one without events."""
    sources: list[RecordSource] = []
    for text in engines:
        if text.partition("=")[0] in _OPTIONS:
            sources.append(_parse_stream(text))
        else:
            found = _with_events(parse_engine(text))
            sources += [RecordSource(e.engine_id, e.events or "", e.replay, e.topic) for e in found]
    if not sources:
        raise ConfigError("no engine: give --engine URL or --engine events=tcp://..[,replay=tcp://..]")
    names = [source.source for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--engine: {name} is named twice")
    return sources


def _parse_stream(text: str) -> RecordSource:
    """Parse ``events=tcp://..[,replay=..][,topic=..][,source=NAME]``: a stream without an HTTP server."""
    values: dict[str, str] = {}
    for option in text.split(","):
        name, separator, value = option.partition("=")
        if name not in _OPTIONS or not separator:
            known = ", ".join(sorted(_OPTIONS))
            raise ConfigError(f"--engine {text!r}: {option!r} is not one of {known} with =VALUE")
        values[name] = value
    if "events" not in values:
        raise ConfigError(f"--engine {text!r}: events= is missing")
    for name in ("events", "replay"):
        if name in values and not values[name].startswith(("tcp://", "ipc://")):
            raise ConfigError(f"--engine {text!r}: {name}={values[name]!r} is not a tcp:// or ipc:// address")
    source = values.pop("source", values["events"])
    return RecordSource(source, **values)


def _with_events(engine: EngineAddress) -> list[EngineAddress]:
    """Return the engine with its event endpoints, read from the server if not given."""
    if engine.events is not None:
        return [engine]
    url, info = f"{engine.base_url}/kv_event_sources", f"{engine.base_url}{SERVER_INFO}"
    hint = "give events=tcp://.. too"
    try:
        status, body = _get(url)
        if status == 200:
            found = event_sources(engine.base_url, body)
        else:
            stated = server_info_statement(_get(info)[1])
            if stated is None or stated.kind != "sglang":
                raise OSError(f"{url}: status {status}")
            found = sglang_engines(engine.base_url, stated.event_ports)
    except OSError as error:
        raise ConfigError(f"{error}; {hint}") from None
    except ValueError as error:
        raise ConfigError(f"{url}: {error}; {hint}") from None
    wanted = [e for e in found if engine.dp_rank is None or (e.dp_rank or 0) == engine.dp_rank]
    if not wanted:
        raise ConfigError(f"{url}: this engine publishes no events; start it with --kv-events-config")
    return wanted


def _get(url: str) -> tuple[int, bytes]:
    return ask(url, timeout_s=_ASK_TIMEOUT_S, bytes_max=_ANSWER_BYTES_MAX)


def _check(options: RecordOptions) -> None:
    for name, value in (
        ("--seconds", options.seconds),
        ("--rotate-mb", options.rotate_mb),
        ("--max-mb", options.max_mb),
    ):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{name}: {value} is not a number above 0")


async def _record(
    recorders: Sequence[SourceRecorder], writer: CaptureWriter, options: RecordOptions, *, quiet: bool
) -> None:
    stop, console = asyncio.Event(), Console(stderr=True)
    with stop_signals(stop.set):
        recording = asyncio.ensure_future(
            record(recorders, stop=stop, seconds=options.seconds, ended=lambda: writer.ended)
        )
        if not quiet and console.is_terminal:
            with Live(console=console, transient=True, auto_refresh=False) as live:
                while not recording.done():
                    await asyncio.wait([recording], timeout=0.5)
                    live.update(_table([recorder.stats for recorder in recorders], writer), refresh=True)
        await recording


def _summary(recorders: Sequence[SourceRecorder], writer: CaptureWriter) -> dict[str, Any]:
    """Build the summary.

    ``complete``: every engine was reached, and nothing is missing since its first frame.
    """
    stats = [recorder.stats for recorder in recorders]
    written = writer.stats
    clean = not written.overflowed_frames and not written.failure and not written.unredactable_frames
    fed = all(s.connected and not s.lost_frames and not s.malformed for s in stats)
    return {
        "complete": clean and fed,
        "files": [str(path) for path in writer.pieces],
        "writer": msgspec.to_builtins(written),
        "sources": [msgspec.to_builtins(s) for s in stats],
    }


def _table(stats: Sequence[RecordStats], writer: CaptureWriter) -> Table:
    title = f"recording {writer.stats.bytes_written / (1 << 20):,.1f} MB"
    columns = (">reached", ">frames", ">history", ">seqs", ">gaps", ">lost", ">restarts", ">malformed")
    table = make_table("engine", *columns, title=title, gap=1, min_width=15)
    for s in stats:
        seqs = "" if s.first_seq is None else f"{s.first_seq}..{s.last_seq}"
        counts = [str(n) for n in (s.gaps, s.lost_frames, s.restarts, s.malformed)]
        reached = "yes" if s.connected else "no"
        style = "red" if s.lost_frames or s.malformed or not s.connected else ""
        table.add_row(s.source, reached, f"{s.frames:,}", f"{s.history_frames:,}", seqs, *counts, style=style)
    return table


def _describe(writer: CaptureWriter, options: RecordOptions) -> str:
    stats = writer.stats
    parts = [f"{stats.frames:,} frames in {', '.join(str(path) for path in writer.pieces)}"]
    if stats.deleted_files:
        parts.append(f"{stats.deleted_files} older files deleted to stay below --max-mb")
    if stats.full:
        parts.append("stopped at --max-mb")
    if stats.overflowed_frames:
        parts.append(f"LOST {stats.overflowed_frames:,} frames: the disk or the processor could not keep up")
    if stats.failure:
        parts.append(f"WRITING FAILED: {stats.failure}")
    if stats.unredactable_frames:
        parts.append(
            f"{stats.unredactable_frames:,} frames written without payload: they could not be redacted"
        )
    if options.redact:
        parts.append(
            "token ids are zeros: the hash scheme cannot be detected from this capture (--hash-scheme)"
        )
    return "\n".join(parts)
