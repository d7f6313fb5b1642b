"""A gateway of the Inference Extension: it asks the router's endpoint picker for an engine, and carries
bytes.

It stands for Envoy with the ext_proc filter in FULL_DUPLEX_STREAMED mode (docs/gateway.md), as far as a
picker sees it: one HTTP/2 connection to the picker with a stream per request, the request's head and body
shown first, then the answer's. Errors of its own have the code ``gateway``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec

from kvatlas.router.http.keepalive import keep_alive
from kvatlas.router.services.epp import messages as m
from kvatlas.router.services.epp.grpc import GrpcReader, message_frame
from kvatlas.router.services.epp.header_fields import DESTINATION
from kvatlas.router.services.epp.protobuf import as_bytes, as_int, bytes_field, fields, number_field
from tests.support.h2_peer import H2Peer
from tests.world.fleet import GATEWAY, PICKER_PORT, Fleet, on, router_host

PORT = 8080
_PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
_REQUEST_HEADERS, _RESPONSE_HEADERS, _REQUEST_BODY, _RESPONSE_BODY = 2, 3, 4, 5
_HEADERS_ANSWER, _BODY_ANSWER = 1, 3
_RESPONSE_HEADERS_ANSWER, _RESPONSE_BODY_ANSWER, _IMMEDIATE = 2, 4, 7
_PIECE_BYTES = 32 * 1024
_MESSAGE_BYTES_MAX = 1 << 24
_WINDOW_BYTES = 65_536
_OWN_ERROR = b"upstream connect error or disconnect/reset before headers"
_MESSAGE_S_MAX = 20.0
"""``message_timeout`` of the filter."""
_HOP = {"connection", "transfer-encoding", "content-length", "host"}

Head = dict[str, str]


class GatewayError(Exception):
    """The gateway answers by itself with this status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Told(msgspec.Struct):
    """One message of the picker. ``kind``: its field number."""

    kind: int
    sets: Head = {}
    removes: list[str] = []
    piece: bytes = b""
    ends: bool = False
    status: int = 0
    body: bytes = b""


def _one(message: bytes, number: int) -> bytes:
    return next((as_bytes(value) for found, value in fields(message) if found == number), b"")


def _mutation(message: bytes) -> tuple[Head, list[str]]:
    sets, removes = {}, []
    for number, value in fields(message):
        if number == 1:
            header = _one(as_bytes(value), 1)
            sets[_one(header, 1).decode()] = (_one(header, 3) or _one(header, 2)).decode("latin-1")
        elif number == 2:
            removes.append(as_bytes(value).decode())
    return sets, removes


def read_told(message: bytes) -> Told | None:
    """Decode a ProcessingResponse; None for one without a part that is used here."""
    for kind, value in fields(message):
        if kind == _IMMEDIATE:
            whole = as_bytes(value)
            status = next((as_int(code) for n, code in fields(_one(whole, 1)) if n == 1), 0)
            return Told(kind, *_mutation(_one(whole, 2)), status=status, body=_one(whole, 3))
        if kind in (_HEADERS_ANSWER, _RESPONSE_HEADERS_ANSWER, _BODY_ANSWER, _RESPONSE_BODY_ANSWER):
            common = _one(as_bytes(value), 1)
            streamed = _one(_one(common, 3), 3)
            ends = any(number == 2 and bool(flag) for number, flag in fields(streamed))
            return Told(kind, *_mutation(_one(common, 2)), piece=_one(streamed, 1), ends=ends)
    return None


def _headers(kind: int, head: Head) -> bytes:
    each = b"".join(
        bytes_field(1, bytes_field(1, name.encode()) + bytes_field(3, value.encode("latin-1")))
        for name, value in head.items()
    )
    modes = bytes_field(11, number_field(1, m.FULL_DUPLEX) + number_field(2, m.FULL_DUPLEX))
    return message_frame(
        bytes_field(kind, bytes_field(1, each)) + (modes if kind == _REQUEST_HEADERS else b"")
    )


def _body(kind: int, data: bytes, *, ends: bool = False) -> bytes:
    return message_frame(bytes_field(kind, bytes_field(1, data) + (number_field(2, 1) if ends else b"")))


