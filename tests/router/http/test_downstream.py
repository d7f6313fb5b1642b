"""HTTP/1.1 as clients speak it: pipelines, old versions, upgrades, nonsense; and ASGI as applications do."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from kvatlas.router.http.settings import ListenSettings
from tests.support.proxy_rig import (
    CHAT,
    SSE_HEAD,
    STREAM,
    Call,
    Engine,
    Rig,
    answer,
    ask,
    chunk,
    event,
    read_answer,
    request,
    routing,
    writes,
)
from tests.support.waiting import run, until


async def _echo(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
    writer.write(answer(200, call.head.first[1].encode() + b" " + call.body))


@pytest.mark.real  # an option of the kernel's sockets
async def test_connection_is_kept_and_has_no_delay() -> None:
    async with Engine(_echo) as engine, routing(engine.url) as rig:
        reader, writer = await rig.connect()
        for i in range(5):
            writer.write(request(b"{}", target=f"/v1/n{i}"))
            assert (await read_answer(reader)).body == b"/v1/n%d {}" % i
        assert engine.connections == 1
        for connection in rig.server.server_state.connections:
            sock = connection.transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_pipelined_requests_are_answered_in_order() -> None:
    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        if call.head.first[1] == "/v1/n0":
            await engine.go.wait()
        await _echo(engine, call, writer)

    async with Engine(script) as engine, routing(engine.url) as rig:
        reader, writer = await rig.connect()
        count = 60  # more than are queued, so that reading pauses
        writer.write(b"".join(request(b"[%d]" % i, target=f"/v1/n{i}") for i in range(count)))
        await until(lambda: len(engine.calls) == 1, "the first is asked")
        engine.go.set()
        for i in range(count):
            assert (await read_answer(reader)).body == b"/v1/n%d [%d]" % (i, i)
        assert rig.listen_stats.requests == count


async def test_client_that_leaves_with_requests_queued() -> None:
    async with Engine(writes(SSE_HEAD, then="hang")) as engine, routing(engine.url) as rig:
        _, writer = await rig.connect()
        writer.write(request(STREAM) * 3)
        await until(lambda: len(engine.calls) == 1, "the first is asked")
        writer.close()
        await engine.calls[0].closed.wait()
        await until(lambda: rig.stats.requests_active == 0, "over")
        assert len(engine.calls) == 1


async def test_one_byte_at_a_time() -> None:
    async with Engine(_echo) as engine, routing(engine.url) as rig:
        reader, writer = await rig.connect()
        for byte in request(CHAT, target="/v1/x?q=1") + b"\r\n" + request(b"2", target="/v1/y"):
            writer.write(bytes([byte]))
            await asyncio.sleep(0.0005)  # only to keep packets apart
        assert (await read_answer(reader)).body == b"/v1/x?q=1 " + CHAT
        assert (await read_answer(reader)).body == b"/v1/y 2"


async def test_connection_close_is_honoured() -> None:
    async with Engine(_echo) as engine, routing(engine.url) as rig:
        reader, writer = await rig.connect()
        writer.write(request(b"{}", "connection: close"))
        got = await read_answer(reader)
        assert got.head["connection"] == "close"
        assert await reader.read() == b""


@pytest.mark.parametrize("fields", [(), ("connection: keep-alive",), ("proxy-connection: keep-alive",)])
async def test_http_1_0_gets_no_chunks(fields: tuple[str, ...]) -> None:
    script = writes(SSE_HEAD, chunk(event("a")), chunk(event("b")) + b"0\r\n\r\n")
    async with Engine(script) as engine, routing(engine.url) as rig:
        reader, writer = await rig.connect()
        writer.write(request(STREAM, *fields).replace(b"HTTP/1.1", b"HTTP/1.0"))
        got = await read_answer(reader)
        assert "transfer-encoding" not in got.head
        assert got.body == event("a") + event("b")


@pytest.mark.parametrize("offer", ["h2c", "websocket"])
async def test_offer_to_upgrade_is_declined_and_the_body_kept(offer: str) -> None:
    """Java's HttpClient offers h2c with its first POST."""
    async with Engine(_echo) as engine, routing(engine.url) as rig:
        reader, writer = await rig.connect()
        fields = ("connection: Upgrade, HTTP2-Settings", f"upgrade: {offer}", "http2-settings: AAMAAABk")
        data = request(CHAT, *fields) + request(b"2", target="/v1/next")
        writer.write(data)
        assert (await read_answer(reader)).body == b"/v1/chat/completions " + CHAT
        assert (await read_answer(reader)).body == b"/v1/next 2"
        assert "upgrade" not in engine.calls[0].head
        assert "http2-settings" not in engine.calls[0].head


