"""Bytes in, bytes out: bodies are never re-encoded, framings survive, every endpoint passes."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvatlas.router.proxy.settings import ProxySettings
from tests.support.proxy_rig import (
    CHAT,
    DONE,
    END,
    SSE_HEAD,
    STREAM,
    Call,
    Engine,
    answer,
    ask,
    chunk,
    event,
    read_answer,
    request,
    routing,
    says,
    served,
    writes,
)
from tests.support.waiting import until

ODD = (
    b'{ "model":"m", "unknown_extra" : {"b":1,"a":2}, '
    b'"messages":[{"role":"latest_reminder","content":"\\u00e9"}] }\n '
)


async def test_request_body_target_and_method_reach_the_engine_unchanged() -> None:
    async with Engine(says(200, b"{}")) as engine, routing(engine.url) as rig:
        await ask(rig, request(ODD, target="/v1/chat/completions?a=%20b&c"))
        call = engine.calls[0]
        assert call.body == ODD
        assert call.head.first == ["POST", "/v1/chat/completions?a=%20b&c", "HTTP/1.1"]
        seen = rig.planner.requests[0]
        assert (seen.model, seen.stream, seen.body) == ("m", False, ODD)


async def test_chunked_request_body_is_forwarded_whole_with_a_length() -> None:
    async with Engine(says(200, b"{}")) as engine, routing(engine.url) as rig:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        await ask(rig, head + chunk(CHAT[:10]) + chunk(CHAT[10:]) + END)
        assert engine.calls[0].body == CHAT
        assert engine.calls[0].head["content-length"] == str(len(CHAT))
        assert "transfer-encoding" not in engine.calls[0].head


async def test_ten_megabytes_both_ways() -> None:
    big = b'{"model":"m","prompt":"' + random.randbytes(5_000_000).hex().encode() + b'"}'
    settings = ProxySettings(body_bytes_max=16_000_000)
    async with Engine(says(200, big)) as engine, routing(engine.url, settings=settings) as rig:
        got = await ask(rig, request(big))
        assert engine.calls[0].body == big
        assert got.body == big
        assert got.head["content-length"] == str(len(big))


async def test_fixed_length_answer_stays_one() -> None:
    body = b'{"ok": true}'
    async with served(says(200, body, "content-type: application/json")) as (_, rig):
        got = await ask(rig)
    assert (got.status, got.body, got.whole) == (200, body, True)
    assert got.head["content-length"] == str(len(body))
    assert "transfer-encoding" not in got.head


@pytest.mark.parametrize("status", [400, 401, 404, 422, 418])
async def test_error_answers_of_engines_pass_byte_for_byte(status: int) -> None:
    body = b'{"error": {"message":"m",  "type":"BadRequestError","param":null,"code":400}}'
    async with Engine(says(status, body)) as engine, routing(engine.url) as rig:
        got = await ask(rig)
        assert (got.status, got.body) == (status, body)
        assert len(engine.calls) == 1
        assert rig.planner.placements[0].told == ["finished"]


async def test_odd_chunking_and_split_packets_do_not_change_the_body() -> None:
    body = b"".join(event(f"token {i}") for i in range(20)) + DONE
    raw = SSE_HEAD
    position = 0
    sizes = random.Random(5)
    while position < len(body):
        size = sizes.randint(1, 90)
        piece = body[position : position + size]
        raw += b"%X;ext=1\r\n%b\r\n" % (len(piece), piece)
        position += size
    raw += b"0\r\ntrailer: x\r\n\r\n"
    packets = []
    while raw:
        size = sizes.randint(1, 200)
        packets.append(raw[:size])
        raw = raw[size:]
    async with Engine(writes(*packets)) as engine, routing(engine.url) as rig:
        got = await ask(rig, request(STREAM))
        assert got.body == body
        assert got.whole
        assert "trailer" not in got.head
        assert rig.planner.placements[0].told == ["first_byte", "finished"]


async def test_each_event_is_passed_on_immediately() -> None:
    step = asyncio.Event()

    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD)
        for i in range(3):
            writer.write(chunk(event(str(i))))
            await step.wait()  # until the client has this event, the next is not written
            step.clear()
        writer.write(chunk(DONE) + END)

    async with Engine(script) as engine, routing(engine.url) as rig:
        reader, writer = await rig.connect()
        writer.write(request(STREAM))
        await reader.readuntil(b"\r\n\r\n")
        for i in range(3):
            wanted = chunk(event(str(i)))
            assert await reader.readexactly(len(wanted)) == wanted
            step.set()


async def test_unfinished_line_waits_for_its_end_only() -> None:
    whole = event("one")
    halves = event("two")

    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunk(whole + halves[:9]))
        await engine.go.wait()
        writer.write(chunk(halves[9:]) + END)

    async with Engine(script) as engine, routing(engine.url) as rig:
        reader, writer = await rig.connect()
        writer.write(request(STREAM))
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(len(chunk(whole))) == chunk(whole)
        engine.go.set()
        assert await reader.readexactly(len(chunk(halves))) == chunk(halves)


async def test_body_that_ends_with_the_connection() -> None:
    script = writes(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n", b"abc", b"def", then="close")
    async with Engine(script) as engine, routing(engine.url) as rig:
        got = await ask(rig)
        assert (got.body, got.whole) == (b"abcdef", True)
        assert rig.planner.placements[0].told == ["first_byte", "finished"]


async def test_interim_answers_are_skipped() -> None:
    hints = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
    script = writes(b"HTTP/1.1 100 Continue\r\n\r\n", hints + answer(200, b"ok", "x-a: 1"))
    async with Engine(script) as engine, routing(engine.url) as rig:
        got = await ask(rig)
        assert (got.status, got.body, got.head["x-a"]) == (200, b"ok", "1")
        assert "link" not in got.head
        await ask(rig)
        assert engine.connections == 1


async def test_head_and_bodiless_statuses_keep_the_connection_usable() -> None:
    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        if call.head.first[0] == "HEAD":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
        elif call.head.first[1] == "/v1/none":
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        elif call.head.first[1] == "/v1/same":
            writer.write(b"HTTP/1.1 304 Not Modified\r\netag: x\r\n\r\n")
        else:
            writer.write(answer(200, b"hello"))

    async with Engine(script) as engine, routing(engine.url) as rig:
        reader, writer = await rig.connect()
        for method, path, status in (
            ("HEAD", "/v1/x", 200),
            ("GET", "/v1/none", 204),
            ("GET", "/v1/same", 304),
            ("GET", "/v1/x", 200),
        ):
            writer.write(request(b"", method=method, target=path))
            got = await read_answer(reader, method)
            assert got.status == status
            if method == "HEAD":
                assert got.head["content-length"] == "5"
        assert got.body == b"hello"
        assert engine.connections == 1


async def test_answers_do_not_leak_into_one_another() -> None:
    """Bytes behind an answer's end make the connection unfit, whatever they are."""

    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(200, b"right") + answer(200, b"poison"))

    async with Engine(script) as engine, routing(engine.url) as rig:
        for _ in range(3):
            assert (await ask(rig)).body == b"right"
        assert engine.connections == 3


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("POST", "/score"),
        ("POST", "/rerank"),
        ("POST", "/v2/rerank"),
        ("POST", "/pooling"),
        ("POST", "/classify"),
        ("POST", "/v1/embeddings"),
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/files/f"),
        ("PUT", "/v1/anything"),
    ],
)
async def test_other_endpoints_pass(method: str, path: str) -> None:
    async with Engine(says(200, b"fine")) as engine, routing(engine.url) as rig:
        body = b"" if method in ("GET", "DELETE") else b'{"model": "m", "x": 1}'
        got = await ask(rig, request(body, method=method, target=path))
        assert got.body == b"fine"
        assert engine.calls[0].head.first[:2] == [method, path]
        assert engine.calls[0].body == body
        assert rig.planner.requests[0].model == ("m" if body else None)


