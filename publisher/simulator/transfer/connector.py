"""The connector's books in one engine: blocks kept for others, and loads from others. Pure, given the time.

As a prefill engine it keeps the blocks of a finished request pinned in the pool under a lease. Heartbeats
prolong it, a notification that they have been read ends it, and so does its end. After that the blocks are
the pool's, and a reader learns nothing: it gets what lies there by then, as RDMA does. ``read`` tells
whether that is still what was computed.

As a decode engine it says how far a request's prompt comes from elsewhere; what it begins waits in ``begun``
for the shell (``link.py``), what is only to be let go in ``unread``.
Always true: a block is pinned once per request that is kept; each request's parameters are used once.
"""

from __future__ import annotations

import uuid
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import xxhash

from publisher.block_pool import HybridBlockPool, PoolRequest
from publisher.groups import Family
from publisher.simulator.request import SimRequest
from publisher.simulator.transfer.params import Fault, TransferParams, exchanged, handed_over
from publisher.simulator.transfer.stats import TransferStats

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
