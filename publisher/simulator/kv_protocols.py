"""MooncakeConnector in one engine: blocks kept by the name of their transfer, and the bootstrap server.

As read in vLLM 0.32; it has not been held against real engines. What differs from NIXL: a prefill engine
keeps the blocks of an answer that its length ended, and of no other, and says nothing in its answer; a decode
engine learns from the bootstrap server where an engine is; whoever asks for a transfer that the prefill
engine does not have yet, or for an engine that is gone, waits until it is there or the time is over, and
takes one of few senders there meanwhile; nobody else can end that. Blocks that were let go are never read, so
there are no wrong answers.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import msgspec

from publisher.block_pool import PoolRequest
from publisher.simulator.kv_connector import EXCHANGE_S, Address, KvConnector, TransferLink, exchange
from publisher.simulator.kv_messages import Fault, FetchRequest, Message, Reply, TransferParams, TransferStats
from publisher.simulator.request import SimRequest

_PAGE_BYTES_MAX = 1 << 16


class _Entry(msgspec.Struct):
    engine_id: str
    worker_addr: dict[str, dict[str, str]]


class MooncakeBooks(KvConnector):
    """See the module; ``request_id`` of a transfer is its name."""

    @property
    def metrics(self) -> TransferStats | None:
        """See ``KvConnector``: its own counters are not played, and it has none of NIXL's."""
        return None

    def finished(self, request: SimRequest, pooled: PoolRequest, reason: str) -> None:
        """See ``KvConnector``."""
        asked = request.transfer
        if asked is not None and asked.do_remote_decode and asked.transfer_id and reason == "length":
            self._keep(asked.transfer_id, pooled, request.prompt)

    def left(self, request: SimRequest, *, loading: bool) -> None:
        """See ``KvConnector``."""
        params = request.transfer
        self.settle(request)
        if params is not None and not loading and self.can_read(params):
            self.unread.append(params)

    def _fault(self, params: TransferParams) -> Fault | None:
        needed = params.remote_engine_id, params.remote_bootstrap_addr, params.transfer_id
        return Fault.HANGS if None in needed else None


class MooncakeLink(TransferLink):
    """The side channel, and beside it, where ``bootstrap_port`` is given, the bootstrap server."""

    senders = 20
    """Loads that are served at a time, those that wait included: twice ``num_workers`` of vLLM."""

    def __init__(self, connector: KvConnector, *, bootstrap_port: int | None, **options: object) -> None:
        super().__init__(connector, **options)  # type: ignore[arg-type]
        self._books = connector
        self._bootstrap_port = bootstrap_port
        self._bootstrap: asyncio.Server | None = None
        self._known: dict[str, Address] = {}
        self._news = asyncio.Event()
        self._senders = asyncio.Semaphore(self.senders)

    async def listen(self, host: str, port: int, advertised: str) -> None:
        """See ``TransferLink``."""
        await super().listen(host, port, advertised)
        if self._bootstrap_port is not None:
            self._bootstrap = await asyncio.start_server(self._tell, host, self._bootstrap_port)

    @property
    def bootstrap_port(self) -> int:
        """Where the bootstrap server listens."""
        number: int = self._bootstrap.sockets[0].getsockname()[1] if self._bootstrap else 0
        return number

    @property
    def busy(self) -> bool:
        """All senders are taken."""
        return self._senders.locked()

    def close(self) -> None:
        """See ``TransferLink``."""
        super().close()
        if self._bootstrap is not None:
            self._bootstrap.close()

    def kick(self) -> None:
        """See ``TransferLink``."""
        super().kick()
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _meet(self, params: TransferParams) -> tuple[Address, str]:
        name, engine_id = params.transfer_id or "", params.remote_engine_id or ""
        address = await self._find(engine_id, params.remote_bootstrap_addr or "")
        wait_s = self._books.lease_s + EXCHANGE_S
        try:
            await exchange(address, FetchRequest(name, self._common), wait_s)
        except (ConnectionError, EOFError):  # ZeroMQ goes on trying, and nobody tells it to stop
            await asyncio.sleep(self._books.lease_s)
            raise
        return address, name

    async def _let_go(self, params: TransferParams) -> tuple[Address, str]:
        return await self._meet(params)

    async def _find(self, engine_id: str, bootstrap: str) -> Address:
        """Raises ``OSError``."""
        if engine_id not in self._known:
            self._known |= await _query(bootstrap)
        if engine_id not in self._known:
            raise OSError(f"remote engine_id {engine_id} not found from bootstrap server {bootstrap}")
        return self._known[engine_id]

    async def _answer(self, message: Message) -> Reply:
        if not isinstance(message, FetchRequest):
            return await super()._answer(message)
        if message.common != self._common:
            return Reply(error=f"incompatible: {self._common}")
        try:
            async with self._senders, asyncio.timeout(self._books.lease_s):
                while not self._books.keeps(message.transfer_id):
                    await self._news.wait()
        except TimeoutError:
            return Reply(error="Timeout waiting for P side ready.")
        return Reply()

    async def _tell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(EXCHANGE_S):
                await reader.readuntil(b"\r\n\r\n")
                host, port = self._books.address
                entry = _Entry(self._books.engine_id, {"0": {"0": f"tcp://{host}:{port}"}})
                body = msgspec.json.encode({"0": entry})
                head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n"
                writer.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
                await writer.drain()
        except (OSError, EOFError, ValueError):
            pass  # who asked has gone, or spoke no HTTP
        finally:
            writer.close()


