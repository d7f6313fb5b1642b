"""A client that leaves takes its request with it, wherever that is."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from kvatlas.router.http.request_cycle import ClientRequest
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.proxy.app import ProxyApp
from tests.support.proxy_rig import (
    CHAT,
    DONE,
    END,
    SSE_HEAD,
    STREAM,
    Engine,
    FakePlacement,
    Paths,
    Rig,
    Script,
    chunk,
    event,
    read_answer,
    request,
    reset,
    routing,
    writes,
)
from tests.support.waiting import until

STAGES: dict[str, tuple[Script, bytes]] = {
    "before the head": (writes(then="hang"), CHAT),
    "before the first token": (writes(SSE_HEAD, then="hang"), STREAM),
    "mid-stream": (writes(SSE_HEAD + chunk(event("a")), then="hang"), STREAM),
    "mid-body": (writes(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", then="hang"), CHAT),
}


@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
@pytest.mark.parametrize("stage", STAGES)
async def test_upstream_is_closed(stage: str, how: str) -> None:
    script, body = STAGES[stage]
    async with Engine(script) as engine, routing(engine.url) as rig:
        reader, writer = await rig.connect()
        writer.write(request(body))
        await until(lambda: bool(engine.calls), "the engine is asked")
        if stage.startswith("mid"):
            await reader.readuntil(b"\r\n\r\n")
            await reader.read(3)
        if how == "close":
            writer.close()
        elif how == "half-close":
            writer.write_eof()
        else:
            reset(writer)
        await engine.calls[0].closed.wait()
        placement = rig.planner.placements[0]
        await until(lambda: placement.over, "the placement ends")
        assert placement.told[-1] == "finished"
        assert placement.usage is None
        assert rig.stats.clients_gone == 1
        assert rig.stats.retries == 0
        assert rig.stats.requests_active == 0
        assert rig.app.client.origin(engine.url).open == 0
        assert rig.planner.available(engine.url)


async def test_a_client_that_leaves_while_its_body_is_looked_at_is_not_answered() -> None:
    async with Engine(writes(then="hang")) as engine, routing(engine.url) as rig:
        looked, outbound = asyncio.Event(), rig.app._outbound

        async def look(request: ClientRequest, *more: Any) -> Any:
            looked.set()
            await until(lambda: request.disconnected, "the client is gone")
            return await outbound(request, *more)

        rig.app._outbound = look  # type: ignore[assignment, method-assign]
        _, writer = await rig.connect()
        writer.write(request(CHAT))
        await looked.wait()
        writer.close()
        await until(lambda: rig.stats.requests_active == 0, "the request ends")
        assert rig.stats.clients_gone == 1
        assert not engine.calls


def placed(rig: Rig, number: int) -> bool:
    return len(rig.planner.placements) == number


@pytest.mark.parametrize("hung", ["no head", "head only"])
async def test_an_engine_without_answers_is_avoided_once_clients_give_up(hung: str) -> None:
    """Its server may live on (vLLM's sends a stream's head immediately) while its engine does nothing."""
    stuck = writes(then="hang") if hung == "no head" else writes(SSE_HEAD, then="hang")
    alive = writes(SSE_HEAD + chunk(event("a") + DONE) + END)
    async with Engine(stuck) as bad, Engine(alive) as good, routing(bad.url, good.url) as rig:
        now = [0.0]
        rig.planner.now = lambda: now[0]
        for number in range(1, 13):
            reader, writer = await rig.connect()
            writer.write(request(STREAM))
            await until(partial(placed, rig, number), "it is placed")
            placement = rig.planner.placements[-1]
            if placement.base_url == bad.url:
                await until(lambda: bool(bad.calls), "the engine is asked")
                now[0] += 2.0
            else:
                await read_answer(reader)
            writer.close()
            await until(lambda: rig.planner.placements[-1].over, "over")
        assert len(bad.calls) == 1
        assert rig.stats.clients_left_unanswered == 1
        now[0] += 10.0
        assert rig.planner.available(bad.url)  # for a probe


async def test_client_that_leaves_while_the_planner_thinks() -> None:
    cancelled = asyncio.Event()
    async with routing() as rig:

        async def place(
            request: InboundRequest, *, exclude: frozenset[str], disagg: object = None
        ) -> FakePlacement:
            rig.planner.requests.append(request)
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            raise AssertionError

        rig.planner.place = place  # type: ignore[method-assign]
        _, writer = await rig.connect()
        writer.write(request())
        await until(lambda: bool(rig.planner.requests), "the planner is asked")
        writer.close()
        await cancelled.wait()
        await until(lambda: rig.stats.clients_gone == 1, "counted")


async def test_client_that_leaves_in_its_body() -> None:
    async with routing() as rig:
        _, writer = await rig.connect()
        writer.write(request()[:-5])
        await until(lambda: rig.stats.requests_active == 1, "the request is being read")
        writer.close()
        await until(lambda: rig.stats.requests_active == 0, "given up")
        assert rig.stats.clients_gone == 1
        assert not rig.planner.requests


async def test_the_engine_notices_each_client_that_leaves() -> None:
    """By the client's end of its connection alone: nothing else happens meanwhile."""
    async with Engine(writes(SSE_HEAD, then="hang")) as engine, routing(engine.url) as rig:
        for number in range(5):
            _, writer = await rig.connect()
            writer.write(request(STREAM))
            await until(lambda number=number: len(engine.calls) > number, "asked")  # type: ignore[misc]
            writer.close()
            await engine.calls[number].closed.wait()


async def test_app_that_fails_after_the_client_left_harms_no_other_request() -> None:
    left = asyncio.Event()

    def wrap(app: ProxyApp) -> Any:
        async def late(scope: Any, receive: Any, send: Any) -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"late"})

        return Paths(app, {"/v1/slow": late})

    async with routing(wrap=wrap) as rig:
        _, writer = await rig.connect()
        writer.write(request(target="/v1/slow"))
        await until(lambda: rig.listen_stats.requests == 1, "begun")
        writer.close()
        await left.wait()
