"""Input from a hostile client or a broken engine that tries to cost the router work, memory or state."""

from __future__ import annotations

import asyncio

import pytest

from kvatlas.router.http.settings import ListenSettings
from tests.support.proxy_rig import (
    CHAT,
    SSE_HEAD,
    STREAM,
    Answer,
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
)
from tests.support.waiting import run, until

GOOD = says(200, b"{}")
CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
SMALL = ListenSettings(header_bytes_max=4096, drain_s_max=0.5)


async def _written_until_answered(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, piece: bytes, gap_s: float = 0
) -> tuple[Answer, int]:
    """The answer to a request that never ends, and how many pieces were written before it came."""
    answered, pieces = asyncio.ensure_future(read_answer(reader)), 0
    while not answered.done():
        writer.write(piece)
        pieces += 1
        await asyncio.sleep(gap_s)
    return await answered, pieces


async def test_body_of_tiny_chunks_costs_no_more_than_its_bytes() -> None:
    """Quadratic work in the pieces of one read would take minutes here."""
    async with Engine(GOOD) as engine, routing(engine.url) as rig:
        reader, writer = await rig.connect()
        body = b'{"model":"m","pad":"' + b"x" * 1_000_000 + b'"}'
        writer.write(CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        assert (await read_answer(reader)).status == 200
        assert engine.calls[0].body == body


@pytest.mark.parametrize("rest", [b"", b"x" * 50_000])
def test_connect_is_refused_once(rest: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        async with routing() as rig:
            reader, writer = await rig.connect()
            writer.write(b"CONNECT a:80 HTTP/1.1\r\nhost: a:80\r\n\r\n" + rest)
            got = await read_answer(reader)
            assert (got.status, got.json()["error"]["code"]) == (405, "method_not_allowed")
            assert await reader.read() == b""

    run(main())
    out = capsys.readouterr()
    assert "Traceback" not in out.err + out.out


async def test_any_number_of_offers_to_upgrade_in_one_read() -> None:
    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(200, call.head.first[1].encode()))

    async with Engine(script) as engine, routing(engine.url) as rig:
        reader, writer = await rig.connect()
        offer = ("connection: Upgrade", "upgrade: h2c")
        writer.write(b"".join(request(b"", *offer, method="GET", target=f"/v1/{i}") for i in range(1500)))
        for i in range(1500):
            assert (await read_answer(reader)).body == b"/v1/%d" % i


@pytest.mark.parametrize(
    "target",
    [
        "/v1/load_lora_adapter#",
        "/v1/x#",
        "/v1/load_lora_adapter?a#b",
        "http://h/v1/load_lora_adapter#x",
        "/v1/chat/completions#",
    ],
)
async def test_fragment_in_a_target_is_refused(target: str) -> None:
    async with Engine(GOOD) as engine, routing(engine.url) as rig:
        got = await ask(rig, request(b"{}", target=target))
        assert (got.status, got.json()["error"]["code"]) == (400, "invalid_http")
        assert "#" in got.json()["error"]["message"]
        assert not engine.calls


@pytest.mark.parametrize(
    ("hosts", "counted"),
    [(b"", "no"), (b"host: a\r\nHost: b\r\n", "2"), (b"host: a\r\nhost: a\r\n", "2")],
    ids=["none", "two", "same"],
)
async def test_exactly_one_host(hosts: bytes, counted: str) -> None:
    async with Engine(GOOD) as engine, routing(engine.url) as rig:
        got = await ask(rig, b"GET /v1/x HTTP/1.1\r\n" + hosts + b"\r\n")
        assert (got.status, got.json()["error"]["code"]) == (400, "invalid_http")
        assert f"has {counted} Host fields" in got.json()["error"]["message"]
        assert not engine.calls
        assert (await ask(rig, b"GET /v1/x HTTP/1.0\r\n\r\n")).status == 200


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (chunk(CHAT) + b"0\r\n", b"a: bcdef\r\n" * 1000),
        (chunk(CHAT) + b"0\r\n", b"a: " + b"x" * 10_000),
        (chunk(CHAT) + b"0\r\n", b"a"),
        (b"1;", b"x" * 1000),
    ],
    ids=["trailer of many fields", "trailer of large fields", "trailer of one line", "chunk extension"],
)
async def test_endless_framing_of_a_request_is_bounded(start: bytes, piece: bytes) -> None:
    async with Engine(GOOD) as engine, routing(engine.url, listen=SMALL) as rig:
        reader, writer = await rig.connect()
        writer.write(CHUNKED + start)
        got, _ = await _written_until_answered(reader, writer, piece)
        assert (got.status, rig.listen_stats.header_overflows) == (431, 1)
        assert not engine.calls


async def test_slow_trailer_of_a_request_is_timed_as_a_head() -> None:
    listen = ListenSettings(header_timeout_s=0.2, drain_s_max=0.5)
    async with routing(listen=listen) as rig:
        reader, writer = await rig.connect()
        writer.write(CHUNKED + chunk(CHAT) + b"0\r\n")
        got, lines = await _written_until_answered(reader, writer, b"a: b\r\n", 0.01)
        assert (got.status, rig.listen_stats.body_timeouts) == (408, 1)
        assert lines < 500, "it was timed as a body: there would be thousands"


