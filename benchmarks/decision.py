"""Measure one decision: Python calls and CPU, for a repeated chat before 1 to 1,024 engines of each layout.

    python -m benchmarks.decision [--layouts full,mla] [--engines 1,2,8,64,1024] [--turns 8] [--rounds 1000]

In process and without a network: a whole router whose engines are made up, each with the events of a pool of
its own that has seen the conversation to a different depth. Only the connection to the engine and the clock's
task are missing. Calls are counted by ``sys.setprofile`` (Python functions only), CPU by ``thread_time`` with
nothing counted. *Decision* is the look-ups and the choice for a prompt that has been read, *placement* is
``place`` and the end of the request; *request* is the whole way of an ASGI
call: reading, placing, relaying, closing. Updates that the router defers (receipts, counts, hot prefixes) are
no part of the calls of a request but counted as *later*; their CPU is part of it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NamedTuple

import msgspec

from benchmarks.layouts import LAYOUTS, Layout, events_of
from kvatlas.publisher.events import DecodedBatch
from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR
from kvatlas.router.app import Router
from kvatlas.router.config.schema import Config, ModelConfig
from kvatlas.router.feeds.base import FeedState, FeedStats
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.status import ModelCard
from kvatlas.router.http.client_head import ClientHead
from kvatlas.router.openai.request import InboundRequest, Usage
from kvatlas.router.placement.shadow import ShadowSettings
from kvatlas.router.prompts.prompt import Prompt
from kvatlas.router.prompts.settings import ANY_MODEL

MODEL = "kvatlas-demo"
_RUNS = 3
ANSWER = msgspec.json.encode(
    {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}}
)


def chat(turns: int) -> bytes:
    """A conversation of this many turns, some 200 tokens each."""
    text = "The quick router reads a long story about a small engine and its famous garden. " * 12
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": f"{i} {text}"} for i in range(2 * turns - 1)]
    return msgspec.json.encode({"model": MODEL, "messages": messages, "max_tokens": 8})


decide_by = attrgetter("_decide")
"""The decision without what ``place`` does around it."""


class Asked:
    """A ``ClientRequest`` that has come whole."""

    peer, carrier, policy, task, disconnected = b"127.0.0.1", None, None, None, False
    connection_scope: ClassVar[dict[str, Any]] = {}

    def __init__(self, path: str, body: bytes) -> None:
        fields = [
            (b"host", b"router"),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ]
        self.head = ClientHead("POST", path, path.encode(), b"", fields, dict(fields))
        self._body = body

    def watch(self) -> None: ...

    def unwatch(self) -> None: ...

    def complete_body(self) -> bytes:
        return self._body

    async def read(self) -> None: ...

    def start(self, status: int, fields: Any, length: bytes | None) -> None:
        assert status == 200

    def write(self, data: bytes, *, more: bool) -> None: ...


class Answered:
    """The connection of an engine that has answered."""

    status = 200
    headers = ((b"content-type", b"application/json"),)
    at_eof = True

    def read_nowait(self) -> bytes:
        return ANSWER

    def make_idle(self) -> bool:
        return False


class Bench:
    """A router before ``engines`` engines of one cache layout that know this conversation.

    ``events`` False: they publish none, and each has a shadow.
    """

    def __init__(
        self,
        engines: int,
        body: bytes = b"",
        layout: Layout = LAYOUTS["full"],
        *,
        events: bool = True,
    ) -> None:
        self.body, self.path = body or chat(8), "/v1/chat/completions"
        self.prompt: Prompt | None = None
        self.layout, self._events = layout, events
        listed = tuple(
            EngineAddress(f"http://10.0.0.{i}:8000", events=f"inproc://{i}" if events else None)
            for i in range(engines)
        )
        window = max(group.sliding_window or 0 for group in layout.groups) or None
        model = ModelConfig(
            tokenizer=str(DEMO_TOKENIZER_DIR),
            shadow=ShadowSettings(sliding_window=window, num_blocks=100_000),
            **layout.facts,
        )
        self.router = Router(Config(engines=listed, models={ANY_MODEL: model}))
        self.router.proxy.client.request = self._exchange  # type: ignore[method-assign, assignment]

    async def warm(self) -> None:
        """Engines come up and tell what they hold; the conversation is read once."""
        prompt = await self.read()
        tokens = list(prompt.token_ids)
        batches = [self.computed(tokens[: len(tokens) - 200 * missing]) for missing in range(7)]
        self.begin()
        for number, status in enumerate(self.router.fleet):
            if self._events:
                for batch in batches[number % 7]:
                    self.told(status.engine_id, batch)
            elif status.shadow is not None:
                status.shadow.served(tokens[: len(tokens) - 200 * (number % 7)], prompt.hashes)
        for _ in range(50):
            await self.place()
            await self.ask()

    async def read(self) -> Prompt:
        """Read the request as the router does; a decision takes it."""
        prompt = await self.router.reader.read(self.request())
        assert isinstance(prompt, Prompt)
        self.prompt = prompt
        return prompt

    def begin(self) -> None:
        """Every engine answers, its feed is whole, and it tells the layout by a prompt of its own: no feed is
        begun."""
        first = self.computed(list(range(1, 1025)))
        for engine in self.router.fleet:
            engine.models, engine.up = (ModelCard(MODEL),), True
            shadow = None if self._events else self.router.config.model(MODEL).shadow_spec()
            engine.learn_from(self.router.scopes.assign(engine.engine_id, MODEL), shadow=shadow)
            if self._events:
                engine.feed = FeedStats(state=FeedState.READY)
                for batch in first:
                    self.told(engine.engine_id, batch)
        while self.router.scopes.advance_detection():
            pass

    def computed(self, tokens: list[int]) -> list[DecodedBatch]:
        """Events of a pool that has computed these tokens, one batch per step of 8,192 tokens."""
        return [DecodedBatch(0.0, events, None, None, []) for events in events_of(self.layout, tokens)]

    def told(self, engine_id: str, batch: DecodedBatch) -> None:
        """A batch of events of this engine is applied."""
        self.router.scopes.apply(engine_id, batch)

    def close(self) -> None:
        """Stop the router's threads."""
        self.router.proxy.close()
        self.router.reader.close()

    def request(self) -> InboundRequest:
        return InboundRequest("POST", self.path, b"", [], self.body, MODEL)

    async def place(self) -> None:
        """One placement, begun and ended."""
        placed = await self.router.planner.place(self.request(), exclude=frozenset())
        placed.first_byte(200)
        # Shadows believe reports, and this engine has no cache.
        placed.finished(Usage(9, 1, 0 if self._events else None))

    async def decide(self) -> None:
        """One decision over a prompt that has been read: its look-ups and the choice."""
        await decide_by(self.router.planner)(self.request(), frozenset(), self.prompt)

    async def ask(self) -> None:
        """One request, from the listener's side."""
        await self.router.answer(Asked(self.path, self.body))

    async def settle(self) -> None:
        """Apply what was deferred."""
        self.router.accounts.books.settle()

    async def _exchange(self, *_: object, **__: object) -> Answered:
        return Answered()


