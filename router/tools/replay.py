"""``kvatlas replay``: play a capture through the serving code, and show what each engine held over time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from kvatlas.router.config.errors import ConfigError
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.tools.capture import CapturedFrame, is_trace, read_capture, with_progress
from kvatlas.router.tools.ops_client import make_table, output_console
from kvatlas.router.tools.replay_player import Player, Sample, SourceRun, samples_of, up_to
from kvatlas.router.tools.trace_file import RecordingError, trace_facts


def stream_table(runs: Sequence[SourceRun]) -> Table:
    """Table of the streams, one row per engine."""
    names = ("frames", "events", "seqs", "gaps", "missing", "restarts", "resets", "late", "bad")
    table = make_table("engine", *[f">{name}" for name in names], title="streams", gap=1, min_width=12)
    for run in runs:
        bad = run.undecodable + run.rejected_events
        counts = (run.gaps, run.missing_batches, run.restarts, run.clears, run.late, bad)
        table.add_row(
            run.source.removeprefix("http://"),
            f"{run.frames:,}",
            f"{run.events:,}",
            f"{run.first_seq}..{run.last_seq}",
            *[f"{n:,}" for n in counts],
            style="yellow" if run.gaps or bad else "",
        )
    return table


def sample_table(samples: Sequence[Sample]) -> Table:
    """Table with one row per time and plane; the engine has a column only if there are several."""
    engines = {p.source for taken in samples for p in taken.planes}
    names = ("s", "seq", "plane", "blocks", "copies", "stored", "removed", "cleared", "unknown", "gaps")
    columns = (*(["engine"] if len(engines) > 1 else []), *[f">{name}" for name in names])
    table = make_table(*columns, title="residency over time", gap=1, min_width=8)
    for taken in samples:
        for number, p in enumerate(taken.planes):
            counts = (p.blocks, p.copies, p.stored, p.removed, p.cleared, p.unknown_removals, p.gaps)
            table.add_row(
                *([p.source.removeprefix("http://")] if len(engines) > 1 else []),
                "" if number else f"{taken.elapsed_s:.1f}",
                str(p.seq),
                f"{p.medium} {p.group}",
                *[f"{n:,}" for n in counts],
            )
        table.add_section()
    return table


class ReplayOptions(msgspec.Struct, frozen=True):
    """Arguments of ``kvatlas replay``."""

    paths: tuple[Path, ...]
    to_seq: int | None = None
    source: str | None = None
    samples: int = 10


def run_replay(options: ReplayOptions, *, as_json: bool) -> int:
    """Returns 0 when done, 2 for unusable input."""
    try:
        _check(options)
        _play(options, as_json=as_json)
    except (RecordingError, ConfigError) as error:
        print(f"kvatlas replay: {error}", file=sys.stderr)
        return 2
    return 0


def facts_of(paths: Sequence[Path]) -> ModelFacts:
    """Return the model facts of a recorded trace; a capture has none."""
    return trace_facts(paths[0]) if is_trace(paths[0]) else ModelFacts()


def _check(options: ReplayOptions) -> None:
    if not options.paths:
        raise ConfigError("give a capture: FILE [FILE ..]")
    if options.to_seq is not None and options.to_seq < 0:
        raise ConfigError(f"--to-seq: {options.to_seq} is not a number of 0 or more")
    if not 1 <= options.samples <= 10_000:
        raise ConfigError(f"--samples: {options.samples} is not 1 to 10000")


def _frames(options: ReplayOptions) -> Iterator[CapturedFrame]:
    for frame in up_to(read_capture(options.paths), options.to_seq):
        if options.source is None or frame.source == options.source:
            yield frame


def _play(options: ReplayOptions, *, as_json: bool) -> None:
    total = sum(1 for _ in _frames(options))
    if not total:
        where = "" if options.source is None else f" of {options.source}"
        raise RecordingError(f"{options.paths[0]}: no frames{where} up to that seq")
    player = Player(facts_of(options.paths))
    frames = with_progress(_frames(options), "playing", quiet=as_json)
    samples = samples_of(player, frames, total=total, samples=options.samples)
    if as_json:
        print(msgspec.json.encode({"sources": player.runs, "samples": samples}).decode())
        return
    console = output_console()
    console.print(stream_table(player.runs))
    console.print(sample_table(samples))
