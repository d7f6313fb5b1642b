"""What ``kvatlas record`` does: sources from the command line, a recording until told to stop, a summary."""

from __future__ import annotations

import asyncio
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
from rich.console import Console
from rich.live import Live
from rich.table import Table

from router.config.errors import ConfigError
from router.config.load import parse_engine
from router.fleet.identity import EngineAddress
from router.fleet.poller import event_sources
from router.tools.capture.file import CaptureError
from router.tools.capture.writer import CaptureWriter
from router.tools.console import output_console
from router.tools.record.order import RecordStats
from router.tools.record.recorder import RecordSource, SourceRecorder, record

_ASK_TIMEOUT_S = 5.0
_ANSWER_BYTES_MAX = 1 << 20
_OPTIONS = {"events", "replay", "topic", "source"}
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class RecordOptions(msgspec.Struct, frozen=True):
    """How a recording is kept."""

    path: Path
    seconds: float | None = None
    rotate_mb: float | None = None
    max_mb: float | None = None
    redact: bool = False


def run_record(engines: Sequence[str], options: RecordOptions, *, as_json: bool) -> int:
    """0 if every frame was recorded, 1 if some were lost or an engine was not reached, 2 for bad input."""
    try:
        sources = resolve(engines)
        _check(options)
        writer = CaptureWriter(
            options.path,
            rotate_bytes=None if options.rotate_mb is None else int(options.rotate_mb * (1 << 20)),
            total_bytes_max=None if options.max_mb is None else int(options.max_mb * (1 << 20)),
            redacted=options.redact,
        )
    except (CaptureError, ConfigError) as error:
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
        print(f"kvatlas record: not an address to record from: {problem}", file=sys.stderr)
        return 2
    summary = _summary(recorders, writer)
    if as_json:
        print(msgspec.json.encode(summary).decode())
    else:
        output_console().print(_table([recorder.stats for recorder in recorders], writer))
        print(_words(writer, options))
    return 0 if summary["complete"] else 1


def resolve(engines: Sequence[str]) -> list[RecordSource]:
    """Streams named by ``--engine``. Raises ``ConfigError`` for one that is none or publishes no events."""
    sources: list[RecordSource] = []
    for text in engines:
        if text.partition("=")[0] in _OPTIONS:
            sources.append(_bare(text))
        else:
            found = _asked(parse_engine(text))
            sources += [RecordSource(e.engine_id, e.events or "", e.replay, e.topic) for e in found]
    if not sources:
        raise ConfigError("no engine: give --engine URL or --engine events=tcp://..[,replay=tcp://..]")
    names = [source.source for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--engine: {name} is named twice")
    return sources


def _bare(text: str) -> RecordSource:
    """``events=tcp://..[,replay=..][,topic=..][,source=NAME]``: a stream without a server to ask."""
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


def _asked(engine: EngineAddress) -> list[EngineAddress]:
    """The engine with its event endpoints, asked from the server where they were not given."""
    if engine.events is not None:
        return [engine]
    url = f"{engine.base_url}/kv_event_sources"
    hint = "give events=tcp://.. too"
    try:
        with urllib.request.urlopen(url, timeout=_ASK_TIMEOUT_S) as answer:  # noqa: S310  # http, checked
            found = event_sources(engine.base_url, answer.read(_ANSWER_BYTES_MAX))
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise ConfigError(f"{url}: {error}; {hint}") from None
    wanted = [e for e in found if engine.dp_rank is None or (e.dp_rank or 0) == engine.dp_rank]
    if not wanted:
        raise ConfigError(f"{url}: this engine publishes no events")
    return wanted


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
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, stop.set)
    console = Console(stderr=True)
    try:
        recording = asyncio.ensure_future(
            record(recorders, stop=stop, seconds=options.seconds, ended=lambda: writer.ended)
        )
        if quiet or not console.is_terminal:
            await recording
            return
        with Live(console=console, transient=True, auto_refresh=False) as live:
            while not recording.done():
                await asyncio.wait([recording], timeout=0.5)
                live.update(_table([recorder.stats for recorder in recorders], writer), refresh=True)
        await recording
    finally:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)


def _summary(recorders: Sequence[SourceRecorder], writer: CaptureWriter) -> dict[str, Any]:
    """``complete``: every engine was reached, and nothing is missing since its first frame."""
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
    table = Table(
        title=f"recording {writer.stats.bytes_written / (1 << 20):,.1f} MB", box=None, padding=(0, 1, 0, 0)
    )
    table.add_column("engine", overflow="fold", min_width=15)
    names = ("frames", "history", "seqs", "gaps", "lost", "restarts", "malformed")
    for name in ("reached", *names):
        table.add_column(name, justify="right", no_wrap=True)
    for s in stats:
        seqs = "" if s.first_seq is None else f"{s.first_seq}..{s.last_seq}"
        counts = [str(n) for n in (s.gaps, s.lost_frames, s.restarts, s.malformed)]
        reached = "yes" if s.connected else "no"
        style = "red" if s.lost_frames or s.malformed or not s.connected else ""
        table.add_row(s.source, reached, f"{s.frames:,}", f"{s.history_frames:,}", seqs, *counts, style=style)
    return table


def _words(writer: CaptureWriter, options: RecordOptions) -> str:
    stats = writer.stats
    said = [f"{stats.frames:,} frames in {', '.join(str(path) for path in writer.pieces)}"]
    if stats.deleted_files:
        said.append(f"{stats.deleted_files} older files deleted to stay below --max-mb")
    if stats.full:
        said.append("stopped at --max-mb")
    if stats.overflowed_frames:
        said.append(f"LOST {stats.overflowed_frames:,} frames: the disk or the processor could not keep up")
    if stats.failure:
        said.append(f"WRITING FAILED: {stats.failure}")
    if stats.unredactable_frames:
        said.append(
            f"{stats.unredactable_frames:,} frames written without payload: they could not be redacted"
        )
    if options.redact:
        said.append(
            "token ids are zeros: the hash scheme cannot be detected from this capture (--hash-scheme)"
        )
    return "\n".join(said)
