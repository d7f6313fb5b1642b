"""Simulated engines against vLLM's own Scheduler in virtual time: agents and conversations, on fleets whose
pools are small enough that prompts wait, blocks are evicted and answers preempted.

A simulated fleet serves a workload; what came to each of its engines, and when, is given to a real scheduler
(``drive_simulation``), with tokens made from the ids. Hits, first tokens, whole answers and preemptions are
compared request by request, and their means and percentiles over the fleet.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from kvatlas.router.simulation.cache_layouts import groups_of, pool_blocks
from kvatlas.router.simulation.fleet import FleetSim
from kvatlas.router.simulation.outcome import FleetRun
from kvatlas.router.simulation.requests import Request, continued
from kvatlas.router.simulation.setup import FleetSetup, Timing
from kvatlas.router.simulation.variants import VARIANTS
from kvatlas.router.simulation.workload import GENERATORS
from tests.vllm.forked import driven

pytestmark = pytest.mark.vllm

DEADLINE_S = 600
ENGINES = 2
TIMING = Timing(chunk_tokens=4096, seqs_max=32)
WITHIN = 0.03
"""Of a mean, a percentile or the hits."""
ALIKE_WITHIN, ALIKE_SHARE = 0.1, 0.95
"""Deviation of one request's first token and of its whole answer, and the share of requests within it."""


class Case(NamedTuple):
    """``share``: of what the requests fill, held by the fleet's pools."""

    workload: str
    model: str
    share: float
    gap_s: float
    requests: int = 150
    retention: int | None = 0


CASES = [
    Case("agents", "full", 0.15, 0.25),
    Case("agents", "gpt-oss-like", 0.4, 0.25),
    Case("agents", "mamba-hybrid", 0.4, 0.25, retention=4096),
    Case("chat", "full", 0.25, 0.1),
    Case("chat", "gemma3-like", 0.8, 0.1, retention=None),
    Case("chat", "mamba-hybrid", 0.8, 0.1),
]


def served(case: Case) -> tuple[FleetSetup, list[Request], FleetRun]:
    requests = continued(GENERATORS[case.workload](case.requests, case.gap_s * case.requests, 3))
    groups = groups_of(case.model)
    setup = FleetSetup(
        groups=groups,
        num_blocks=pool_blocks(requests, groups, ENGINES, case.share),
        engines=ENGINES,
        retention=case.retention,
        timing=TIMING,
        closed=True,
    )
    return setup, requests, FleetSim(setup, VARIANTS["kvatlas"]).run(requests)


def logs_of(setup: FleetSetup, requests: Sequence[Request], run: FleetRun) -> list[dict[str, Any]]:
    """One log per engine."""
    logs = []
    for engine in range(ENGINES):
        rows = sorted((row for row in run.rows if row.engine == engine), key=lambda row: row.arrived_s)
        asked = [(row.arrived_s, requests[row.index]) for row in rows]
        logs.append(
            {
                "groups": msgspec.to_builtins(setup.groups),
                "num_blocks": setup.num_blocks,
                "retention": setup.retention,
                "timing": msgspec.to_builtins(setup.timing),
                "unit_tokens": requests[0].unit_tokens,
                "requests": [[at_s, one.input_tokens, one.output_tokens, one.ids] for at_s, one in asked],
            }
        )
    return logs


def replayed(python: str, model: Path, directory: Path, logs: Sequence[dict[str, Any]]) -> list[Any]:
    """The rows of each log, from vLLM's interpreter."""
    paths = [directory / f"{number:03}.json" for number in range(len(logs))]
    for path, log in zip(paths, logs, strict=True):
        path.write_text(json.dumps(log))
    words = ("tests.vllm.drive_simulation", "--model", str(model), *map(str, paths))
    lines = driven(python, *words, timeout=DEADLINE_S, VLLM_ALLOW_LONG_MAX_MODEL_LEN="1")
    return [json.loads(line)["rows"] for line in lines if line.startswith("{")]


def same_requests(run: FleetRun, real: Sequence[Any]) -> tuple[Any, Any]:
    """Seconds to first and last token, hits and preemptions of each request: simulated, and real."""
    mine, theirs = [], []
    for engine, ones in enumerate(real):
        rows = sorted((row for row in run.rows if row.engine == engine), key=lambda row: row.arrived_s)
        mine += [(row.ttft_s, row.answer_s, row.hit, row.preempted) for row in rows]
        theirs += [
            (one["first_s"] - row.arrived_s, one["ended_s"] - row.arrived_s, one["hit"], one["preempted"])
            for row, one in zip(rows, ones, strict=True)
        ]
    return np.array(mine).T, np.array(theirs).T


@pytest.mark.timeout(DEADLINE_S + 60)
def test_engines_step_as_vllms_scheduler_does(vllm_python: str, tiny_model: Path, tmp_path: Path) -> None:
    runs = {case: served(case) for case in CASES}
    logs = [log for run in runs.values() for log in logs_of(*run)]
    real = replayed(vllm_python, tiny_model, tmp_path, logs)
    preempted, waited = 0, 0.0
    for number, (case, (_, _, run)) in enumerate(runs.items()):
        ours, vllms = same_requests(run, real[ENGINES * number : ENGINES * (number + 1)])
        for what, mine, theirs in zip(("first token", "whole answer", "hit"), ours, vllms, strict=False):
            found = f"{case}: {what}: simulated mean {mine.mean()}, vLLM {theirs.mean()}"
            assert mine.mean() == pytest.approx(theirs.mean(), rel=WITHIN), found
            p99s = [float(np.percentile(values, 99)) for values in (mine, theirs)]
            assert p99s[0] == pytest.approx(p99s[1], rel=WITHIN), f"{case}: {what}: p99 {p99s}"
            alike = (np.abs(mine - theirs) <= ALIKE_WITHIN * theirs).mean()
            assert alike >= ALIKE_SHARE, f"{case}: {what}: {alike:.1%} of requests alike"
        preempted += int(vllms[3].sum())
        waited = max(waited, vllms[0].max())
    assert preempted > 20, "no pool was tight enough to preempt"
    assert waited > 10, "no prompt waited"