async def test_absolute_form() -> None:
    async with Engine(_echo) as engine, routing(engine.url) as rig:
        got = await ask(rig, request(b"1", target="http://elsewhere/v1/x?y=1"))
        assert got.body == b"/v1/x?y=1 1"


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v1/x HTTP/1.1\r\nbad header: \x00\r\n\r\n",
    ],
)
async def test_nonsense_is_refused_by_name(data: bytes) -> None:
    async with Engine(_echo) as engine, routing(engine.url) as rig:
        got = await ask(rig, data)
        assert (got.status, got.json()["error"]["code"]) == (400, "invalid_http")
        assert rig.listen_stats.bad_requests == 1
        assert not engine.calls
        assert (await ask(rig)).status == 200
        await until(lambda: rig.stats.requests_active == 0, "nothing left")


async def _app_answers(app: Any, data: bytes | None = None) -> tuple[Any, Rig]:
    async with routing(wrap=lambda _: app) as rig:
        return await ask(rig, data), rig


def test_application_that_raises() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("secret detail")

    got, _ = run(_app_answers(app))
    assert (got.status, got.json()["error"]["code"]) == (500, "internal_error")
    assert b"secret" not in got.body


@pytest.mark.parametrize("how", ["returns", "raises"])
def test_application_that_stops_half_way(how: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        if how == "raises":
            raise RuntimeError

    got, _ = run(_app_answers(app))
    assert not got.whole


@pytest.mark.parametrize(
    "headers", [[(b"x-a", b"1\r\nx-b: 2")], [(b"x-a\n", b"1")], [(b"content-length", b"3")]]
)
def test_application_cannot_split_or_misframe_its_answer(headers: list[tuple[bytes, bytes]]) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"too long"})

    got, _ = run(_app_answers(app))
    assert got.status == 500 or not got.whole
    assert "x-b" not in got.head


@pytest.mark.parametrize(
    ("value", "closes"), [(b"close", True), (b"Keep-Alive, CLOSE", True), (b"keep-alive", False)]
)
async def test_application_that_says_whether_the_connection_stays(value: bytes, closes: bool) -> None:
    headers = [(b"content-length", b"2"), (b"Connection", value)]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    async with routing(wrap=lambda _: app) as rig:
        reader, writer = await rig.connect()
        for _ in range(1 if closes else 2):
            writer.write(request())
            assert (await read_answer(reader)).body == b"ok"
        if closes:
            assert await reader.read() == b""


async def test_application_that_waits_for_the_end_of_a_request_hears_of_it() -> None:
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert not (await receive())["more_body"]
        waiting = asyncio.create_task(receive())
        await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})
        heard.append((await waiting)["type"])

    async with routing(wrap=lambda _: app) as rig:
        reader, writer = await rig.connect()
        writer.write(request())
        assert (await read_answer(reader)).body == b"ok"
        await until(lambda: heard == ["http.disconnect"], "it hears of it")
        writer.close()


async def test_application_that_ignores_the_body_keeps_the_connection() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async with routing(wrap=lambda _: app) as rig:
        reader, writer = await rig.connect()
        for _ in range(3):
            writer.write(request(b"x" * 2_000_000))
            assert (await read_answer(reader)).body == b"ok"


def test_scope_is_asgis() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        keys = ("type", "http_version", "method", "scheme", "path", "root_path")
        body = json.dumps(
            {key: scope[key] for key in keys}
            | {"raw": scope["raw_path"].decode(), "query": scope["query_string"].decode()}
        ).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    got, _ = run(_app_answers(app, request(b"", method="GET", target="/v1/%C3%A9%2Fx?a=%20")))
    assert got.json() == {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/v1/é/x",
        "root_path": "",
        "raw": "/v1/%C3%A9%2Fx",
        "query": "a=%20",
    }


async def test_body_is_given_in_pieces_and_reading_waits_for_the_application(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvatlas.router.http.downstream.BODY_AHEAD_BYTES_MAX", 100_000)
    sizes = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            sizes.append(len(message["body"]))
            more = message["more_body"]
            await asyncio.sleep(0.001)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    listen = ListenSettings(drain_s_max=0.5)
    async with routing(wrap=lambda _: app, listen=listen) as rig:
        assert (await ask(rig, request(b"x" * 5_000_000))).status == 200
        assert sum(sizes) == 5_000_000
        assert max(sizes) <= 100_000 + 256 * 1024  # one read beyond the limit