class Count(NamedTuple):
    """Python functions entered, and where they are."""

    calls: int
    files: int
    changes: int
    """Times a function called one of another room (folder)."""


async def counted(work: Callable[[], Awaitable[None]]) -> Count:
    """One run of ``work``: every call of the router and of libraries, not of this file."""
    calls: Counter[str] = Counter()
    changes = 0

    def enter(frame: FrameType, event: str, _: object) -> None:
        nonlocal changes
        if event == "call":
            name = frame.f_code.co_filename
            if name == __file__:
                return
            calls[name] += 1
            caller = frame.f_back.f_code.co_filename if frame.f_back is not None else name
            changes += Path(caller).parent != Path(name).parent

    sys.setprofile(enter)
    try:
        await work()
    finally:
        sys.setprofile(None)
    return Count(calls.total(), len(calls), changes)


async def cpu_us(
    work: Callable[[], Awaitable[None]], rounds: int, settle: Callable[[], Awaitable[None]]
) -> float:
    """CPU of one run in microseconds, with what it deferred: the least of many short rounds, since others are
    busy too."""
    best = float("inf")
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(_RUNS):
            await work()
        await settle()
        best = min(best, (time.thread_time() - start) / _RUNS)
    return best * 1e6


async def measure(layout: str, engines: int, turns: int, rounds: int, *, events: bool = True) -> str:
    """One line of the table."""
    bench = Bench(engines, chat(turns), LAYOUTS[layout], events=events)
    await bench.warm()
    explained = await bench.router.planner.explain(bench.request())
    hits = [candidate.hit for candidate in explained.candidates]
    assert all(hit.confidence == ("exact" if events else "shadow") for hit in hits)
    assert max(hit.whole_tokens for hit in hits) > 1000
    await bench.settle()
    place, ask = await counted(bench.place), await counted(bench.ask)
    await bench.settle()
    await bench.ask()
    later = await counted(bench.settle)
    cells = [layout, engines, *place, *ask, later.calls]
    works = bench.decide, bench.place, bench.ask
    times = [await cpu_us(work, rounds, bench.settle) for work in works]
    bench.close()
    return "| " + " | ".join([*map(str, cells), *(f"{us:.0f}" for us in times)]) + " |"


async def main(
    layouts: Sequence[str], fleets: Sequence[int], turns: int, rounds: int, *, events: bool
) -> None:
    """Print the table."""
    print(
        "| layout | engines | placement: calls | files | changes of folder | request: calls | files", end=" "
    )
    print("| changes of folder | later: calls | decision: CPU us | placement: CPU us | request: CPU us |")
    print("| --- |" + " ---: |" * 11)
    for layout in layouts:
        for engines in fleets:
            print(await measure(layout, engines, turns, rounds, events=events), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="cache layouts")
    parser.add_argument("--engines", default="1,2,8,64,1024", help="sizes of fleets")
    parser.add_argument("--turns", type=int, default=8, help="turns of the conversation, 26 blocks each")
    parser.add_argument("--rounds", type=int, default=1000, help="rounds of three runs for the CPU")
    parser.add_argument("--no-events", action="store_true", help="engines without events")
    args = parser.parse_args()
    fleets = [int(count) for count in args.engines.split(",")]
    asyncio.run(main(args.layouts.split(","), fleets, args.turns, args.rounds, events=not args.no_events))
