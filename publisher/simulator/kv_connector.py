"""The KV connector of one simulated engine: blocks kept for other engines, loads from them, the side channel.

A prefill engine keeps the blocks of a finished request pinned in the pool under a lease. Heartbeats extend
the lease; a read notification or its expiry ends it. After that the pool may reuse the blocks, and a late
reader gets their current content without an error, as with RDMA. ``read`` returns whether that content is
still the computed one.

A decode engine knows how much of a prompt comes from elsewhere. Loads to run wait in ``begun`` for the link,
transfers to release without a load in ``unread``.

Invariants: a block is pinned once per kept request; each request's parameters are used once.
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

from kvatlas.publisher.block_pool import HybridBlockPool, PoolRequest, Reach
from kvatlas.publisher.groups import Family
from kvatlas.publisher.simulator.kv_messages import (
    Fault,
    Heartbeat,
    Message,
    Read,
    Reply,
    TransferHandshake,
    TransferParams,
    TransferStats,
    prefill_params,
    transferred_blocks,
)
from kvatlas.publisher.simulator.request import SimRequest

_REPORTS_REMOTE_HIT = (0, 31)
# Released requests remembered for late readers; blocks of older ones count as reused.
_REMEMBERED_MAX = 4096


class EngineDownError(RuntimeError):
    """An error that ends a real engine's process: parameters that no prefill engine sends."""


class Load(NamedTuple):
    """A running load of one prompt up to token ``end``, in ``num_blocks`` blocks of all groups."""

    request: SimRequest
    params: TransferParams
    end: int
    num_blocks: int


class _Kept(NamedTuple):
    blocks: list[int]
    writes: list[int]
    """Write count of each block when it was kept."""
    prompt: array[int]
    """The prompt that the blocks were computed for."""


def prompt_digest(prompt: Sequence[int], end: int) -> int:
    return xxhash.xxh3_64_intdigest(array("I", prompt[:end]).tobytes())


