"""``kvatlas replay``: play a capture, show it, publish it again, or compare it with another state."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
from rich.console import Console
from rich.live import Live
from rich.table import Table

from publisher.zmq_publisher import ZmqPublisher
from router.config.errors import ConfigError
from router.index.base import Plane
from router.index.learn.layout import ModelFacts
from router.tools.capture import CapturedFrame, is_trace, read_capture, with_progress
from router.tools.ops_client import make_table, output_console, stop_signals
from router.tools.replay_player import (
    Player,
    PublishEndpoint,
    Sample,
    Sampler,
    SourceRun,
    paced,
    parse_endpoint,
    publish_frame,
    publishers,
    sample,
    topics_of,
    up_to,
)
from router.tools.trace_verification import RecordingError, trace_facts

# Differences between two states of residency: two captures, or one capture at two points.


class PlaneDiff(msgspec.Struct, frozen=True):
    """Differences in one plane of one engine, blocks as 16 hexadecimal digits.

    ``copies`` counts the blocks held in both states with different numbers of copies.
    """

    source: str
    medium: str
    group: int
    same: int
    only_a: list[str]
    only_b: list[str]
    copies: int

    @property
    def differs(self) -> bool:
        return bool(self.only_a or self.only_b or self.copies)


def diff(a: Player, b: Player) -> list[PlaneDiff]:
    """Compare every plane that either state has.

    Engines are paired by name; if each state has a single engine, the two are paired regardless of their
    names.
    """
    names_a, names_b = ([run.source for run in player.runs] for player in (a, b))
    pairs = [(name, name) for name in dict.fromkeys([*names_a, *names_b])]
    if len(names_a) == len(names_b) == 1:
        pairs = [(names_a[0], names_b[0])]
    found = []
    for name_a, name_b in pairs:
        label = name_a if name_a == name_b else f"{name_a} / {name_b}"
        planes = {*a.ledger.seen_planes(name_a), *b.ledger.seen_planes(name_b)}
        found += [_plane(label, plane, a, name_a, b, name_b) for plane in sorted(planes)]
    return found


def _plane(label: str, plane: Plane, a: Player, name_a: str, b: Player, name_b: str) -> PlaneDiff:
    held_a, held_b = a.ledger.held(name_a, plane), b.ledger.held(name_b, plane)
    both = held_a.keys() & held_b.keys()
    return PlaneDiff(
        label,
        plane.medium,
        plane.group_idx,
        len(both),
        hex_blocks(held_a.keys() - held_b.keys()),
        hex_blocks(held_b.keys() - held_a.keys()),
        sum(held_a[block] != held_b[block] for block in both),
    )


def hex_blocks(blocks: Iterable[int]) -> list[str]:
    """Format blocks as 16 hexadecimal digits, sorted."""
    return [f"{block:016x}" for block in sorted(blocks)]


_SHOWN_HASHES = 8


def diff_table(found: Sequence[PlaneDiff], *, title: str = "residency: A against B") -> Table:
    """Table of the blocks held in only one of two states, plane by plane."""
    columns = (">medium", ">group", ">in both", ">only A", ">only B", ">copies", "<blocks")
    table = make_table("engine", *columns, title=title, gap=1, min_width=12)
    for plane in found:
        shown = [*(f"A {h}" for h in plane.only_a), *(f"B {h}" for h in plane.only_b)]
        more = [f"and {len(shown) - _SHOWN_HASHES} more (--json)"] if len(shown) > _SHOWN_HASHES else []
        numbers = (plane.same, len(plane.only_a), len(plane.only_b), plane.copies)
        table.add_row(
            plane.source.removeprefix("http://"),
            plane.medium,
            str(plane.group),
            *[f"{n:,}" for n in numbers],
            "\n".join([*shown[:_SHOWN_HASHES], *more]),
            style="yellow" if plane.differs else "",
        )
    return table


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


_REFRESH_S = 0.25


class ReplayOptions(msgspec.Struct, frozen=True):
    """Arguments of ``kvatlas replay``."""

    paths: tuple[Path, ...]
    to_seq: int | None = None
    source: str | None = None
    speed: float | None = None
    """Multiple of the recorded pace; 0: as fast as possible. Default 0, with ``publish`` 1."""
    publish: tuple[str, ...] = ()
    stay_s: float | None = None
    """Seconds to serve replay after the last published frame; None: until a signal."""
    samples: int = 10
    diff: Path | None = None
    diff_seq: int | None = None


def run_replay(options: ReplayOptions, *, as_json: bool) -> int:
    """Returns 0 when done, 1 if states differ, 2 for unusable input."""
    try:
        _check(options)
        if options.diff is not None or options.diff_seq is not None:
            return _diff(options, as_json=as_json)
        return _play(options, as_json=as_json)
    except (RecordingError, ConfigError) as error:
        print(f"kvatlas replay: {error}", file=sys.stderr)
        return 2


def facts_of(paths: Sequence[Path]) -> ModelFacts:
    """Return the model facts of a recorded trace; a capture has none."""
    return trace_facts(paths[0]) if is_trace(paths[0]) else ModelFacts()


def _check(options: ReplayOptions) -> None:
    if not options.paths:
        raise ConfigError("give a capture: FILE [FILE ..]")
    for name, value in (
        ("--to-seq", options.to_seq),
        ("--diff-seq", options.diff_seq),
        ("--speed", options.speed),
        ("--stay", options.stay_s),
    ):
        if value is not None and not 0 <= value < float("inf"):
            raise ConfigError(f"{name}: {value} is not a number of 0 or more")
    if not 1 <= options.samples <= 10_000:
        raise ConfigError(f"--samples: {options.samples} is not in 1..10000")
    if options.diff is not None and options.diff_seq is not None:
        raise ConfigError("--diff and --diff-seq exclude each other")
    if options.publish and (options.diff is not None or options.diff_seq is not None):
        raise ConfigError("--publish and --diff exclude each other")


def _frames(options: ReplayOptions, to_seq: int | None) -> Iterator[CapturedFrame]:
    for frame in up_to(read_capture(options.paths), to_seq):
        if options.source is None or frame.source == options.source:
            yield frame


def _diff(options: ReplayOptions, *, as_json: bool) -> int:
    a, b = Player(facts_of(options.paths)), Player(facts_of(options.paths))
    a.play_all(_frames(options, options.to_seq))
    if options.diff is not None:
        b = Player(facts_of([options.diff]))
        b.play_all(up_to(read_capture([options.diff]), options.to_seq))
    else:
        b.play_all(_frames(options, options.diff_seq))
    found = diff(a, b)
    differs = any(plane.differs for plane in found)
    if as_json:
        planes = [msgspec.to_builtins(plane) for plane in found]
        print(msgspec.json.encode({"same": not differs, "planes": planes}).decode())
    else:
        output_console().print(diff_table(found))
    return 1 if differs else 0


def _play(options: ReplayOptions, *, as_json: bool) -> int:
    total = sum(1 for _ in _frames(options, options.to_seq))
    if not total:
        where = "" if options.source is None else f" of {options.source}"
        raise RecordingError(f"{options.paths[0]}: no frames{where} up to that seq")
    endpoints = _endpoints(options)
    try:
        player, samples = asyncio.run(_run(options, endpoints, total=total, quiet=as_json))
    except zmq.ZMQError as error:
        raise ConfigError(f"--publish: {error}") from None
    if as_json:
        report = {"sources": player.runs, "samples": samples}
        print(msgspec.json.encode(report).decode())
    else:
        console = output_console()
        console.print(stream_table(player.runs))
        console.print(sample_table(samples))
    return 0


def _endpoints(options: ReplayOptions) -> dict[str, PublishEndpoint]:
    """Return the endpoint of each published engine, in the order of their first frames."""
    if not options.publish:
        return {}
    try:
        given = [parse_endpoint(text) for text in options.publish]
    except ValueError as error:
        raise ConfigError(str(error)) from None
    names = list(topics_of(_frames(options, options.to_seq)))
    if len(given) != len(names):
        raise ConfigError(
            f"--publish: {len(given)} addresses for {len(names)} engines ({', '.join(names)}); "
            "repeat it, or select one engine with --source"
        )
    return dict(zip(names, given, strict=True))


async def _run(
    options: ReplayOptions, endpoints: dict[str, PublishEndpoint], *, total: int, quiet: bool
) -> tuple[Player, list[Sample]]:
    """Play all frames at their pace; with endpoints, publish them and then keep serving replay."""
    player = Player(facts_of(options.paths))
    sampler = Sampler(player, total=total, samples=options.samples)
    speed = options.speed if options.speed is not None else 1.0 if endpoints else 0.0
    topics = topics_of(_frames(options, options.to_seq)) if endpoints else {}
    console = Console(stderr=True)
    live = (
        Live(console=console, transient=True, auto_refresh=False)
        if console.is_terminal and not quiet and speed
        else None
    )
    stop = asyncio.Event()
    with contextlib.ExitStack() as stack:
        published = stack.enter_context(publishers(endpoints, topics, buffer_steps=total))
        if endpoints:
            stack.enter_context(stop_signals(stop.set))
            for source, publisher in published.items():
                replay = f", replay {publisher.replay_endpoint}" if publisher.replay_endpoint else ""
                print(f"{source}: events {publisher.endpoint}{replay}", file=sys.stderr, flush=True)
        if live is not None:
            stack.enter_context(live)
        frames = with_progress(_frames(options, options.to_seq), "playing", quiet=quiet or bool(speed))
        await _feed(sampler, paced(frames, speed), published, stop, live, player)
        if endpoints and not stop.is_set():
            print(f"all {total} frames sent; serving replay until Ctrl-C", file=sys.stderr, flush=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(options.stay_s):
                    await stop.wait()
    return player, sampler.taken


async def _feed(
    sampler: Sampler,
    frames: Any,
    published: dict[str, ZmqPublisher],
    stop: asyncio.Event,
    live: Live | None,
    player: Player,
) -> None:
    loop = asyncio.get_running_loop()
    shown = loop.time()
    async with contextlib.aclosing(frames):
        async for frame in frames:
            if stop.is_set():
                return
            if frame.source in published:
                publish_frame(published[frame.source], frame)
            sampler.play(frame)
            if live is not None and loop.time() - shown > _REFRESH_S:
                shown = loop.time()
                live.update(sample_table([sample(player, sampler.frames, 0.0)]), refresh=True)
