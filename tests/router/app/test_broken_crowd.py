"""Many streams of one engine that dies go on from the others, whose own clients wait for few of them."""

from __future__ import annotations

import asyncio
import random
import statistics
from typing import Any

import aiohttp
import pytest

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.openai.apis import COMPLETION
from kvatlas.router.proxy import turns
from tests.support.waiting import until
from tests.support.whole_router import MODEL, configure, routing, running

STREAMS, TOKENS, ANSWER, INTERVAL = 200, 1000, 200, 10
PREFILL_S = 2e-4
ENGINE: dict[str, Any] = {
    "prefill_s_per_token": PREFILL_S,
    "decode_s_per_token": 0.05,
    "num_blocks": 40_000,
    "max_num_seqs": 512,
    "max_num_batched_tokens": 2048,
    "stream_interval": INTERVAL,
}


def body(number: int, tokens: int, answer: int) -> dict[str, Any]:
    rng = random.Random(number)
    prompt = [rng.randrange(3, 250) for _ in range(tokens)]
    return {"model": MODEL, "prompt": prompt, "max_tokens": answer, "ignore_eos": True, "stream": True}


class Clients:
    """Clients that stream, as many at a time as they want."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url + COMPLETION

    async def ask(self, number: int, tokens: int, answer: int) -> tuple[float, int]:
        """Seconds until the first event, and the number of events; fails where the stream breaks."""
        now = asyncio.get_running_loop().time
        began, first_s, data = now(), 0.0, b""
        async with self._session.post(self._url, json=body(number, tokens, answer)) as response:
            assert response.status == 200, await response.text()
            async for piece in response.content.iter_any():
                data += piece
                if not first_s and b"data: " in data:
                    first_s = now() - began
        assert b'"error"' not in data
        assert data.endswith(b"data: [DONE]\n\n")
        return first_s, data.count(b'"text":')


def dies(engine: SimulatedEngine) -> None:
    """Its core ends, and its server says so in each stream."""

    def fails() -> Any:
        raise MemoryError("CUDA out of memory")

    stepper: Any = engine.stepper
    stepper.scheduler.begin_step = fails
    stepper._wake.set()


async def first_tokens_of_others() -> list[float]:
    """Seconds until the first tokens of 40 clients that come while the streams go on."""
    first = {**ENGINE, "prefill_s_per_token": 1e-6}
    async with (
        running(first, ENGINE, ENGINE) as engines,
        routing(configure(*engines)) as rig,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        router, clients = rig.router, Clients(session, rig.url)
        others = [one.base_url for one in engines[1:]]
        for url in others:
            router.desired.drain(url, "ops")
        router._assign()
        crowd = [asyncio.create_task(clients.ask(number, TOKENS, ANSWER)) for number in range(STREAMS)]
        (dying,) = [one for one in router.fleet if one.engine_id == engines[0].base_url]
        await until(lambda: len(dying.answering) == STREAMS, "all have begun")
        for url in others:
            router.desired.undrain(url)
        # The dead one gets none of what comes later.
        router.desired.drain(dying.engine_id, "ops")
        router._assign()
        dies(engines[0])
        later = []
        for number in range(40):
            await asyncio.sleep(0.25)
            later.append(asyncio.create_task(clients.ask(STREAMS + number, 200, 2)))
        found = [first_s for first_s, _ in await asyncio.gather(*later)]
        events = [count for _, count in await asyncio.gather(*crowd)]
        assert min(events) >= ANSWER // INTERVAL
        assert router.proxy.stats.continuations == {"completed": STREAMS}
        return found


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_streams_of_a_dead_engine_keep_other_clients_waiting_for_few_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = await first_tokens_of_others()
    monkeypatch.setattr(turns, "ON_ENGINE_MAX", STREAMS)
    monkeypatch.setattr(turns, "_PLACING_MAX", STREAMS)
    at_once = await first_tokens_of_others()
    assert max(few) < 2 * 8 * TOKENS * PREFILL_S
    assert statistics.median(at_once) > 3 * statistics.median(few)
