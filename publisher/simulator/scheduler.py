"""The engine's scheduler: continuous batching, one iteration at a time, on a hybrid block pool.

Each step gives running requests their next tokens (first come first served, within a token budget), then
admits waiting ones, as vLLM 0.32 does. A prompt longer than what is left of the budget is computed in
chunks over several steps. Where the pool has no block left, the newest running request gives up its blocks
and goes back to the front of the queue.

    step duration = prefill_s_per_token * (prompt tokens computed in the step, cached ones cost nothing)
                  + load_s_per_token    * (tokens that requests admitted in the step load from host memory)
                  + decode_s_per_token  * (1 if any request decodes in the step else 0)

So decoding is shared by the batch, and a long prefill delays the tokens of everybody in its step.

Pure: no sockets, no sleeping, the clock is given. The caller alternates ``begin_step`` and ``end_step``,
with the step's duration in between, and may add or abort requests at any time; one thread only.
With a connector (``transfer/connector.py``) a request may first be loaded from another engine: it holds the
blocks of its prompt meanwhile, others go on, and it runs once ``loaded`` was called.
Always true: a request is in exactly one of ``waiting``, ``loading``, ``running``, or finished; those that
wait hold blocks only if they have been loaded. One that is given up while it is loaded keeps its blocks until
the load has ended, well or not: as in vLLM, since until then they may be written to.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable

import msgspec

from publisher.block_pool import HybridBlockPool, PoolRequest
from publisher.events import Event
from publisher.pool.host_tier import HostTier
from publisher.simulator.kv_connector import KvConnector
from publisher.simulator.request import EngineStats, FinishReason, Gauges, Sampler, SimRequest


def _rank(request: SimRequest) -> tuple[int, float]:
    """Place in the order of priorities (vllm/v1/request.py ``Request.__lt__``, 0.32)."""
    return request.priority, request.arrival_s


def _turn(waiting: tuple[SimRequest, PoolRequest]) -> tuple[int, float]:
    return _rank(waiting[0])


class StepCosts(msgspec.Struct, frozen=True):
    """Seconds of model time; see the module head for the formula."""

    prefill_s_per_token: float
    decode_s_per_token: float
    load_s_per_token: float = 0.0


class Step(msgspec.Struct, frozen=True):
    """What one iteration computes, in schedule order, and how long it takes."""

    requests: tuple[SimRequest, ...]
    duration_s: float


class Output(msgspec.Struct, frozen=True):
    """One new token of one request; ``finish_reason`` is set on its last."""

    request: SimRequest
    token_id: int
    finish_reason: FinishReason | None


class _Plan:
    """A step being filled: what is left of the token budget, and what it holds so far."""

    def __init__(self, *, budget: int) -> None:
        self.budget = budget
        self.requests: list[SimRequest] = []
        self.prefill_tokens = 0
        self.loaded_tokens = 0
        self.decodes = False

    def take(self, request: SimRequest, num_tokens: int, end: int, *, is_prefill: bool) -> None:
        """``num_tokens`` up to the prompt's token ``end``."""
        self.requests.append(request)
        self.budget -= num_tokens
        loaded = max(0, min(request.loaded_to, end) - (end - num_tokens))
        self.prefill_tokens += num_tokens - loaded if is_prefill else 0
        self.decodes |= not is_prefill


