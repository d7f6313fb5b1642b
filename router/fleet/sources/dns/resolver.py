"""A stub resolver: asks the configured servers in turn, over UDP, and over TCP where the answer is cut off.

The standard library tells neither TTLs nor SRV records (docs/decisions/007-fleet-sources.md). Always true: a
question ends after ``timeout_s`` per server and transport; every question has its own socket, port and random
number, and an answer that does not fit it is dropped.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from router.fleet.sources.dns.message import NO_ERROR, NO_SUCH_NAME, Answer, BadMessageError, parse, question

_PORT = 53
_SERVERS_MAX = 3
_SEARCH_MAX = 16


class ResolveError(Exception):
    """No server gave an answer that can be used."""


class Where(NamedTuple):
    """Whom to ask, and how short names are completed, as ``resolv.conf`` says."""

    servers: tuple[tuple[str, int], ...]
    search: tuple[str, ...] = ()
    ndots: int = 1

    def candidates(self, name: str) -> list[str]:
        """The names to ask for, in turn; one that ends in a dot is complete."""
        if name.endswith("."):
            return [name]
        completed = [f"{name}.{domain}" for domain in self.search]
        return [name, *completed] if name.count(".") >= self.ndots else [*completed, name]


def read_resolv_conf(path: Path = Path("/etc/resolv.conf")) -> Where:
    """The system's resolvers. Raises ``ResolveError`` where there is none."""
    servers: list[tuple[str, int]] = []
    search: tuple[str, ...] = ()
    ndots = 1
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ResolveError(f"{path}: {error}") from None
    for line in lines:
        key, *values = line.split("#")[0].split() or [""]
        if key == "nameserver" and values:
            servers.append((values[0], _PORT))
        elif key in {"search", "domain"}:
            search = tuple(value.rstrip(".") for value in values[:_SEARCH_MAX] if value != ".")
        elif key == "options":
            wanted = [v.partition(":")[2] for v in values if v.startswith("ndots:")]
            ndots = int(wanted[-1]) if wanted and wanted[-1].isdecimal() else ndots
    if not servers:
        raise ResolveError(f"{path}: no nameserver")
    return Where(tuple(servers[:_SERVERS_MAX]), search, ndots)


def parse_server(text: str) -> tuple[str, int]:
    """``ADDRESS``, ``ADDRESS:PORT`` or ``[IPV6]:PORT``. Raises ``ValueError``."""
    host, separator, port = text.rpartition(":")
    if not separator or (":" in host and not host.startswith("[")):
        host, port = text, str(_PORT)
    try:
        address = str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        address = ""
    if not address or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{text!r} is not ADDRESS or ADDRESS:PORT")
    return address, int(port)


class Resolver:
    """See the module. ``where`` is asked for every question, so that a changed ``resolv.conf`` counts."""

    def __init__(self, where: Callable[[], Where], *, timeout_s: float) -> None:
        self._where = where
        self._timeout_s = timeout_s

    async def ask(self, name: str, kind: int) -> Answer:
        """The answer for ``name``, completed as ``resolv.conf`` says. Raises ``ResolveError``.

        A name that does not exist is an answer too, without records.
        """
        where = self._where()
        answer: Answer | None = None
        for candidate in where.candidates(name):
            answer = await self._ask_all(where, candidate, kind)
            if answer.records:
                break
        if answer is None:
            raise ResolveError(f"{name}: nothing to ask for")
        return answer

    async def _ask_all(self, where: Where, name: str, kind: int) -> Answer:
        problems = []
        for host, port in where.servers:
            try:
                answer = await self._ask_one(host, port, name, kind)
            except (OSError, TimeoutError, BadMessageError, ValueError, asyncio.IncompleteReadError) as error:
                problems.append(f"{host}:{port}: {type(error).__name__} {error}".strip())
                continue
            if answer.code in {NO_ERROR, NO_SUCH_NAME}:
                return answer
            problems.append(f"{host}:{port}: answer code {answer.code}")
        raise ResolveError(f"{name}: {'; '.join(problems)}")

    async def _ask_one(self, host: str, port: int, name: str, kind: int) -> Answer:
        ident = secrets.randbits(16)
        asked = question(ident, name, kind)
        async with asyncio.timeout(self._timeout_s):
            answer = await _by_udp(host, port, asked, lambda raw: parse(raw, ident, name, kind))
        if answer.truncated:
            async with asyncio.timeout(self._timeout_s):
                answer = parse(await _by_tcp(host, port, asked), ident, name, kind)
        return answer


class _Asking(asyncio.DatagramProtocol):
    def __init__(self, read: Callable[[bytes], Answer]) -> None:
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._read = read

    def datagram_received(self, data: bytes, addr: object) -> None:
        try:
            answer = self._read(data)
        except BadMessageError:
            return  # somebody else's, or forged: the right one may still come
        if not self.answer.done():
            self.answer.set_result(answer)

    def error_received(self, exc: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(exc)


async def _by_udp(host: str, port: int, asked: bytes, read: Callable[[bytes], Answer]) -> Answer:
    loop = asyncio.get_running_loop()
    transport, asking = await loop.create_datagram_endpoint(lambda: _Asking(read), remote_addr=(host, port))
    try:
        transport.sendto(asked)
        return await asking.answer
    finally:
        transport.close()


async def _by_tcp(host: str, port: int, asked: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(struct.pack("!H", len(asked)) + asked)
        (length,) = struct.unpack("!H", await reader.readexactly(2))
        return await reader.readexactly(length)
    finally:
        writer.close()
