"""However a connection or a stream ends, its requests end: in the queue, in the accounts, at the engine.

One engine is busy, so that requests wait; then each way in which a client or a gateway can leave is tried on
a connection with a request that waits in the queue and one whose body has not come whole. The other side
keeps its connection, and reads nothing, wherever it can.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from kvatlas.router.admission.admission_queue import QueueSettings
from kvatlas.router.http import h2_codec as h2
from kvatlas.router.http.h2_codec import (
    encode_literal,
    frame,
    rst_stream_frame,
    settings_frame,
    window_update_frame,
)
from kvatlas.router.http.settings import ListenSettings
from kvatlas.router.services.epp.settings import EppSettings
from tests.router.app.test_queue import ONE, busy
from tests.router.services.epp.test_exchange import POST, PROCESS, REQUEST
from tests.support.proxy_rig import reset
from tests.support.waiting import until
from tests.support.whole_router import MODEL, Rig, configure, number, routing, running

HEAD = b"".join(
    encode_literal(name, value)
    for name, value in (
        (b":method", b"POST"),
        (b":path", PROCESS.encode()),
        (b"content-type", b"application/grpc"),
    )
)
QUEUED, READING = 1, 3
OPENED = (
    h2.PREFACE
    + settings_frame({})
    + frame(h2.HEADERS, h2.END_HEADERS, QUEUED, HEAD)
    + frame(h2.DATA, 0, QUEUED, REQUEST)
    + frame(h2.HEADERS, h2.END_HEADERS, READING, HEAD)
    + frame(h2.DATA, 0, READING, POST)
)
Way = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


async def closes(writer: asyncio.StreamWriter) -> None:
    writer.close()


async def resets(writer: asyncio.StreamWriter) -> None:
    reset(writer)


async def half_closes(writer: asyncio.StreamWriter) -> None:
    writer.write_eof()


def both(make: Callable[[int], bytes]) -> bytes:
    return make(QUEUED) + make(READING)


HTTP2: dict[str, Way] = {
    "streams are reset": both(lambda n: rst_stream_frame(n, h2.CANCEL)),
    "streams end": both(lambda n: frame(h2.DATA, h2.END_STREAM, n)),
    "trailers end them": both(
        lambda n: frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, n, encode_literal(b"a", b"b"))
    ),
    "windows of streams beyond the limit": both(lambda n: window_update_frame(n, h2.WINDOW_MAX)),
    "the connection's window beyond the limit": window_update_frame(0, h2.WINDOW_MAX),
    "an initial window beyond the limit": settings_frame({h2.SETTINGS_INITIAL_WINDOW_SIZE: 1 << 31}),
    "settings of an odd size": frame(h2.SETTINGS, 0, 0, b"abc"),
    "a window of nothing": window_update_frame(QUEUED, 0),
    "a push": frame(h2.PUSH_PROMISE, 0, QUEUED, bytes(4)),
    "a frame of a stream that was never opened": rst_stream_frame(9, h2.CANCEL),
    "a frame within a header block": frame(h2.HEADERS, 0, 5, HEAD) + frame(h2.PING, 0, 0, bytes(8)),
    "a header block of nonsense": frame(h2.HEADERS, h2.END_HEADERS, 5, b"\xff\xff"),
    "a header block that is too long": frame(h2.HEADERS, h2.END_HEADERS, 5, b"\x82" * 40_000),
    "trailers that end nothing": frame(h2.HEADERS, h2.END_HEADERS, QUEUED, encode_literal(b"a", b"b")),
    "padding longer than its frame": frame(h2.DATA, h2.PADDED, QUEUED, b"\xff"),
    "a frame that is too long": b"\xff\xff\xff\x00\x00\x00\x00\x00\x01",
    "too many control frames": frame(h2.PING, 0, 0, bytes(8)) * 25_000,
    "messages that are none": both(lambda n: frame(h2.DATA, 0, n, b"\0\0\0\0\x02\xff\xff")),
    "compressed messages": both(lambda n: frame(h2.DATA, 0, n, b"\1\0\0\0\0")),
    "a close": closes,
    "a reset": resets,
    "a half close": half_closes,
    "a GOAWAY and a half close": frame(h2.GOAWAY, 0, 0, bytes(8)),
}


@asynccontextmanager
async def crowded(**listen: float) -> AsyncIterator[Rig]:
    """Its engine is busy; in the end nothing is left."""
    queue = QueueSettings(saturation_s=60.0, engine_requests_max=1, wait_s_max=600.0)
    config = {
        "queue": queue,
        "epp": EppSettings(listen="127.0.0.1:0", tls=False),
        "listen": ListenSettings(drain_s_max=0.2, **listen),  # type: ignore[arg-type]
    }
    async with running(ONE) as engines, routing(configure(*engines, **config)) as rig:
        async with busy(rig):
            yield rig
        await rig.over()


def active(rig: Rig) -> int:
    """Requests beside the one that the engine has."""
    return rig.router.proxy.stats.requests_active - 1


def waiting(rig: Rig) -> int:
    room = rig.router.accounts.room
    return room.stats.waiting


async def ends(rig: Rig, port: int, opened: bytes, counts: tuple[int, int], way: Way, name: str) -> None:
    """Open a connection with these requests, ``counts`` of which wait and are active; they end by this."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(opened)
    await until(lambda: (waiting(rig), active(rig)) == counts, f"{name}: all requests have come")
    with contextlib.suppress(ConnectionError):
        if isinstance(way, bytes):
            writer.write(way)
            await writer.drain()
            if name.endswith("half close"):
                writer.write_eof()
        else:
            await way(writer)
    await until(lambda: (waiting(rig), active(rig)) == (0, 0), f"{name}: its requests have ended")
    writer.close()