class Scheduler:
    """Requests in, steps out."""

    def __init__(
        self,
        pool: HybridBlockPool,
        *,
        costs: StepCosts,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        clock: Callable[[], float],
        tier: HostTier | None = None,
        connector: KvConnector | None = None,
        wrong_answer: Callable[[], Sampler] | None = None,
        by_priority: bool = False,
    ) -> None:
        """``wrong_answer``: what a request samples whose blocks hold another prompt's KV. ``by_priority``:
        requests wait and are preempted by priority, then by arrival."""
        self._by_priority = by_priority
        self.stats = EngineStats()
        self._wrong_answer = wrong_answer
        self._foreign: dict[int, int] = {}
        """Blocks that were loaded with another content than their hashes say, and their count of writes."""
        self.connector = connector
        self._tier = tier
        self._pool = pool
        self._costs = costs
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        self._clock = clock
        self._waiting: deque[tuple[SimRequest, PoolRequest]] = deque()
        self._loading: dict[SimRequest, PoolRequest] = {}
        self._left: dict[SimRequest, PoolRequest] = {}
        self._running: dict[SimRequest, PoolRequest] = {}  # in the order of admission

    @property
    def has_work(self) -> bool:
        """Whether any request waits for its turn or runs."""
        return bool(self._waiting or self._running)

    def gauges(self) -> Gauges:
        """Queue lengths and pool usage now."""
        return Gauges(len(self._running), len(self._waiting) + len(self._loading), self._pool.usage)

    def add(self, request: SimRequest) -> None:
        """Queue a new request."""
        request.arrival_s = self._clock()
        if self.connector is None:
            request.transfer = None
        else:
            self.connector.arrived(request)
        self._enqueue(request, self._pool.request(request.prompt, request.extras), again=False)

    def abort(self, request: SimRequest) -> None:
        """Drop a request and free its blocks; no effect on one that is finished."""
        if request.finish_reason is not None:
            return
        if request in self._running:
            self._finish(request, "abort")
        else:
            self._drop(request, "abort")

    def loaded(self, request: SimRequest, end: int, *, intact: bool) -> None:
        """Its prompt is here up to token ``end``, or (not ``intact``) what lay there instead, which is cached
        under the prompt's hashes as well (vllm/v1/core/sched/scheduler.py ``_update_waiting_for_remote_kv``,
        0.32). Nothing happens where the request was given up meanwhile."""
        self._load_ended(request)
        pooled = self._loading.pop(request, None)
        if pooled is None or self.connector is None or request.transfer is None:
            return
        if not intact:
            tables = zip(pooled.tables, pooled.num_cached, strict=True)
            loaded = [block for table, cached in tables for block in table[cached:] if block]
            self._foreign |= zip(loaded, self._pool.writes(loaded), strict=True)
            self._spoil(request)
        if request.reported_hit is None:
            request.cached_tokens = end
        self.connector.settle(request)
        self._pool.loaded(pooled)
        self._enqueue(request, pooled)

    def load_failed(self, request: SimRequest, *, recompute: bool) -> None:
        """Its prompt will not come: compute it here, or end it with an error."""
        self._load_ended(request)
        pooled = self._loading.get(request)
        if pooled is None or self.connector is None:
            return
        self.connector.settle(request)
        if not recompute:
            self._drop(request, "error")
            self._load_ended(request)
            return
        del self._loading[request]
        self._pool.preempt(pooled)
        self._enqueue(request, pooled)

    def begin_step(self) -> Step:
        """Choose and allocate what the next iteration computes; may be empty right after a preemption."""
        plan = _Plan(budget=self._budget)
        if self.connector is not None:
            self.connector.check()
        if self._schedule_running(plan):
            self._schedule_waiting(plan)
        costs = self._costs
        prefill_s = plan.prefill_tokens * costs.prefill_s_per_token
        load_s = plan.loaded_tokens * costs.load_s_per_token
        decode_s = costs.decode_s_per_token if plan.decodes else 0.0
        return Step(tuple(plan.requests), prefill_s + load_s + decode_s)

    def end_step(self, step: Step) -> list[Output]:
        """The tokens the iteration produced; requests aborted in the meantime are left out."""
        self._pool.end_step()
        outputs = []
        for request in step.requests:
            pooled = self._running.get(request)
            if pooled is None or pooled.num_computed < pooled.num_tokens:
                continue
            token_id = request.sampler.token(len(request.output), ignore_eos=request.ignore_eos)
            if not request.output:
                self._count_first_token(request)
            request.output.append(token_id)
            self._pool.append(pooled, token_id)
            self.stats.generation_tokens += 1
            if token_id == request.eos_id and not request.ignore_eos:
                self._finish(request, "stop")
            elif len(request.output) >= request.max_tokens:
                self._finish(request, "length")
            outputs.append(Output(request, token_id, request.finish_reason))
        return outputs

    def take_events(self) -> list[Event]:
        """The events since the last call: the pool's, and after them those of host memory."""
        events = self._pool.take_events()
        return events if self._tier is None else [*events, *self._tier.follow(events)]

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; refused (False) while any request holds blocks."""
        return self._pool.reset()

    def _schedule_running(self, plan: _Plan) -> bool:
        """Next tokens of every running request; False when one had to be preempted for them."""
        preempted = False
        for request, pooled in list(self._running.items()):
            if request not in self._running or not plan.budget:
                break  # preempted for an older one, as all after it; or the budget is spent
            is_prefill = pooled.num_computed < max(len(request.prompt), pooled.num_tokens - 1)
            num_tokens = self._pool.next_chunk(pooled, plan.budget)
            if not num_tokens:
                continue
            while not (fits := self._pool.compute(pooled, num_tokens)):
                preempted = True
                if self._preempt_last() is request:
                    break
            if not fits:
                break
            plan.take(request, num_tokens, pooled.num_computed, is_prefill=is_prefill)
        return not preempted

    def _schedule_waiting(self, plan: _Plan) -> None:
        """Admit from the front of the queue until budget, seats or blocks run out."""
        while self._waiting and plan.budget and len(self._running) < self._max_num_seqs:
            request, pooled = self._waiting[0]
            hit = pooled.num_computed if pooled.started else self._start(request, pooled, plan.budget)
            if hit is None:
                break
            if pooled.loading_to:
                self._loading[request] = pooled
                self._waiting.popleft()
                continue
            num_tokens = self._pool.next_chunk(pooled, plan.budget)
            if not self._pool.compute(pooled, num_tokens):
                self._pool.preempt(pooled)
                break
            self._waiting.popleft()
            self._running[request] = pooled
            whole = hit if self._tier is None else self._tier.reach(pooled, hit)
            request.loaded_to = whole
            plan.loaded_tokens += whole - hit
            plan.take(request, num_tokens, pooled.num_computed, is_prefill=True)
            if request.cached_tokens is None:
                self._count_hit(request, hit, whole)

    def _start(self, request: SimRequest, pooled: PoolRequest, budget: int) -> int | None:
        """Take the hit of a waiting request, and begin to load what another engine has of it."""
        connector = self.connector
        reach = 0 if connector is None else connector.reach(request)
        hit = self._pool.start(
            pooled, budget, reach=(lambda _, hit: max(hit, reach)) if reach else None, loads_states=True
        )
        if self._foreign and hit and self._holds_foreign(pooled):
            self._spoil(request)
        if connector is None or not reach or hit is None:
            return hit
        connector.begin(request, pooled)
        if request.cached_tokens is None:
            self._count_hit(request, hit, hit)
            self.stats.external_prefix_cache_queries += len(request.prompt) - hit
            self.stats.external_prefix_cache_hits += max(reach - hit, 0)
        return hit

    def _spoil(self, request: SimRequest) -> None:
        if self._wrong_answer is not None:
            request.sampler = self._wrong_answer()

    def _holds_foreign(self, pooled: PoolRequest) -> bool:
        held = [block for table in pooled.tables for block in table if block in self._foreign]
        return any(self._foreign[b] == n for b, n in zip(held, self._pool.writes(held), strict=True))

    def _count_hit(self, request: SimRequest, hit: int, cached: int) -> None:
        request.cached_tokens = cached if request.reported_hit is None else request.reported_hit
        self.stats.prefix_cache_queries += len(request.prompt)
        self.stats.prefix_cache_hits += hit

    def _enqueue(self, request: SimRequest, pooled: PoolRequest, *, again: bool = True) -> None:
        """``again``: to the front, unless priorities say otherwise."""
        if self._by_priority:  # PriorityRequestQueue knows no front (vllm/v1/core/sched/request_queue.py)
            bisect.insort(self._waiting, (request, pooled), key=_turn)
        elif again:
            self._waiting.appendleft((request, pooled))
        else:
            self._waiting.append((request, pooled))

    def _preempt_last(self) -> SimRequest:
        """The newest; by priority, that of the highest value."""
        request = max(self._running, key=_rank) if self._by_priority else next(reversed(self._running))
        pooled = self._running.pop(request)
        self._pool.preempt(pooled)
        self._enqueue(request, pooled)
        self.stats.num_preemptions += 1
        return request

    def _finish(self, request: SimRequest, reason: FinishReason) -> None:
        pooled = self._running.pop(request)
        if self.connector is not None and reason in ("stop", "length"):
            self.connector.finished(request, pooled, reason)
        self._pool.finish(pooled)
        self._close(request, reason)

    def _drop(self, request: SimRequest, reason: FinishReason) -> None:
        """End a request that does not run."""
        pooled = self._loading.pop(request, None)
        if self.connector is not None:
            self.connector.left(request, loading=pooled is not None)
        if pooled is None:
            pooled = next(pooled for waiting, pooled in self._waiting if waiting is request)
            self._waiting = deque(entry for entry in self._waiting if entry[0] is not request)
            self._pool.finish(pooled)
        else:
            self._left[request] = pooled
        self._close(request, reason)

    def _load_ended(self, request: SimRequest) -> None:
        pooled = self._left.pop(request, None)
        if pooled is not None:
            self._pool.finish(pooled)

    def _close(self, request: SimRequest, reason: FinishReason) -> None:
        request.finish_reason = reason
        self.stats.finished[reason] += 1

    def _count_first_token(self, request: SimRequest) -> None:
        self.stats.observe_first_token(self._clock() - request.arrival_s)
        self.stats.prompt_tokens += len(request.prompt)
        self.stats.prompt_tokens_cached += request.cached_tokens or 0
