"""Engines without events are a budget too: no step of the loop grows with their number times the prompt."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.decision import Bench, chat, decide_by
from benchmarks.layouts import LAYOUTS
from benchmarks.steps import Steps, counting
from kvatlas.router.placement.placement import Decision
from tests.support.waiting import run

ENGINES = 160


async def _decided(layout: str, engines: int, turns: int, held: float, steps: Steps) -> Decision:
    """A decision before engines whose shadows hold this share of the prompt."""
    bench = Bench(engines, chat(turns), LAYOUTS[layout], events=False)
    prompt = await bench.read()
    bench.begin()
    tokens = list(prompt.token_ids)[: int(prompt.num_tokens * held)]
    for engine in bench.router.fleet if held else ():
        assert engine.shadow is not None
        engine.shadow.served(tokens, prompt.hashes)
    for _ in range(8):  # long prompts are taken in chunk by chunk
        await asyncio.sleep(0)
    steps.begin()
    decide = decide_by(bench.router.planner)
    decision: Decision = await asyncio.create_task(decide(bench.request(), frozenset(), prompt))
    bench.close()
    return decision


@pytest.mark.parametrize(
    ("layout", "held"),
    [
        ("full", 1.0),
        pytest.param("gemma3-like", 1.0, marks=pytest.mark.long),
        pytest.param("gemma3-like", 0.0, marks=pytest.mark.long),
        pytest.param("mamba-align", 1.0, marks=pytest.mark.long),
    ],
)
def test_a_decision_before_many_shadows_takes_turns(layout: str, held: float) -> None:
    with counting(lines=True) as steps:
        decision = run(_decided(layout, ENGINES, 8, held, steps))
    assert len(decision.engines) == ENGINES
    assert (decision.hit.whole_tokens > 0) == (held > 0)
    # The look-ups of some 80 engines, or the costs of all of them.
    assert steps.most_lines <= 70_000
