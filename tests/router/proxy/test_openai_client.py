"""The real ``openai`` client against the proxy, unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import openai
import pytest

from tests.support.clients import openai_client
from tests.support.ports import free_port
from tests.support.proxy_rig import (
    DONE,
    END,
    SSE_HEAD,
    Engine,
    Rig,
    Script,
    chunk,
    event,
    routing,
    says,
    served,
    writes,
)
from tests.support.waiting import run

MESSAGES = [{"role": "user", "content": "x"}]


@contextlib.asynccontextmanager
async def client_key(rig: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(rig.url) as client:
        yield client


async def _error(*scripts: Script, model: str = "m") -> openai.APIStatusError:
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Engine(script)) for script in scripts]
        urls = [engine.url for engine in engines] or [f"http://127.0.0.1:{free_port()}"]
        rig = await stack.enter_async_context(routing(*urls))
        client = await stack.enter_async_context(client_key(rig))
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(model=model, messages=MESSAGES)  # type: ignore[arg-type]
        return caught.value


async def test_answer_and_stream() -> None:
    body = (
        b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":'
        b'{"role":"assistant","content":"hello"},"finish_reason":"stop"}]}'
    )
    async with (
        served(says(200, body, "content-type: application/json")) as (engine, rig),
        client_key(rig) as client,
    ):
        raw = await client.chat.completions.with_raw_response.create(
            model="m",
            messages=MESSAGES,  # type: ignore[arg-type]
            extra_body={"cache_salt": "s", "priority": 1},
        )
        assert raw.parse().choices[0].message.content == "hello"
        assert raw.request_id == engine.calls[0].head["x-request-id"]
        assert b'"cache_salt":"s"' in engine.calls[0].body.replace(b" ", b"")
        engine.script = writes(SSE_HEAD, chunk(event("a")), chunk(event("b") + DONE) + END)
        stream = await client.chat.completions.create(
            model="m",
            messages=MESSAGES,  # type: ignore[arg-type]
            stream=True,
        )
        text = "".join([part.choices[0].delta.content or "" async for part in stream])
        assert text == "ab"


def test_unreachable_engine() -> None:
    error = run(_error())
    assert (error.status_code, error.code, error.type) == (
        502,
        "engine_unreachable",
        "service_unavailable_error",
    )
    assert error.request_id


def test_engines_error_reaches_the_client_as_it_is() -> None:
    body = b'{"error":{"message":"too long","type":"BadRequestError","param":"messages","code":400}}'
    error = run(_error(says(400, body, "content-type: application/json")))
    assert (error.status_code, error.type, error.param) == (400, "BadRequestError", "messages")
    assert "too long" in error.message


async def test_error_in_place_of_a_stream() -> None:
    body = b'{"error":{"message":"no","type":"NotFoundError","param":null,"code":404}}'
    async with (
        served(says(404, body, "content-type: application/json")) as (_, rig),
        client_key(rig) as client,
    ):
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="m", prompt="x", stream=True)
