"""An engine's breaker counts answers, not their heads."""

from __future__ import annotations

import asyncio
import math

import pytest

from kvatlas.router.openai.apis import CHAT, COMPLETION, MESSAGES, RESPONSES
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.proxy.breaker import Breaker
from tests.router.proxy.test_deaths import body
from tests.support.api_streams import STREAMS, event_of, stream_of
from tests.support.proxy_rig import (
    END,
    SSE_HEAD,
    Call,
    Engine,
    FakePlacement,
    Script,
    ask,
    chunk,
    reset,
    routing,
    says,
)
from tests.support.waiting import until

_HALF = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 900000\r\n\r\n"


class Counted(Breaker):
    """Remembers the outcomes that it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[bool] = []
        self.heads = 0

    def taken(self, now: float) -> None:
        self.heads += 1
        super().taken(now)

    def record(self, ok: bool, now: float, *, connection: bool = True) -> None:
        self.told.append(ok)
        super().record(ok, now, connection=connection)


def begins(path: str, how: str) -> Script:
    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        stream = STREAMS[path]
        if how == "whole":
            writer.write(SSE_HEAD + chunk(stream_of(path)) + END)
            return
        if how == "long":
            writer.write(_HALF + b"x" * 300_000)
        else:
            openings = b"".join(map(event_of, stream.openings))
            more = {
                "head": b"",
                "comments": b": x\n\n",
                "openings": openings,
                "token": event_of(stream.token),
            }
            writer.write(SSE_HEAD + (chunk(more[how]) if more[how] else b""))
        await writer.drain()
        if how == "token":
            await engine.go.wait()
        reset(writer)

    return script


@pytest.mark.parametrize("path", [CHAT, COMPLETION, MESSAGES, RESPONSES])
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("head", [False]),
        ("comments", [False]),
        ("openings", [False]),
        ("token", [True, False]),
        ("whole", [True]),
        ("long", [False]),
    ],
)
async def test_a_head_of_success_is_none(path: str, how: str, told: list[bool]) -> None:
    async with Engine(begins(path, how)) as engine, routing(engine.url) as rig:
        breaker = rig.planner.breakers[engine.url] = Counted()
        task = asyncio.create_task(ask(rig, body("x", path, stream=how != "long")))
        if how == "token":
            await until(lambda: breaker.told == [True], "its first token came")
            engine.go.set()
        await task
        assert breaker.told == told


@pytest.mark.parametrize("later", [False, True])
def test_an_engine_is_waited_for_since_it_is_asked(later: bool) -> None:
    stream = InboundRequest("POST", COMPLETION, b"", [], b"", stream=True)
    attempt = FakePlacement("a", request=stream, breaker=(breaker := Breaker()), later=later)
    assert (breaker.free_until == math.inf) == later
    attempt.asked()
    assert breaker.free_until < math.inf


@pytest.mark.parametrize(("status", "told"), [(200, [True]), (400, [True]), (404, [True]), (500, [False])])
async def test_a_whole_answer_counts_once(status: int, told: list[bool]) -> None:
    async with Engine(says(status, b'{"x": 1}')) as engine, routing(engine.url) as rig:
        breaker = rig.planner.breakers[engine.url] = Counted()
        await ask(rig, body("x"))
        assert breaker.told == told
        assert breaker.heads == (status == 200)


async def test_an_engine_that_breaks_each_stream_behind_its_head_is_left_out() -> None:
    """Three failures in a row: its heads are no successes between them."""
    async with Engine(begins(COMPLETION, "openings")) as engine, routing(engine.url) as rig:
        for _ in range(3):
            assert rig.planner.available(engine.url)
            await ask(rig, body("x", stream=True))
        assert not rig.planner.available(engine.url)
