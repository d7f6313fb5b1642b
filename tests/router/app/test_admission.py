"""Requests refused for their predicted wait by a whole router: 429 with the seconds to come back in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import openai
import pytest
from structlog.testing import capture_logs

from kvatlas.router.admission.admission_queue import QueueSettings
from kvatlas.router.placement.engine import Engine
from kvatlas.router.placement.rates import PrefillSample
from kvatlas.router.placement.seconds import FirstTokenWork
from kvatlas.router.reloads import apply
from tests.router.app.test_prefill_decode import D, P, apart, completion
from tests.router.app.test_queue import waits
from tests.support.clients import anthropic_client
from tests.support.pairs import busy as decoding
from tests.support.waiting import until
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routed, routing, running, tenants

TARGET = QueueSettings(wait_target_s=3.0)
LOW, HIGH = {"x-kvatlas-priority": "low"}, {"x-kvatlas-priority": "high"}
WAIT_S = 100.0
ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": TEXT}]}


@contextmanager
def queued(*engines: Engine, wait_s: float = WAIT_S) -> Iterator[None]:
    """This many seconds of prompts are ahead on these engines, which are as fast as is assumed at first."""
    now = time.monotonic()
    for engine in engines:
        teach(engine, engine.rates.prefill_s_per_token(now))
    tokens = [int(wait_s / e.rates.prefill_s_per_token(now)) for e in engines]
    tickets = [
        e.load.admit(uncached_tokens=n, now=now, streams=False) for e, n in zip(engines, tokens, strict=True)
    ]
    yield
    for engine, ticket in zip(engines, tickets, strict=True):
        engine.load.fail(ticket, time.monotonic())


def teach(engine: Engine, s_per_token: float) -> None:
    """Prompts of this engine took as long."""
    now = time.monotonic()
    for tokens in range(100, 10_100, 100):
        engine.rates.model.observe(FirstTokenWork(tokens), s_per_token * tokens, now - 101.0 + tokens / 100)


async def test_a_wait_beyond_the_target_is_429_for_both_clients_and_leaves_nothing(
    anthropic: ModuleType,
) -> None:
    async with running({}, {}) as engines, routing(configure(*engines, queue=TARGET)) as rig:
        one, two = rig.router.fleet
        with queued(one):
            assert (await rig.chat(TEXT)).headers["x-kvatlas-engine"] == two.engine_id
        with queued(one, two), capture_logs() as lines:
            admitted = rig.router.accounts.load_stats.admitted
            prompts = rig.router.accounts.inflight.stats.prompts
            with pytest.raises(openai.RateLimitError) as refused:
                await rig.chat(TEXT)
            assert refused.value.code == "predicted_wait"
            assert 90 <= int(refused.value.response.headers["retry-after"]) <= WAIT_S - 2
            async with anthropic_client(anthropic, rig.url) as client:
                with pytest.raises(anthropic.RateLimitError) as other:
                    await client.messages.create(**ASKED, max_tokens=3)
            assert other.value.body["error"]["type"] == "rate_limit_error"
            assert 90 <= int(other.value.response.headers["retry-after"]) <= WAIT_S - 2
            _, told = await rig.ask("POST", "/kvatlas/explain", ASKED)
            assert told["refused"]["target_s"] == 3.0
            assert told["refused"]["wait_s"] == pytest.approx(WAIT_S, abs=10)
            assert rig.router.accounts.load_stats.admitted == admitted
            assert rig.router.accounts.inflight.stats.prompts == prompts
            (line,) = [each for each in lines if "predicted wait" in each["event"]]
            assert (line["priority"], line["target_s"]) == ("normal", 3.0)
            assert 'kvatlas_admission_refused_total{priority="normal"} 2.0' in await rig.page()
        assert (await rig.chat(TEXT)).http_response.status_code == 200
        _, told = await rig.ask("POST", "/kvatlas/explain", ASKED)
        assert told["refused"] is None
        await rig.over()


async def test_a_long_prompt_is_not_refused_for_its_own_work() -> None:
    queue = QueueSettings(wait_target_s=0.001)
    async with running({}) as engines, routing(configure(*engines, queue=queue)) as rig:
        answer = await rig.chat(TEXT * 200)
        assert answer.http_response.status_code == 200
        await until(lambda: rig.idle, "the receipt is written")
        assert rig.router.accounts.receipts.latest[-1].prefill_s > 0.001


async def test_classes_have_their_own_targets_and_a_reload_takes_them_back() -> None:
    queue = QueueSettings(wait_target_low_s=1.0)
    async with running({}) as engines, routing(configure(*engines, queue=queue)) as rig:
        with queued(*rig.router.fleet):
            for fields in ({"extra_headers": LOW}, {"extra_body": {"priority": 5}}):
                with pytest.raises(openai.RateLimitError):
                    await rig.chat("hi", **fields)
            for fields in ({}, {"extra_headers": HIGH}):
                assert (await rig.chat("hi", **fields)).http_response.status_code == 200
            _, told = await rig.ask("POST", "/kvatlas/explain", {**ASKED, "priority": 1})
            assert told["refused"]["target_s"] == 1.0
            assert rig.router.accounts.admission_stats.refused == {"low": 2}
            await apply(rig.router, msgspec.structs.replace(rig.router.config, queue=QueueSettings()))
            assert (await rig.chat("hi", extra_headers=LOW)).http_response.status_code == 200
        await rig.over()


async def test_a_tenants_own_target_counts_and_a_refusal_costs_it_nothing(tmp_path: Path) -> None:
    rules = {
        "same": "requests_per_minute = 5\nuncached_tokens_per_minute = 100000\nconcurrent_requests = 1",
        "patient": "wait_target_s = inf",
        "bulk": 'priority = "low"\nwait_target_s = 200.0\nwait_target_low_s = 2.0',
    }
    async with routed({}, queue=TARGET, keys=tenants(tmp_path, rules)) as (rig, _):

        async def status(tenant: str) -> int:
            headers = {"authorization": f"Bearer key-of-{tenant}"}
            url = f"{rig.url}/v1/chat/completions"
            async with rig.session.post(url, json=ASKED, headers=headers) as answer:
                assert answer.status == 200 or b"predicted_wait" in await answer.read()
                return answer.status

        with queued(*rig.router.fleet):
            assert [await status("same") for _ in range(8)] == [429] * 8
            assert await status("patient") == 200
            assert await status("bulk") == 429
            await apply(rig.router, msgspec.structs.replace(rig.router.config, queue=QueueSettings()))
            assert await status("bulk") == 429, "its own target, although there is none for all"
        stats = rig.router.gate.tenants()["same"]
        assert (stats.active, stats.uncached_tokens, stats.refused) == (0, 0, {})
        assert [await status("same") for _ in range(5)] == [200] * 5
        await rig.over()


async def test_the_work_that_waits_in_the_router_counts_for_its_class_and_those_below() -> None:
    """Requests that may wait here are refused on arrival or not at all; a refused one takes no place."""
    queue = QueueSettings(saturation_s=0.5, wait_s_max=600.0, wait_target_s=1050.0)
    async with running({}) as engines, routing(configure(*engines, queue=queue)) as rig:
        room = rig.router.accounts.room
        (engine,) = rig.router.fleet
        for _ in range(100):
            engine.rates.observe(PrefillSample(tokens=1000, service_s=100.0, running=0), time.monotonic())
        with queued(engine, wait_s=1000.0):
            first = asyncio.ensure_future(rig.chat(TEXT * 60, max_tokens=1))
            await waits(room, 1)
            with pytest.raises(openai.RateLimitError) as refused:
                await rig.chat("one more")
            assert refused.value.code == "predicted_wait"
            _, told = await rig.ask("POST", "/kvatlas/explain", ASKED)
            assert told["waits"] is False
            assert told["refused"]["wait_s"] > 1050.0
            assert room.stats.waiting == 1
            high = asyncio.ensure_future(rig.chat("first", max_tokens=1, extra_headers=HIGH))
            await waits(room, 2)
        room.changed()
        for answer in await asyncio.gather(high, first):
            assert answer.http_response.status_code == 200
        assert room.stats.refused == {}
        await rig.over()


async def test_a_split_request_waits_where_its_prompt_is_computed() -> None:
    async with apart(P, D, queue=TARGET) as (rig, _):
        (p,) = [one for one in rig.router.fleet if one.engine.prefills]
        with decoding(rig):
            status, _ = await rig.ask("POST", "/v1/completions", completion(1))
            assert (status, rig.router.proxy.pd_stats.split) == (200, 1)
        with held(rig), queued(p, wait_s=20.0):
            admitted = rig.router.accounts.load_stats.admitted
            status, body = await rig.ask("POST", "/v1/completions", completion(2))
            assert (status, body["error"]["code"]) == (429, "predicted_wait")
            assert rig.router.accounts.load_stats.admitted == admitted
            assert rig.router.proxy.pd_stats.split == 1


@contextmanager
def held(rig: Rig) -> Iterator[None]:
    """Enough sequences run on the decode engine that no prompt is computed there."""
    (decode,) = [one for one in rig.router.fleet if one.engine.decodes]
    tickets = [decode.load.reserve(time.monotonic()) for _ in range(2000)]
    yield
    for ticket in tickets:
        decode.load.finish(ticket, time.monotonic())
