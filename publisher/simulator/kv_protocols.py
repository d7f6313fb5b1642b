"""MooncakeConnector and OffloadingConnector of one simulated engine.

Both follow the source of vLLM 0.32; neither was compared with real engines. MooncakeConnector differs from
NIXL in these points: A prefill engine keeps blocks under the transfer's name, only for answers with finish
reason ``length``, and adds nothing to its answer. A decode engine gets engine addresses from the bootstrap
server. A request for a transfer that does not exist yet, or for an engine that is gone, waits until it exists
or times out; meanwhile it occupies one of a few senders, and cannot be cancelled. Released blocks are never
read, so there are no wrong answers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from kvatlas.publisher.block_pool import HybridBlockPool, PoolRequest, Reach
from kvatlas.publisher.pool.host_tier import HeldKey, HostTier
from kvatlas.publisher.simulator.kv_connector import (
    EXCHANGE_S,
    Address,
    KvConnector,
    Load,
    RefusedError,
    TransferLink,
    exchange,
    log,
)
from kvatlas.publisher.simulator.kv_messages import (
    Fault,
    Fetch,
    FetchRequest,
    Json,
    Message,
    Probe,
    Reply,
    TransferParams,
    TransferStats,
)
from kvatlas.publisher.simulator.request import SimRequest

_PAGE_BYTES_MAX = 1 << 16
LOOKUP_S = 5.0
"""vLLM's ``_LOOKUP_PENDING_TIMEOUT_S``."""
LOAD_S = 30.0
"""vLLM's ``_LOAD_TIMEOUT_S``."""


class _Entry(msgspec.Struct):
    engine_id: str
    worker_addr: dict[str, dict[str, str]]


class MooncakeConnector(KvConnector):
    """Keeps blocks under transfer names instead of request ids."""

    @property
    def metrics(self) -> TransferStats | None:
        # Mooncake's own counters are not simulated, and it has none of NIXL's.
        return None

    def finished(self, request: SimRequest, pooled: PoolRequest, reason: str) -> None:
        params = request.transfer
        if params is not None and params.do_remote_decode and params.transfer_id and reason == "length":
            self._keep(params.transfer_id, pooled, request.prompt)

    def aborted(self, request: SimRequest, *, loading: bool) -> None:
        params = request.transfer
        self.settle(request)
        if params is not None and not loading and self.can_read(params):
            self.unread.append(params)

    def _fault(self, params: TransferParams) -> Fault | None:
        needed = params.remote_engine_id, params.remote_bootstrap_addr, params.transfer_id
        return Fault.HANGS if None in needed else None


