"""The connector's books in one engine: blocks kept for others, and loads from others. Pure, given the time.

As a prefill engine it keeps the blocks of a finished request pinned in the pool under a lease. Heartbeats
prolong it, a notification that they have been read ends it, and so does its end. After that the blocks are
the pool's, and a reader learns nothing: it gets what lies there by then, as RDMA does. ``read`` tells
whether that is still what was computed.

As a decode engine it says how far a request's prompt comes from elsewhere; what it begins waits in ``begun``
for the shell, what is only to be let go in ``unread``.
Always true: a block is pinned once per request that is kept; each request's parameters are used once.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Sequence
from typing import NamedTuple

import msgspec
import structlog
import xxhash

from publisher.block_pool import HybridBlockPool, PoolRequest
from publisher.events import Family
from publisher.simulator.kv_messages import (
    Alive,
    Fault,
    Message,
    Read,
    Reply,
    TransferHandshake,
    TransferParams,
    TransferStats,
    exchanged,
    handed_over,
)
from publisher.simulator.request import SimRequest

_REPORTS_REMOTE_HIT = (0, 31)
_REMEMBERED_MAX = 4096
"""Requests let go whose late readers are told apart; blocks of older ones count as reused."""


class EngineDownError(RuntimeError):
    """What ends a real engine's process: parameters that no prefill engine gave."""


class Load(NamedTuple):
    """One prompt on its way here: up to token ``end``, in ``num_blocks`` blocks of all groups."""

    request: SimRequest
    params: TransferParams
    end: int
    num_blocks: int


class _Kept(NamedTuple):
    blocks: list[int]
    writes: list[int]
    """Each block's count when it was kept."""
    prompt: array[int]
    """What they were computed for."""


def digest_of(prompt: Sequence[int], end: int) -> int:
    """What tells prompts apart up to token ``end``."""
    return xxhash.xxh3_64_intdigest(array("I", prompt[:end]).tobytes())


