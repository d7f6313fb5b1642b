"""A stream that goes on is placed as any request: by what engines hold of prompt and answer, and in the queue
by its class."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvatlas.publisher.simulator.request import SimRequest
from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.admission.admission_queue import QueueSettings
from kvatlas.router.openai.apis import COMPLETION
from tests.router.app.test_broken_crowd import body, dies
from tests.support.waiting import until
from tests.support.whole_router import Rig, configure, routing, running

SLOW = {"decode_s_per_token": 0.05, "prefill_s_per_token": 1e-3, "max_num_batched_tokens": 8192}


class Crew:
    """Engines behind a router; some get new requests."""

    def __init__(self, rig: Rig, engines: list[SimulatedEngine]) -> None:
        self.rig, self.engines = rig, engines

    def only(self, *numbers: int) -> None:
        """Only these engines get new requests."""
        desired = self.rig.router.desired
        for number, engine in enumerate(self.engines):
            (desired.undrain(engine.base_url) if number in numbers else desired.drain(engine.base_url, "ops"))
        self.rig.router._assign()

    async def ask(self, number: int, tokens: int, answer: int, priority: str = "normal") -> str:
        fields = {"x-kvatlas-priority": priority}
        data = body(number, tokens, answer)
        status, stream = await self.rig.ask("POST", COMPLETION, data, fields)
        assert (status, '"error"' in stream) == (200, False)
        return str(stream)

    async def streams(self, number: int) -> None:
        """An answer comes from this engine."""
        (one,) = [one for one in self.rig.router.fleet if one.engine_id == self.engines[number].base_url]
        await until(lambda: one.answering, "its answer has begun")
        await asyncio.sleep(1.0)


@asynccontextmanager
async def crew(count: int, **changes: Any) -> AsyncIterator[Crew]:
    async with running(*[SLOW] * count) as engines, routing(configure(*engines, **changes)) as rig:
        yield Crew(rig, engines)


async def test_it_goes_on_from_the_engine_that_holds_its_prompt() -> None:
    for holder in (1, 2):
        async with crew(3) as one:
            one.only(holder)
            await one.ask(1, 600, 1)
            await one.rig.caught_up(*one.engines)
            one.only(0)
            stream = asyncio.create_task(one.ask(1, 600, 100))
            await one.streams(0)
            one.only(1, 2)
            dies(one.engines[0])
            await stream
            record = one.rig.router.proxy.requests.ended[-1]
            urls = [engine.base_url for engine in one.engines]
            assert (record.continued_from, record.engine) == (urls[0], urls[holder])
            told = (await one.rig.ok("GET", "/kvatlas/answers"))[-1]
            assert [told[name] for name in ("continued_from", "engine", "status")] == [
                urls[0],
                urls[holder],
                "200",
            ]
            assert 0 < record.recomputed_tokens < 60, "the answer so far, and the prompt's last block"


def watched(engine: SimulatedEngine) -> list[int]:
    """Lengths of the prompts that it is given from now on, in their order."""
    came: list[int] = []
    submit = engine.stepper.submit

    def noted(request: SimRequest) -> Any:
        came.append(len(request.prompt))
        return submit(request)

    engine.stepper.submit = noted  # type: ignore[method-assign]
    return came


@pytest.mark.parametrize(("priority", "place"), [("high", 0), ("low", 2)])
async def test_it_waits_in_the_queue_by_its_class(priority: str, place: int) -> None:
    async with crew(2, queue=QueueSettings(saturation_s=0.1)) as one:
        one.only(0)
        stream = asyncio.create_task(one.ask(1, 100, 100, priority))
        await one.streams(0)
        one.only(1)
        came, room = watched(one.engines[1]), one.rig.router.accounts.room
        assert room is not None
        others = [asyncio.create_task(one.ask(10 + n, 2000, 1)) for n in range(3)]
        await until(lambda: (len(came), len(room)) == (1, 2), "two wait")
        dies(one.engines[0])
        await asyncio.gather(stream, *others)
        assert [tokens < 2000 for tokens in came[1:]].index(True) == place, came
