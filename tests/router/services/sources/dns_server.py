"""A real DNS server over UDP and TCP, with its own encoder: what the resolver reads, another hand wrote."""

from __future__ import annotations

import asyncio
import ipaddress
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

A, CNAME, AAAA, SRV = 1, 5, 28, 33
Data = tuple[int, int, bytes]
"""Kind, TTL and content of one record."""


def name(text: str) -> bytes:
    return b"".join(bytes([len(p)]) + p.encode() for p in text.rstrip(".").split(".")) + b"\0"


def text(encoded: bytes) -> str:
    labels, at = [], 0
    while length := encoded[at]:
        labels.append(encoded[at + 1 : at + 1 + length].decode())
        at += 1 + length
    return ".".join(labels)


def a(address: str, ttl: int = 5) -> Data:
    ip = ipaddress.ip_address(address)
    return (A if ip.version == 4 else AAAA, ttl, ip.packed)


def srv(priority: int, port: int, target: str, ttl: int = 5) -> Data:
    return SRV, ttl, struct.pack("!3H", priority, 10, port) + name(target)


class DnsServer(asyncio.DatagramProtocol):
    """``records`` by lower-case name; names not in it do not exist. ``extra`` goes along with any answer."""

    def __init__(self) -> None:
        self.records: dict[str, list[Data]] = {}
        self.extra: list[tuple[str, Data]] = []
        self.asked: list[tuple[str, int]] = []
        self.by_tcp = 0
        self.code = 0
        self.truncate = False
        self.silent = False
        self.damage: Callable[[bytes], bytes] = bytes
        """Effect on answers by TCP on their way."""
        self.forge: list[bytes] = []
        """Datagrams sent before the real answer."""
        self.port = 0
        self.transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        assert self.transport is not None
        if self.silent:
            self.asked.append(self._question(data)[:2])
            return
        for forged in self.forge:
            self.transport.sendto(forged, addr)
        self.transport.sendto(self.answer(data, udp=True), addr)

    def _question(self, data: bytes) -> tuple[str, int, bytes]:
        asked = text(data[12:])
        end = 12 + len(name(asked))
        (kind,) = struct.unpack_from("!H", data, end)
        return asked.lower(), kind, data[12 : end + 4]

    def answer(self, data: bytes, *, udp: bool) -> bytes:
        asked, kind, question = self._question(data)
        self.asked.append((asked, kind))
        known = self.records.get(asked)
        found = list(self._found(b"\xc0\x0c", known or [], kind))  # the question's name
        code = self.code or (3 if known is None else 0)
        flags = 0x8180 | code | (0x0200 if udp and self.truncate else 0)
        if flags & 0x0200:
            found = []
        extra = [(name(of), record) for of, record in self.extra] if found else []
        body = b"".join(owner + self._record(record) for owner, record in [*found, *extra])
        head = struct.pack("!6H", struct.unpack_from("!H", data)[0], flags, 1, len(found), 0, len(extra))
        return head + question + body

    def _found(self, owner: bytes, known: list[Data], kind: int) -> Iterator[tuple[bytes, Data]]:
        """The records of a name, with the aliases on the way to them."""
        for record in known:
            if record[0] == kind:
                yield owner, record
            elif record[0] == CNAME:
                yield owner, record
                target = record[2]
                yield from self._found(target, self.records.get(text(target), []), kind)

    @staticmethod
    def _record(record: Data) -> bytes:
        kind, ttl, content = record
        return struct.pack("!HHIH", kind, 1, ttl, len(content)) + content

    async def serve_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.by_tcp += 1
        (length,) = struct.unpack("!H", await reader.readexactly(2))
        answer = self.damage(self.answer(await reader.readexactly(length), udp=False))
        writer.write(struct.pack("!H", len(answer)) + answer)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def dns_server() -> AsyncIterator[DnsServer]:
    """A server on the same free port of UDP and TCP."""
    loop = asyncio.get_running_loop()
    server = DnsServer()
    tcp = await asyncio.start_server(server.serve_tcp, "127.0.0.1", 0)
    server.port = tcp.sockets[0].getsockname()[1]
    transport, _ = await loop.create_datagram_endpoint(lambda: server, local_addr=("127.0.0.1", server.port))
    try:
        yield server
    finally:
        transport.close()
        tcp.close()
