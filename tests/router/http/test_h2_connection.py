"""One HTTP/2 connection: flow control, floods, limits, drain. The peer is the library ``h2`` or raw bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from kvatlas.router.http import h2_codec as h2
from kvatlas.router.http.deadlines import Sweeper
from kvatlas.router.http.h2_codec import FrameReader, H2Frame, encode_literal, frame, settings_frame
from kvatlas.router.http.h2_connection import HANDSHAKE_TIMEOUT_S, H2Connection, H2Stats
from kvatlas.router.http.h2_streams import Stream
from kvatlas.router.http.hpack_decoding import Field
from tests.support.h2_peer import h2_peer
from tests.support.transports import FakeTransport
from tests.support.waiting import until

HEAD = encode_literal(b":method", b"POST") + encode_literal(b":path", b"/")
HELLO = h2.PREFACE + settings_frame({})
ENDS = encode_literal(b"grpc-status", b"0")


class Echo:
    """Echoes what it receives immediately."""

    def __init__(self, server: Echoing, stream: Stream) -> None:
        self.server = server
        self.stream = stream
        stream.send_headers(b"\x88")

    def on_data(self, data: bytes) -> None:
        self.stream.acknowledge_data(len(data))
        self.stream.send_data(data)

    def on_end(self) -> None:
        self.stream.send_trailers(ENDS)

    def on_lost(self) -> None:
        self.server.lost += 1


class Echoing:
    """A server of ``Echo``."""

    def __init__(self, connections_max: int = 256) -> None:
        self.connections_max = connections_max
        self.stats = H2Stats()
        self.members: dict[H2Connection, None] = {}
        self.heads: list[list[Field]] = []
        self.lost = 0
        self.port = 0
        self.now = time.monotonic()
        self.sweeper = Sweeper(lambda: self.now, 0.01)

    def opens(self, stream: Stream, head: list[Field]) -> Echo:
        self.heads.append(head)
        return Echo(self, stream)

    def protocol(self) -> H2Connection:
        return H2Connection(
            self.opens,
            stats=self.stats,
            clock=lambda: self.now,
            sweeper=self.sweeper,
            connections=self.members,
            connections_max=self.connections_max,
        )


@asynccontextmanager
async def echoing(connections_max: int = 256) -> AsyncIterator[Echoing]:
    echo = Echoing(connections_max)
    server = await asyncio.get_running_loop().create_server(echo.protocol, "127.0.0.1", 0)
    echo.port = server.sockets[0].getsockname()[1]
    try:
        yield echo
    finally:
        server.close()
        for member in list(echo.members):
            member.abort()
        await until(lambda: not echo.members, "every connection is gone")
    assert echo.stats.streams_open == echo.stats.connections_open == 0


async def answer_to(echo: Echoing, data: bytes) -> list[H2Frame]:
    """The server's response to these bytes, until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", echo.port)
    writer.write(data)
    found = FrameReader(1 << 20)
    frames: list[H2Frame] = []
    try:
        while raw := await reader.read(65536):
            frames += found.feed(raw)
    except ConnectionError:
        pass
    writer.close()
    return frames


@pytest.mark.real  # CPU time
async def test_bodies_come_back_under_small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.router.http.h2_connection.STREAM_WINDOW_BYTES", 1000)
    async with echoing() as echo, h2_peer(echo.port, window=500) as peer:
        data = bytes(range(256)) * 400
        numbers = [peer.open("/") for _ in range(5)]
        await asyncio.gather(*(peer.send(number, data, end=True) for number in numbers))
        for number in numbers:
            await peer.until_over(number)
            assert peer.data[number] == data
            assert peer.headers[number][-1] == {"grpc-status": "0"}
        assert echo.stats.streams == 5


async def test_a_response_to_a_complete_request_is_not_followed_by_a_reset() -> None:
    async with echoing() as echo:
        reader, writer = await asyncio.open_connection("127.0.0.1", echo.port)
        writer.write(HELLO + frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, 1, HEAD))
        splitter = FrameReader(1 << 20)
        frames: list[H2Frame] = []

        async def read_until(kind: int, flag: int) -> None:
            while not any(each.kind == kind and each.flags & flag for each in frames):
                frames.extend(splitter.feed(await reader.read(65536)))

        await read_until(h2.HEADERS, h2.END_STREAM)
        writer.write(frame(h2.PING, 0, 0, bytes(8)))
        await read_until(h2.PING, h2.ACK)
        assert h2.RST_STREAM not in {each.kind for each in frames}
        writer.close()