@pytest.mark.parametrize(
    "path",
    [
        "/sleep",
        "/wake_up?level=1",
        "/reset_prefix_cache",
        "/collective_rpc",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter/",
        "/v1//load_lora_adapter",
        "/v1/%6coad_lora_adapter",
        "/v1/../sleep",
        "/v1/%2e%2e/sleep",
        "//sleep",
    ],
)
async def test_unsafe_paths_are_refused_however_they_are_spelled(path: str) -> None:
    async with Engine(says(200, b"fine")) as engine, routing(engine.url) as rig:
        got = await ask(rig, request(b"{}", target=path))
        assert got.status == 403
        assert got.json()["error"]["code"] == "path_not_proxied"
        assert not engine.calls
        assert rig.stats.paths_refused == 1


async def test_unknown_path_is_not_found() -> None:
    async with Engine(says(200, b"fine")) as engine, routing(engine.url) as rig:
        got = await ask(rig, request(b"", method="GET", target="/admin"))
        assert (got.status, got.json()["error"]["code"]) == (404, "path_not_found")
        assert not engine.calls


@pytest.mark.parametrize("body", [b"", b'{"model": "m"', b"[1]", b"\xff\xfe", b'"text"'])
async def test_completion_body_that_is_no_object_is_refused_here(body: bytes) -> None:
    async with Engine(says(200, b"fine")) as engine, routing(engine.url) as rig:
        got = await ask(rig, request(body))
        assert (got.status, got.json()["error"]["code"]) == (400, "invalid_json")
        assert got.head["x-request-id"]
        assert not engine.calls
        assert rig.stats.errors == {"invalid_json": 1}


async def test_slow_client_pauses_the_engine_and_gets_everything() -> None:
    piece = event("x" * 60_000)
    count = 400

    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD)
        for _ in range(count):
            writer.write(chunk(piece))
            await writer.drain()
        writer.write(END)

    async with Engine(script) as engine, routing(engine.url) as rig:
        reader, writer = await rig.connect()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(request(STREAM))
        await until(lambda: rig.stats.read_pauses > 0, "reading pauses")
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        got = await read_answer(reader)
        assert got.body == piece * count