class MooncakeLink(TransferLink):
    """The side channel, with a bootstrap server if ``bootstrap_port`` is given."""

    senders = 20
    """Loads served at a time, including waiting ones: twice ``num_workers`` of vLLM."""

    def __init__(self, connector: KvConnector, *, bootstrap_port: int | None, **options: object) -> None:
        super().__init__(connector, **options)  # type: ignore[arg-type]
        self._connector = connector
        self._bootstrap_port = bootstrap_port
        self._bootstrap: asyncio.Server | None = None
        self._known: dict[str, Address] = {}
        self._news = asyncio.Event()
        self._senders = asyncio.Semaphore(self.senders)

    async def listen(self, host: str, port: int, advertised: str) -> None:
        await super().listen(host, port, advertised)
        if self._bootstrap_port is not None:
            self._bootstrap = await asyncio.start_server(self._serve_bootstrap, host, self._bootstrap_port)

    @property
    def bootstrap_port(self) -> int:
        """Port of the bootstrap server; 0 without one."""
        number: int = self._bootstrap.sockets[0].getsockname()[1] if self._bootstrap else 0
        return number

    @property
    def busy(self) -> bool:
        """Whether all senders are taken."""
        return self._senders.locked()

    def close(self) -> None:
        super().close()
        if self._bootstrap is not None:
            self._bootstrap.close()

    def kick(self) -> None:
        super().kick()
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _await_source(self, params: TransferParams) -> tuple[Address, str]:
        name, engine_id = params.transfer_id or "", params.remote_engine_id or ""
        address = await self._find(engine_id, params.remote_bootstrap_addr or "")
        wait_s = self._connector.lease_s + EXCHANGE_S
        try:
            await exchange(address, FetchRequest(name, self._common), wait_s)
        except (ConnectionError, EOFError):
            # ZeroMQ keeps reconnecting, and vLLM has no way to stop it.
            await asyncio.sleep(self._connector.lease_s)
            raise
        return address, name

    async def _release_target(self, params: TransferParams) -> tuple[Address, str]:
        return await self._await_source(params)

    async def _find(self, engine_id: str, bootstrap: str) -> Address:
        """Side-channel address of an engine, from the bootstrap server. Raises ``OSError``."""
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
            async with self._senders, asyncio.timeout(self._connector.lease_s):
                while not self._connector.keeps(message.transfer_id):
                    await self._news.wait()
        except TimeoutError:
            return Reply(error="Timeout waiting for P side ready.")
        return Reply()

    async def _serve_bootstrap(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(EXCHANGE_S):
                await reader.readuntil(b"\r\n\r\n")
                host, port = self._connector.address
                entry = _Entry(self._connector.engine_id, {"0": {"0": f"tcp://{host}:{port}"}})
                body = msgspec.json.encode({"0": entry})
                head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n"
                writer.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
                await writer.drain()
        except (OSError, EOFError, ValueError):
            # The client is gone or does not speak HTTP.
            pass
        finally:
            writer.close()


async def _query(bootstrap: str) -> dict[str, Address]:
    """Side-channel addresses by engine id. Raises ``OSError``."""
    url = urlsplit(bootstrap)
    async with asyncio.timeout(EXCHANGE_S):
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        try:
            writer.write(b"GET /query HTTP/1.0\r\n\r\n")
            page = b""
            while len(page) < _PAGE_BYTES_MAX and (piece := await reader.read(_PAGE_BYTES_MAX - len(page))):
                page += piece  # it may come in several segments
        finally:
            writer.close()
    try:
        entries = msgspec.json.decode(page.partition(b"\r\n\r\n")[2], type=dict[str, _Entry])
        workers = {entry.engine_id: urlsplit(entry.worker_addr["0"]["0"]) for entry in entries.values()}
    except (msgspec.MsgspecError, KeyError) as error:
        raise OSError(f"{bootstrap}: {error}") from None
    return {engine_id: (worker.hostname or "", worker.port or 0) for engine_id, worker in workers.items()}


class Inquiry(NamedTuple):
    """A probe to be sent for a request."""

    request: SimRequest
    address: Address
    keys: list[HeldKey]


class OffloadingConnector(KvConnector):
    """OffloadingConnector with a ``p2p`` tier: keeps blocks under a name that the router chooses.

    A prefill engine keeps computed blocks until they are fetched or a timeout ends, and refuses later
    requests. A decode engine fetches whole blocks and computes the rest. Incomplete parameters have no
    effect.

    A request with ``remote_kv_source`` is set aside when its turn comes, until that engine has said which
    blocks its host memory ``tier`` holds; others go on. It then loads what both host memories reach together
    (vllm/v1/kv_offload/tiering/p2p/manager.py ``lookup``, 0.32), and computes what does not come.
    """

    def __init__(self, pool: HybridBlockPool, *, tier: HostTier | None, **options: Any) -> None:
        super().__init__(pool, **options)
        self.tier = tier
        self.inquiries: deque[Inquiry] = deque()

    def must_probe(self, request: SimRequest, pooled: PoolRequest) -> bool:
        params, tier = request.transfer, self.tier
        if request.found is not None or params is None or tier is None or params.remote_prefiller:
            return False
        named = _named(params.remote_kv_source)
        keys = tier.missing_keys(pooled) if named is not None else []
        if named is None or not keys:
            return False
        self.inquiries.append(Inquiry(request, named[0], keys))
        return True

    def holds(self, keys: Sequence[HeldKey]) -> list[bool]:
        """Which of these blocks the host memory holds."""
        return [self.tier is not None and key in self.tier for key in keys]

    def reaches(self, request: SimRequest) -> Reach | None:
        found, tier = request.found, self.tier
        if found is None or tier is None:
            return super().reaches(request)
        return (lambda pooled, hit: tier.reach(pooled, hit, found)) if found else None

    @property
    def metrics(self) -> TransferStats | None:
        # Its own counters are not simulated.
        return None

    def arrived(self, request: SimRequest) -> None:
        # Unlike with NIXL, a prefill computes the whole prompt.
        params = request.transfer
        if params is not None:
            self._report(request, params)
            params.do_remote_prefill = _source(params) is not None

    def reach(self, request: SimRequest) -> int:
        # Only whole blocks before the last token are fetched.
        unit = self.pool.layout.alignment
        return (super().reach(request) - 1) // unit * unit if super().reach(request) else 0

    def begin(self, request: SimRequest, pooled: PoolRequest) -> None:
        # A request with a complete hit sends no notification.
        params = request.transfer
        if request.found and self.tier is not None and params is not None:
            if not pooled.loading_to:
                self.settle(request)
            else:
                keys = self.tier.load_keys(pooled, pooled.num_computed, pooled.loading_to)
                fetched = sum(key in request.found for key in keys)
                self.begun.append(Load(request, params, pooled.loading_to, fetched))
            return
        super().begin(request, pooled)
        self.unread.clear()

    def settle(self, request: SimRequest) -> None:
        super().settle(request)
        if request.found is not None:
            request.found = frozenset()

    def finished(self, request: SimRequest, pooled: PoolRequest, reason: str) -> None:
        params = None if request.transfer is None else request.transfer.remote_decoder
        if params and params.get("kv_request_id"):
            self._keep(str(params["kv_request_id"]), pooled, request.prompt)

    def aborted(self, request: SimRequest, *, loading: bool) -> None:
        # No notification is sent.
        self.settle(request)

    def _fault(self, params: TransferParams) -> Fault | None:
        return None


class OffloadingLink(MooncakeLink):
    """The side channel of OffloadingConnector."""

    senders = 128
    """vLLM's ``VLLM_P2P_MAX_PEERS``."""

    def __init__(
        self,
        connector: OffloadingConnector,
        *,
        probed: Callable[[SimRequest, frozenset[HeldKey]], None],
        working: Callable[[], bool],
        handshake_s: float,
        **options: Any,
    ) -> None:
        """Make the link. ``probed`` is called with each answer to a probe; ``working``: whether the engine
        has steps to run, between which it answers."""
        super().__init__(connector, bootstrap_port=None, **options)
        self._offloading = connector
        self._probed = probed
        self._working = working
        self._handshake_s = handshake_s
        self._sending = asyncio.Lock()

    def kick(self) -> None:
        super().kick()
        inquiries = self._offloading.inquiries
        while inquiries:
            self._jobs.put_nowait(self._inquire(inquiries.popleft()))

    async def _inquire(self, inquiry: Inquiry) -> None:
        found: frozenset[HeldKey] = frozenset()
        try:
            reply = await self._handshaken(inquiry.address, Probe(self._common, inquiry.keys))
            found = frozenset(key for key, hit in zip(inquiry.keys, reply.hits, strict=True) if hit)
        except (OSError, EOFError, ValueError, msgspec.MsgspecError) as error:
            log.warning("probe_failed", source=inquiry.address, error=str(error) or type(error).__name__)
        self._probed(inquiry.request, found)

    async def _handshaken(self, address: Address, message: Message) -> Reply:
        """Send one message to an engine that may be gone: ZeroMQ does not say so, and vLLM waits for the
        handshake (``VLLM_P2P_HANDSHAKE_TIMEOUT_S``). Raises like ``exchange``."""
        ends_s = asyncio.get_running_loop().time() + self._handshake_s
        try:
            return await exchange(address, message, LOOKUP_S)
        except RefusedError:
            raise  # incompatible: the connection is closed at once
        except (OSError, EOFError):
            await asyncio.sleep(max(0.0, ends_s - asyncio.get_running_loop().time()))
            raise

    async def _fetch(self, load: Load) -> Reply:
        named = _named(load.params.remote_kv_source)
        if load.request.found is None or named is None:
            return await super()._fetch(load)
        return await exchange(named[0], Fetch(load.num_blocks), LOAD_S)

    async def _await_source(self, params: TransferParams) -> tuple[Address, str]:
        found = _source(params)
        if found is None:
            raise OSError("no address to fetch from")
        address, name = found
        await exchange(address, FetchRequest(name, self._common), self._connector.lease_s + EXCHANGE_S)
        return address, name

    async def _answer(self, message: Message) -> Reply:
        match message:
            case FetchRequest(transfer_id, _) if self._connector.released(transfer_id):
                return Reply(error="these blocks have been dropped")
            case Probe(common, keys):
                if common != self._common:
                    return Reply(error=f"incompatible: {self._common}")
                # vLLM's scheduler answers peers once per step (``serve_external_requests``), so a busy source
                # answers late.
                if self._working():
                    await self._news.wait()
                return Reply(hits=self._offloading.holds(keys))
            case Fetch(num_blocks):
                async with self._sending:
                    await asyncio.sleep(num_blocks * self._s_per_block)
                return Reply()
            case _:
                return await super()._answer(message)


def _source(params: TransferParams) -> tuple[Address, str] | None:
    return _named(params.remote_prefiller)


def _named(role: Json | None) -> tuple[Address, str] | None:
    """Address of the other engine, and the name of the transfer; None if incomplete."""
    named = role or {}
    host, port, name = (named.get(key) for key in ("remote_host", "remote_port", "kv_request_id"))
    return ((str(host), int(port)), str(name)) if host and port and name else None
