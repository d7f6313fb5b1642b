"""Events that come later than the whole answer: siblings of its prompt still find its blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest
import zmq
import zmq.asyncio

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.placement.inflight import InflightSettings
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routing, running

PROMPT = TEXT * 12


class EventRelay:
    """Passes an engine's event messages on; holds them while ``open`` is not set."""

    def __init__(self, source: zmq.asyncio.Socket, target: zmq.asyncio.Socket) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.endpoint = ""
        self._source, self._target = source, target

    async def run(self) -> None:
        while True:
            frames = await self._source.recv_multipart()
            await self.open.wait()
            await self._target.send_multipart(frames)


@asynccontextmanager
async def relaying(engine: SimulatedEngine) -> AsyncIterator[EventRelay]:
    context = zmq.asyncio.Context()
    source, target = context.socket(zmq.SUB), context.socket(zmq.PUB)
    relay = EventRelay(source, target)
    source.subscribe(b"")
    source.connect(engine.events_endpoint or "")
    port = target.bind_to_random_port("tcp://127.0.0.1")
    relay.endpoint = f"tcp://127.0.0.1:{port}"
    task = asyncio.create_task(relay.run())
    try:
        yield relay
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)


async def asked(rig: Rig, text: str) -> tuple[str, int, int]:
    """The engine of one chat, the hit predicted, and the one it reports."""
    raw = await rig.chat(text)
    usage = raw.parse().usage
    predicted = int(raw.headers["x-kvatlas-hit-tokens"])
    return raw.headers["x-kvatlas-engine"], predicted, usage.prompt_tokens_details.cached_tokens


async def emptied(engine: SimulatedEngine) -> None:
    """Its cache is reset behind the router's back; the event travels with the next step's."""
    async with aiohttp.ClientSession() as session:
        for path, body in (
            ("/reset_prefix_cache", None),
            ("/v1/completions", {"model": MODEL, "prompt": TEXT, "max_tokens": 1}),
        ):
            async with session.post(engine.base_url + path, json=body) as answer:
                assert answer.status == 200
                await answer.read()


@pytest.mark.parametrize("groups", ["full", "gptoss-like", "mamba-hybrid"])
async def test_a_sibling_finds_the_blocks_of_an_answer_whose_events_are_late(groups: str) -> None:
    async with AsyncExitStack() as stack:
        engines = await stack.enter_async_context(running({"groups": groups}, {"groups": groups}))
        relays = [await stack.enter_async_context(relaying(engine)) for engine in engines]
        addresses = [
            EngineAddress(engine.base_url, events=relay.endpoint, replay=engine.replay_endpoint)
            for engine, relay in zip(engines, relays, strict=True)
        ]
        async with routing(configure(*addresses)) as rig:
            for number in range(4):  # both engines' hashes and groups become known
                await asked(rig, f"{number} {TEXT * 3}")
            await rig.caught_up(*engines)
            rig.router.accounts.inflight.settings = InflightSettings(grace_s=3600.0)

            for relay in relays:
                relay.open.clear()
            engine, predicted, reported = await asked(rig, PROMPT)
            assert predicted == reported
            sibling, predicted, reported = await asked(rig, PROMPT)
            assert (sibling, predicted) == (engine, reported)
            assert reported > 100

            for relay in relays:
                relay.open.set()
            await rig.caught_up(*engines)
            for one in engines:
                await emptied(one)
            await rig.caught_up(*engines)
            _, predicted, reported = await asked(rig, PROMPT)
            assert predicted == reported < 100, "the events came, and say that it is gone"
            rig.check_books()