@pytest.mark.parametrize("piece", [b"a: bcdef\r\n" * 1000, b"a: " + b"x" * 10_000], ids=["fields", "one"])
async def test_endless_trailer_of_an_engine_is_bounded(piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.router.http.upstream.HEAD_BYTES_MAX", 4096)

    sent = 0

    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(SSE_HEAD + chunk(event("a")) + b"0\r\n")
        while sent < 50_000_000:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)

    async with Engine(script) as engine, routing(engine.url) as rig:
        got = await ask(rig, request(STREAM))
        assert b"engine_stream_broken" in got.body
        await engine.calls[0].closed.wait()
        assert sent < 50_000_000


async def test_head_over_the_limit_in_one_read() -> None:
    async with Engine(GOOD) as engine, routing(engine.url) as rig:
        for field in ("x: " + "y" * 100_000, "\r\n".join(["x: " + "y" * 1000] * 100)):
            got = await ask(rig, request(CHAT, field))
            assert (got.status, got.json()["error"]["code"]) == (431, "headers_too_large")
        got = await ask(rig, request(b"{}", target="/v1/" + "x" * 100_000))
        assert got.status == 431
        assert not engine.calls
        assert (await ask(rig, request(CHAT, "x: " + "y" * 60_000))).status == 200


async def test_head_of_an_engine_over_the_limit_in_one_read() -> None:
    script = says(200, b"{}", "x: " + "y" * 100_000)
    async with Engine(script) as engine, routing(engine.url) as rig:
        assert (await ask(rig)).status == 502


@pytest.mark.parametrize("cut", [1, 40, 70])
async def test_head_behind_a_large_body_is_its_own(cut: int) -> None:
    """The rest of a body in the same read is no part of the next head."""
    async with Engine(GOOD) as engine, routing(engine.url, listen=SMALL) as rig:
        reader, writer = await rig.connect()
        first, second = request(b'{"model":"%b"}' % (b"m" * 100_000)), request()
        writer.write(first + second[:cut])
        await until(lambda: len(engine.calls) == 1, "the first is asked")
        assert (await read_answer(reader)).status == 200
        writer.write(second[cut:])
        assert (await read_answer(reader)).status == 200
        assert rig.listen_stats.header_overflows == 0


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (request(b"", "x: " + "y" * 5000, method="GET", target="/v1/x"), 431),
        (CHUNKED + b"zz\r\n", 400),
    ],
    ids=["no request", "large head", "broken body"],
)
async def test_refused_request_leaves_those_before_it_their_answers(bad: bytes, status: int) -> None:
    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        await engine.go.wait()
        writer.write(answer(200, call.body))

    async with Engine(script) as engine, routing(engine.url, listen=SMALL) as rig:
        reader, writer = await rig.connect()
        writer.write(request(b"[1]", target="/v1/x") + request(b"[2]", target="/v1/y") + bad)
        await until(lambda: len(engine.calls) == 1, "the first is asked")
        engine.go.set()
        assert (await read_answer(reader)).body == b"[1]"
        assert (await read_answer(reader)).body == b"[2]"
        assert (await read_answer(reader)).status == status
        assert await reader.read() == b""
        assert len(engine.calls) == 2


async def test_bytes_after_a_refused_request_are_discarded() -> None:
    async with Engine(GOOD) as engine, routing(engine.url) as rig:
        reader, writer = await rig.connect()
        writer.write(b"nonsense\r\n\r\n")
        assert (await read_answer(reader)).status == 400
        writer.write(request(b"{}") + b"more nonsense\r\n\r\n")
        assert await reader.read() == b""
        writer.close()
        await until(lambda: not rig.server.server_state.connections, "the connection ends")
        assert (rig.listen_stats.bad_requests, rig.listen_stats.requests) == (1, 0)
        assert engine.calls == []


async def test_body_below_the_least_rate_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then keeps ``body_timeout_s`` from passing."""
    monkeypatch.setattr("kvatlas.router.http.downstream.BODY_GRACE_S", 0.3)
    monkeypatch.setattr("kvatlas.router.http.listen_config.BODY_GRACE_S", 0.3)

    listen = ListenSettings(body_bytes_per_s_min=1_000_000, drain_s_max=0.5)
    async with routing(listen=listen) as rig:
        reader, writer = await rig.connect()
        head = request(b"x" * 1_000_000)
        writer.write(head[:100_000])  # what came early earns no more than the grace
        got, _ = await _written_until_answered(reader, writer, b"x", 0.005)
        assert (got.status, rig.listen_stats.body_timeouts) == (408, 1)


async def test_body_above_the_least_rate_may_take_longer_than_the_grace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvatlas.router.http.downstream.BODY_GRACE_S", 0.5)
    monkeypatch.setattr("kvatlas.router.http.listen_config.BODY_GRACE_S", 0.5)

    listen = ListenSettings(body_bytes_per_s_min=1, drain_s_max=0.5)
    async with Engine(GOOD) as engine, routing(engine.url, listen=listen) as rig:
        reader, writer = await rig.connect()
        loop = asyncio.get_running_loop()
        begun = loop.time()
        data = request(b"x" * 1_000_000, target="/v1/x")
        writer.write(data[:-400])
        for i in range(len(data) - 400, len(data)):
            await asyncio.sleep(0.002)
            writer.write(data[i : i + 1])
        assert loop.time() - begun > 0.5
        assert (await read_answer(reader)).status == 200
