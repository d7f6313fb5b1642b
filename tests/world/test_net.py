"""TCP in memory behaves as kernels and links do where programs can see it."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable

import pytest

from tests.world.loop import VirtualLoop
from tests.world.net import WINDOW_BYTES
from tests.world.seams import run, run_with

A, B = "10.0.0.1", "10.0.0.2"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


async def start(loop: VirtualLoop, serve: Serve = echo, machine: str = B) -> int:
    """A server in a process of its own, on port 80."""
    with loop.machine(machine, process=True) as process:
        await asyncio.start_server(serve, None, 80)
    return process


async def reach(loop: VirtualLoop) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    with loop.machine(A):
        return await asyncio.open_connection(B, 80)


async def busy_world(loop: VirtualLoop) -> int:
    """Several clients, many bytes: the digest of the run."""
    await start(loop)

    async def client(number: int) -> None:
        reader, writer = await reach(loop)
        writer.write(bytes([number]) * 100_000)
        writer.write_eof()
        assert await reader.read() == bytes([number]) * 100_000
        writer.close()

    async with asyncio.TaskGroup() as tasks:
        for number in range(5):
            tasks.create_task(client(number))
    return loop.digest


def test_a_run_is_repeated_by_its_seed_alone() -> None:
    digests = [run_with(busy_world, seed) for seed in (1, 2, 1)]
    assert digests[0] == digests[2] != digests[1]


def test_no_listener() -> None:
    async def main(loop: VirtualLoop) -> None:
        with pytest.raises(ConnectionRefusedError):
            await reach(loop)
        await start(loop)
        with pytest.raises(OSError, match="in use") as taken:
            await start(loop)
        assert taken.value.errno == errno.EADDRINUSE
        loop.net.cut(A, B)
        begun = loop.time()
        with pytest.raises(TimeoutError):
            await reach(loop)
        assert loop.time() - begun == pytest.approx(127, abs=0.1)

    run_with(main)


def test_bytes_wait_while_a_link_is_cut() -> None:
    async def main(loop: VirtualLoop) -> None:
        await start(loop)
        reader, writer = await reach(loop)
        loop.net.cut(A, B)
        writer.write(b"hello")
        await asyncio.sleep(60)
        loop.net.cut(A, B, up=True)
        begun = loop.time()
        assert await reader.readexactly(5) == b"hello"
        assert loop.time() - begun < 0.1
        loop.net.cut(A, B)
        writer.write(b"again")
        with pytest.raises(TimeoutError):
            await reader.read()
        assert loop.time() - begun == pytest.approx(924.6, abs=1)

    run_with(main)


def test_a_killed_server_resets_and_one_without_power_says_nothing() -> None:
    async def main(loop: VirtualLoop) -> None:
        process = await start(loop)
        reader, writer = await reach(loop)
        loop.kill(process)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        process = await start(loop)
        reader, writer = await reach(loop)
        loop.net.power_off(B)
        loop.kill(process, silent=True)
        await asyncio.sleep(3)
        loop.net.power_on(B)
        await start(loop)
        with pytest.raises(TimeoutError):  # half open: nothing is sent, nothing is noticed
            async with asyncio.timeout(7200):
                await reader.read()
        writer.write(b"are you there?")
        with pytest.raises(ConnectionResetError):
            await reader.read()

    run_with(main, limit_s=10_000)


@pytest.mark.parametrize("back", [True, False])
def test_keepalive_notices_a_half_open_connection(*, back: bool) -> None:
    async def main(loop: VirtualLoop) -> None:
        process = await start(loop)
        reader, writer = await reach(loop)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        await asyncio.sleep(100)  # an idle connection stays
        loop.net.power_off(B)
        loop.kill(process, silent=True)
        begun = loop.time()
        if back:
            loop.net.power_on(B)
        with pytest.raises(ConnectionResetError if back else TimeoutError):
            await reader.read()
        assert loop.time() - begun <= (30 if back else 60)

    run_with(main)


def test_a_slow_reader_holds_the_writer_back() -> None:
    async def main(loop: VirtualLoop) -> None:
        held: list[asyncio.StreamReader] = []
        open_writers: list[asyncio.StreamWriter] = []  # a writer that nothing holds closes its connection

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            held.append(reader)
            open_writers.append(writer)

        await start(loop, serve)
        _, writer = await reach(loop)
        size = 4 * WINDOW_BYTES
        writer.write(bytes(size))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await writer.drain()
        transport = writer.transport
        assert size - WINDOW_BYTES - (1 << 16) <= transport.get_write_buffer_size() <= size - WINDOW_BYTES
        held[0]._transport.resume_reading()  # type: ignore[attr-defined]
        assert len(await held[0].readexactly(size)) == size
        await writer.drain()
        writer.close()
        open_writers[0].close()

    run_with(main)


def test_closing_with_unread_bytes_resets() -> None:
    async def main(loop: VirtualLoop) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(1)
            writer.close()

        await start(loop, serve)
        reader, writer = await reach(loop)
        writer.write(b"not read")
        with pytest.raises(ConnectionResetError):
            await reader.read()

    run_with(main)


def test_each_machine_has_its_own_loopback() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for machine in (A, B):
            with loop.machine(machine):
                await asyncio.start_server(echo, "127.0.0.1", 80)
        with loop.machine(A):
            _, writer = await asyncio.open_connection("localhost", 80)
            assert writer.get_extra_info("peername") == (A, 80)
            writer.close()

    run(main())


@pytest.mark.parametrize("seed", range(8))
def test_a_connection_reset_at_once_is_lost_at_both_ends(seed: int) -> None:
    """Before or after the server's program accepted it: links give both orders."""
    calls: list[str] = []

    class Server(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            calls.append("made")

        def connection_lost(self, error: Exception | None) -> None:
            calls.append(type(error).__name__)

    async def main(loop: VirtualLoop) -> None:
        with loop.machine(B, process=True):
            await loop.create_server(Server, None, 80)
        with loop.machine(A):
            transport, _ = await loop.create_connection(asyncio.Protocol, B, 80)
        assert isinstance(transport, asyncio.WriteTransport)
        transport.abort()
        await asyncio.sleep(1)
        assert not loop.net.transports

    run_with(main, seed)
    assert calls == ["made", "ConnectionResetError"]
