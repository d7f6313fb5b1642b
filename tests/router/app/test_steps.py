"""No legal request holds the loop: every cache layout, prompt length, form and turn, with and without events.

Counted in Python lines of the longest step (``benchmarks.steps``), which the machine and other work on it do
not change. 200,000 lines take some 5 ms. By layout nothing may grow but what is in proportion to the prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import tracemalloc

import pytest

from benchmarks.decision import Bench
from benchmarks.layouts import LAYOUTS, Layout
from benchmarks.steps import Conversation, Steps, both_turns, counting
from kvatlas.router.placement import engine as engine_module
from kvatlas.router.placement import inflight
from tests.support.examples import some
from tests.support.waiting import run
from tests.support.worst_bodies import long_prompts

LINES_MAX = {True: 50_000, False: 200_000}
"""With events, and without: then a pool of Python stands in for the engine's, some 35 lines per block."""
CELLS = [
    (layout, tokens, form, events)
    for tokens, form, events, layout in itertools.product(
        (4_000, 32_000, 128_000, 256_000), ("chat", "ids"), (True, False), LAYOUTS
    )
]
SHORT = {
    *((layout, 32_000, "chat", True) for layout in ("full", "gemma3-like", "mamba-align")),
    ("full", 256_000, "chat", True),
    ("mla", 128_000, "ids", True),
    ("full", 256_000, "ids", False),
    ("gemma3-like", 128_000, "chat", False),
}


CASES = [
    pytest.param(*cell, marks=() if cell in SHORT else pytest.mark.long, id="-".join(map(str, cell)))
    for cell in CELLS
]
"""Some of them are tried each time, the others are ``long``."""


@pytest.fixture(scope="module", autouse=True)
def _first_request() -> None:
    """Steps of the first request of a process only."""
    with counting(lines=False) as steps:
        run(both_turns(LAYOUTS["full"], 1000, steps, form="chat", events=True))


@pytest.mark.parametrize(("layout", "tokens", "form", "events"), CASES)
def test_no_step_of_a_request_is_long(layout: str, tokens: int, form: str, events: bool) -> None:
    with counting(lines=True) as steps:
        cold, following = run(both_turns(LAYOUTS[layout], tokens, steps, form=form, events=events))
    assert max(cold.lines, following.lines) <= LINES_MAX[events]
    if events:
        # Its blocks are there, up to those of a window or chunk, and what a drafter drops.
        assert following.hit_tokens > 0.9 * tokens


@pytest.mark.parametrize(
    ("size", "layout", "events"),
    [
        (128 << 10, "full", True),
        *(
            pytest.param(1 << 20, layout, events, marks=pytest.mark.long)
            for layout in ("full", "gpt-oss-like")
            for events in (True, False)
        ),
        pytest.param(7 << 20, "gpt-oss-like", True, marks=pytest.mark.long),
    ],
)
def test_no_step_of_a_prompt_of_any_content_is_long(size: int, layout: str, events: bool) -> None:
    """Up to ``prompts.prompt_bytes_max`` they are read, though many have more tokens than any model takes."""
    for name, (path, body) in long_prompts(size).items():
        with counting(lines=True) as steps:
            run(placed(LAYOUTS[layout], path, body, steps, events=events))
        assert steps.most_lines <= LINES_MAX[False], name


async def placed(layout: Layout, path: str, body: bytes, steps: Steps, *, events: bool) -> None:
    bench = Bench(2, body, layout, events=events)
    bench.path = path
    bench.begin()
    steps.begin()
    with contextlib.suppress(AssertionError):  # an error of the request's own
        await asyncio.create_task(bench.ask())
    with steps.step():
        bench.router.accounts.books.settle()
    bench.close()


def test_a_step_for_each_block_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_by_one(*args: object) -> inflight.Kept:
        return tuple(range(end, end + 1) for span in inflight.kept_prefixes(*args) for end in span)  # type: ignore[arg-type]

    monkeypatch.setattr(engine_module, "kept_prefixes", one_by_one)
    with counting(lines=True) as steps:
        turns = run(both_turns(LAYOUTS["full"], 4_000, steps, form="ids", events=True))
    assert max(turn.lines for turn in turns) > LINES_MAX[True]


@pytest.mark.parametrize("events", some([True, False], 2))
@pytest.mark.parametrize("layout", some(LAYOUTS, len(LAYOUTS)))
def test_a_prompt_in_flight_takes_the_same_memory_in_every_layout(layout: str, events: bool) -> None:
    """Tokens, hashes and their rows; 750 bytes a block of full attention were 47 a token."""
    short, long = (kept_bytes(layout, tokens, events=events) for tokens in (32_000, 64_000))
    assert (long - short) / 32_000 < 30


def kept_bytes(layout: str, tokens: int, *, events: bool) -> int:
    """Objects that a request leaves."""

    async def ask() -> int:
        conversation = Conversation(LAYOUTS[layout], tokens, form="ids", events=events)
        gc.collect()
        tracemalloc.start()
        try:
            await conversation.cold(steps)
            conversation.bench.body = b""
            gc.collect()
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
            conversation.close()

    with counting(lines=False) as steps:
        return run(ask())