async def test_every_end_of_a_gateways_stream_or_connection_ends_its_requests() -> None:
    async with crowded() as rig:
        port = rig.router.picker.addresses["listen"][1]
        for name, way in HTTP2.items():
            await ends(rig, port, OPENED, (1, 2), way, name)
        assert rig.router.picker._context.capacity.body_bytes == 0


BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}).encode()
HTTP1_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
WHOLE = HTTP1_HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
HALF = HTTP1_HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"
HTTP1: dict[str, Way] = {"a close": closes, "a reset": resets, "a half close": half_closes}


IN_A_BODY: dict[str, Way] = {
    **HTTP1,
    "a chunk of nonsense": b"nonsense\r\n",
    "silence": b"",
    "slowness": b"1\r\n",
}


async def test_every_end_of_a_clients_connection_ends_its_requests() -> None:
    async with crowded(body_timeout_s=0.2) as rig:
        port, capacity = number(rig.url), rig.server.config.capacity  # type: ignore[attr-defined]
        before = capacity.body_bytes  # of the one that the engine has
        for name, way in HTTP1.items():
            await ends(rig, port, WHOLE, (1, 1), way, name)
            await ends(rig, port, WHOLE + HALF, (1, 1), way, f"{name}, with a body behind")
        for name, way in IN_A_BODY.items():
            await ends(rig, port, HALF, (0, 1), way, f"{name}, in a body")
        assert capacity.body_bytes == before


async def test_the_end_of_the_router_ends_all_requests() -> None:
    config = {
        "epp": EppSettings(listen="127.0.0.1:0", tls=False, drain_s_max=0.1),
        "listen": ListenSettings(drain_s_max=0.1),
    }
    queue = QueueSettings(saturation_s=60.0, engine_requests_max=1, wait_s_max=600.0)
    async with running(ONE) as engines:
        async with routing(configure(*engines, queue=queue, **config)) as rig:
            holds = asyncio.ensure_future(rig.chat("hold on", max_tokens=100))
            await until(lambda: active(rig) == 0, "the engine has a request")
            opened = [(number(rig.url), WHOLE), (number(rig.url), HALF)]
            writers = []
            for port, data in [*opened, (rig.router.picker.addresses["listen"][1], OPENED)]:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(data)
                writers.append(writer)
            await until(lambda: (waiting(rig), active(rig)) == (2, 4), "all requests have come")
        assert rig.idle
        assert waiting(rig) == 0
        rig.check_books()
        await asyncio.gather(holds, return_exceptions=True)
        for writer in writers:
            writer.close()
