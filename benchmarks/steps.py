"""Measure the longest step of the event loop for one request: every cache layout, prompt length and turn.

    python -m benchmarks.steps [--layouts full,mla] [--tokens 4,32,128,256] [--forms chat,ids] [--rounds 3]

In process and without a network: a whole router before two made-up engines (``decision.py``). Each cell is
one conversation. *Cold*: its first request. *Next*: after the engine has computed it and told of its blocks
(or a shadow has taken it in, without events), the same and one more exchange. A step is what the loop runs
without a turn for anything else: the request's own, what it defers, and each batch of the engine's events for
it (one per 8,192 tokens). Work in threads is not counted. CPU is the least of ``--rounds`` conversations;
lines are Python lines of the longest step, which other work on the machine does not change
(tests/router/app/test_steps.py bounds them). Goal: no step above 10 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import msgspec

from benchmarks.decision import MODEL, Bench
from benchmarks.layouts import LAYOUTS, Layout


class Steps:
    """The longest step of a loop since ``begin``: CPU seconds of its thread, and Python lines if counted."""

    def __init__(self, *, lines: bool) -> None:
        self._lines = lines
        self._count = 0
        self.begin()

    def begin(self) -> None:
        self.longest_s, self.most_lines = 0.0, 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count what runs within as one step."""
        self._count, began = 0, time.thread_time()
        if self._lines:
            sys.settrace(self._enter)
        try:
            yield
        finally:
            if self._lines:
                sys.settrace(None)
            self.longest_s = max(self.longest_s, time.thread_time() - began)
            self.most_lines = max(self.most_lines, self._count)

    def _enter(self, frame: FrameType, event: str, _: object) -> Any:
        return self._line

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        self._count += event == "line"
        return self._line


@contextmanager
def counting(*, lines: bool) -> Iterator[Steps]:
    """Count the steps of every loop that runs within, without the collector's passes."""
    steps, run = Steps(lines=lines), asyncio.Handle._run  # noqa: SLF001  # the one place that runs a step

    def counted(handle: asyncio.Handle) -> None:
        with steps.step():
            run(handle)

    asyncio.Handle._run = counted  # type: ignore[method-assign, assignment]  # noqa: SLF001
    gc.collect()
    gc.disable()
    try:
        yield steps
    finally:
        gc.enable()
        asyncio.Handle._run = run  # type: ignore[method-assign]  # noqa: SLF001


class Longest(NamedTuple):
    """Of one request."""

    cpu_s: float
    lines: int
    hit_tokens: int


class Conversation:
    """A router before two engines, and one conversation with it."""

    def __init__(self, layout: Layout, tokens: int, *, form: str, events: bool, seed: int = 0) -> None:
        self._tokens, self._form, self._events = tokens, form, events
        self.bench = Bench(2, layout=layout, events=events)
        # Some 204 tokens each; no two conversations share any.
        text = "The quick router reads a long story about a small engine and its famous garden. " * 12
        self._messages = [
            {"role": ("user", "assistant")[n % 2], "content": f"{seed} {n} {text}"}
            for n in range(max(1, tokens // 204) | 1)
        ]
        self._ids = [(7 * seed + 31 * n) % 900 + 100 for n in range(tokens)]

    def _body(self) -> bytes:
        if self._form == "ids":
            return msgspec.json.encode({"model": MODEL, "prompt": self._ids, "max_tokens": 1})
        fields = {"model": MODEL, "messages": self._messages, "max_tokens": 1}
        return msgspec.json.encode(fields)

    def _go_on(self) -> None:
        self._ids += [(11 * n) % 900 + 100 for n in range(100)]
        self._messages += [
            {"role": "assistant", "content": "It is so."},
            {"role": "user", "content": "And then what happened in the garden?"},
        ]

    async def cold(self, steps: Steps) -> Longest:
        """The first request."""
        self.bench.begin()
        return await self._ask(steps)

    async def next_turn(self, steps: Steps) -> Longest:
        """The one after; what came between counts too: the batches of events, or the shadow."""
        steps.begin()
        for batch in self.bench.computed(list((await self.bench.read()).token_ids)) if self._events else ():
            with steps.step():
                self.bench.told(self._engine_id, batch)
        between = steps.longest_s, steps.most_lines
        self._go_on()
        found = await self._ask(steps)
        return Longest(max(found.cpu_s, between[0]), max(found.lines, between[1]), found.hit_tokens)

    async def _ask(self, steps: Steps) -> Longest:
        self.bench.body = self._body()
        self.bench.path = "/v1/completions" if self._form == "ids" else "/v1/chat/completions"
        await asyncio.sleep(0)
        steps.begin()
        await asyncio.create_task(self.bench.ask())
        await asyncio.sleep(0)
        with steps.step():
            self.bench.router.accounts.books.settle()
        for _ in range(self._tokens // 8192 + 8):  # a shadow takes it in chunk by chunk
            await asyncio.sleep(0)
        receipt = self.bench.router.accounts.receipts.latest[-1]
        self._engine_id = receipt.engine_id
        return Longest(steps.longest_s, steps.most_lines, receipt.predicted_tokens or 0)

    def close(self) -> None:
        self.bench.close()


async def both_turns(
    layout: Layout, tokens: int, steps: Steps, *, form: str, events: bool, seed: int = 0
) -> tuple[Longest, Longest]:
    """The longest steps of a cold request and of its next turn."""
    conversation = Conversation(layout, tokens, form=form, events=events, seed=seed)
    try:
        return await conversation.cold(steps), await conversation.next_turn(steps)
    finally:
        conversation.close()


def measure(layout: Layout, tokens: int, rounds: int, *, form: str, events: bool) -> list[tuple[float, int]]:
    """CPU seconds and lines of the longest step of either turn."""
    kinds = [False] * rounds + [True]
    found: list[list[Longest]] = [[], []]
    for seed, lines in enumerate(kinds):
        with counting(lines=lines) as steps:
            turns = asyncio.run(both_turns(layout, tokens, steps, form=form, events=events, seed=seed))
        for of_turn, one in zip(found, turns, strict=True):
            of_turn.append(one)
    return [(min(one.cpu_s for one in turn[:-1]), turn[-1].lines) for turn in found]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--tokens", default="4,32,128,256", help="thousands")
    parser.add_argument("--forms", default="chat,ids")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    lengths = [int(thousand) for thousand in args.tokens.split(",")]
    print("| layout | prompt | events | turn |", " | ".join(f"{k}k: ms | lines" for k in lengths), "|")
    print("| --- | --- | --- | --- |" + " ---: |" * 2 * len(lengths))
    longest_s = 0.0
    measure(LAYOUTS["full"], 1000, 1, form="chat", events=True)  # what only the first request does
    for name in args.layouts.split(","):
        for form in args.forms.split(","):
            for events in (True, False):
                cells = [
                    measure(LAYOUTS[name], thousand * 1000, args.rounds, form=form, events=events)
                    for thousand in lengths
                ]
                for place, turn in enumerate(("cold", "next")):
                    row = [cell[place] for cell in cells]
                    longest_s = max(longest_s, *(cpu_s for cpu_s, _ in row))
                    words = " | ".join(f"{1000 * cpu_s:.1f} | {lines}" for cpu_s, lines in row)
                    print(f"| {name} | {form} | {'yes' if events else 'no'} | {turn} | {words} |", flush=True)
    print(f"\nThe longest step: {1000 * longest_s:.1f} ms.")


if __name__ == "__main__":
    main()
