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
from urllib.parse import urlsplit

import msgspec

from publisher.block_pool import PoolRequest
from publisher.simulator.request import SimRequest
from publisher.simulator.transfer.connector import KvConnector
from publisher.simulator.transfer.link import EXCHANGE_S, Address, TransferLink, exchange
from publisher.simulator.transfer.messages import Message, Reply, Take
from publisher.simulator.transfer.params import Fault, TransferParams
from publisher.simulator.transfer.stats import TransferStats

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
            await exchange(address, Take(name, self._common), wait_s)
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
        if not isinstance(message, Take):
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
