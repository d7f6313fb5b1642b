"""No client and no gateway holds the router's loop, whatever it sends: the worst bodies, heads and frames
that are known."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import hpack
import pytest

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.http import h2_codec as h2
from kvatlas.router.http.h2_codec import encode_literal, frame, settings_frame, window_update_frame
from kvatlas.router.proxy.settings import ProxySettings
from kvatlas.router.services.epp.settings import EppSettings
from tests.router.services.epp.test_exchange import POST, PROCESS
from tests.support.loop_pauses import Pauses, elsewhere, pauses
from tests.support.waiting import HANG_S, run_real, until
from tests.support.whole_router import Rig, configure, number, routing, running
from tests.support.worst_bodies import worst_bodies

pytestmark = pytest.mark.real  # CPU time


@asynccontextmanager
async def paused_router(**changes: object) -> AsyncIterator[tuple[Rig, Pauses]]:
    """A router whose engine has a loop of its own."""

    @asynccontextmanager
    async def engine() -> AsyncIterator[SimulatedEngine]:
        async with running({"groups": "full"}) as (one,):
            yield one

    async with elsewhere(engine) as one:
        config = configure(
            one,
            epp=EppSettings(listen="127.0.0.1:0", tls=False),
            aliases={"m": "kvatlas-demo"},
            proxy=ProxySettings(kv_cache_report_mode="refuse"),
            **changes,
        )
        async with routing(config) as rig, pauses() as found:
            yield rig, found


def talk(port: int, *pieces: bytes, until_said: bytes = b"HTTP/1.1 ") -> bytes:
    """Send all, and read until this has come, or the end; blocking."""
    said = b""
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as sock:
        with contextlib.suppress(ConnectionError):  # it may be refused before its end
            for piece in pieces:
                sock.sendall(piece)
        with contextlib.suppress(ConnectionError):
            while until_said not in said and (data := sock.recv(1 << 18)):
                said = said[-100:] + data
    return said


def posted(body: bytes) -> bytes:
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    )


@pytest.mark.long
@pytest.mark.parametrize("size", [256 << 10, 60 << 20])
def test_no_body_holds_the_loop(size: int) -> None:
    bodies = worst_bodies(size)  # made outside of the loop that is looked at

    async def main() -> None:
        async with paused_router() as (rig, found):
            for name, body in bodies.items():

                async def send(name: str = name, body: bytes = body) -> None:
                    said = await asyncio.to_thread(talk, number(rig.url), posted(body), body)
                    assert b"HTTP/1.1 " in said, name

                await found.during(name, send)
            assert found.too_long == {}

    run_real(main(), 500)


CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
GET = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
TINY = b"1\r\nx\r\n"
HTTP1 = {
    "bodies of one-byte chunks": CHUNKED + TINY * 100_000 + b"0\r\n\r\n",
    "chunks with extensions": CHUNKED + (b"1;" + b"e" * 200 + b"\r\nx\r\n") * 5_000 + b"0\r\n\r\n",
    "a head of many fields": b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"a:b\r\n" * 10_000 + b"\r\n",
    "a head of one long field": b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 60_000 + b"\r\n\r\n",
    "a trailer of many fields": CHUNKED + b"0\r\n" + b"a:b\r\n" * 10_000 + b"\r\n",
    "concurrent requests": GET * 3_000,
    "line ends before a request": b"\r\n" * 100_000 + GET,
    "a long target": b"GET /" + b"%61" * 20_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
}


def test_no_head_or_chunk_holds_the_loop() -> None:
    async def main() -> None:
        async with paused_router() as (rig, found):
            for name, sent in HTTP1.items():
                await found.during(name, partial(asyncio.to_thread, talk, number(rig.url), sent))
            assert found.too_long == {}

    run_real(main(), 500)


HELLO = h2.PREFACE + settings_frame({})
HEAD = b"".join(
    encode_literal(name, value)
    for name, value in (
        (b":method", b"POST"),
        (b":path", PROCESS.encode()),
        (b"content-type", b"application/grpc"),
    )
)
ALL = 4096
LAST = frame(h2.PING, 0, 0, b"the last")


def opened(*streams: int, end: bool = False) -> bytes:
    flags = h2.END_HEADERS | (h2.END_STREAM if end else 0)
    return b"".join(frame(h2.HEADERS, flags, n, HEAD) for n in streams)


def heads(value: bytes) -> bytes:
    """Huffman coded, and no two alike."""
    blocks = (hpack.Encoder().encode([(b"a", b"%d" % n + value)]) for n in range(20))
    return b"".join(frame(h2.HEADERS, h2.END_HEADERS, 2 * n + 1, block) for n, block in enumerate(blocks))


STREAMS = range(1, 2 * ALL, 2)
HEALTH = HEAD.replace(
    encode_literal(b":path", PROCESS.encode()), encode_literal(b":path", b"/grpc.health.v1.Health/Check")
)
NO_WINDOW = h2.PREFACE + settings_frame({h2.SETTINGS_INITIAL_WINDOW_SIZE: 0})
BLOCKED = NO_WINDOW + b"".join(
    frame(h2.HEADERS, h2.END_HEADERS, n, HEALTH) + frame(h2.DATA, 0, n, bytes(5)) for n in STREAMS
)
"""Streams whose answers wait for a window."""
TURNS = settings_frame({h2.SETTINGS_INITIAL_WINDOW_SIZE: 1}) + settings_frame(
    {h2.SETTINGS_INITIAL_WINDOW_SIZE: 0}
)


def http2_attacks() -> dict[str, bytes]:
    return {
        "streams": HELLO + opened(*STREAMS),
        "streams that end": HELLO + opened(*STREAMS, end=True),
        "streams beyond their number": HELLO + opened(*range(1, 40_000, 2)),
        "settings beside streams": BLOCKED + settings_frame({}) * 15_000,
        "settings that change windows": BLOCKED + TURNS * 7_000,
        "settings of many values": HELLO + settings_frame(dict.fromkeys(range(100, 10_000), 0)) * 20,
        "bytes of the connection's window": BLOCKED
        + window_update_frame(0, 1) * 10_000
        + settings_frame({h2.SETTINGS_INITIAL_WINDOW_SIZE: 100}),
        "bytes of one stream's window": BLOCKED + window_update_frame(1, 1) * 15_000,
        "windows beyond the limit": BLOCKED
        + b"".join(window_update_frame(n, h2.WINDOW_MAX) * 2 for n in STREAMS),
        "pings": HELLO + frame(h2.PING, 0, 0, bytes(8)) * 19_000,
        "priorities": HELLO + opened(1) + frame(h2.PRIORITY, 0, 1, bytes(5)) * 19_000,
        "unknown frames": HELLO + frame(0xEE, 0, 1) * 19_000,
        "bytes of data": HELLO + opened(1) + frame(h2.DATA, 0, 1, b"\0") * 100_000,
        "bytes of a request": HELLO
        + opened(1)
        + frame(h2.DATA, 0, 1, POST)
        + frame(h2.DATA, 0, 1, b"\0" * 5) * 100_000,
        "empty messages": HELLO
        + opened(1)
        + frame(h2.DATA, 0, 1, POST)
        + frame(h2.DATA, 0, 1, bytes(60_000)) * 20,
        "padded data": HELLO + opened(1) + frame(h2.DATA, h2.PADDED, 1, b"\xff" + bytes(255)) * 3000,
        "heads of short codes": HELLO + heads(b"a" * 30_000),
        "heads of long codes": HELLO + heads(b"\xff" * 9000),
        "heads of many fields": HELLO
        + b"".join(
            frame(h2.HEADERS, h2.END_HEADERS, n, b"\x82" * 900 + bytes([0x80 | n % 60 + 1])) for n in STREAMS
        ),
        "continuations": HELLO + frame(h2.HEADERS, 0, 1, HEAD) + frame(h2.CONTINUATION, 0, 1) * 60,
        "resets": HELLO + b"".join(opened(n) + h2.rst_stream_frame(n, h2.CANCEL) for n in STREAMS),
    }


@pytest.mark.long
def test_no_frames_hold_the_loop() -> None:
    attacks = http2_attacks()  # made outside of the loop that is looked at

    async def main() -> None:
        async with paused_router() as (rig, found):
            port = rig.router.picker.addresses["listen"][1]
            for name, sent in attacks.items():

                async def send(sent: bytes = sent) -> None:
                    await asyncio.to_thread(talk, port, sent + LAST, until_said=b"the last")
                    await until(lambda: rig.idle, "every request has ended")

                await found.during(name, send)
            assert found.too_long == {}

    run_real(main(), 500)
