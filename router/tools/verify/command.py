"""What ``kvatlas verify`` prints: a table with a progress bar, or JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from router.replication.redis.errors import IndexUnavailable
from router.replication.settings import IndexSettings
from router.tools.console import output_console
from router.tools.verify.run import TraceResult, total, verify_trace
from router.tools.verify.shared import SharedVerifier
from router.tools.verify.traces import TraceError, trace_files

_NUMBERS = {"probes": 6, "exact": 6, "over": 4, "under": 5, "tokens": 9, "error": 5}
"""Columns of counts, each with the width it keeps on a narrow terminal; a cold run has one more."""
_WIDE = 120


def run_verify(
    paths: list[Path], *, as_json: bool, index: IndexSettings | None = None, cold: bool = False
) -> int:
    """0 if every prediction for every trace is exact, 1 if not, 2 for a trace that cannot be read.

    With a shared ``index`` another process writes the events to it, and this one predicts from it. A ``cold``
    run predicts each probe from the events before it only.
    """
    if not paths:
        print("kvatlas verify: give at least one trace file or folder", file=sys.stderr)
        return 2
    if cold and index is not None and index.is_shared:
        print("kvatlas verify: --cold is of one process; leave --index out", file=sys.stderr)
        return 2
    try:
        files = trace_files(paths)
        with _verifier(index, cold=cold) as verify_one:
            results = _json_lines(files, verify_one) if as_json else _with_progress(files, verify_one)
    except (TraceError, IndexUnavailable) as error:
        print(f"kvatlas verify: {error}", file=sys.stderr)
        return 2
    if not as_json:
        console = output_console()
        console.print(_table(results, narrow=console.width < _WIDE, cold=cold))
    return 0 if all(result.all_exact for result in results) else 1


@contextmanager
def _verifier(index: IndexSettings | None, *, cold: bool) -> Iterator[Callable[[Path], TraceResult]]:
    """What verifies one trace: from memory, or through a shared index."""
    if index is None or not index.is_shared:
        yield partial(verify_trace, cold=cold)
    else:
        with SharedVerifier(index) as verifier:
            yield verifier.verify_trace


def _json_lines(files: list[Path], verify_one: Callable[[Path], TraceResult]) -> list[TraceResult]:
    results = []
    for path in files:
        results.append(verify_one(path))
        print(msgspec.json.encode(results[-1]).decode(), flush=True)
    summed = msgspec.to_builtins(total(results))
    kept = {name: value for name, value in summed.items() if name not in {"trace", "family", "detected"}}
    print(msgspec.json.encode({"total": {"traces": len(files), **kept}}).decode())
    return results


def _with_progress(files: list[Path], verify_one: Callable[[Path], TraceResult]) -> list[TraceResult]:
    results = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("verifying", total=len(files))
        for path in files:
            results.append(verify_one(path))
            progress.advance(task)
    return results


def _table(results: list[TraceResult], *, narrow: bool, cold: bool = False) -> Table:
    """All counts have their place on a narrow terminal, at the cost of long names."""
    table = Table(
        title="predicted hits against recorded truth", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column("trace", no_wrap=True, overflow="ellipsis", max_width=22 if narrow else None)
    table.add_column("scheme", no_wrap=True, overflow="ellipsis", max_width=11 if narrow else None)
    for name, digits in (_NUMBERS | ({"unknown": 7} if cold else {})).items():
        table.add_column(name, justify="right", no_wrap=True, min_width=digits)
    for result in (*results, total(results)):
        counts = (result.probes, result.exact, result.over, result.under)
        tokens = (result.truth_tokens, result.abs_error_tokens, *([result.unknown] if cold else []))
        style = "bold" if result.trace == "total" else "" if result.all_exact else "red"
        table.add_row(result.trace, _scheme(result), *[f"{n:,}" for n in (*counts, *tokens)], style=style)
    return table


def _scheme(result: TraceResult) -> str:
    if result.detected is None:
        return ""
    scheme = result.detected["scheme"]
    return result.detected["mode"] if scheme is None else f"{scheme['algo']}/{scheme['hash_block_size']}"