class KvConnector:
    """One engine's connector; ``address`` is where its side channel listens."""

    def __init__(
        self,
        pool: HybridBlockPool,
        *,
        engine_id: str,
        lease_s: float,
        release: tuple[int, int],
        clock: Callable[[], float],
    ) -> None:
        self.engine_id = engine_id
        self.release = release
        self.address = ("", 0)
        self.stats = TransferStats()
        self.lease_s = lease_s
        self.begun: deque[Load] = deque()
        self.unread: deque[TransferParams] = deque()
        self._pool = pool
        self._clock = clock
        self._backoff = int(any(group.family is Family.MAMBA for group in pool.layout.groups))
        self._kept: dict[str, _Kept] = {}
        self._deadlines_s: dict[str, float] = {}
        self._gone: OrderedDict[str, _Kept] = OrderedDict()
        self._awaited: dict[SimRequest, TransferParams] = {}
        self._broken = False

    @property
    def num_kept(self) -> int:
        """Requests whose blocks are kept for another engine."""
        return len(self._kept)

    @property
    def metrics(self) -> TransferStats | None:
        """What ``GET /metrics`` tells of it."""
        return self.stats

    def keeps(self, request_id: str) -> bool:
        """Whether this request's blocks wait here."""
        return request_id in self._kept

    def dropped(self, request_id: str) -> bool:
        """Whether they did, and have been let go."""
        return request_id in self._gone

    # decode

    def arrived(self, request: SimRequest) -> None:
        """A new request. What is computed for a model with Mamba layers stops one token short: their state
        is not to hold the last one."""
        asked = request.transfer
        if asked is None:
            return
        self._report(request, asked)
        if asked.do_remote_decode and len(request.prompt) > self._backoff:
            request.prompt = request.prompt[: len(request.prompt) - self._backoff]
        elif asked.tp_size is not None and self.can_read(asked):  # else it knows not whom to tell
            self._awaited[request] = asked

    def _report(self, request: SimRequest, asked: TransferParams) -> None:
        """The other engine's hit is reported (vllm/v1/engine/output_processor.py, from 0.31 on)."""
        if asked.do_remote_prefill and self.release >= _REPORTS_REMOTE_HIT:
            request.reported_hit = asked.remote_prefill_cached_tokens

    def reach(self, request: SimRequest) -> int:
        """Up to which token of its prompt a request is given from elsewhere; 0: it is not."""
        if request.transfer is None or not request.transfer.do_remote_prefill:
            return 0
        num_tokens = len(request.prompt)
        return num_tokens - self._backoff if num_tokens > self._backoff else num_tokens

    def begin(self, request: SimRequest, pooled: PoolRequest) -> None:
        """The pool has started this request, and loads what is missing unless it missed nothing.
        Raises ``EngineDownError`` as a real engine fails."""
        params = request.transfer
        if params is None or not params.do_remote_prefill:
            return
        fault = self._fault(params)
        if fault is Fault.ENDS and pooled.loading_to:
            raise EngineDownError("assert num_external_tokens == 0")
        if fault is Fault.HANGS:
            return
        if not pooled.loading_to:
            self.settle(request)
            self.unread.append(params)
            return
        fresh = 0
        for group, table in zip(self._pool.layout.groups, pooled.tables, strict=True):
            fresh += len(exchanged(group, table[pooled.num_cached[group.group_idx] :]))
        self.begun.append(Load(request, params, pooled.loading_to, fresh))

    def can_read(self, params: TransferParams) -> bool:
        """Whether blocks wait elsewhere, and all is said that reading them takes."""
        return params.do_remote_prefill and self._fault(params) is None

    def _fault(self, params: TransferParams) -> Fault | None:
        """What is wrong with parameters that ask for a load."""
        if not params.remote_block_ids:
            return Fault.ENDS
        needed = params.remote_engine_id, params.remote_request_id, params.remote_host, params.remote_port
        return Fault.HANGS if None in needed else None

    def settle(self, request: SimRequest) -> None:
        """This request's parameters are used up."""
        self._awaited.pop(request, None)
        request.transfer = None

    def left(self, request: SimRequest, *, loading: bool) -> None:
        """A request was given up before it had its prompt: if nothing is on its way, let go what waits."""
        params = request.transfer
        self.settle(request)
        if params is None:
            return
        if loading and params.do_remote_prefill and self._fault(params) is Fault.HANGS:
            self._broken = True
        elif not loading and self.can_read(params):
            self.unread.append(params)

    def check(self) -> None:
        """Raise ``EngineDownError`` once a request that hung has been given up."""
        if self._broken:
            raise EngineDownError("KeyError: a request that was never received is finished")

    def awaited(self) -> dict[tuple[str, int], list[str]]:
        """Whom to tell that which requests are still wanted."""
        told: dict[tuple[str, int], list[str]] = {}
        for params in self._awaited.values():
            told.setdefault(params.address, []).append(params.remote_request_id or "")
        return told

    # prefill

    def finished(self, request: SimRequest, pooled: PoolRequest, reason: str) -> None:
        """A request is complete; if its blocks are wanted elsewhere, keep them and say where."""
        if request.transfer is None or not request.transfer.do_remote_decode:
            return
        request_id = f"{request.request_id}-{uuid.uuid4().hex[:8]}"  # clients may use an id twice
        self._keep(request_id, pooled, request.prompt)
        groups = self._pool.layout.groups
        request.handed = handed_over(
            request_id=request_id,
            engine_id=self.engine_id,
            address=self.address,
            block_ids=[exchanged(group, table) for group, table in zip(groups, pooled.tables, strict=True)],
            num_tokens=len(request.prompt),
            cached_tokens=request.cached_tokens or 0,
            release=self.release,
        )

    def _keep(self, request_id: str, pooled: PoolRequest, prompt: list[int]) -> None:
        blocks = [block for table in pooled.tables for block in table if block]
        self._pool.pin(blocks)
        self._kept[request_id] = _Kept(blocks, self._pool.writes(blocks), array("I", prompt))
        self._deadlines_s[request_id] = self._clock() + self.lease_s

    def renew(self, request_ids: list[str]) -> None:
        """Heartbeats: these are wanted for two thirds of a lease from now at least."""
        until_s = self._clock() + self.lease_s * 2 / 3
        for request_id in request_ids:
            if request_id in self._deadlines_s:
                self._deadlines_s[request_id] = max(self._deadlines_s[request_id], until_s)

    def read(self, request_id: str, end: int = 0, digest: int = 0) -> bool:
        """A request's blocks have been read, or (``end`` 0) are not wanted: let them go. Whether they still
        held what was computed for it, and that was the KV of a prompt of this digest up to token ``end``."""
        kept = self._kept.pop(request_id, None)
        if kept is not None:
            self._let_go(request_id, kept)
            return not end or digest_of(kept.prompt, end) == digest
        self.stats.notifications_after_expiry += 1
        gone = self._gone.get(request_id)
        if gone is None or self._pool.writes(gone.blocks) != gone.writes:
            return False
        return not end or digest_of(gone.prompt, end) == digest

    def expire(self) -> None:
        """Let go what nobody read within its lease."""
        now = self._clock()
        for request_id in [one for one, deadline_s in self._deadlines_s.items() if deadline_s <= now]:
            self._let_go(request_id, self._kept.pop(request_id))
            self.stats.kv_expired_reqs += 1

    def next_deadline_s(self) -> float | None:
        """When the next lease ends."""
        return min(self._deadlines_s.values(), default=None)

    def _let_go(self, request_id: str, kept: _Kept) -> None:
        del self._deadlines_s[request_id]
        self._pool.unpin(kept.blocks)
        self._gone[request_id] = kept
        while len(self._gone) > _REMEMBERED_MAX:
            self._gone.popitem(last=False)


# The side channel between simulated engines: loads, notifications and heartbeats over real TCP.
#
# A decode engine opens a connection for each exchange, sends one message and reads one reply; a message is
# its length (four bytes) and msgpack. A load is a handshake, as long a time as its blocks take, and the
# notification that they have been read. Everything is bounded: messages, connections, the time of an
# exchange.


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
        await exchange(params.address, TransferHandshake(params.remote_engine_id or "", self._common))
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
            case TransferHandshake(engine_id, common):
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
