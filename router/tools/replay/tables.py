"""What ``kvatlas replay`` shows on a terminal: streams, residency over time, differences."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from router.tools.replay.diff import PlaneDiff
from router.tools.replay.player import Sample, SourceRun

_SHOWN_HASHES = 8


def diff_table(found: Sequence[PlaneDiff], *, title: str = "residency: A against B") -> Table:
    """What only one of two states holds, plane by plane."""
    table = Table(title=title, box=None, padding=(0, 1, 0, 0))
    table.add_column("engine", overflow="fold", min_width=12)
    for name in ("medium", "group", "in both", "only A", "only B", "copies"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("blocks", no_wrap=True)
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
    """One row per engine: what its stream was like."""
    table = Table(title="streams", box=None, padding=(0, 1, 0, 0))
    table.add_column("engine", overflow="fold", min_width=12)
    names = ("frames", "events", "seqs", "gaps", "missing", "restarts", "resets", "late", "bad")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
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
    """One row per moment and plane; the engine has a column only where there are several."""
    engines = {p.source for taken in samples for p in taken.planes}
    table = Table(title="residency over time", box=None, padding=(0, 1, 0, 0))
    if len(engines) > 1:
        table.add_column("engine", overflow="fold", min_width=8)
    names = ("plane", "blocks", "copies", "stored", "removed", "cleared", "unknown", "gaps")
    for name in ("s", "seq", *names):
        table.add_column(name, justify="right", no_wrap=True)
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