async def test_a_stream_that_is_not_read_holds_no_other_up() -> None:
    async with echoing() as echo, h2_peer(echo.port, window=1000) as peer:
        peer.reads = False
        stalled = peer.open("/")
        await peer.send(stalled, bytes(5000), end=True)
        await until(lambda: len(peer.data[stalled]) == 1000, "its window is full")
        peer.reads = True
        other = peer.open("/")
        await peer.send(other, bytes(5000), end=True)
        await peer.until_over(other)
        assert len(peer.data[other]) == 5000
        assert stalled not in peer.ended
        peer.state.acknowledge_received_data(1000, stalled)  # now it is read
        peer.flush()
        await peer.until_over(stalled)
        assert len(peer.data[stalled]) == 5000


async def test_streams_continue_when_the_connection_window_opens() -> None:
    async with echoing() as echo, h2_peer(echo.port, window=1 << 20) as peer:
        peer.reads = False
        numbers = [peer.open("/") for _ in range(3)]
        for number in numbers:
            await peer.send(number, bytes(40_000), end=True)
        ended = peer.open("/")
        await peer.send(ended, b"", end=True)
        await peer.until_over(ended)  # what has no body needs no window
        await until(
            lambda: sum(map(len, peer.data.values())) == h2.WINDOW_DEFAULT, "the connection's is full"
        )
        peer.state.increment_flow_control_window(1 << 20)
        peer.flush()
        for number in numbers:
            await peer.until_over(number)
        assert [len(peer.data[number]) for number in numbers] == [40_000] * 3


async def test_a_long_answer_goes_out_however_it_is_divided() -> None:
    class Long(Echo):
        def on_end(self) -> None:
            for piece in (bytes(1_000_000), b"", b"a" * 70_000, b"b"):
                self.stream.send_data(piece)
            self.stream.send_trailers(ENDS)

    async with echoing() as echo:
        echo.opens = lambda stream, head: Long(echo, stream)  # type: ignore[method-assign]
        async with h2_peer(echo.port, window=1 << 24) as peer:
            peer.reads = False
            peer.state.increment_flow_control_window(1 << 24)
            number = peer.open("/", end=True)
            await peer.until_over(number)
        assert peer.data[number] == bytes(1_000_000) + b"a" * 70_000 + b"b"


def test_a_window_is_extended_when_half_as_much_as_it_still_holds_is_processed() -> None:
    extended: list[int] = []

    class Connection:
        def send_window_update(self, stream: Stream, size: int) -> None:
            extended.append(size)

    stream = Stream(cast("Any", Connection()), 1, receive_window=100)
    for size in (30, 19, 1, 49, 2):
        stream.acknowledge_data(size)
    assert extended == [50, 51]


async def test_a_reset_is_reported_and_nothing_more_is_sent() -> None:
    async with echoing() as echo, h2_peer(echo.port) as peer:
        number = peer.open("/")
        peer.state.reset_stream(number)
        peer.flush()
        await until(lambda: echo.lost == 1, "the handler knows")
        assert echo.stats.streams_reset == 1
        again = peer.open("/")
        await peer.send(again, b"x", end=True)
        await peer.until_over(again)
        assert peer.data[again] == b"x"


async def test_too_many_streams_are_refused_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.router.http.h2_connection.STREAMS_MAX", 2)
    async with echoing() as echo:
        heads = b"".join(frame(h2.HEADERS, h2.END_HEADERS, number, HEAD) for number in (1, 3, 5))
        reader, writer = await asyncio.open_connection("127.0.0.1", echo.port)
        writer.write(HELLO + heads)
        found, frames = FrameReader(1 << 20), []
        while not any(each.kind == h2.RST_STREAM for each in frames):
            frames += found.feed(await reader.read(65536))
        (refused,) = [each for each in frames if each.kind == h2.RST_STREAM]
        assert (refused.stream_id, h2.parse_uint32(refused.payload)) == (5, h2.REFUSED_STREAM)
        assert (echo.stats.streams, echo.stats.streams_refused) == (2, 1)
        writer.close()


