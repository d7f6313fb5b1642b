"""Answers that have begun end with the process that gives them, once another one runs in its place."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from kvatlas.router.openai.apis import CHAT, COMPLETION, MESSAGES, RESPONSES
from kvatlas.router.placement.engine import Engine as FleetEngine
from tests.router.app.test_moved_requests import _CARDS, _config
from tests.router.proxy.test_first_token import error_of
from tests.support.api_streams import STREAMS, event_of
from tests.support.proxy_rig import SSE_HEAD, Call, Engine, answer, chunk
from tests.support.waiting import until
from tests.support.whole_router import Rig, routing

_LONG = b'{"x": "' + b"x" * 300_000
"""More than is kept back of an answer that is not streamed."""


class Cut:
    """A script: begins its answers, and says nothing more unless ``speaks``."""

    def __init__(self, path: str, *, begins: bytes = b"") -> None:
        self.path, self.begins = path, begins
        self.asked = 0
        self.speaks = asyncio.Event()

    async def __call__(self, engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        path = call.head.first[1]
        if path == "/v1/models":
            writer.write(answer(200, _CARDS))
        elif path != self.path:
            writer.write(answer(404, b""))
        elif self.asked:
            self.asked += 1
            writer.write(answer(200, b'{"second": 1}', "content-type: application/json"))
        else:
            self.asked += 1
            if self.begins:
                head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 900000\r\n\r\n"
                writer.write(head.encode() + self.begins)
            else:
                writer.write(SSE_HEAD + chunk(event_of(STREAMS[path].token)))
            await self.speaks.wait()
            writer.write(chunk(event_of(STREAMS[path].token)))
            await engine.go.wait()


def _begun(engine: FleetEngine) -> bool:
    return bool(engine.answering)


@asynccontextmanager
async def begun(
    path: str, script: Cut, *, stream: bool = True
) -> AsyncIterator[tuple[Rig, FleetEngine, asyncio.Task[tuple[int, object]]]]:
    """An engine whose answer has begun, as of 30 s ago; it answered a poll 20 s ago."""
    async with Engine(script) as one, routing(_config(one)) as rig:
        (engine,) = rig.router.fleet
        body = {**STREAMS[path].body, "model": "m", "stream": stream}
        task = asyncio.create_task(rig.ask("POST", path, body))
        await until(partial(_begun, engine), "its answer has begun")
        ((attempt, held),) = engine.answering.items()
        now = rig.router.clock()
        attempt.asked_s, engine.polled_s = now - 30, now - 20
        held.heard_s = now - 25  # type: ignore[attr-defined]
        yield rig, engine, task
        script.speaks.set()
        one.go.set()


def _restart(rig: Rig, engine: FleetEngine, how: str, skew_s: float = 0.0) -> None:
    """Another process runs there since 10 s ago."""
    if how == "metrics":
        engine.started = rig.router.accounts.wall() + skew_s - 10
        rig.router.lifecycle.engine_restarted(engine)
    else:
        rig.router.lifecycle._feed_restarted(engine, 1, rig.router.clock() - 10)


@pytest.mark.parametrize("how", ["metrics", "events"])
@pytest.mark.parametrize("path", [CHAT, COMPLETION, MESSAGES, RESPONSES])
async def test_a_stream_of_a_process_that_is_gone_ends_with_its_apis_error(path: str, how: str) -> None:
    script = Cut(path)
    async with begun(path, script) as (rig, engine, task):
        _restart(rig, engine, how)
        status, body = await task
        assert status == 200
        assert isinstance(body, str)
        assert error_of(path, body.encode())["code"] == "engine_stream_broken"
        stats = rig.router.proxy.stats
        assert (stats.streams_broken, stats.suspects_noted, script.asked) == (1, 1, 1)
        assert engine.breaker.closed
        assert not engine.answering
        rig.check_books()


@pytest.mark.parametrize(
    ("skew_s", "alive", "ends"),
    [(skew_s, alive, not alive) for skew_s in (0.0, 1000.0, -1000.0) for alive in (True, False)],
)
async def test_a_stream_that_goes_on_is_of_the_process_that_lives(
    skew_s: float, alive: bool, ends: bool
) -> None:
    """Several processes may answer at one address, each with a start of its own."""
    script = Cut(COMPLETION)
    async with begun(COMPLETION, script) as (rig, engine, task):
        if alive:
            before = rig.router.proxy.requests.live
            script.speaks.set()
            await until(lambda: any(one.streamed_tokens == 2 for one in before), "it goes on")
        _restart(rig, engine, "metrics", skew_s)
        if ends:
            assert (await task)[0] == 200
        await asyncio.sleep(0.5)
        assert bool(engine.answering) is not ends
        assert rig.router.proxy.stats.streams_broken == ends
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.parametrize("age_s", [0.0, 5.0])
async def test_an_answer_that_is_younger_than_the_process_goes_on(age_s: float) -> None:
    script = Cut(COMPLETION)
    async with begun(COMPLETION, script) as (rig, engine, task):
        (attempt,) = engine.answering
        attempt.asked_s = rig.router.clock() - age_s
        _restart(rig, engine, "metrics")
        assert engine.answering
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: not engine.answering, "forgotten with its end")


@pytest.mark.parametrize("how", ["metrics", "events"])
async def test_an_answer_that_is_kept_back_is_asked_for_again(how: str) -> None:
    """Nothing of it has been passed on: its end decides whether it is to be."""
    script = Cut(COMPLETION, begins=_LONG[:1000])
    async with begun(COMPLETION, script, stream=False) as (rig, engine, task):
        _restart(rig, engine, how)
        status, body = await task
        assert (status, rig.router.proxy.stats.streams_broken) == (502, 0), json.dumps(body)
        rig.check_books()


async def test_a_long_answer_that_is_not_streamed_is_cut() -> None:
    script = Cut(COMPLETION, begins=_LONG)
    async with begun(COMPLETION, script, stream=False) as (rig, engine, task):
        await until(lambda: next(iter(rig.router.proxy.requests.live)).bytes_out > 0, "passed on")
        _restart(rig, engine, "metrics")
        await asyncio.wait([task])
        assert task.exception() is not None
        assert rig.router.proxy.stats.streams_broken == 1