class KvConnector:
    """One engine's NixlConnector; ``address`` is that of its side channel."""

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
        self.pool = pool
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
        """Counters shown by ``GET /metrics``; None for connectors without simulated metrics."""
        return self.stats

    def keeps(self, request_id: str) -> bool:
        """Whether this request's blocks are kept."""
        return request_id in self._kept

    def released(self, request_id: str) -> bool:
        """Whether this request's blocks were kept and have been released."""
        return request_id in self._gone

    # decode

    def arrived(self, request: SimRequest) -> None:
        # A prefill for a model with Mamba layers stops one token early, so that the state excludes the last
        # token.
        params = request.transfer
        if params is None:
            return
        self._report(request, params)
        if params.do_remote_decode and len(request.prompt) > self._backoff:
            request.prompt = request.prompt[: len(request.prompt) - self._backoff]
        elif params.tp_size is not None and self.can_read(params):
            # vLLM needs tp_size to send heartbeats.
            self._awaited[request] = params

    def _report(self, request: SimRequest, params: TransferParams) -> None:
        """Report the other engine's hit (vllm/v1/engine/output_processor.py, from 0.31 on)."""
        if params.do_remote_prefill and self.release >= _REPORTS_REMOTE_HIT:
            request.reported_hit = params.remote_prefill_cached_tokens

    def must_probe(self, request: SimRequest, pooled: PoolRequest) -> bool:
        """Whether the request waits for an answer of another engine, which is asked now; then ``found``
        has the answer."""
        return False

    def reaches(self, request: SimRequest) -> Reach | None:
        """How far the request is loaded from another engine, given its hit; None: it is not."""
        reach = self.reach(request)
        return (lambda _, hit: max(hit, reach)) if reach else None

    def reach(self, request: SimRequest) -> int:
        """Tokens of its prompt that a request loads from another engine; 0 for none."""
        if request.transfer is None or not request.transfer.do_remote_prefill:
            return 0
        num_tokens = len(request.prompt)
        return num_tokens - self._backoff if num_tokens > self._backoff else num_tokens

    def begin(self, request: SimRequest, pooled: PoolRequest) -> None:
        """Begin the load of a request that the pool has started, unless its hit is complete.

        Raises ``EngineDownError`` for parameters that make a real engine fail.
        """
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
        for group, table in zip(self.pool.layout.groups, pooled.tables, strict=True):
            fresh += len(transferred_blocks(group, table[pooled.num_cached[group.group_idx] :]))
        self.begun.append(Load(request, params, pooled.loading_to, fresh))

    def can_read(self, params: TransferParams) -> bool:
        """Whether blocks are kept elsewhere and the parameters are complete."""
        return params.do_remote_prefill and self._fault(params) is None

    def _fault(self, params: TransferParams) -> Fault | None:
        """Fault of parameters that ask for a load."""
        if not params.remote_block_ids:
            return Fault.ENDS
        needed = params.remote_engine_id, params.remote_request_id, params.remote_host, params.remote_port
        return Fault.HANGS if None in needed else None

    def settle(self, request: SimRequest) -> None:
        """Mark this request's parameters as used."""
        self._awaited.pop(request, None)
        request.transfer = None

    def aborted(self, request: SimRequest, *, loading: bool) -> None:
        """Handle a request aborted before its load ended: without a running load, release the remote
        blocks."""
        params = request.transfer
        self.settle(request)
        if params is None:
            return
        if loading and params.do_remote_prefill and self._fault(params) is Fault.HANGS:
            self._broken = True
        elif not loading and self.can_read(params):
            self.unread.append(params)

    def check(self) -> None:
        """Raise ``EngineDownError`` after a hanging request was aborted."""
        if self._broken:
            raise EngineDownError("KeyError: a request that was never received is finished")

    def awaited(self) -> dict[tuple[str, int], list[str]]:
        """Request ids to send in heartbeats, by address of the prefill engine."""
        by_address: dict[tuple[str, int], list[str]] = {}
        for params in self._awaited.values():
            by_address.setdefault(params.address, []).append(params.remote_request_id or "")
        return by_address

    # prefill

    def finished(self, request: SimRequest, pooled: PoolRequest, reason: str) -> None:
        """Complete a request; if another engine wants its blocks, keep them and put their address in the
        answer."""
        if request.transfer is None or not request.transfer.do_remote_decode:
            return
        request_id = f"{request.request_id}-{uuid.uuid4().hex[:8]}"  # clients may use an id twice
        self._keep(request_id, pooled, request.prompt)
        groups = self.pool.layout.groups
        request.handed = prefill_params(
            request_id=request_id,
            engine_id=self.engine_id,
            address=self.address,
            block_ids=[
                transferred_blocks(group, table) for group, table in zip(groups, pooled.tables, strict=True)
            ],
            num_tokens=len(request.prompt),
            cached_tokens=request.cached_tokens or 0,
            release=self.release,
        )

    def _keep(self, request_id: str, pooled: PoolRequest, prompt: list[int]) -> None:
        blocks = [block for table in pooled.tables for block in table if block]
        self.pool.pin(blocks)
        self._kept[request_id] = _Kept(blocks, self.pool.writes(blocks), array("I", prompt))
        self._deadlines_s[request_id] = self._clock() + self.lease_s

    def renew(self, request_ids: list[str]) -> None:
        """Handle a heartbeat: extend these leases to at least two thirds of a lease from now."""
        until_s = self._clock() + self.lease_s * 2 / 3
        for request_id in request_ids:
            if request_id in self._deadlines_s:
                self._deadlines_s[request_id] = max(self._deadlines_s[request_id], until_s)

    def read(self, request_id: str, end: int = 0, digest: int = 0) -> bool:
        """Release a request's blocks, which were read or (``end`` 0) are not wanted.

        Returns whether they still held the computed KV, of a prompt with this digest up to token ``end``.
        """
        kept = self._kept.pop(request_id, None)
        if kept is not None:
            self._release(request_id, kept)
            return not end or prompt_digest(kept.prompt, end) == digest
        self.stats.notifications_after_expiry += 1
        gone = self._gone.get(request_id)
        if gone is None or self.pool.writes(gone.blocks) != gone.writes:
            return False
        return not end or prompt_digest(gone.prompt, end) == digest

    def expire(self) -> None:
        """Release the blocks of expired leases."""
        now = self._clock()
        for request_id in [one for one, deadline_s in self._deadlines_s.items() if deadline_s <= now]:
            self._release(request_id, self._kept.pop(request_id))
            self.stats.kv_expired_reqs += 1

    def next_deadline_s(self) -> float | None:
        """Time at which the next lease ends."""
        return min(self._deadlines_s.values(), default=None)

    def _release(self, request_id: str, kept: _Kept) -> None:
        del self._deadlines_s[request_id]
        self.pool.unpin(kept.blocks)
        self._gone[request_id] = kept
        while len(self._gone) > _REMEMBERED_MAX:
            self._gone.popitem(last=False)


