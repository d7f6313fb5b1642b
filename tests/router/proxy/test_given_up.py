"""Engines that answer 200 and that they gave the request up, or whose stream begins with an error: another
one is asked while the client has had nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.publisher.simulator.settings import EngineSettings
from kvatlas.router.proxy.answers import SseRelay
from tests.support.clients import anthropic_client, openai_client
from tests.support.proxy_rig import (
    DONE,
    END,
    SSE_HEAD,
    STREAM,
    ask,
    chunk,
    event,
    request,
    routing,
    says,
    served,
    writes,
)
from tests.support.waiting import until
from tests.support.whole_router import MODEL, QUICK, running

TEXT = "Say something at length. "
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": TEXT, "max_tokens": 6, "ignore_eos": True},
    "/v1/chat/completions": {
        "model": MODEL,
        "messages": [{"role": "user", "content": TEXT}],
        "max_tokens": 6,
        "ignore_eos": True,
    },
    "/v1/messages": {"model": MODEL, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 6},
    "/v1/responses": {"model": MODEL, "input": TEXT, "max_output_tokens": 6, "store": False},
    "/inference/v1/generate": {"model": MODEL, "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 6}},
}
CASES = [(path, stream) for path in BODIES for stream in (False, True) if (path[1] == "v") or not stream]
ENDLESS = {"prefill_s_per_token": 60.0}
"""No answer ends before its engine is stopped."""


def text_of(answer: str) -> list[str]:
    """Generated texts, in order."""
    found: list[str] = []

    def look(value: Any) -> None:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if key in ("text", "content") and isinstance(item, str):
                found.append(item)
            elif key == "token_ids" and item:
                found.append(str(item))
            elif isinstance(item, dict | list) and key not in ("usage", "messages"):
                look(item)

    lines = [line[5:] for line in answer.splitlines() if line.startswith("data:") and "[DONE]" not in line]
    for line in lines or [answer]:
        look(json.loads(line))
    return found


async def post(url: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body) as answer:
        return answer.status, await answer.text()


@pytest.mark.parametrize(("path", "stream"), CASES)
async def test_a_terminated_engine_costs_no_answer(path: str, stream: bool) -> None:
    body = {**BODIES[path], "stream": stream}
    async with running(ENDLESS, {}) as (old, new), routing(old.base_url, new.base_url) as rig:
        _, alone = await post(new.base_url, path, body)
        asked = asyncio.ensure_future(post(rig.url, path, body))
        await until(lambda: old.scheduler.gauges().num_running == 1, "the old engine has it")
        await old.stop()
        status, answer = await asked
        assert status == 200, answer
        assert text_of(answer) == text_of(alone)
        assert (rig.stats.engine_failures, rig.stats.streams_broken) == ({"aborted": 1}, 0)
        assert (rig.stats.retries, rig.stats.engines_broken) == (1, 0)


async def begun(decode_s: float = 0.02) -> SimulatedEngine:
    engine = SimulatedEngine(EngineSettings(**{**QUICK, "decode_s_per_token": decode_s}))
    await engine.start()
    return engine


async def test_a_stream_with_text_ends_with_the_apis_error(anthropic: Any) -> None:
    engine = await begun()
    async with routing(engine.base_url) as rig:
        url = rig.url
        chat = {**BODIES["/v1/chat/completions"], "max_tokens": 5000}
        ignore_eos = {"ignore_eos": chat.pop("ignore_eos")}
        async with (
            openai_client(url) as api,
            anthropic_client(anthropic, url) as other,
        ):
            pieces = await api.chat.completions.create(**chat, stream=True, extra_body=ignore_eos)
            message = {**BODIES["/v1/messages"], "max_tokens": 5000}
            events = await other.messages.create(**message, stream=True)
            got = [(await anext(pieces)).choices[0].finish_reason for _ in range(3)]
            names = [(await anext(events)).type for _ in range(3)]
            await engine.stop()

            async def rest() -> None:
                got.extend([piece.choices[0].finish_reason async for piece in pieces])

            async def rest_of_message() -> None:
                names.extend([one.type async for one in events])

            for reads, error in ((rest, openai.APIError), (rest_of_message, anthropic.APIError)):
                with pytest.raises(error, match="before its answer was complete"):
                    await reads()
        assert set(got) == {None}
        assert "message_stop" not in names
        assert rig.stats.streams_broken == 2
        assert rig.stats.engine_failures == {"aborted": 2}


ERROR = {"message": "Internal server error", "type": "InternalServerError", "param": None}


def failed(code: Any) -> bytes:
    error = chunk(b"data: %b\n\n" % json.dumps({"error": {**ERROR, "code": code}}).encode())
    return error + chunk(DONE) + END


@pytest.mark.parametrize(("code", "retries"), [(500, 1), (503, 1), ("odd", 1), (400, 0)])
async def test_a_stream_that_begins_with_an_error_has_the_status_that_it_names(
    code: Any, retries: int
) -> None:
    good = writes(SSE_HEAD, chunk(event("a") + DONE), END)
    async with served(writes(SSE_HEAD, failed(code)), good) as (_, _, rig):
        got = await ask(rig, request(STREAM))
        assert got.status == 200
        assert (b'"error"' in got.body) == (not retries)
        assert rig.stats.retries == retries
        assert rig.stats.engine_failures == ({"status": 1} if retries else {})
        assert rig.planner.placements[0].told != ["first_byte", "finished"]


async def test_an_error_that_every_engine_has_is_answered_as_one() -> None:
    async with served(writes(SSE_HEAD, failed(503)), writes(SSE_HEAD, failed(503))) as (_, _, rig):
        got = await ask(rig, request(STREAM))
        assert (got.status, got.head["content-type"]) == (503, "application/json")
        assert json.loads(got.body)["error"]["message"] == ERROR["message"]


def test_a_gateways_answer_is_never_replaced() -> None:
    """It has gone to the client already: what is read of it is passed on as it is."""
    relay = SseRelay("/v1/chat/completions")
    opening = b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
    given_up = b'data: {"choices":[{"delta":{"content":""},"finish_reason":"abort"}]}\n\n'
    assert relay.feed(opening) == opening
    assert not relay.begun
    assert relay.feed(given_up) == given_up
    assert (relay.begun, relay.aborted) == (True, False)


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices":[{"message":{"content":"finish_reason\\":\\"abort\\""},"finish_reason":"stop"}]}',
        b'{"choices":[{"text":"abort","finish_reason":"length"}],"finish_reason":"abort"}',
    ],
)
async def test_an_answer_that_speaks_of_giving_up_is_one(body: bytes) -> None:
    async with served(says(200, body, "content-type: application/json")) as (_, rig):
        got = await ask(rig)
        assert (got.status, got.body) == (200, body)
