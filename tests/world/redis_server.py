"""A Redis server in a world: fakeredis behind the in-memory network, with Lua, so that kvatlas's own scripts
run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import fakeredis
import redis.asyncio
from fakeredis._helpers import SimpleError
from fakeredis._socket import AsyncFakeSocket

_INFO = b"""# Server\r
redis_version:7.4.0\r
redis_mode:standalone\r
run_id:%040d\r
# Replication\r
role:master\r
connected_slaves:0\r
"""


class RedisServer:
    """``start`` listens on the machine of ``address``, with the data of before unless ``empty``; ``stop``
    resets every connection. Each start has another ``run_id``."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self.starts = self.commands = 0
        self.connections: dict[_Connection, None] = {}
        self.frozen = False
        """Whether it takes bytes and answers nothing, as a stopped process."""
        self._process = 0
        self._store: Any = None

    @property
    def url(self) -> str:
        return f"redis://{self.address[0]}:{self.address[1]}/0"

    async def start(self, *, empty: bool = True) -> None:
        self.listen(asyncio.get_running_loop(), empty=empty)

    def listen(self, loop: Any, *, empty: bool = True) -> None:
        """Start, on this loop."""
        if empty or self._store is None:
            self._store = fakeredis.FakeServer(server_type="valkey", version=(7, 4))
            self._store.dbs[0]._change_callbacks = _InOrder()
        self.starts += 1
        with loop.machine(self.address[0], process=True) as self._process:
            self.address = loop.net.listen(lambda: _Connection(self), None, self.address[1]).key

    def stop(self, *, silent: bool = False) -> None:
        """End its process; ``silent``: as when power fails."""
        loop: Any = asyncio.get_running_loop()
        loop.kill(self._process, silent=silent)
        self.connections.clear()

    def info(self) -> bytes:
        return _INFO % self.starts

    def open(self) -> Any:
        return _Socket(self._store, 0, None, redis.asyncio.Redis)

    def client(self) -> Any:
        """A client without a network, to look at the data."""
        return fakeredis.FakeStrictRedis(server=self._store)

    def thaw(self) -> None:
        self.frozen = False
        for one in list(self.connections):
            one.data_received(b"")


class _InOrder(dict[Any, None]):
    """A set in the order of insertion: a set of callbacks has that of addresses in memory."""

    def add(self, one: Any) -> None:
        self[one] = None

    def remove(self, one: Any) -> None:
        del self[one]


class _Socket(AsyncFakeSocket):
    """Keeps errors as they are; else it makes exceptions of a client library of them. ``replied`` is called
    at each reply, also of a command that waited."""

    replied: Callable[[], None] = staticmethod(lambda: None)

    def put_response(self, msg: Any) -> None:
        super().put_response(msg)
        self.replied()

    def _decode_error(self, error: Any) -> Any:
        return error


class _Connection(asyncio.Protocol):
    def __init__(self, server: RedisServer) -> None:
        self._server = server

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._unread = b""
        self._server.connections[self] = None
        self._socket: Any = self._server.open()
        self._loop: Any = asyncio.get_running_loop()
        self._process = self._socket._process_command
        self._socket._process_command = self._command
        self._socket.replied = self._reply
        self._reading = False

    def _command(self, fields: list[bytes]) -> None:
        self._server.commands += 1
        match fields[0].upper() if fields else b"":
            case b"INFO":
                self._socket.put_response(self._server.info())
            case b"HELLO":
                self._socket.put_response(SimpleError("ERR unknown command 'HELLO'"))
            case b"CLIENT":
                self._socket.put_response(b"OK")
            case _:
                # A script is one turn of several commands for each of its keys here.
                with self._loop.not_counted():
                    self._process(fields)

    def data_received(self, data: bytes) -> None:
        data, self._unread = self._unread + data, b""
        if self._server.frozen:
            self._unread = data
            return
        self._reading = True  # what comes together is answered together
        self._socket.sendall(data)
        self._reading = False
        self._reply()

    def _reply(self) -> None:
        if self._reading or self._server.frozen:
            return
        replies = self._socket.responses
        written = []
        while not replies.empty():
            written.append(encode(replies.get_nowait()))
        if written:
            self._transport.write(b"".join(written))

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.pop(self, None)


def encode(reply: Any) -> bytes:
    """A reply in RESP 2."""
    match reply:
        case None:
            return b"$-1\r\n"
        case bool() | int():
            return b":%d\r\n" % reply
        case list() | tuple():
            return b"*%d\r\n" % len(reply) + b"".join(map(encode, reply))
        case dict():
            return encode([part for pair in reply.items() for part in pair])
        case SimpleError():
            return b"-" + reply.value.encode() + b"\r\n"
        case Exception():
            return b"-" + str(reply).encode() + b"\r\n"
    data = reply if isinstance(reply, bytes) else str(reply).encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)
