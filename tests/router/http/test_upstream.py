"""The engine connection by itself, where sockets cannot bring packets apart on command."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from kvatlas.router.http.upstream import UpstreamConnection, UpstreamError
from kvatlas.router.http.upstream_pool import UpstreamClient
from kvatlas.router.proxy.settings import ProxySettings, ProxyStats
from tests.support.proxy_rig import Call, Engine, answer, says
from tests.support.transports import FakeTransport


def _made(settings: ProxySettings | None = None) -> tuple[UpstreamConnection, FakeTransport]:
    connection = UpstreamConnection(settings or ProxySettings(), ProxyStats(), time.monotonic, lambda _: None)
    transport = FakeTransport()
    connection.connection_made(transport)
    connection.send_request("POST", b"head", b"", 1.0)
    return connection, transport


async def _read(connection: UpstreamConnection) -> bytes:
    body = b""
    while data := await connection.read():
        body += data
    return body


@pytest.mark.parametrize("late", [b"x", b"HTTP/1.1 200 OK\r\n", answer(200, b"poison")])
async def test_bytes_behind_an_answer_make_it_unfit_for_reuse(late: bytes) -> None:
    connection, transport = _made()
    connection.data_received(answer(200, b"right"))
    connection.data_received(late)
    assert await _read(connection) == b"right"
    assert not connection.make_idle()
    assert transport.aborted


@pytest.mark.parametrize("late", [b"x", answer(200, b"poison")])
async def test_bytes_behind_an_answer_that_was_read_are_never_given(late: bytes) -> None:
    connection, _ = _made()
    connection.data_received(answer(200, b"right"))
    assert await connection.read() == b"right"
    connection.data_received(late)
    assert await connection.read() == b""
    assert not connection.make_idle()


async def test_whole_answer_can_be_followed_by_another() -> None:
    connection, transport = _made()
    for body in (b"one", b"", b"three"):
        connection.data_received(answer(200, body))
        assert await _read(connection) == body
        assert connection.at_eof
        assert connection.make_idle()
        connection.send_request("POST", b"head", b"", 1.0)
    assert not transport.aborted


@pytest.mark.parametrize("raw", [answer(200, b"x", "connection: close"), b"HTTP/1.0 200 OK\r\n\r\n"])
async def test_engine_that_will_close_is_not_reused(raw: bytes) -> None:
    connection, transport = _made()
    connection.data_received(raw)
    assert not connection.make_idle()
    assert transport.aborted


@pytest.mark.parametrize("error", [None, ConnectionResetError()])
async def test_only_an_orderly_close_ends_a_body_without_a_length(error: Exception | None) -> None:
    connection, _ = _made()
    connection.data_received(b"HTTP/1.1 200 OK\r\n\r\nall")
    assert await connection.read() == b"all"
    connection.connection_lost(error)
    if error is None:
        assert await connection.read() == b""
    else:
        with pytest.raises(UpstreamError, match="broken_stream"):
            await connection.read()


async def test_answer_before_the_request_was_sent_whole_ends_the_connection() -> None:
    connection, transport = _made()
    transport.unsent = 5
    connection.data_received(answer(413, b"too large"))
    assert await _read(connection) == b"too large"
    assert not connection.make_idle()


async def test_the_answer_to_head_ends_with_its_head_and_another_request_follows() -> None:
    connection, _ = _made()
    connection.data_received(answer(200, b"one"))
    assert connection.make_idle()
    connection.send_request("HEAD", b"head", b"", 1.0)
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n")
    assert connection.complete
    assert connection.make_idle()
    connection.send_request("POST", b"head", b"", 1.0)
    connection.data_received(answer(200, b"two"))
    assert await _read(connection) == b"two"


async def test_a_request_that_was_given_up_does_not_fail_with_its_engine() -> None:
    connection, _ = _made()
    connection.abort()
    assert not connection.lose(time.monotonic())
    connection.connection_lost(None)
    assert not connection.head_received()
    connection.abort()
    assert connection.closed


async def test_a_request_on_a_connection_that_went_stale_may_have_been_received() -> None:
    """Though the new connection is refused."""

    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        if len(engine.calls) == 2:
            engine.server.close()
            raise ConnectionResetError
        await says(200, b"ok")(engine, call, writer)

    client = UpstreamClient(ProxySettings(), ProxyStats(), time.monotonic)
    async with Engine(script) as engine:
        origin, head = client.origin(engine.url), b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
        connection = await client.request(origin, "GET", head, b"", 5.0)
        assert await _read(connection) == b"ok"
        client.release(connection)
        with pytest.raises(UpstreamError, match="refused") as caught:
            await client.request(origin, "GET", head, b"", 5.0)
        assert caught.value.sent
        with pytest.raises(UpstreamError, match="refused") as caught:
            await client.request(origin, "GET", head, b"", 5.0)
        assert not caught.value.sent
        client.close()


async def test_unsolicited_bytes_close_an_idle_connection() -> None:
    connection, transport = _made()
    connection.data_received(answer(200, b""))
    assert connection.make_idle()
    connection.data_received(answer(200, b"surprise"))
    assert transport.aborted
    assert not connection.is_available()


async def test_reading_pauses_at_the_limit_and_the_engine_is_not_timed_out_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvatlas.router.http.upstream.READ_AHEAD_BYTES_MAX", 1000)

    connection, transport = _made()
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 3000\r\n\r\n")
    connection.data_received(b"x" * 900)
    assert transport.reading
    connection.data_received(b"x" * 200)
    assert not transport.reading
    assert connection.deadline == float("inf")
    assert await connection.read() == b"x" * 1100
    assert transport.reading
    assert connection.deadline < float("inf")


async def test_loss_before_the_request_is_reported_immediately() -> None:
    connection, _ = _made()
    connection.data_received(answer(200, b""))
    assert connection.make_idle()
    connection.connection_lost(None)
    connection.send_request("POST", b"head", b"", 1.0)
    with pytest.raises(UpstreamError) as caught:
        connection.head_received()
    assert caught.value.reason == "reset"


async def test_a_connection_to_an_engine_is_probed_by_the_system() -> None:
    """A machine without power sends nothing: it is noticed within a minute, sent bytes or not."""
    client = UpstreamClient(ProxySettings(), ProxyStats(), time.monotonic)
    async with Engine(says(200, b"ok")) as engine:
        origin = client.origin(engine.url)
        connection = await client.request(origin, "GET", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"", 5.0)
        transport = connection._transport
        assert transport is not None
        sock = transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        tcp = {
            name: sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            if hasattr(socket, name)
        }
        assert tcp == {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
        client.close()
