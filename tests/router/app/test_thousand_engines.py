"""A fleet of 1,000 engines is a budget: instructions of everything that looks at all of them.

Bounds are instructions of Python (``tests.support.steps``), 4 to 10 ns each in the loops that count here, so
that no test waits for a clock: 100,000 are half a millisecond to one of the event loop. What happens for
every engine that leaves, restarts or changes must not look at every engine, prompt or entry again; those
tests compare two sizes of fleets.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from benchmarks.decision import Bench, chat, decide_by
from benchmarks.layouts import LAYOUTS, Layout
from kvatlas.publisher.events import BlockStored, DecodedBatch, encode_tokens
from kvatlas.router.admission.admission_queue import QueueSettings
from kvatlas.router.api.explanation import explain
from kvatlas.router.api.ops_app import _SharedAnswer
from kvatlas.router.api.views import LocalView
from kvatlas.router.app import Router
from kvatlas.router.fleet.engines import DesiredFleet, EngineAddress
from kvatlas.router.fleet.status import ModelCard
from kvatlas.router.openai.members import run_cooperatively
from kvatlas.router.openai.request import QueueTicketRequest
from kvatlas.router.placement.candidate import PolicySettings, PullSettings
from kvatlas.router.placement.cost import choose
from kvatlas.router.placement.engine import Engine
from kvatlas.router.placement.pull import PullSources, with_pull
from tests.router.placement.candidates import make_candidate
from tests.support.steps import steps, steps_of
from tests.support.whole_router import MODEL

ENGINES = 1000


class ManyEngines(Bench):
    """A router before engines of which each tenth holds another part of a conversation (``up``)."""

    def __init__(
        self, engines: int = ENGINES, layout: Layout = LAYOUTS["gemma3-like"], **changes: Any
    ) -> None:
        super().__init__(1, chat(2), layout)
        listed = tuple(
            EngineAddress(f"http://10.0.{i // 250}.{i % 250}:8000", events=f"inproc://{i}")
            for i in range(engines)
        )
        self.router.reader.close()
        self.router = Router(msgspec.structs.replace(self.router.config, engines=listed, **changes))
        self.router.proxy.client.request = self._exchange  # type: ignore[method-assign, assignment]

    @property
    def engines(self) -> list[Engine]:
        return list(self.router.fleet)

    async def up(self, *cards: ModelCard) -> None:
        """Every engine answers, and has told what it holds."""
        tokens = list((await self.read()).token_ids)
        self.begin()
        kinds = [self.computed(tokens[: len(tokens) - 64 * missing]) for missing in range(10)]
        for number, engine in enumerate(self.engines):
            if cards:
                engine.models = cards
            self.tells(engine, kinds[number % 10])
        for _ in range(3):
            await self.decide()

    def tells(self, engine: Engine, batches: list[DecodedBatch]) -> None:
        for batch in batches:
            self.told(engine.engine_id, batch)


async def made(engines: int = ENGINES, **changes: Any) -> ManyEngines:
    many = ManyEngines(engines, **changes)
    await many.up()
    return many


async def growth(name: str, small: int = 100, large: int = 400) -> float:
    """By how much the instructions of this work for all engines grow more than their number."""
    counts = []
    # Twice small: Python 3.12 and later count nothing of a function that runs while it is first traced.
    for engines in (small, small, large):
        many = await made(engines)
        counts.append(await steps_of(lambda many=many: WORKS[name](many)))  # type: ignore[misc]
        many.close()
    return counts[2] / counts[1] * small / large


async def all_restart(many: ManyEngines) -> None:
    for engine in many.engines:
        assert engine.residency is not None
        engine.residency.forget()
        engine.reset()
    await many.decide()


async def all_go_down(many: ManyEngines) -> None:
    for engine in many.engines[:-1]:
        engine.up = False
        many.router.lifecycle.engine_down(engine)
    await many.decide()


async def all_leave(many: ManyEngines) -> None:
    accounts, tracker = many.router.accounts, many.router.proxy.requests
    cards = [ModelCard(MODEL), *(ModelCard(f"adapter-{n}", root="/a", parent=MODEL) for n in range(50))]
    for number, engine in enumerate(many.engines):
        engine.models = (*cards, ModelCard(f"own-{number}", root="/a", parent=MODEL))
    many.router.fleet.assign(DesiredFleet(()))
    assert not accounts.inflight.stats.prompts
    assert {engine for _, engine, _ in tracker.counts} <= {""}


async def all_join(many: ManyEngines) -> None:
    listed = tuple(EngineAddress(f"http://10.1.{i // 250}.{i % 250}:8000") for i in range(len(many.engines)))
    many.router.fleet.assign(DesiredFleet((*(one.engine for one in many.engines), *listed)))


async def all_are_polled(many: ManyEngines) -> None:
    for engine in many.engines:
        base_url = engine.engine.base_url
        assert many.router.fleet.ranks(base_url) == [engine]
        assert many.router.fleet.configured(base_url) == [engine.engine]


# In each run; the others are long.
QUICK = ("all_are_polled",)
WORKS = {work.__name__: work for work in (all_restart, all_go_down, all_leave, all_join, all_are_polled)}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in WORKS]
)
async def test_the_cost_of_events_at_all_engines_grows_linearly(name: str) -> None:
    assert await growth(name) < 1.3


@pytest.mark.parametrize("table", ["texts", "sessions", "counts", "in flight"])
def test_an_engine_that_leaves_is_not_looked_for_in_large_tables(table: str) -> None:
    accounts = ManyEngines(3).router.accounts
    names = [f"http://10.0.0.{number}:8000" for number in range(3)]

    def fill(count: int) -> None:
        for number in range(count):
            if table == "texts":
                accounts.affinity.record([number], names[number % 2])
            elif table == "sessions":
                accounts.sessions.stored(names[number % 2], f"session {number}", [number])  # type: ignore[list-item]
            elif table == "in flight":
                accounts.inflight.add(names[number % 2], [number], 0.0)  # type: ignore[list-item]

    fill(1000)
    assert steps(lambda: accounts.leave(names[2])) < 1000  # type: ignore[arg-type]


# A hundred for each engine: about half a millisecond of the loop.
ONE_LOOK = 100_000


@pytest.mark.parametrize(
    "layout", ["full", *(pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS if name != "full")]
)
async def test_a_decision_looks_at_engines_by_classes(layout: str) -> None:
    many = await made(layout=LAYOUTS[layout])
    assert await steps_of(many.decide) < ONE_LOOK
    engines = many.engines

    async def retry(*without: int) -> None:
        exclude = frozenset(engines[at].engine_id for at in without)
        await decide_by(many.router.planner)(many.request(), exclude, many.prompt)

    assert await steps_of(lambda: retry(3)) < 1.5 * ONE_LOOK
    assert await steps_of(lambda: retry(3, 500)) < 1.5 * ONE_LOOK, "a list that differs by one more"
    counts = []
    for at in (5, 900, 0):
        engines[at].up = False
        counts.append(await steps_of(many.decide))
    engines[7].held = "drained"
    counts.append(await steps_of(many.decide))
    engines[900].up = True
    counts.append(await steps_of(many.decide))
    assert max(counts) < 1.5 * ONE_LOOK, "nor is a set of all engines built again for one of them"
    many.close()


@pytest.mark.parametrize("requests_max", [None, pytest.param(2, marks=pytest.mark.long)])
async def test_a_saturated_queue_looks_at_each_engine_once(requests_max: int | None) -> None:
    queue = QueueSettings(saturation_s=1.0, engine_requests_max=requests_max, requests_max=10_000)
    adapters = [f"adapter-{number}" for number in range(100)]
    many = ManyEngines(queue=queue)
    await many.up(ModelCard(MODEL), *(ModelCard(name, root="/a", parent=MODEL) for name in adapters))
    now = many.router.clock()
    for engine in many.engines:
        engine.load.admit(uncached_tokens=10**9, now=now)
    gate = many.router.planner.gate
    assert gate is not None
    room = gate.room
    claim = QueueTicketRequest()
    waiting = [
        asyncio.ensure_future(
            room.wait(claim, work_s=1.0, pool=MODEL, lane=lane, engines=ENGINES, tokens_per_s=1.0)
        )
        for lane in [
            *((name, None, 0.0) for name in adapters),
            *((MODEL, engine.engine_id, 0.0) for engine in many.engines[:50]),
        ]
    ]
    await asyncio.sleep(0)
    assert len(room) == 150
    assert steps(room.changed) < 1.5 * ONE_LOOK
    # Half of the engines lose half of the adapters: two classes of engines.
    for engine in many.engines[::2]:
        engine.models = engine.models[:50]
    room.changed()
    assert steps(room.changed) < 1.5 * ONE_LOOK
    assert len(room) == 150
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    many.close()


def test_a_model_that_no_engine_has_costs_no_look_at_all_engines() -> None:
    fleet = ManyEngines().router.fleet
    for engine in fleet:
        engine.models, engine.up = (ModelCard(MODEL), ModelCard("adapter", parent=MODEL)), True
    assert len(fleet.ready(MODEL)) == len(fleet.ready("adapter")) == ENGINES

    def ask() -> None:
        for number in range(100):
            assert not fleet.ready(f"unknown-{number}")
            assert not fleet.knows(f"unknown-{number}")

    assert steps(ask) < ONE_LOOK
    assert steps(fleet.model_cards) < ONE_LOOK
    assert steps(fleet.model_cards) < 100


@pytest.mark.long
async def test_pulls_are_weighed_between_few_targets_and_sources() -> None:
    many = await made(pull=PullSettings(enabled=True))
    assert many.prompt is not None
    now = many.router.clock()
    told, other = many.computed(list(many.prompt.token_ids)), many.computed([9] * 512)
    # As vLLM's own offloading tells it: a hash per event, and no tokens.
    outside = [
        BlockStored([block], None, encode_tokens([]), 0, medium="CPU", group_idx=event.group_idx)
        for event in told[0].events
        if isinstance(event, BlockStored)
        for block in event.block_hashes
    ]
    for number, engine in enumerate(many.engines):
        engine.version = "0.32"
        if number % 2:  # half of the engines could give the prompt to the others
            many.tells(engine, [DecodedBatch(0.0, outside, None, None, [])])
            engine.load.admit(uncached_tokens=100_000 + number, now=now)
        else:
            assert engine.residency is not None
            engine.residency.forget()
            many.tells(engine, other)
    await many.decide()
    decision = await decide_by(many.router.planner)(many.request(), frozenset(), many.prompt)
    assert await steps_of(many.decide) < 4 * ONE_LOOK
    assert decision.prompt_tokens
    many.close()


def test_a_pull_is_the_same_whichever_engines_come_first() -> None:
    """Beyond the bound of targets and sources: the cheapest ones are looked at, not the first ones."""
    queues = [0.5 + number / 1000 for number in range(300)]
    queues[250] = 0.0
    candidates = [
        make_candidate(f"e{number:03}", hit_tokens=0, queue_s=queue_s)
        for number, queue_s in enumerate(queues)
    ]
    held = [0] * 300
    held[200], held[290] = 16_000, 15_000
    sources = PullSources(held, [0.0] * 300, 1e-6, [0.0] * 300)
    found = with_pull(choose(candidates, 20_000, PolicySettings()), sources)
    assert (found.index, found.reason) == (250, "pull")
    assert found.pull is not None
    assert found.pull.source == 200


@pytest.mark.long
async def test_the_engines_own_order_is_asked_once_for_each_engine() -> None:
    many = await made(policy=PolicySettings(engine_priority=2.0))
    now = many.router.clock()
    for number, engine in enumerate(many.engines):
        for waits in range(30):
            engine.load.admit(uncached_tokens=10**6 + number, now=now, rank_s=1e12 + 1000.0 * waits)
    for number in range(2000):
        name = many.engines[number % ENGINES].engine_id
        many.router.accounts.inflight.add(name, [1, 2, 3, number + 10], now, rank=5.0)  # type: ignore[list-item]
    await many.decide()
    many.engines[5].load.admit(uncached_tokens=10, now=now, rank_s=1e12)
    assert await steps_of(many.decide) < 4 * ONE_LOOK
    many.close()


async def longest_hold(work: Coroutine[Any, Any, object]) -> int:
    """Instructions of the longest time for which this work keeps the loop."""
    longest, coroutine = 0, work.__await__()

    def step() -> None:
        coroutine.send(None)

    while True:
        try:
            longest = max(longest, steps(step))
        except StopIteration:
            return longest
        await asyncio.sleep(0)


@pytest.mark.long
@pytest.mark.real  # pages pause by the clock
async def test_pages_of_all_engines_are_made_in_short_steps() -> None:
    many = await made()
    view = LocalView(many.router.sources)
    assert len(await view.engines()) == ENGINES
    for work in (view.engines(), view.problems(), view.metrics()):
        assert await longest_hold(work) < ONE_LOOK
    decision = await many.router.planner.explain(many.request())
    assert len((await run_cooperatively(explain(decision, "chat")))["engines"]) == ENGINES
    assert await longest_hold(run_cooperatively(explain(decision, "chat"))) < ONE_LOOK
    await many.router.planner.place(many.request(), exclude=frozenset())
    assert await longest_hold(view.prefixes()) < ONE_LOOK
    assert steps(many.router.readiness) < ONE_LOOK
    many.close()


async def test_open_pages_share_an_answer_about_a_large_fleet() -> None:
    made_of: list[int] = []

    async def make() -> bytes:
        made_of.append(1)
        await asyncio.sleep(0)
        return b"[]"

    large, small = _SharedAnswer(make, lambda: ENGINES), _SharedAnswer(make, lambda: 8)
    large._until_s = math.inf
    assert [await large.get() for _ in range(5)] == [b""] * 5
    large._until_s = -math.inf
    await asyncio.gather(*(large.get() for _ in range(5)))
    assert 1 <= len(made_of) <= 5
    made_of.clear()
    for _ in range(5):
        await small.get()
    assert len(made_of) == 5
