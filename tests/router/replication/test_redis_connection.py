"""One connection: replies meet their questions, whatever is late, lost or too much."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from redis.asyncio import BlockingConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError

from kvatlas.router.replication.index_url import parse_url
from kvatlas.router.replication.master import Master
from kvatlas.router.replication.redis_client import connection_arguments
from kvatlas.router.replication.redis_connection import (
    IndexUnavailable,
    PipelinedConnection,
    ServerError,
    pack,
    unavailable,
    within,
)
from tests.world.loop import VirtualLoop
from tests.world.seams import run_with

INFO = b"run_id:abc\r\nredis_mode:standalone\r\nrole:master\r\n"
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def talk(answer: Answer, body: Callable[[PipelinedConnection], Awaitable[None]]) -> None:
    """A server of one connection."""
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"replication\r\n")
            writer.write(b"$%d\r\n%b\r\n" % (len(INFO), INFO))
            await answer(reader, writer)
        finally:
            writer.close()
            done.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    arguments = connection_arguments(parse_url(f"redis://127.0.0.1:{port}"), 10.0)
    link = PipelinedConnection(arguments.pop("connection_class")(host="127.0.0.1", port=port, **arguments))
    async with asyncio.TaskGroup() as tasks:
        await link.open(tasks)
        assert link.run_id == "abc"
        try:
            await body(link)
        finally:
            link.abort()
            await done.wait()
    server.close()
    await server.wait_closed()


async def test_a_late_answer_is_not_taken_for_the_next_one() -> None:
    go = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        writer.write(b":1\r\n:2\r\n:3\r\n")
        await reader.read()

    async def body(link: PipelinedConnection) -> None:
        with pytest.raises(IndexUnavailable, match="timeout"):
            await link.ask(b"one two", 2, 0.01)
        assert link.waited_s > 0
        future = await link.send(b"three", 1, 10)
        go.set()
        assert await within(future, 10) == [3]
        assert link.waited_s == 0

    await talk(answer, body)


@pytest.mark.parametrize("after_us", range(0, 1000, 100))
def test_a_command_that_connects_leaves_no_connection_when_its_master_is_closed(after_us: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            writer.write(b"+OK\r\n")
        writer.close()

    async def main(loop: VirtualLoop) -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 6379)
        arguments = connection_arguments(parse_url("redis://127.0.0.1:6379"), 10.0)
        pool = BlockingConnectionPool(host="127.0.0.1", port=6379, **arguments)
        master = Master(pool, PipelinedConnection(pool.make_connection(), lambda: None), 10.0, lambda _: None)
        asked = asyncio.ensure_future(master.command("SET", "a", "b"))
        await asyncio.sleep(after_us / 1e6)
        await master.close()
        await asyncio.gather(asked, return_exceptions=True)
        await asyncio.sleep(1)
        assert not loop.net.transports
        server.close()

    run_with(main)


async def test_replies_in_pieces() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        for byte in b"*3\r\n$3\r\na\r\n\r\n$-1\r\n*1\r\n:7\r\n-ERR no\r\n":
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        await reader.read()

    async def body(link: PipelinedConnection) -> None:
        first, second = await link.ask(b"x", 2, 10)
        assert first == [b"a\r\n", None, [7]]
        assert (second.status_code, str(second)) == ("ERR", "no")

    await talk(answer, body)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (b"ERR no", "ERR"),
        (b"OOM command not allowed", "OOM"),
        (b"READONLY a replica", "READONLY"),
        (b"NOSCRIPT No matching script.", "NOSCRIPT"),
        (b"UNBLOCKED force unblock from blocking operation", "UNBLOCKED"),
        (b"MOVED 7 10.0.0.1:6379", "MOVED"),
        (b"FENCED", "FENCED"),
        (b"", "ERR"),
    ],
)
async def test_errors_of_the_server_are_named_by_their_first_word(error: bytes, reason: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"-%b\r\n" % error)
        await reader.read()

    async def body(link: PipelinedConnection) -> None:
        (reply,) = await link.ask(b"x", 1, 10)
        found = unavailable(reply)
        assert (type(found), found.reason) == (ServerError, reason)

    await talk(answer, body)


def test_a_refused_connection_is_described_once() -> None:
    said = "Error 111 connecting to 10.0.0.5:6379. Connect call failed ('10.0.0.5', 6379)."
    found = unavailable(RedisConnectionError(said))
    assert str(found) == "connection: 10.0.0.5:6379: connection refused"
    assert str(IndexUnavailable("connection", str(found))) == str(found)
    tls = "Error 1 connecting to 10.0.0.5:6379. [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed."
    assert str(unavailable(RedisConnectionError(tls))) == f"connection: {tls}"


@pytest.mark.parametrize("said", [b"", b":1\r\n", b"?nonsense\r\n"])
async def test_a_lost_connection_fails_what_waits(said: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(said)

    async def body(link: PipelinedConnection) -> None:
        futures = [await link.send(b"x", 2, 10), await link.send(b"y", 1, 10)]
        for future in futures:
            with pytest.raises(IndexUnavailable, match="connection"):
                await within(future, 10)
        assert not link.is_open
        with pytest.raises(IndexUnavailable, match="connection"):
            await link.send(b"z", 1, 10)

    await talk(answer, body)


async def test_the_queue_of_commands_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.router.replication.redis_connection._WAITING_MAX", 3)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del writer
        await reader.read()

    async def body(link: PipelinedConnection) -> None:
        for _ in range(3):
            await link.send(b"x", 1, 10)
        with pytest.raises(IndexUnavailable, match="busy"):
            await link.send(b"x", 1, 10)

    await talk(answer, body)


def test_commands_are_packed() -> None:
    assert pack("SET", b"\x00k", 12) == b"*3\r\n$3\r\nSET\r\n$2\r\n\x00k\r\n$2\r\n12\r\n"
