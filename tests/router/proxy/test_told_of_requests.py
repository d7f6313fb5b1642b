"""Reports of the proxy about its requests: retries, broken answers, clients that left, its own errors."""

from __future__ import annotations

import structlog

from tests.support.proxy_rig import (
    CHAT,
    SSE_HEAD,
    Engine,
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

STREAM = CHAT.replace(b"{", b'{"stream": true, ', 1)
PIECES = [chunk(event(text)) for text in ("one", "two", "three")]


async def test_a_retry_is_reported_and_the_request_counts_for_the_engine_that_answered() -> None:
    async with (
        Engine(says(503, b"busy")) as busy,
        Engine(says(200, b'{"good": 1}')) as good,
        routing(busy.url, good.url) as rig,
    ):
        with structlog.testing.capture_logs() as logs:
            await ask(rig, request(CHAT, "x-request-id: r-1"))
        (line,) = [line for line in logs if line["event"] == "request retried"]
        assert (line["engine"], line["next"], line["problem"]) == (busy.url, good.url, "status 503")
        assert line["request_id"] == "r-1"
        await until(lambda: bool(rig.app.requests.counts), "counted")
        ((_, engine, status),) = rig.app.requests.counts
        assert (engine, status) == (good.url, "200")


async def test_a_broken_answer_is_reported_and_is_no_success() -> None:
    async with Engine(writes(SSE_HEAD, *PIECES, then="reset")) as bad, routing(bad.url) as rig:
        with structlog.testing.capture_logs() as logs:
            await ask(rig, request(STREAM))
        (line,) = [line for line in logs if line["event"] == "answer broke off"]
        assert (line["engine"], line["log_level"]) == (bad.url, "warning")
        book = rig.app.requests
        await until(lambda: bool(book.counts), "counted")
        assert [status for _, _, status in book.counts] == ["broken_stream"]
        (times,) = book.models.values()
        assert sum(times.first_token.counts) == 1
        assert sum(times.whole.counts) == 0


async def test_a_client_that_leaves_is_not_a_success() -> None:
    async with Engine(writes(SSE_HEAD, PIECES[0], then="hang")) as slow, routing(slow.url) as rig:
        reader, writer = await rig.connect()
        writer.write(request(STREAM))
        await reader.readuntil(b"one")
        writer.close()
        await until(lambda: bool(rig.app.requests.counts), "counted")
        assert [status for _, _, status in rig.app.requests.counts] == ["client_gone"]


async def test_a_client_that_leaves_before_the_end_of_its_body_is_gone() -> None:
    async with served(says(200, b"{}")) as (engine, rig):
        _, writer = await rig.connect()
        whole = request(b"x" * 1000)
        writer.write(whole[:-500])
        await until(lambda: rig.stats.requests_active, "it is being read")
        assert rig.stats.requests_active == 1
        writer.close()
        await until(lambda: bool(rig.app.requests.counts), "counted")
        assert [status for _, _, status in rig.app.requests.counts] == ["client_gone"]
        assert rig.stats.clients_gone == 1
        assert engine.calls == []


async def test_the_routers_own_errors_are_logged_seldom_and_each_refusal_with_its_id() -> None:
    async with routing() as rig:
        with structlog.testing.capture_logs() as logs:
            for _ in range(20):
                assert (await ask(rig)).status == 503
            refused = [
                await ask(rig, request(b"{")),
                await ask(rig, request(b"", method="GET", target="/nothing"), "GET"),
            ]
            assert [one.status for one in refused] == [400, 404]
        lines = [line for line in logs if line["event"] == "request refused"]
        assert [(line["request_id"], line["code"], line["path"]) for line in lines] == [
            (refused[0].head["x-request-id"], "invalid_json", "/v1/chat/completions"),
            (refused[1].head["x-request-id"], "path_not_found", "/nothing"),
        ]
        told = [line for line in logs if line["event"] == "request not served"]
        assert 1 <= len(told) < 5
        assert told[0]["code"] == "no_ready_engine"
        assert rig.stats.errors == {"no_ready_engine": 20, "invalid_json": 1}
        assert rig.stats.not_found == {"path_not_found": 1}
        assert rig.app.requests.counts["", "", "503"] == 20
        assert rig.app.requests.models == {}
