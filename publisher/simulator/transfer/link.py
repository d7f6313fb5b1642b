"""The side channel between simulated engines: loads, notifications and heartbeats over real TCP.

A decode engine opens a connection for each exchange, sends one message and reads one reply; a message is its
length (four bytes) and msgpack. A load is a handshake, as long a time as its blocks take, and the
notification that they have been read. Everything is bounded: messages, connections, the time of an exchange.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine

import msgspec
import structlog

from publisher.simulator.request import SimRequest
from publisher.simulator.transfer.connector import KvConnector, Load, digest_of
from publisher.simulator.transfer.messages import Alive, Message, Read, Reply, Shake
from publisher.simulator.transfer.params import TransferParams

Address = tuple[str, int]
_MESSAGE_BYTES_MAX = 1 << 20
_CONNECTIONS_MAX = 256
EXCHANGE_S = 5.0
"""How long an exchange may take, as the receive timeout of vLLM's handshake."""
_HEARTBEATS_PER_LEASE = 6
_PREFIX_BYTES = 4

log = structlog.get_logger()


class TransferLink:
    """One engine's end of the side channel. ``common`` is what two engines must share to exchange blocks,
    ``s_per_block`` how long one block of one group takes, ``block_bytes`` its size. ``loaded`` is told of
    loads that came, and whether with what was computed for them, ``failed`` of those that will not come."""

    def __init__(
        self,
        connector: KvConnector,
        *,
        loaded: Callable[[Load, bool], None],
        failed: Callable[[SimRequest], None],
        common: str,
        s_per_block: float,
        block_bytes: int,
    ) -> None:
        self._connector = connector
        self._loaded = loaded
        self._failed = failed
        self._common = common
        self._s_per_block = s_per_block
        self._block_bytes = block_bytes
        self._jobs: asyncio.Queue[Coroutine[None, None, None]] = asyncio.Queue()  # one per request at most
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._connections = 0

    async def listen(self, host: str, port: int, advertised: str) -> None:
        """Bind the side channel. Raises ``OSError``."""
        self._server = await asyncio.start_server(self._serve, host, port)
        self._connector.address = advertised, self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Stop listening; a second call does nothing."""
        if self._server is not None:
            self._server.close()

    async def run(self) -> None:
        """Move blocks, renew leases and let them end; returns only by cancellation."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._heartbeats())
            tasks.create_task(self._leases())
            while True:
                tasks.create_task(await self._jobs.get())

    def kick(self) -> None:
        """Something may have changed in the connector's books."""
        connector = self._connector
        self._changed.set()
        while connector.begun:
            self._jobs.put_nowait(self._load(connector.begun.popleft()))
        while connector.unread:
            self._jobs.put_nowait(self._notify(connector.unread.popleft()))

    async def _load(self, load: Load) -> None:
        params, stats = load.params, self._connector.stats
        begun_s = time.monotonic()
        try:
            address, name = await self._meet(params)
            await asyncio.sleep(load.num_blocks * self._s_per_block)
            digest = digest_of(load.request.prompt, load.end)
            reply = await exchange(address, Read(name, load.end, digest))
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            stats.failed_transfers += 1
            log.warning("transfer_failed", source=params.source, error=str(error) or type(error).__name__)
            self._failed(load.request)
            return
        stats.transferred(time.monotonic() - begun_s, load.num_blocks * self._block_bytes)
        self._loaded(load, reply.intact)

    async def _notify(self, params: TransferParams) -> None:
        try:
            address, name = await self._let_go(params)
            await exchange(address, Read(name))
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            self._connector.stats.failed_notifications += 1
            self._connector.stats.failed_transfers += 1
            log.warning("notification_failed", source=params.source, error=str(error))

    async def _meet(self, params: TransferParams) -> tuple[Address, str]:
        """The engine that has the blocks is ready to be read from; where, and under which name. Raises as
        ``exchange`` does."""
        await exchange(params.address, Shake(params.remote_engine_id or "", self._common))
        return await self._let_go(params)

    async def _let_go(self, params: TransferParams) -> tuple[Address, str]:
        """The same for blocks that are not wanted."""
        return params.address, params.remote_request_id or ""

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._connector.lease_s / _HEARTBEATS_PER_LEASE)
            for address, request_ids in self._connector.awaited().items():
                try:
                    await exchange(address, Alive(request_ids))
                except (OSError, EOFError, msgspec.MsgspecError) as error:
                    log.warning("heartbeat_failed", address=address, error=str(error))

    async def _leases(self) -> None:
        while True:
            self._changed.clear()
            deadline_s = self._connector.next_deadline_s()
            wait_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                self._connector.expire()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections <= _CONNECTIONS_MAX:
                async with asyncio.timeout(EXCHANGE_S):
                    message = msgspec.msgpack.decode(await _receive(reader), type=Message)
                reply = await self._answer(message)
                async with asyncio.timeout(EXCHANGE_S):
                    await _send(writer, reply)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            log.warning("side_channel_failed", error=str(error) or type(error).__name__)
        finally:
            self._connections -= 1
            writer.close()

    async def _answer(self, message: Message) -> Reply:
        connector = self._connector
        match message:
            case Shake(engine_id, common):
                if engine_id != connector.engine_id:
                    return Reply(error=f"this engine is {connector.engine_id}, not {engine_id}")
                return Reply(error="" if common == self._common else f"incompatible: {self._common}")
            case Read(request_id, end, digest):
                return Reply(intact=connector.read(request_id, end, digest))
            case Alive(request_ids):
                connector.renew(request_ids)
                return Reply()
            case _:
                return Reply(error="this engine has no Mooncake")


async def exchange(address: Address, message: Message, timeout_s: float = EXCHANGE_S) -> Reply:
    """Raises ``OSError`` (also where time is up, or the other side refuses), ``EOFError`` and
    ``msgspec.MsgspecError``."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(*address)
        try:
            await _send(writer, message)
            reply = msgspec.msgpack.decode(await _receive(reader), type=Reply)
        finally:
            writer.close()
    if reply.error:
        raise ConnectionRefusedError(reply.error)
    return reply


async def _send(writer: asyncio.StreamWriter, message: Message | Reply) -> None:
    payload = msgspec.msgpack.encode(message)
    writer.write(len(payload).to_bytes(_PREFIX_BYTES, "big") + payload)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await reader.readexactly(_PREFIX_BYTES), "big")
    if size > _MESSAGE_BYTES_MAX:
        raise ConnectionAbortedError(f"a message of {size} bytes, at most {_MESSAGE_BYTES_MAX}")
    return await reader.readexactly(size)