async def _query(bootstrap: str) -> dict[str, Address]:
    """Engine -> where its side channel listens. Raises ``OSError``."""
    url = urlsplit(bootstrap)
    async with asyncio.timeout(EXCHANGE_S):
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        try:
            writer.write(b"GET /query HTTP/1.0\r\n\r\n")
            page = await reader.read(_PAGE_BYTES_MAX)
        finally:
            writer.close()
    try:
        entries = msgspec.json.decode(page.partition(b"\r\n\r\n")[2], type=dict[str, _Entry])
        workers = {entry.engine_id: urlsplit(entry.worker_addr["0"]["0"]) for entry in entries.values()}
    except (msgspec.MsgspecError, KeyError) as error:
        raise OSError(f"{bootstrap}: {error}") from None
    return {engine_id: (worker.hostname or "", worker.port or 0) for engine_id, worker in workers.items()}


# OffloadingConnector with a ``p2p`` tier in one engine: blocks kept by the name that the router gave.
#
# As read in vLLM 0.32; it has not been held against real engines. A prefill engine keeps what it computed
# until somebody fetches it, or the time is over, and refuses whoever comes later; a decode engine fetches
# whole blocks and computes the rest. Parameters that lack a part mean nothing.


class OffloadingBooks(KvConnector):
    """See the module."""

    @property
    def metrics(self) -> TransferStats | None:
        """See ``KvConnector``: its own counters are not played."""
        return None

    def arrived(self, request: SimRequest) -> None:
        """See ``KvConnector``: a prompt is computed whole."""
        asked = request.transfer
        if asked is not None:
            self._report(request, asked)
            asked.do_remote_prefill = _source(asked) is not None

    def reach(self, request: SimRequest) -> int:
        """See ``KvConnector``: whole blocks before the last token."""
        unit = self._pool.layout.alignment
        return (super().reach(request) - 1) // unit * unit if super().reach(request) else 0

    def begin(self, request: SimRequest, pooled: PoolRequest) -> None:
        """See ``KvConnector``: whoever needs nothing tells nobody."""
        super().begin(request, pooled)
        self.unread.clear()

    def finished(self, request: SimRequest, pooled: PoolRequest, reason: str) -> None:
        """See ``KvConnector``."""
        asked = None if request.transfer is None else request.transfer.remote_decoder
        if asked and asked.get("kv_request_id"):
            self._keep(str(asked["kv_request_id"]), pooled, request.prompt)

    def left(self, request: SimRequest, *, loading: bool) -> None:
        """See ``KvConnector``: nobody is told."""
        self.settle(request)

    def _fault(self, params: TransferParams) -> Fault | None:
        return None


class OffloadingLink(MooncakeLink):
    """The side channel."""

    senders = 128
    """vLLM's ``VLLM_P2P_MAX_PEERS``."""

    def __init__(self, connector: OffloadingBooks, **options: Any) -> None:
        super().__init__(connector, bootstrap_port=None, **options)

    async def _meet(self, params: TransferParams) -> tuple[Address, str]:
        found = _source(params)
        if found is None:
            raise OSError("no address to fetch from")
        address, name = found
        await exchange(address, FetchRequest(name, self._common), self._books.lease_s + EXCHANGE_S)
        return address, name

    async def _answer(self, message: Message) -> Reply:
        if isinstance(message, FetchRequest) and self._books.dropped(message.transfer_id):
            return Reply(error="these blocks have been dropped")
        return await super()._answer(message)


def _source(params: TransferParams) -> tuple[Address, str] | None:
    named = params.remote_prefiller or {}
    host, port, name = (named.get(key) for key in ("remote_host", "remote_port", "kv_request_id"))
    return ((str(host), int(port)), str(name)) if host and port and name else None
