"""A fleet of 1,000 engines is a budget: instructions of everything that looks at all of them.

Bounds are instructions of Python (``tests.support.steps``), some 30 to 50 ns each, so that no test waits for
a clock: 20,000 are about a millisecond of the event loop. What happens for every engine that leaves, restarts
or changes must not look at every engine, prompt or entry again; those tests compare two sizes of fleets.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.decision import SCHEME, Bench, chat, events_of
from publisher.events import DecodedBatch
from publisher.simulator.settings import DEMO_TOKENIZER_DIR
from router.app import Router
from router.config.schema import Config, ModelConfig
from router.fleet.engines import DesiredFleet, EngineAddress
from router.fleet.status import ModelCard
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
