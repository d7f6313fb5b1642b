"""The answer begins with its first token, in every API and framing: before it, another engine may go on in
the same response, and after it no engine does. Over HTTP, with a clock of the test's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from kvatlas.router.http.settings import ClientStats
from kvatlas.router.http.upstream import UpstreamConnection
from kvatlas.router.openai.apis import CHAT, COMPLETION, MESSAGES, RESPONSES
from kvatlas.router.openai.members import at_once
from kvatlas.router.pd.bodies import split_body
from kvatlas.router.proxy.settings import ProxySettings
from tests.router.proxy.split.test_legs import Numbered, all_over, apart, in_turn, told
from tests.support.api_streams import LINE_ENDS, SGLANG, STREAMS, data_of_events, event_of, stream_of
from tests.support.proxy_rig import (
    END,
    SSE_HEAD,
    Call,
    Engine,
    Script,
    answer,
    ask,
    chunk,
    request,
    says,
    served,
    writes,
)
from tests.support.transports import FakeTransport
from tests.support.waiting import run

SPLIT = [path for path in STREAMS if path != SGLANG]
PASSED = ProxySettings(passed_paths=frozenset({SGLANG}))
COMMENT = b": keep-alive\n\n"


def asks(path: str, *, stream: bool = True) -> bytes:
    return request(json.dumps({**STREAMS[path].body, "stream": stream}).encode(), target=path)


def good(path: str) -> bytes:
    """The answer of the other engine."""
    return stream_of(path).replace(b"SECRET", b"right")


def openings(path: str, end: bytes = b"\n") -> bytes:
    return b"".join(event_of(one, end) for one in STREAMS[path].openings)


def error_of(path: str, body: bytes) -> Any:
    """The API's own error with which a stream ends."""
    last = data_of_events(body)[-1]
    if path == RESPONSES:
        assert last["type"] == "error"
        return last
    if path == MESSAGES:
        assert last["type"] == "error"
    return last["error"]