class _Call:
    """One ext_proc stream."""

    def __init__(self, peer: H2Peer) -> None:
        self.peer = peer
        self.number = peer.open(_PROCESS)
        self._reader = GrpcReader(_MESSAGE_BYTES_MAX)
        self._told: list[Told] = []
        self._read = 0

    async def send(self, data: bytes) -> None:
        if self.peer.closed or self.number in self.peer.reset or self.number in self.peer.ended:
            raise GatewayError(503, "the picker has ended the call")
        try:
            async with asyncio.timeout(_MESSAGE_S_MAX):
                await self.peer.send(self.number, data)
        except (TimeoutError, OSError) as error:
            raise GatewayError(504, f"the picker takes nothing: {error}") from None

    async def told(self) -> Told:
        """The picker's next message."""
        try:
            async with asyncio.timeout(_MESSAGE_S_MAX):
                return await self._next()
        except TimeoutError:
            raise GatewayError(504, "the picker does not answer") from None

    async def _next(self) -> Told:
        while True:
            data = self.peer.data[self.number]
            if len(data) > self._read:
                new, self._read = data[self._read :], len(data)
                self._told += [one for raw in self._reader.feed(new) if (one := read_told(raw)) is not None]
            if self._told:
                return self._told.pop(0)
            if self.peer.closed or self.number in self.peer.reset or self.number in self.peer.ended:
                raise GatewayError(503, "the picker has ended the call")
            await self.peer.changed()

    def close(self) -> None:
        """No more is sent: an end, or a reset if the call has none yet."""
        if self.peer.closed or self.number in self.peer.ended or self.number in self.peer.reset:
            return
        with suppress(Exception):
            self.peer.state.reset_stream(self.number, 8)
            self.peer.flush()


class Gateway:
    """Serves clients on a machine of its own; ``address`` is theirs."""

    address = GATEWAY, PORT

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._server: asyncio.Server
        self._peers: dict[int, tuple[H2Peer, asyncio.Task[None], asyncio.StreamWriter]] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}

    async def start(self) -> None:
        with on(GATEWAY):
            self._server = await asyncio.start_server(self._client, GATEWAY, PORT)

    async def stop(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        for peer, task, writer in self._peers.values():
            peer.closed = True
            task.cancel()
            writer.close()

    async def _peer(self, r: int) -> H2Peer:
        found = self._peers.get(r)
        if found is not None and not found[0].closed and not found[0].goaway:
            return found[0]
        try:
            async with asyncio.timeout(2.0):
                reader, writer = await asyncio.open_connection(router_host(r), PICKER_PORT)
        except (OSError, TimeoutError) as error:
            raise GatewayError(503, f"no picker: {error}") from None
        peer = H2Peer(reader, writer, window=_WINDOW_BYTES)
        self._peers[r] = peer, asyncio.create_task(peer.run()), writer
        return peer

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = None
        try:
            head, body = await _read_request(reader)
            carrying = asyncio.create_task(self._carry(head, body, writer))
            leaving = asyncio.create_task(reader.read())
            await asyncio.wait((carrying, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not carrying.done():
                carrying.cancel()
            leaving.cancel()
            await asyncio.gather(carrying, leaving, return_exceptions=True)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # cancelled: the gateway stops
        finally:
            self._tasks.pop(task, None)
            writer.close()

    async def _carry(self, head: Head, body: bytes, writer: asyncio.StreamWriter) -> None:
        call: _Call | None = None
        try:
            call = _Call(await self._peer(0))
            await self._through(call, head, body, writer)
        except GatewayError as error:
            text = json.dumps(
                {"error": {"message": str(error), "type": "gateway", "param": None, "code": "gateway"}}
            )
            with suppress(OSError):
                writer.write(_whole(error.status, {"content-type": "application/json"}, text.encode()))
        except OSError:
            pass
        finally:
            if call is not None:
                call.close()

    async def _through(self, call: _Call, head: Head, body: bytes, writer: asyncio.StreamWriter) -> None:
        await call.send(_headers(_REQUEST_HEADERS, head))
        for piece in _pieces(body):
            await call.send(_body(_REQUEST_BODY, piece))
        await call.send(_body(_REQUEST_BODY, b"", ends=True))
        named, given, ended = dict(head), b"", False
        while not ended or DESTINATION not in named:
            told = await call.told()
            if told.kind == _IMMEDIATE:
                writer.write(_whole(told.status, told.sets, told.body))
                return
            named |= told.sets
            for name in told.removes:
                named.pop(name, None)
            given += told.piece
            ended |= told.ends
        await self._to_engine(call, named, given, writer)

    async def _to_engine(self, call: _Call, head: Head, body: bytes, writer: asyncio.StreamWriter) -> None:
        host, _, port = head[DESTINATION].partition(",")[0].rpartition(":")
        engine: asyncio.StreamWriter | None = None
        try:
            try:
                async with asyncio.timeout(2.0):
                    reader, engine = await asyncio.open_connection(host, int(port))
                keep_alive(engine.transport)
                engine.write(_request(head, body))
                answered = await _read_head(reader)
            except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
                await self._own(call)
                raise GatewayError(503, f"upstream connect error: {error}") from None
            await call.send(_headers(_RESPONSE_HEADERS, answered))
            told = await call.told()
            status = int(answered.pop(":status"))
            kept = {name: value for name, value in answered.items() if name not in _HOP}
            writer.write(_begin(status, {**kept, **told.sets, "x-kvatlas-engine": f"http://{host}:{port}"}))
            await self._answer(call, reader, answered, writer)
        finally:
            if engine is not None:
                engine.close()

    async def _answer(
        self, call: _Call, reader: asyncio.StreamReader, head: Head, writer: asyncio.StreamWriter
    ) -> None:
        """The engine's answer, piece by piece, through the picker to the client."""
        showing = asyncio.create_task(_show(call, reader, head))
        try:
            while True:
                told = await call.told()
                if told.piece:
                    writer.write(b"%x\r\n%b\r\n" % (len(told.piece), told.piece))
                    await writer.drain()
                if told.ends:
                    writer.write(b"0\r\n\r\n")
                    return
        except GatewayError:
            writer.transport.abort()  # in the middle of an answer there is nothing else to say
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)

    async def _own(self, call: _Call) -> None:
        """Show the picker that the engine was not reached."""
        with suppress(GatewayError):
            await call.send(_headers(_RESPONSE_HEADERS, {":status": "503", "content-type": "text/plain"}))
            await call.send(_body(_RESPONSE_BODY, _OWN_ERROR, ends=True))
            while not (await call.told()).ends:
                pass


async def _show(call: _Call, reader: asyncio.StreamReader, head: Head) -> None:
    try:
        async for piece in _read_body(reader, head):
            await call.send(_body(_RESPONSE_BODY, piece))
        await call.send(_body(_RESPONSE_BODY, b"", ends=True))
    except (OSError, asyncio.IncompleteReadError, ValueError, GatewayError):
        call.close()
        call.peer.reset[call.number] = 8
        call.peer._news.set()


def _pieces(body: bytes) -> Iterator[bytes]:
    for at in range(0, len(body), _PIECE_BYTES):
        yield body[at : at + _PIECE_BYTES]


async def _read_request(reader: asyncio.StreamReader) -> tuple[Head, bytes]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = lines[0].split()
    head = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:] if line)}
    body = await reader.readexactly(int(head.get("content-length", 0)))
    fields_ = {name: value for name, value in head.items() if name not in ("connection", "host")}
    return {":method": method, ":path": path, ":authority": head["host"], **fields_}, body


