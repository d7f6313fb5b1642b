"""Comments that keep a silent stream open, and the parts of the time to first token in the answer's head."""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any

import pytest

from kvatlas.router.config.schema import ServerConfig
from kvatlas.router.http.settings import ListenSettings
from tests.support.clients import anthropic_client
from tests.support.proxy_rig import DONE, END, SSE_HEAD, STREAM, Call, Engine, chunk, event, request, served
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routed, routing, running

SILENCE_S = 0.2
COMMENT = b": keep-alive\n\n"
# First tokens after 0.5 s, then one each 0.7 s.
SLOW = {"prefill_s_per_token": 0.5 / 60, "decode_s_per_token": 0.7}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 3},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 3},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 3, "store": False},
}


async def raw(rig: Rig, path: str) -> tuple[bytes, float]:
    """The bytes of a stream, and the longest time without any from the first on."""
    body = {"model": MODEL, "stream": True, "ignore_eos": True, **ASKED[path]}
    loop, got, longest, last = asyncio.get_running_loop(), b"", 0.0, 0.0
    async with rig.session.post(rig.url + path, json=body) as answer:
        assert answer.status == 200
        async for piece in answer.content.iter_any():
            longest, last = max(longest, loop.time() - last if last else 0.0), loop.time()
            got += piece
    return got, longest


@pytest.mark.parametrize("path", ASKED)
async def test_a_silent_stream_has_comments_between_its_events_and_nothing_else_changes(path: str) -> None:
    listen = ListenSettings(drain_s_max=5.0, keepalive_comment_s=SILENCE_S)
    async with running(SLOW) as engines:
        async with routing(configure(*engines, listen=listen)) as rig:
            got, silence_s = await raw(rig, path)
        async with routing(configure(*engines)) as rig:
            plain, plain_silence_s = await raw(rig, path)
    assert got.count(COMMENT) >= 6
    assert silence_s <= SILENCE_S < plain_silence_s
    assert b": keep-alive" not in plain
    # Each stands alone, and without them the events are those of a stream that has none.
    events = [one for one in got.split(b"\n\n") if one != COMMENT[:-2]]
    assert b"keep-alive" not in b"".join(events)
    assert [one[:12] for one in events] == [one[:12] for one in plain.split(b"\n\n")]


@pytest.mark.long  # both libraries are imported
async def test_the_client_libraries_read_over_comments(anthropic: ModuleType) -> None:
    listen = ListenSettings(drain_s_max=5.0, keepalive_comment_s=SILENCE_S)
    async with running(SLOW) as engines, routing(configure(*engines, listen=listen)) as rig:
        whole = (await rig.chat(TEXT)).parse().choices[0].message.content
        _, chunks = await rig.streamed(TEXT)
        assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == whole
        stream = await rig.api.completions.create(model=MODEL, prompt=TEXT, max_tokens=3, stream=True)
        assert len([one async for one in stream]) >= 3
        made = await rig.api.responses.create(model=MODEL, input=TEXT, max_output_tokens=3, stream=True)
        assert [one.type async for one in made][-1] in {"response.completed", "response.incomplete"}
        async with anthropic_client(anthropic, rig.url) as client:
            asked = [{"role": "user", "content": TEXT}]
            async with client.messages.stream(model=MODEL, max_tokens=3, messages=asked) as told:
                final = await told.get_final_message()
        assert final.content[0].text


async def test_no_comment_stands_within_an_event_or_behind_the_end() -> None:
    sent = [event("a"), event("b"), event("c")]

    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        for piece in (SSE_HEAD, chunk(sent[0] + sent[1][:9]), chunk(sent[1][9:]), chunk(sent[2])):
            writer.write(piece)
            await asyncio.sleep(1.0)
        writer.write(chunk(DONE))
        await asyncio.sleep(1.0)
        writer.write(END)

    async with served(script, silence_s=SILENCE_S) as (_, rig):
        reader, writer = await rig.connect()
        writer.write(request(STREAM))
        got = await reader.readuntil(b"0\r\n\r\n")
        writer.close()
    body = b"".join(got.split(b"\r\n\r\n", 1)[1].split(b"\r\n")[1::2])
    assert body.replace(COMMENT, b"") == b"".join(sent) + DONE
    assert body.count(COMMENT) >= 20
    for one in sent:
        assert one in body
    assert body.startswith(COMMENT)


async def test_an_engine_that_fails_behind_comments_is_replaced() -> None:
    async def dies(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD)
        await asyncio.sleep(1.0)
        writer.transport.abort()

    async def works(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunk(event("a")) + chunk(DONE) + END)
        await writer.drain()

    async with served(dies, works, silence_s=SILENCE_S) as (_, _, rig):
        reader, writer = await rig.connect()
        writer.write(request(STREAM))
        got = await reader.readuntil(b"0\r\n\r\n")
        writer.close()
    assert got.count(COMMENT) >= 4
    assert got.count(b"HTTP/1.1 200") == 1
    assert event("a") in got
    assert b"error" not in got


@pytest.mark.parametrize("stream", [False, True])
async def test_server_timing_has_predicted_and_measured_parts(stream: bool) -> None:
    async with routed({"prefill_s_per_token": 0.01}) as (rig, engines):
        await rig.chat(TEXT * 3)
        await rig.caught_up(*engines)
        body = {"model": MODEL, "stream": stream, **ASKED["/v1/chat/completions"]}
        async with rig.session.post(rig.url + "/v1/chat/completions", json=body) as answer:
            told = ", ".join(answer.headers.getall("server-timing"))
            await answer.read()
    parts = {name: float(value) for name, value in (part.split(";dur=") for part in told.split(", "))}
    predicted = [parts[f"predicted-{name}"] for name in ("queue", "pages", "load", "prefill", "engine")]
    assert sum(predicted) == pytest.approx(parts["predicted-total"], abs=0.5)
    measured = [parts[name] for name in ("router", "wait", "engine")]
    assert sum(measured) == pytest.approx(parts["total"], abs=0.5)
    assert parts["engine"] > 0


async def test_answers_without_exposed_decisions_have_no_timing() -> None:
    async with running({}) as engines:
        config = configure(*engines, server=ServerConfig(port=0))
        async with routing(config) as rig:
            assert "server-timing" not in (await rig.chat(TEXT)).headers
