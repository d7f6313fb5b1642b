"""A fleet of 1,000 engines is a budget: instructions of everything that looks at all of them.

Bounds are instructions of Python (``tests.support.steps``), 4 to 10 ns each in the loops that count here, so
that no test waits for a clock: 100,000 are half a millisecond to one of the event loop. What happens for
every engine that leaves, restarts or changes must not look at every engine, prompt or entry again; those
tests compare two sizes of fleets.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from benchmarks.decision import SCHEME, Bench, chat, decide_by, events_of
from publisher.events import DecodedBatch
from publisher.simulator.settings import DEMO_TOKENIZER_DIR
from router.admission.admission_queue import QueueSettings
from router.app import Router
from router.config.schema import Config, ModelConfig
from router.fleet.engines import DesiredFleet, EngineAddress
from router.fleet.status import ModelCard
from router.openai.request import QueueTicketRequest
from router.placement.engine import Engine
from router.prompts.prompt import Prompt
from router.prompts.settings import ANY_MODEL
from tests.support.steps import steps, steps_of
from tests.support.whole_router import MODEL

ENGINES = 1000


class ManyEngines(Bench):
    """A router before engines of which each tenth holds another part of a conversation (``up``)."""

    def __init__(
        self, engines: int = ENGINES, *, turns: int = 2, events: bool = True, **changes: Any
    ) -> None:
        self.body = chat(turns)
        self.prompt: Prompt | None = None
        listed = tuple(
            EngineAddress(
                f"http://10.0.{i // 250}.{i % 250}:8000", events=f"inproc://{i}" if events else None
            )
            for i in range(engines)
        )
        model = ModelConfig(tokenizer=str(DEMO_TOKENIZER_DIR))
        config = Config(**{"engines": listed, "models": {ANY_MODEL: model}, **changes})
        self.router = Router(config)
        self.router.proxy.client.request = self._exchange  # type: ignore[method-assign, assignment]

    @property
    def engines(self) -> list[Engine]:
        return list(self.router.fleet)

    async def up(self, *cards: ModelCard) -> None:
        """Every engine answers, and has told what it holds."""
        prompt = await self.router.reader.read(self.request())
        assert isinstance(prompt, Prompt)
        self.prompt = prompt
        tokens = list(prompt.token_ids)
        size = SCHEME.hash_block_size
        kinds = [events_of(tokens[: len(tokens) - 4 * size * missing]) for missing in range(10)]
        for number, engine in enumerate(self.engines):
            self._up(engine)
            if cards:
                engine.models = cards
            if engine.publishes_events:
                self._told(engine.engine_id, kinds[number % 10])
        while self.router.scopes.advance_detection():
            pass
        for _ in range(3):
            await self.decide()

    def told(self, engine: Engine, batch: DecodedBatch) -> None:
        self._told(engine.engine_id, batch)

    def close(self) -> None:
        self.router.proxy.close()
        self.router.reader.close()


async def made(engines: int = ENGINES, **changes: Any) -> ManyEngines:
    many = ManyEngines(engines, **changes)
    await many.up()
    return many


async def growth(name: str, small: int = 100, large: int = 400) -> float:
    """By how much the instructions of this work for all engines grow more than their number."""
    counts = []
    for engines in (small, large):
        many = await made(engines)
        counts.append(await steps_of(lambda many=many: WORKS[name](many)))  # type: ignore[misc]
        many.close()
    return counts[1] / counts[0] * small / large


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


WORKS = {work.__name__: work for work in (all_restart, all_go_down, all_leave, all_join, all_are_polled)}


@pytest.mark.parametrize("name", WORKS)
async def test_what_happens_to_all_engines_together_grows_with_their_number(name: str) -> None:
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


async def test_a_decision_looks_at_engines_by_classes() -> None:
    many = await made()
    assert await steps_of(many.decide) < ONE_LOOK
    engines = many.engines

    async def retry(*without: int) -> None:
        exclude = frozenset(engines[at].engine_id for at in without)
        await decide_by(many.router.planner)(many.request(), exclude, many.prompt)

    assert await steps_of(lambda: retry(3)) < 1.2 * ONE_LOOK
    assert await steps_of(lambda: retry(3, 500)) < 1.2 * ONE_LOOK, "a list that differs by one more"
    counts = []
    for at in (5, 900, 0):
        engines[at].up = False
        counts.append(await steps_of(many.decide))
    engines[7].held = "drained"
    counts.append(await steps_of(many.decide))
    engines[900].up = True
    counts.append(await steps_of(many.decide))
    assert max(counts) < 1.2 * ONE_LOOK, "nor is a set of all engines made anew for one of them"
    many.close()


@pytest.mark.parametrize("requests_max", [None, 2])
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
            *((name, None) for name in adapters),
            *((MODEL, engine.engine_id) for engine in many.engines[:50]),
        ]
    ]
    await asyncio.sleep(0)
    assert len(room) == 150
    assert steps(room.changed) < 1.3 * ONE_LOOK
    # Half of the engines lose half of the adapters: two classes of engines.
    for engine in many.engines[::2]:
        engine.models = engine.models[:50]
    room.changed()
    assert steps(room.changed) < 1.3 * ONE_LOOK
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
