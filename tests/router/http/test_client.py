"""The router's own requests: connections are reused only when clean, every failure is described in words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvatlas.router.http import client as module
from kvatlas.router.http.client import HttpClient, ResponseError, TooLongError
from kvatlas.router.http.error_texts import NotConnectedError, describe_error
from tests.support.waiting import until

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
Writer = asyncio.StreamWriter


class Server:
    """Answers every request with ``answer``, after ``before``; remembers heads and open connections."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.heads: list[bytes] = []
        self.open = self.opened = 0
        self.before: Callable[[], Awaitable[object]] | None = None
        self.closes = False

    async def serve(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        self.open += 1
        self.opened += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.heads.append(head)
                if self.before is not None:
                    await self.before()
                writer.write(self.answer)
                if self.closes:
                    return
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def served(answer: bytes = OK) -> AsyncIterator[tuple[Server, str]]:
    server = Server(answer)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    async with listening:
        yield server, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


async def get(client: HttpClient, url: str, timeout_s: float | None = 5.0) -> bytes:
    async with client.exchange("GET", url, timeout_s) as answer:
        return await answer.body(1000)


async def test_a_connection_is_reused_after_a_whole_response_and_only_then() -> None:
    async with served() as (server, url), HttpClient() as client:
        for _ in range(3):
            assert await get(client, url) == b"hi"
        assert server.opened == 1
        server.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"
        async with client.exchange("GET", url, 5.0) as answer:
            assert answer.status == 200  # left before its end
        await until(lambda: server.open == 0, "the connection is closed")
        server.answer = OK
        assert await get(client, url) == b"hi"
        assert server.opened == 2


@pytest.mark.parametrize("once", [False, True])
async def test_a_request_is_sent_again_on_a_new_connection_unless_it_must_not(once: bool) -> None:
    async with served() as (server, url), HttpClient() as client:
        assert await get(client, url) == b"hi"
        server.answer, server.closes = b"", True
        with pytest.raises(ResponseError):
            async with client.exchange("POST", url, 5.0, once=once):
                pass
        assert len(server.heads) == (2 if once else 3)


async def test_a_request_carries_its_target_headers_and_body() -> None:
    async with served() as (server, url), HttpClient({"authorization": "Bearer k"}) as client:
        async with client.exchange("POST", f"{url}/a/b?c=d%20e", 5.0, b"{}", {"x-more": "1"}) as answer:
            assert answer.header(b"content-length") == "2"
        (head,) = server.heads
        lines = head.decode().split("\r\n")
        assert lines[0] == "POST /a/b?c=d%20e HTTP/1.1"
        fields = {"authorization: Bearer k", "x-more: 1", "content-length: 2"}
        assert {f"host: {url.removeprefix('http://')}", *fields} <= set(lines)


@pytest.mark.parametrize(
    ("url", "headers"), [("/a b", {}), ("/a\x7f", {}), ("/", {"x": "1\r\ny: 2"}), ("/", {"x": "a\nb"})]
)
async def test_nothing_can_end_the_request_line_or_a_field(url: str, headers: dict[str, str]) -> None:
    async with served() as (server, base_url), HttpClient() as client:
        with pytest.raises(ValueError, match="must not have"):
            async with client.exchange("GET", base_url + url, 5.0, headers=headers):
                pass
        assert server.opened == 0


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "connection closed without an answer"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not an HTTP answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", "the answer ended early"),
    ],
)
async def test_an_incomplete_response_is_an_error_with_the_reason(answer: bytes, words: str) -> None:
    async with served(answer) as (server, url), HttpClient() as client:
        server.closes = True
        with pytest.raises(ResponseError) as found:
            await get(client, url)
        assert describe_error(found.value) == words


async def test_a_response_over_the_limit_is_not_read() -> None:
    longer = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nnine more"
    async with (
        served(longer) as (_, url),
        HttpClient() as client,
        client.exchange("GET", url, 5.0) as answer,
    ):
        with pytest.raises(TooLongError, match="answer over 8 bytes"):
            await answer.body(8)


async def test_the_beginning_of_a_body_is_read_and_no_more() -> None:
    async with (
        served(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nthe") as (_, url),  # the rest never comes
        HttpClient() as client,
        client.exchange("GET", url, 5.0) as answer,
    ):
        assert await answer.beginning(2) == b"th"


async def test_redirects_are_answers() -> None:
    moved = b"HTTP/1.1 302 Found\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n"
    async with served(moved) as (server, url), HttpClient() as client:
        async with client.exchange("GET", url, 5.0) as answer:
            assert (answer.status, answer.header(b"location")) == (302, "/elsewhere")
        assert len(server.heads) == 1


async def test_a_silent_server_costs_the_time_out_and_no_connection() -> None:
    async with served() as (server, url):
        server.before = asyncio.Event().wait
        for limits in ({"timeout_s": 0.05}, {"timeout_s": None}):
            async with HttpClient(pause_s_max=0.05) as client:
                with pytest.raises(TimeoutError):
                    await get(client, url, **limits)
                await until(lambda: not client._client._owner, "it is closed")


async def test_no_more_concurrent_requests_than_allowed() -> None:
    async with served() as (server, url), HttpClient(requests_max=2) as client:
        held = asyncio.Event()
        server.before = held.wait
        asking = [asyncio.create_task(get(client, url)) for _ in range(5)]
        await until(lambda: len(server.heads) == 2, "two are asked")
        for _ in range(50):
            await asyncio.sleep(0)
        assert server.opened == 2
        held.set()
        assert await asyncio.gather(*asking) == [b"hi"] * 5


async def test_addresses_of_servers_that_left_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ORIGINS_MIN", 4)
    async with served() as (server, url), HttpClient() as client:
        await get(client, url)
        for number in range(20):
            with pytest.raises(NotConnectedError):
                await get(client, f"http://127.0.0.{number + 2}:1")
        assert len(client._origins) <= 4
        assert await get(client, url) == b"hi"
        assert server.opened == 1  # one with a connection is kept


async def test_a_unix_socket(tmp_path: Path) -> None:
    server = Server(OK)
    path = str(tmp_path / "socket")
    async with (
        await asyncio.start_unix_server(server.serve, path),
        HttpClient(socket_path=path) as client,
    ):
        assert await get(client, "http://anyone/x") == b"hi"
    async with HttpClient(socket_path=str(tmp_path / "none")) as client:
        with pytest.raises(NotConnectedError, match="no such file"):
            await get(client, "http://anyone/x")
