"""An engine that dies after its answer has begun: the client gets an error, not an end."""

from __future__ import annotations

import msgspec
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from kvatlas.router.proxy.settings import ProxySettings
from tests.support.clients import openai_client
from tests.support.examples import some
from tests.support.proxy_rig import (
    DONE,
    END,
    SSE_HEAD,
    STREAM,
    Engine,
    Script,
    ask,
    chunk,
    event,
    request,
    routing,
    says,
    served,
    writes,
)


def _events(body: bytes) -> list[bytes]:
    assert body.endswith(b"\n\n")
    return [part[6:] for part in body[:-2].split(b"\n\n")]


@pytest.mark.parametrize("then", ["close", "reset"])
async def test_stream_ends_with_an_error_event_and_cleanly(then: str) -> None:
    script = writes(SSE_HEAD, chunk(event("a")), chunk(event("b")), then=then)
    async with served(script, says(200, b"{}")) as (_, other, rig):
        got = await ask(rig, request(STREAM))
        assert got.whole
        assert got.body.startswith(event("a") + event("b"))
        error = msgspec.json.decode(_events(got.body)[-1])["error"]
        assert error["code"] == "engine_stream_broken"
        assert isinstance(error["message"], str)
        assert b"127.0.0.1" not in got.body
        assert b"[DONE]" not in got.body
        assert not other.calls
        assert rig.planner.placements[0].told == ["first_byte", "broken_stream"]
        assert rig.stats.streams_broken == 1


@pytest.mark.parametrize("cut", some(range(1, len(event("two"))), 3))
async def test_death_anywhere_in_an_event_leaves_a_readable_stream(cut: int) -> None:
    script = writes(SSE_HEAD + chunk(event("one")) + chunk(event("two")[:cut]), then="close")
    async with Engine(script) as engine, routing(engine.url) as rig:
        got = await ask(rig, request(STREAM))
        events = [msgspec.json.decode(data) for data in _events(got.body)]
        assert got.whole
        assert "error" in events[-1]
        assert all("choices" in data for data in events[:-1])


async def test_death_inside_a_chunk_frame() -> None:
    script = writes(SSE_HEAD, chunk(event("one")) + b"ff\r\ndata: {", then="reset")
    async with Engine(script) as engine, routing(engine.url) as rig:
        got = await ask(rig, request(STREAM))
        assert got.whole
        assert "error" in msgspec.json.decode(_events(got.body)[-1])


async def test_stream_that_said_done_is_not_broken() -> None:
    script = writes(SSE_HEAD, chunk(event("a")), chunk(DONE), then="reset")
    async with Engine(script) as engine, routing(engine.url) as rig:
        got = await ask(rig, request(STREAM))
        assert (got.body, got.whole) == (event("a") + DONE, True)
        assert rig.planner.placements[0].told == ["first_byte", "finished"]


@pytest.mark.parametrize(
    "script",
    [
        writes(b"HTTP/1.1 200 OK\r\ncontent-length: 90\r\n\r\n", b'{"half":', then="close"),
        writes(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", chunk(b'{"half":'), then="close"),
        writes(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n", b"half", then="reset"),
    ],
    ids=["content-length", "chunked", "until close"],
)
async def test_broken_body_breaks_the_clients_connection(script: Script) -> None:
    async with Engine(script) as engine, routing(engine.url) as rig:
        got = await ask(rig)
        assert got.status == 200
        assert not got.whole
        assert rig.planner.placements[0].told == ["first_byte", "broken_stream"]
        assert rig.stats.streams_broken == 1


async def test_silence_in_a_stream_is_a_time_out() -> None:
    script = writes(SSE_HEAD, chunk(event("a")), then="hang")
    settings = ProxySettings(idle_timeout_s=0.3)
    async with Engine(script) as engine, routing(engine.url, settings=settings) as rig:
        got = await ask(rig, request(STREAM))
        assert got.whole
        assert "error" in msgspec.json.decode(_events(got.body)[-1])
        assert rig.planner.placements[0].told == ["first_byte", "timeout"]


async def _collect(stream: openai.AsyncStream[ChatCompletionChunk], seen: list[str | None]) -> None:
    async for part in stream:
        seen.append(part.choices[0].delta.content)  # noqa: PERF401  # kept when the stream raises


async def test_openai_client_raises_with_our_code() -> None:
    script = writes(SSE_HEAD, chunk(event("a")), chunk(event("b")[:20]), then="close")
    async with (
        served(script) as (_, rig),
        openai_client(rig.url) as client,
    ):
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], stream=True
        )
        seen: list[str | None] = []
        with pytest.raises(openai.APIError) as caught:
            await _collect(stream, seen)
        assert seen == ["a"]
        assert caught.value.code == "engine_stream_broken"


async def test_error_events_of_engines_pass() -> None:
    body = event("a") + b'data: {"error": {"message": "m", "code": 500}}\n\n' + DONE
    async with Engine(writes(SSE_HEAD, chunk(body) + END)) as engine, routing(engine.url) as rig:
        got = await ask(rig, request(STREAM))
        assert got.body == body