# What comes before the token, by name: framing and content.
SHAPES: dict[str, Callable[[str], bytes]] = {
    "nothing": lambda path: b"",
    "comment": lambda path: COMMENT,
    "comments": lambda path: b": a\r\n\r\n:\n\n: b\n\n" * 5,
    "openings": openings,
    "crlf": lambda path: openings(path, b"\r\n") + b": ping\r\n\r\n",
    "cr": lambda path: openings(path, b"\r") + b": ping\r\r",
    "empty data": lambda path: b"data:\n\ndata: \n\ndata\n\n",
    "no data": lambda path: b"event: x\n\nretry: 100\n\nid: 1\n\n",
    "comment and openings": lambda path: COMMENT + openings(path) + COMMENT,
    "large": lambda path: (
        openings(path) + b'data: {"choices":[],"prompt_token_ids":[%b5]}\n\n' % (b"5," * 200_000)
    ),
    "half a comment": lambda path: b": keep",
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("path", SPLIT)
async def test_no_token_of_a_late_answer_is_given_out(path: str, shape: str) -> None:
    """Only comments came in time: the same response continues, with a new answer."""
    now = [1000.0]

    async def late(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD)
        if before := SHAPES[shape](path):
            writer.write(chunk(before))
        await writer.drain()
        await asyncio.sleep(0.002)  # only so that it comes in a packet of its own; nothing depends on it
        now[0] += 100.0
        rest = (b"\n\n" if shape == "half a comment" else b"") + stream_of(path)
        writer.write(chunk(rest) + END)

    async with AsyncExitStack() as stack:
        again = writes(SSE_HEAD, chunk(good(path)), END)
        rig, (p,), (d,) = await apart(
            stack, [Numbered().script()], [in_turn(late, again)], now=lambda: now[0]
        )
        got = await ask(rig, asks(path))
        assert (got.status, got.whole) == (200, True)
        assert b"SECRET" not in got.body
        comments = [line for line in got.body.splitlines() if line.startswith(b":")]
        assert shape == "half a comment" or bool(comments) == (
            shape in ("comment", "comments", "comment and openings", "crlf", "cr")
        )
        assert got.body.endswith(good(path))
        rest = got.body.removesuffix(good(path))
        assert set(rest.splitlines()) <= {*comments, b""}
        assert (len(p.calls), told(d)) == (1, [1, None])
        assert b"cache_salt" in d.calls[1].body
        stats = rig.app.pd_stats
        assert (stats.answers_late, stats.handoffs_lost, rig.stats.streams_broken) == (1, 1, 0)
        assert all_over(rig)


@pytest.mark.parametrize("path", SPLIT)
async def test_a_late_answer_that_is_not_streamed_is_requested_again(path: str) -> None:
    now = [1000.0]

    async def late(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        now[0] += 100.0
        await says(200, b'{"text": "SECRET"}', "content-type: application/json")(engine, call, writer)

    async with AsyncExitStack() as stack:
        again = says(200, b'{"text": "right"}', "content-type: application/json")
        rig, _, (d,) = await apart(stack, [Numbered().script()], [in_turn(late, again)], now=lambda: now[0])
        got = await ask(rig, asks(path, stream=False))
        assert (got.status, got.body) == (200, b'{"text": "right"}')
        assert (rig.app.pd_stats.answers_late, told(d)) == (1, [1, None])
        assert all_over(rig)


async def test_a_late_answer_of_another_kind_is_requested_again() -> None:
    """Neither an event stream nor JSON: its beginning says nothing of when it was computed."""
    now = [1000.0]

    async def late(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(chunk(COMMENT))
        await writer.drain()
        await asyncio.sleep(0.002)
        now[0] += 100.0
        writer.write(chunk(stream_of(CHAT)) + END)

    async with AsyncExitStack() as stack:
        again = writes(SSE_HEAD, chunk(good(CHAT)), END)
        rig, _, _ = await apart(stack, [Numbered().script()], [in_turn(late, again)], now=lambda: now[0])
        assert (await ask(rig, asks(CHAT))).body == good(CHAT)


async def test_a_response_that_was_named_ends_with_an_error_where_it_is_late() -> None:
    """No other engine can go on with it: its id is the client's already."""
    now = [1000.0]
    created = {"type": "response.created", "sequence_number": 0, "response": {"id": "r", "background": True}}

    async def late(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunk(event_of(("response.created", created))))
        await writer.drain()
        await asyncio.sleep(0.002)
        now[0] += 100.0
        writer.write(chunk(event_of(STREAMS[RESPONSES].token)) + END)

    async with AsyncExitStack() as stack:
        rig, _, (d,) = await apart(stack, [Numbered().script()], [late], now=lambda: now[0])
        got = await ask(rig, asks(RESPONSES))
        assert (got.status, got.whole, b"SECRET" in got.body) == (200, True, False)
        error = error_of(RESPONSES, got.body)
        assert (error["code"], error["sequence_number"]) == ("engine_stream_broken", 1)
        assert len(d.calls) == 1
        assert (rig.app.pd_stats.answers_late, rig.stats.streams_broken) == (1, 1)
        assert all_over(rig)


def test_background_requests_stay_on_one_engine() -> None:
    body = b'{"model": "m", "input": "x", "background": true}'
    assert at_once(split_body(RESPONSES, body)).whole == "background"


LOST: dict[str, Callable[[str], Script]] = {
    "cut": lambda path: writes(SSE_HEAD, chunk(COMMENT), chunk(openings(path)), then="reset"),
    "closed": lambda path: writes(SSE_HEAD, chunk(COMMENT + COMMENT), then="close"),
    "error": lambda path: writes(SSE_HEAD, chunk(COMMENT), chunk(event_of(STREAMS[path].error)), END),
    "abort": lambda path: writes(SSE_HEAD, chunk(COMMENT), chunk(event_of(STREAMS[path].abort)), END),
}


@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("path", STREAMS)
async def test_another_engine_goes_on_behind_comments(path: str, how: str) -> None:
    again = writes(SSE_HEAD, chunk(COMMENT), chunk(good(path)), END)
    async with served(LOST[how](path), again, settings=PASSED) as (_, _, rig):
        got = await ask(rig, asks(path))
        assert (got.status, got.whole) == (200, True)
        assert got.body.removesuffix(good(path)) in (COMMENT * 2, COMMENT * 3)
        assert got.body.endswith(good(path))
        assert (rig.stats.retries, rig.stats.streams_broken) == (1, 0)
        assert all_over(rig)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (writes(then="reset"), "engine_unreachable"),
        (says(503, b'{"error": {"message": "full"}}'), "engine_refused"),
        (says(400, b'{"error": {"message": "too long"}}'), "engine_refused"),
        (says(200, b'{"whole": 1}', "content-type: application/json"), "engine_refused"),
        (writes(SSE_HEAD, chunk(COMMENT), then="reset"), "engine_unreachable"),
    ],
)
@pytest.mark.parametrize("path", STREAMS)
async def test_where_no_engine_goes_on_the_stream_ends_with_the_apis_error(
    path: str, script: Script, code: str
) -> None:
    async with served(LOST["cut"](path), script, settings=PASSED) as (_, _, rig):
        got = await ask(rig, asks(path))
        assert (got.status, got.whole) == (200, True)
        assert error_of(path, got.body)["code"] == code
        assert rig.stats.streams_broken == 1
        assert all_over(rig)


@pytest.mark.parametrize(("status", "asks_on"), [(400, False), (413, False), (500, True), (503, True)])
async def test_sglang_refuses_a_request_in_its_stream(status: int, asks_on: bool) -> None:
    """An abort with a status is an error: another engine would refuse the request as well."""
    reason = {"type": "abort", "message": "too long", "status_code": status}
    refusal = event_of(("", {"text": "", "meta_info": {"finish_reason": reason, "completion_tokens": 0}}))
    script = writes(SSE_HEAD, chunk(COMMENT), chunk(refusal), END)
    again = writes(SSE_HEAD, chunk(good(SGLANG)), END)
    async with served(script, again, settings=PASSED) as (_, other, rig):
        got = await ask(rig, asks(SGLANG))
        assert got.body == COMMENT + (good(SGLANG) if asks_on else refusal)
        assert (len(other.calls), rig.stats.retries) == (asks_on, asks_on)
        assert rig.stats.engine_failures == ({"status": 1} if asks_on else {})
        assert all_over(rig)


async def test_with_no_engine_left_to_ask_too() -> None:
    async with served(LOST["cut"](CHAT)) as (_, rig):
        got = await ask(rig, asks(CHAT))
        assert (got.status, error_of(CHAT, got.body)["code"]) == (200, "engine_unreachable")


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("end", LINE_ENDS.values(), ids=LINE_ENDS)
async def test_after_a_token_no_engine_continues(path: str, end: bytes) -> None:
    begun = COMMENT + openings(path, end) + event_of(STREAMS[path].token, end)
    script = writes(SSE_HEAD, chunk(begun), then="reset")
    async with served(script, says(200, b"{}"), settings=PASSED) as (_, other, rig):
        got = await ask(rig, asks(path))
        assert got.body.startswith(begun)
        assert error_of(path, got.body)["code"] == "engine_stream_broken"
        assert (other.calls, rig.stats.streams_broken) == ([], 1)


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("end", LINE_ENDS.values(), ids=LINE_ENDS)
@pytest.mark.parametrize("apart_by", ["one piece", "pieces"])
async def test_an_error_behind_tokens_is_a_break(path: str, end: bytes, apart_by: str) -> None:
    """An engine whose core dies says so in the stream, and ends it cleanly."""
    begun = openings(path) + event_of(STREAMS[path].token)
    failed = event_of(STREAMS[path].error, end) + b"data: [DONE]" + end + end
    pieces = [begun + failed] if apart_by == "one piece" else [begun, failed]
    script = writes(SSE_HEAD, *map(chunk, pieces), END)
    async with served(script, says(200, b"{}"), settings=PASSED) as (_, other, rig):
        got = await ask(rig, asks(path))
        assert got.body == begun + failed
        assert (other.calls, rig.stats.streams_broken) == ([], 1)
        assert rig.stats.engine_failures == {"status": 1}
        assert rig.planner.placements[0].told == ["first_byte", "status"]


@pytest.mark.parametrize("path", STREAMS)
async def test_an_error_of_the_request_behind_tokens_is_not_the_engines(path: str) -> None:
    """The stream broke; its engine is well."""
    if path in (MESSAGES, RESPONSES):
        pytest.skip("their errors name no status")
    error = event_of(("", {"error": {"message": "no such tool", "code": 400}}))
    begun = event_of(STREAMS[path].token)
    async with served(writes(SSE_HEAD, chunk(begun), chunk(error), END), settings=PASSED) as (_, rig):
        assert (await ask(rig, asks(path))).body == begun + error
        assert (rig.stats.streams_broken, rig.stats.engine_failures) == (1, {})


@pytest.mark.parametrize("path", STREAMS)
async def test_an_abort_behind_tokens_is_a_break(path: str) -> None:
    begun = openings(path) + event_of(STREAMS[path].token)
    script = writes(SSE_HEAD, chunk(begun), chunk(event_of(STREAMS[path].abort) + b"data: [DONE]\n\n"), END)
    async with served(script, settings=PASSED) as (_, rig):
        got = await ask(rig, asks(path))
        assert got.body.startswith(begun)
        assert error_of(path, got.body)["code"] == "engine_stream_broken"
        assert (rig.stats.streams_broken, rig.stats.engine_failures) == (1, {"aborted": 1})


async def test_a_whole_answer_too_long_to_keep_back_that_was_given_up_is_a_break() -> None:
    body = b'{"choices":[{"text":"%b","finish_reason":"abort"}]}' % (b"x" * 600_000)
    whole = answer(200, body, "content-type: application/json")
    async with served(writes(whole[:400_000], whole[400_000:])) as (_, rig):
        got = await ask(rig, asks(COMPLETION, stream=False))
        assert got.body == body
        assert (rig.stats.streams_broken, rig.stats.engine_failures) == (1, {"aborted": 1})


def test_comments_do_not_put_off_the_time_out() -> None:
    """An engine that stands still behind a server that keeps the connection open."""
    now = [0.0]
    settings = ProxySettings(first_byte_timeout_s=60.0, idle_timeout_s=20.0)

    async def main() -> None:
        connection = UpstreamConnection(settings, ClientStats(), lambda: now[0], lambda _: None)
        connection.connection_made(FakeTransport())
        connection.send_request("POST", b"head", b"", 1.0)
        connection.data_received(SSE_HEAD)
        assert connection.deadline == 60.0
        now[0] = 30.0
        connection.data_received(chunk(COMMENT))
        connection.kept_alive()
        assert connection.deadline == 60.0
        now[0] = 40.0
        connection.data_received(chunk(b"a token"))
        assert connection.deadline == 60.0
        now[0] = 50.0
        connection.data_received(chunk(COMMENT))
        connection.kept_alive()
        assert connection.deadline == 60.0

    run(main())


@pytest.mark.parametrize("path", STREAMS)
async def test_an_engine_that_only_keeps_the_connection_open_is_given_up(path: str) -> None:
    async def waits(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD)
        while True:
            writer.write(chunk(COMMENT) + chunk(openings(path)))
            await writer.drain()
            await asyncio.sleep(0.01)

    again = writes(SSE_HEAD, chunk(good(path)), END)
    settings = ProxySettings(first_byte_timeout_s=0.1, idle_timeout_s=60.0, passed_paths=PASSED.passed_paths)
    async with served(waits, again, settings=settings) as (_, _, rig):
        got = await ask(rig, asks(path))
        assert got.body.endswith(good(path))
        assert rig.stats.engine_failures == {"timeout": 1}