PING = frame(h2.PING, 0, 0, bytes(8))
OPEN = frame(h2.HEADERS, h2.END_HEADERS, 1, HEAD)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", h2.PROTOCOL_ERROR),
        (h2.PREFACE + PING, h2.PROTOCOL_ERROR),  # no settings first
        (HELLO + PING * 200, h2.ENHANCE_YOUR_CALM),
        (HELLO + settings_frame({}) * 200, h2.ENHANCE_YOUR_CALM),
        (HELLO + OPEN + frame(h2.DATA, 0, 1) * 200, h2.ENHANCE_YOUR_CALM),  # empty data
        (
            HELLO
            + b"".join(  # rapid reset
                frame(h2.HEADERS, h2.END_HEADERS, n, HEAD) + h2.rst_stream_frame(n, h2.CANCEL)
                for n in range(1, 99, 2)
            ),
            h2.ENHANCE_YOUR_CALM,
        ),
        (
            HELLO
            + frame(h2.HEADERS, 0, 1, HEAD)
            + frame(h2.CONTINUATION, 0, 1, encode_literal(b"a", b"b")) * 5000,
            h2.ENHANCE_YOUR_CALM,
        ),
        (HELLO + frame(h2.HEADERS, 0, 1, HEAD) + PING, h2.PROTOCOL_ERROR),  # within a header block
        (HELLO + frame(h2.HEADERS, 0, 1, HEAD) + frame(h2.CONTINUATION, 4, 3), h2.PROTOCOL_ERROR),
        (HELLO + frame(h2.CONTINUATION, h2.END_HEADERS, 1, HEAD), h2.PROTOCOL_ERROR),  # of nothing
        (HELLO + frame(h2.HEADERS, h2.END_HEADERS, 2, HEAD), h2.PROTOCOL_ERROR),  # a server's number
        (HELLO + frame(h2.HEADERS, h2.END_HEADERS, 1, b"\x82" * 2000), h2.ENHANCE_YOUR_CALM),  # a bomb
        (HELLO + frame(h2.HEADERS, h2.END_HEADERS, 1, b"\xff\xff"), h2.COMPRESSION_ERROR),
        (HELLO + frame(h2.DATA, 0, 1, b"x"), h2.PROTOCOL_ERROR),  # never opened
        (HELLO + frame(h2.WINDOW_UPDATE, 0, 0, bytes(4)), h2.PROTOCOL_ERROR),
        (HELLO + h2.window_update_frame(0, h2.WINDOW_MAX), h2.FLOW_CONTROL_ERROR),
        (HELLO + settings_frame({h2.SETTINGS_INITIAL_WINDOW_SIZE: 1 << 31}), h2.FLOW_CONTROL_ERROR),
        (HELLO + settings_frame({h2.SETTINGS_MAX_FRAME_SIZE: 10}), h2.PROTOCOL_ERROR),
        (HELLO + frame(h2.SETTINGS, 0, 0, b"abc"), h2.FRAME_SIZE_ERROR),
        (HELLO + frame(h2.PUSH_PROMISE, 0, 1, bytes(4)), h2.PROTOCOL_ERROR),
        (HELLO + b"\xff\xff\xff\x00", h2.FRAME_SIZE_ERROR),
        (HELLO + OPEN + frame(h2.DATA, 0, 1, bytes(60_000)) * 20, h2.FLOW_CONTROL_ERROR),
    ],
)
async def test_protocol_errors_and_limits_end_the_connection(
    sent: bytes, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.router.http.h2_connection.CONTROL_FRAMES_PER_S_MAX", 100)
    monkeypatch.setattr("kvatlas.router.http.h2_connection.HEADER_BYTES_MAX", 16_384)

    class Deaf(Echo):
        def on_data(self, data: bytes) -> None:  # takes nothing, so that the window gets full
            pass

    async with echoing() as echo:
        echo.opens = lambda stream, head: Deaf(echo, stream)  # type: ignore[method-assign]
        frames = await answer_to(echo, sent)
        last = [each for each in frames if each.kind == h2.GOAWAY][-1]
        assert int.from_bytes(last.payload[4:8]) == code
        assert echo.stats.connections_broken == 1


async def test_resets_of_streams_that_are_over_are_no_attack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Envoy ends each of its calls so: it may have as many as control frames are allowed."""
    monkeypatch.setattr("kvatlas.router.http.h2_connection.CONTROL_FRAMES_PER_S_MAX", 100)
    async with echoing() as echo, h2_peer(echo.port) as peer:
        for _ in range(60):
            number = peer.open("/")
            await peer.send(number, b"x", end=True)
            await peer.until_over(number)
            peer.writer.write(h2.rst_stream_frame(number, h2.NO_ERROR))
        assert not peer.closed
        assert echo.stats.connections_broken == echo.stats.streams_reset == 0


async def test_much_data_of_one_read_is_processed_in_several_turns() -> None:
    echo, transport = Echoing(), FakeTransport()
    connection = echo.protocol()
    connection.connection_made(transport)
    connection.data_received(HELLO + OPEN + frame(h2.DATA, 0, 1, bytes(60_000)) * 5)
    assert not transport.reading
    await until(lambda: transport.reading, "all is processed")
    connection.connection_lost(None)


async def test_unknown_frames_and_priorities_are_ignored() -> None:
    async with echoing() as echo, h2_peer(echo.port) as peer:
        number = peer.open("/")
        peer.writer.write(frame(0xEE, 0xFF, number, b"later") + frame(h2.PRIORITY, 0, number, bytes(5)))
        await peer.send(number, b"x", end=True)
        await peer.until_over(number)
        assert peer.data[number] == b"x"


async def test_a_head_may_come_in_several_frames() -> None:
    async with echoing() as echo:
        _, writer = await asyncio.open_connection("127.0.0.1", echo.port)
        begin = frame(h2.HEADERS, h2.END_STREAM, 1, HEAD[:3]) + frame(h2.CONTINUATION, 0, 1, HEAD[3:9])
        writer.write(HELLO + begin + frame(h2.CONTINUATION, h2.END_HEADERS, 1, HEAD[9:]))
        await until(lambda: echo.heads == [[(b":method", b"POST"), (b":path", b"/")]], "the head is whole")
        writer.close()


async def test_a_silent_peer_is_disconnected() -> None:
    async with echoing() as echo:
        _, writer = await asyncio.open_connection("127.0.0.1", echo.port)
        await until(lambda: len(echo.members) == 1, "it is connected")
        echo.now += HANDSHAKE_TIMEOUT_S + 1
        await until(lambda: not echo.members, "it is cut")
        assert echo.stats.handshake_timeouts == 1
        writer.close()


async def test_too_many_connections_are_closed() -> None:
    async with echoing(connections_max=1) as echo, h2_peer(echo.port) as peer:
        await until(lambda: len(echo.members) == 1, "it is connected")
        async with h2_peer(echo.port) as other:
            await until(lambda: other.closed, "it is refused")
        assert echo.stats.connections_refused == 1
        assert not peer.closed


async def test_a_drain_lets_streams_end_that_were_opened_before_the_peer_knew() -> None:
    async with echoing() as echo:
        reader, writer = await asyncio.open_connection("127.0.0.1", echo.port)
        found, frames = FrameReader(1 << 20), list[H2Frame]()

        async def read_until(kind: int, count: int = 1) -> H2Frame:
            while sum(each.kind == kind for each in frames) < count:
                raw = await reader.read(65536)
                assert raw
                frames.extend(found.feed(raw))
            return [each for each in frames if each.kind == kind][-1]

        writer.write(HELLO + OPEN)
        await until(lambda: len(echo.heads) == 1, "it is open")
        (member,) = echo.members
        member.drain()
        member.drain()
        told = await read_until(h2.GOAWAY)
        assert int.from_bytes(told.payload[:4]) == h2.WINDOW_MAX  # requests in flight are answered
        ping = await read_until(h2.PING)
        late = frame(h2.HEADERS, h2.END_HEADERS, 3, HEAD)  # opened before the GOAWAY had come
        writer.write(late + frame(h2.PING, h2.ACK, 0, ping.payload))
        told = await read_until(h2.GOAWAY, 2)
        assert int.from_bytes(told.payload[:4]) == 3
        writer.write(frame(h2.HEADERS, h2.END_HEADERS, 5, HEAD))
        refused = await read_until(h2.RST_STREAM)
        assert (refused.stream_id, h2.parse_uint32(refused.payload)) == (5, h2.REFUSED_STREAM)
        assert (echo.stats.streams, echo.stats.streams_refused) == (2, 1)
        writer.write(frame(h2.DATA, h2.END_STREAM, 1, b"a") + frame(h2.DATA, h2.END_STREAM, 3, b"b"))
        assert await reader.read() != b""  # what is left, and then the end
        writer.close()
        assert not echo.members