Address = tuple[str, int]
_MESSAGE_BYTES_MAX = 1 << 20
_CONNECTIONS_MAX = 256
# Timeout of an exchange, as the receive timeout of vLLM's handshake.
EXCHANGE_S = 5.0
_HEARTBEATS_PER_LEASE = 6
_PREFIX_BYTES = 4

log = structlog.get_logger()


class TransferLink:
    """One engine's end of the side channel.

    ``common`` must be equal on two engines that exchange blocks. One block of one group takes ``s_per_block``
    seconds and has ``block_bytes`` bytes. ``loaded`` is called for each completed load, with whether its
    content was intact; ``failed`` for each load that failed.

    The side channel between simulated engines: loads, notifications and heartbeats over real TCP.

    A decode engine opens a connection for each exchange, sends one message and reads one reply. A message is
    its length (four bytes) and msgpack. A load is a handshake, a delay for its blocks, and a read
    notification. Message size, connections and the time of an exchange are bounded.
    """

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
        """Move blocks, renew leases and expire them; runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._heartbeats())
            tasks.create_task(self._leases())
            while True:
                tasks.create_task(await self._jobs.get())

    def kick(self) -> None:
        """Process changes of the connector's state."""
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
            reply = await self._fetch(load)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            stats.failed_transfers += 1
            log.warning("transfer_failed", source=params.source, error=str(error) or type(error).__name__)
            self._failed(load.request)
            return
        stats.transferred(time.monotonic() - begun_s, load.num_blocks * self._block_bytes)
        self._loaded(load, reply.intact)

    async def _fetch(self, load: Load) -> Reply:
        """Move the blocks of a load. Raises like ``exchange``."""
        address, name = await self._await_source(load.params)
        await asyncio.sleep(load.num_blocks * self._s_per_block)
        return await exchange(address, Read(name, load.end, prompt_digest(load.request.prompt, load.end)))

    async def _notify(self, params: TransferParams) -> None:
        try:
            address, name = await self._release_target(params)
            await exchange(address, Read(name))
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            self._connector.stats.failed_notifications += 1
            self._connector.stats.failed_transfers += 1
            log.warning("notification_failed", source=params.source, error=str(error))

    async def _await_source(self, params: TransferParams) -> tuple[Address, str]:
        """Wait until the blocks can be read; returns their address and name. Raises like ``exchange``."""
        await exchange(params.address, TransferHandshake(params.remote_engine_id or "", self._common))
        return await self._release_target(params)

    async def _release_target(self, params: TransferParams) -> tuple[Address, str]:
        """Address and name for releasing blocks without reading them."""
        return params.address, params.remote_request_id or ""

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._connector.lease_s / _HEARTBEATS_PER_LEASE)
            for address, request_ids in self._connector.awaited().items():
                try:
                    await exchange(address, Heartbeat(request_ids))
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
                if end and not (connector.keeps(request_id) or connector.released(request_id)):
                    # Restarted during the transfer: a real one breaks off, and nothing of it is read.
                    return Reply(error=f"unknown request {request_id}")
                return Reply(intact=connector.read(request_id, end, digest))
            case Heartbeat(request_ids):
                connector.renew(request_ids)
                return Reply()
            case _:
                return Reply(error="this engine has no Mooncake")


async def exchange(address: Address, message: Message, timeout_s: float = EXCHANGE_S) -> Reply:
    """Send one message and receive its reply.

    Raises ``OSError`` (also on timeout or refusal), ``EOFError`` and ``msgspec.MsgspecError``.
    """
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(*address)
        try:
            await _send(writer, message)
            reply = msgspec.msgpack.decode(await _receive(reader), type=Reply)
        finally:
            writer.close()
    if reply.error:
        raise RefusedError(reply.error)
    return reply


class RefusedError(ConnectionRefusedError):
    """The other engine is there, and refuses."""


async def _send(writer: asyncio.StreamWriter, message: Message | Reply) -> None:
    payload = msgspec.msgpack.encode(message)
    writer.write(len(payload).to_bytes(_PREFIX_BYTES, "big") + payload)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await reader.readexactly(_PREFIX_BYTES), "big")
    if size > _MESSAGE_BYTES_MAX:
        raise ConnectionAbortedError(f"a message of {size} bytes, at most {_MESSAGE_BYTES_MAX}")
    return await reader.readexactly(size)
