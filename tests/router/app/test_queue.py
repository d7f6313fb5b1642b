"""Requests that wait in a whole router while its engine has all it may have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.admission.admission_queue import AdmissionQueue, QueueSettings
from kvatlas.router.proxy.settings import ProxySettings
from kvatlas.router.reloads import apply
from tests.support.waiting import until
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routed, routing, running, tenants

ONE = {"decode_s_per_token": 0.05}
"""An answer of 2,000 tokens takes longer than any test."""
LOW, HIGH = {"x-kvatlas-priority": "low"}, {"x-kvatlas-priority": "high"}


@asynccontextmanager
async def crowded(**changes: Any) -> AsyncIterator[tuple[Rig, SimulatedEngine, AdmissionQueue]]:
    """One engine that may have one request at a time."""
    settings = changes.pop("settings", {})
    given = {"saturation_s": 60.0, "engine_requests_max": 1, "wait_s_max": 600.0, **settings}
    async with routed(ONE, queue=QueueSettings(**given), **changes) as (rig, engines):
        room = rig.router.accounts.room
        assert room is not None
        yield rig, engines[0], room
        await rig.over()


@asynccontextmanager
async def busy(rig: Rig) -> AsyncIterator[None]:
    """The engine has its request until this ends."""
    stream = await rig.api.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hold on"}],
        max_tokens=2000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    try:
        await anext(aiter(stream))
        yield
    finally:
        await stream.close()


def asks(rig: Rig, text: str = "hi", **fields: Any) -> asyncio.Task[Any]:
    return asyncio.ensure_future(rig.chat(text, **{"max_tokens": 1, **fields}))


async def take(rig: Rig, **changes: Any) -> None:
    """As if it was reloaded."""
    await apply(rig.router, msgspec.structs.replace(rig.router.config, **changes))


def ended(order: list[str], name: str, _: asyncio.Task[Any]) -> None:
    order.append(name)


async def waits(room: AdmissionQueue, count: int) -> None:
    await until(lambda: room.stats.waiting == count, f"{count} wait")


async def test_a_request_waits_until_the_engine_has_room_and_says_how_long() -> None:
    async with crowded() as (rig, engine, room):
        async with busy(rig):
            later = asks(rig, TEXT * 20)
            await waits(room, 1)
            _, told = await rig.ask("POST", "/kvatlas/explain", explained(TEXT))
            assert told["waits"] is True
        answer = await later
        assert answer.headers["x-kvatlas-engine"] == engine.base_url
        await until(lambda: rig.idle, "requests over")
        _, receipts = await rig.ask("GET", "/kvatlas/receipts")
        assert [one["waited_s"] > 0 for one in receipts] == [False, True]
        _, page = await rig.ask("GET", "/metrics")
        assert "kvatlas_queue_waited_total 1.0" in page
        assert "kvatlas_queue_waiting 0.0" in page
        _, told = await rig.ask("POST", "/kvatlas/explain", explained(TEXT))
        assert told["waits"] is False


def explained(text: str) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}]}


async def test_too_many_get_429_and_too_long_503_as_the_openai_client_sees_them() -> None:
    async with crowded(settings={"requests_max": 1}) as (rig, _, room), busy(rig):
        first = asks(rig)
        await waits(room, 1)
        with pytest.raises(openai.RateLimitError) as full:
            await rig.chat("no room")
        assert full.value.code == "queue_full"
        assert int(full.value.response.headers["retry-after"]) >= 1
        first.cancel()
        await waits(room, 0)
        with pytest.raises(openai.InternalServerError) as late:
            await rig.chat("too late", extra_headers={"x-request-timeout": "0.05"})
        assert (late.value.status_code, late.value.code) == (503, "queue_timeout")
        assert int(late.value.response.headers["retry-after"]) >= 1
        with pytest.raises(openai.BadRequestError, match="x-request-timeout"):
            await rig.chat("when?", extra_headers={"x-request-timeout": "soon"})
        assert room.stats.refused == {"full": 1, "x-request-timeout": 1}


async def test_a_tenant_that_floods_does_not_keep_another_waiting(tmp_path: Path) -> None:
    async with crowded(keys=tenants(tmp_path, {"flood": "", "guest": ""})) as (rig, _, room):
        rig.api.api_key = "key-of-flood"
        order: list[str] = []
        async with busy(rig):
            asked = [asks(rig, f"{i} {TEXT}") for i in range(6)]
            await waits(room, 6)
            guest = {"authorization": "Bearer key-of-guest"}
            asked.append(asks(rig, TEXT, extra_headers=guest))
            await waits(room, 7)
            for task, name in zip(asked, ["flood"] * 6 + ["guest"], strict=True):
                task.add_done_callback(partial(ended, order, name))
        await asyncio.gather(*asked)
        assert order.index("guest") <= 1


async def test_those_that_wait_are_answered_when_the_router_drains() -> None:
    async with crowded() as (rig, _, room):
        async with busy(rig):
            asked = [asks(rig, f"{i} {TEXT}") for i in range(3)]
            await waits(room, 3)
            rig.server.drain()
        answers = await asyncio.gather(*asked)
        assert [one.http_response.status_code for one in answers] == [200, 200, 200]


async def test_requests_that_wait_for_a_vanished_engine_get_an_error() -> None:
    proxy = ProxySettings(pin_header=True)
    async with crowded(proxy=proxy) as (rig, engine, room), busy(rig):
        pinned = {"x-kvatlas-engine": engine.base_url}
        asked = [asks(rig, TEXT), asks(rig, TEXT * 2, extra_headers=LOW), asks(rig, extra_headers=pinned)]
        await waits(room, 3)
        await take(rig, engines=())
        for task in asked:
            with pytest.raises(openai.InternalServerError) as gone:
                await task
            assert gone.value.code == "no_ready_engine"
        assert (room.stats.waited, room.stats.refused) == (3, {})


async def test_those_that_wait_when_one_of_two_engines_dies_get_the_other() -> None:
    given = QueueSettings(saturation_s=60.0, engine_requests_max=1, wait_s_max=600.0)
    # One of them may be sent to the engine while that stops: it is not suspected here of having ended it.
    config = {"queue": given, "proxy": ProxySettings(suspect_s=0.0)}
    async with running(ONE, ONE) as engines, routing(configure(*engines, **config)) as rig:
        room = rig.router.accounts.room
        assert room is not None
        async with busy(rig):
            try:
                async with busy(rig):
                    asked = [asks(rig, f"{i} {TEXT}") for i in range(4)]
                    await waits(room, 4)
                    held = {e.engine_id: e.load.current(0.0).running for e in rig.router.fleet}
                    assert set(held.values()) == {1}
                    await engines[0].stop()
            except openai.APIError:
                pass  # the stream of the engine that died
            await until(lambda: sum(one.up for one in rig.router.fleet) == 1, "it is known to be down")
        for answer in await asyncio.gather(*asked):
            assert answer.headers["x-kvatlas-engine"] == engines[1].base_url
        await rig.over()


async def test_without_the_setting_there_is_no_queue_and_its_headers_mean_nothing() -> None:
    async with running({}) as engines, routing(configure(*engines)) as rig:
        assert rig.router.accounts.room is None
        await rig.chat("hi", extra_headers={"x-request-timeout": "soon", "x-kvatlas-priority": "urgent"})
        assert "kvatlas_queue_waiting" not in await rig.page()


async def test_the_queue_is_switched_on_and_off_while_requests_wait() -> None:
    async with running(ONE) as engines, routing(configure(*engines)) as rig:
        await take(rig, queue=QueueSettings(saturation_s=60.0, engine_requests_max=1))
        room = rig.router.accounts.room
        async with busy(rig):
            waiting = [asks(rig, extra_headers=LOW), asks(rig)]
            await waits(room, 2)
            await take(rig, queue=QueueSettings())
            await asyncio.gather(*waiting)  # although the engine is busy still
            assert room.stats.waited == 2
            await rig.chat("goes immediately")
            assert room.stats.waited == 2
        await rig.over()
