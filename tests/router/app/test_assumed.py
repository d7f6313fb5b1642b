"""A hash scheme that is only assumed: used, taken back by receipts, at last replaced by the right one."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from kvatlas.publisher.block_hash import DEFAULT_SEED, HashScheme
from kvatlas.publisher.zmq_publisher import ZmqPublisher
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.index.learn import hash_scheme
from kvatlas.router.openai.request import InboundRequest, Usage
from kvatlas.router.placement.placement import Placement
from kvatlas.router.prompts.settings import ANY_MODEL
from tests.support.event_writer import Writer
from tests.support.waiting import until
from tests.support.whole_router import LOCAL, MODEL, Rig, configure, routing, running

CHUNK = 64
PROMPT = 100
HELD = 96
"""Of every prompt: its whole blocks. Without them it still starts with a whole chunk that needs none."""
SCHEME = HashScheme(seed="42")
TOLD = 300
"""Prompts whose blocks the engine told of: more than are remembered, so the first show nothing any more."""


def prompt(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(3, 250) for _ in range(PROMPT)]


async def place(rig: Rig, number: int) -> Placement:
    body = msgspec.json.encode({"model": MODEL, "prompt": prompt(number), "max_tokens": 1})
    request = InboundRequest("POST", "/v1/completions", b"", [], body, MODEL)
    placed = await rig.router.planner.place(request, exclude=frozenset())
    placed.first_byte(200)
    return placed


async def told(rig: Rig) -> Any:
    """The router's view of its engine."""
    _, engines = await rig.ask("GET", "/kvatlas/engines")
    return engines[0]


@pytest.mark.long
async def test_receipts_take_back_what_was_assumed_and_the_right_scheme_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hash_scheme, "SEEDS_MAX", 100)

    publisher = ZmqPublisher("tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
    publisher.start()
    try:
        async with running({"publish_events": False}) as (engine,):
            given = EngineAddress(engine.base_url, None, publisher.endpoint, publisher.replay_endpoint)
            model = msgspec.structs.replace(LOCAL, attention_chunk_size=CHUNK)
            async with routing(configure(given, models={ANY_MODEL: model})) as rig:
                await check(rig, publisher)
    finally:
        publisher.close()


async def check(rig: Rig, publisher: ZmqPublisher) -> None:
    writer = Writer(SCHEME, kind="chunked_local_attention")
    publisher.publish([writer.stored(prompt(n), start=4) for n in range(TOLD)])
    (status,) = rig.router.fleet
    feed = rig.router.lifecycle.feeds.stats[status.engine_id]
    await until(lambda: feed.last_seq == publisher.next_seq - 1, "applied")
    assert (await told(rig))["assumed_scheme"]["seed"] == DEFAULT_SEED

    for number in range(3):
        assert (await told(rig))["assumed_scheme"] is not None
        placed = await place(rig, number)
        hit = placed.decision.candidate.hit
        assert (hit.mode, hit.whole_tokens) == ("assumed", CHUNK)
        placed.finished(Usage(PROMPT, 1, cached_tokens=HELD))
    assert rig.outcomes("under") == 3
    assert (await told(rig))["assumed_scheme"] is None
    placed = await place(rig, 3)
    hit = placed.decision.candidate.hit
    assert (hit.mode, hit.whole_tokens) == ("learned", CHUNK), "no event showed what is before its blocks"
    placed.finished(Usage(PROMPT, 1, cached_tokens=HELD))

    placed = await place(rig, TOLD - 1)  # this one holds blocks told of last: something to try seeds on
    placed.finished(Usage(PROMPT, 1, cached_tokens=HELD))
    residency = status.residency
    await until(lambda: residency.writer.scheme == SCHEME, "the seed is found")
    placed = await place(rig, 0)
    hit = placed.decision.candidate.hit
    assert (hit.mode, hit.whole_tokens) == ("native", HELD), "nothing that was told is lost"
    placed.finished(Usage(PROMPT, 1, cached_tokens=HELD))
    assert (rig.outcomes("under"), rig.outcomes("exact")) == (5, 1)