def _request(head: Head, body: bytes) -> bytes:
    kept = {name: value for name, value in head.items() if name[0] != ":" and name not in _HOP}
    rows = {"host": head[":authority"], "content-length": str(len(body)), "connection": "close", **kept}
    lines = [
        f"{head[':method']} {head[':path']} HTTP/1.1",
        *(f"{name}: {value}" for name, value in rows.items()),
    ]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


async def _read_head(reader: asyncio.StreamReader) -> Head:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    head = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:] if line)}
    return {":status": lines[0].split()[1], **head}


async def _read_body(reader: asyncio.StreamReader, head: Head) -> Any:
    if head.get("transfer-encoding") != "chunked":
        left = int(head["content-length"])
        while left:
            piece = await reader.read(min(left, _PIECE_BYTES))
            if not piece:
                raise asyncio.IncompleteReadError(piece, left)
            left -= len(piece)
            yield piece
        return
    while True:
        size = int((await reader.readline()).split(b";")[0], 16)
        piece = await reader.readexactly(size + 2)
        if not size:
            return
        yield piece[:-2]


def _begin(status: int, head: Head) -> bytes:
    rows = {**head, "transfer-encoding": "chunked", "connection": "close"}
    return (
        "\r\n".join([f"HTTP/1.1 {status} -", *(f"{n}: {v}" for n, v in rows.items())]).encode("latin-1")
        + b"\r\n\r\n"
    )


def _whole(status: int, head: Head, body: bytes) -> bytes:
    rows = {**head, "content-length": str(len(body)), "connection": "close"}
    text = "\r\n".join([f"HTTP/1.1 {status} -", *(f"{n}: {v}" for n, v in rows.items())])
    return text.encode("latin-1") + b"\r\n\r\n" + body
