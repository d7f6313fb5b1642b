"""The engine's scheduler: continuous batching, one iteration at a time, on a hybrid block pool.

Each step gives running requests their next tokens (first come first served, within a token budget), then
admits waiting ones, as vLLM 0.32 does. A prompt longer than what is left of the budget is computed in
chunks over several steps. Where the pool has no block left, the newest running request gives up its blocks
and goes back to the front of the queue.

    step duration = prefill_s_per_token * (prompt tokens computed in the step, cached ones cost nothing)
                  + load_s_per_token    * (tokens that requests admitted in the step load from host memory)
                  + decode_s_per_token  * (1 if any request decodes in the step else 0)

So the batch shares the cost of decoding, and a long prefill delays all tokens of its step.

The scheduler has no sockets and no sleeps; the caller gives the clock. The caller alternates ``begin_step``
and ``end_step``, with the step's duration in between, and may add or abort requests at any time, from one
thread. With a connector (``kv_connector.py``) a request may first be loaded from another engine: it holds the
blocks of its prompt during the load, other requests continue, and it runs after ``loaded`` was called.

Invariants: a request is in exactly one of ``waiting``, ``loading``, ``running``, or finished. Waiting
requests hold blocks only if they have been loaded. A request aborted during its load keeps its blocks until
the load has ended, as in vLLM, because until then they may be written to.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable

import msgspec

from kvatlas.publisher.block_pool import EnginePool, HybridBlockPool, PoolRequest
from kvatlas.publisher.events import Event
from kvatlas.publisher.pool.host_tier import HeldKey, HostTier
from kvatlas.publisher.simulator.kv_connector import KvConnector
from kvatlas.publisher.simulator.metrics import TTFT_BUCKETS_S, EngineStats, Gauges
from kvatlas.publisher.simulator.request import FinishReason, Sampler, SimRequest


def _rank(request: SimRequest) -> tuple[int, float]:
    """Sort key by priority, then arrival (vllm/v1/request.py ``Request.__lt__``, 0.32)."""
    return request.priority, request.arrival_s


class StepCosts(msgspec.Struct, frozen=True):
    """Seconds of model time, for the formula in the module's docstring."""

    prefill_s_per_token: float
    decode_s_per_token: float
    load_s_per_token: float = 0.0


class Step(msgspec.Struct, frozen=True):
    """The requests of one iteration, in schedule order, and its duration."""

    requests: tuple[SimRequest, ...]
    duration_s: float


class Output(msgspec.Struct, frozen=True):
    """One new token of one request; ``finish_reason`` is set on its last one."""

    request: SimRequest
    token_id: int
    finish_reason: FinishReason | None


class _Plan:
    """A step under construction: the remaining token budget and the requests so far."""

    def __init__(self, *, budget: int) -> None:
        self.budget = budget
        self.requests: list[SimRequest] = []
        self.prefill_tokens = 0
        self.loaded_tokens = 0
        self.decodes = False

    def take(self, request: SimRequest, num_tokens: int, end: int, *, is_prefill: bool) -> None:
        self.requests.append(request)
        self.budget -= num_tokens
        loaded = max(0, min(request.loaded_to, end) - (end - num_tokens))
        self.prefill_tokens += num_tokens - loaded if is_prefill else 0
        self.decodes |= not is_prefill


class Scheduler:
    """Continuous batching of requests into steps."""

    def __init__(
        self,
        pool: EnginePool,
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
        """Make a scheduler.

        ``wrong_answer`` samples for a request whose blocks hold another prompt's KV. With ``by_priority``,
        requests wait and are preempted by priority, then by arrival.
        """
        self._by_priority = by_priority
        self.stats = EngineStats()
        self._wrong_answer = wrong_answer
        # Blocks loaded with content that does not match their hashes, with their write count.
        self._wrong_blocks: dict[int, int] = {}
        self.connector = connector
        self._tier = tier
        self._pool = pool
        self._costs = costs
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        self._clock = clock
        self._waiting: deque[tuple[SimRequest, PoolRequest]] = deque()
        self._loading: dict[SimRequest, PoolRequest] = {}
        self._aborted_loads: dict[SimRequest, PoolRequest] = {}
        self._running: dict[SimRequest, PoolRequest] = {}  # in the order of admission

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._waiting or self._running)

    def gauges(self) -> Gauges:
        """Current queue lengths and pool usage."""
        return Gauges(len(self._running), len(self._waiting) + len(self._loading), self._pool.usage)

    def add(self, request: SimRequest) -> None:
        request.arrival_s = self._clock()
        if self.connector is None:
            request.transfer = None
        else:
            self.connector.arrived(request)
        pooled = self._pool.request(request.prompt, request.extras)
        pooled.session_id = request.session_id
        self._enqueue(request, pooled, again=False)

    def abort(self, request: SimRequest, reason: FinishReason = "abort") -> None:
        """Drop a request and free its blocks; no effect on a finished one."""
        if request.finish_reason is not None:
            return
        if request in self._running:
            self._finish(request, reason)
        else:
            self._drop(request, reason)

    def loaded(self, request: SimRequest, end: int, *, intact: bool) -> None:
        """Complete the load of a request up to token ``end``; no effect on an aborted request.

        Content that is not ``intact`` is cached under the prompt's hashes too
        (vllm/v1/core/sched/scheduler.py ``_update_waiting_for_remote_kv``, 0.32).
        """
        self._load_ended(request)
        pooled = self._loading.pop(request, None)
        if pooled is None or self.connector is None or request.transfer is None:
            return
        if not intact:
            tables = zip(pooled.tables, pooled.num_cached, strict=True)
            loaded = [block for table, cached in tables for block in table[cached:] if block]
            self._wrong_blocks |= zip(loaded, self.connector.pool.writes(loaded), strict=True)
            self._use_wrong_answer(request)
        if request.reported_hit is None:
            request.cached_tokens = end
        self.connector.settle(request)
        self.connector.pool.loaded(pooled)
        self._enqueue(request, pooled)

    def probed(self, request: SimRequest, found: frozenset[HeldKey]) -> None:
        """Continue a request with the answer to its probe; no effect on an aborted request."""
        self._load_ended(request)
        pooled = self._loading.pop(request, None)
        if pooled is not None:
            request.found = found
            self._enqueue(request, pooled)

    def load_failed(self, request: SimRequest, *, recompute: bool) -> None:
        """Handle a failed load: compute the prompt here, or end the request with an error."""
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
        """Choose and allocate the work of the next iteration; may be empty directly after a preemption."""
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
        """Tokens that the iteration produced, without requests aborted in the meantime."""
        self._pool.end_step()
        outputs = []
        for request in step.requests:
            pooled = self._running.get(request)
            if pooled is None or pooled.num_computed < pooled.num_tokens:
                continue
            token_id = request.next_token()
            if not request.output:
                self._count_first_token(request)
            request.output.append(token_id)
            pooled.append(token_id)
            self.stats.generation_tokens += 1
            if token_id == request.eos_id and not request.ignore_eos:
                self._finish(request, "stop")
            elif len(request.output) >= request.max_tokens:
                self._finish(request, "length")
            outputs.append(Output(request, token_id, request.finish_reason))
        return outputs

    def take_events(self) -> list[Event]:
        """The events since the last call: the pool's, then those of host memory."""
        events = self._pool.take_events()
        return events if self._tier is None else [*events, *self._tier.follow(events)]

    def reset_prefix_cache(self) -> bool:
        """Remove every cached block; returns False, with nothing changed, while a request holds blocks."""
        return self._pool.reset()

    def _schedule_running(self, plan: _Plan) -> bool:
        """Schedule the next tokens of every running request; False if one had to be preempted."""
        preempted = False
        for request, pooled in list(self._running.items()):
            if request not in self._running or not plan.budget:
                # This and all later ones were preempted, or the budget is spent.
                break
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
        """Admit from the front of the queue until budget, sequence slots or blocks run out."""
        while self._waiting and plan.budget and len(self._running) < self._max_num_seqs:
            request, pooled = self._waiting[0]
            if (
                not pooled.started
                and self.connector is not None
                and self.connector.must_probe(request, pooled)
            ):
                self._loading[request] = pooled
                self._waiting.popleft()
                continue
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
            plan.loaded_tokens += whole - hit + pooled.host_hit
            plan.take(request, num_tokens, pooled.num_computed, is_prefill=True)
            if request.cached_tokens is None:
                self._count_hit(request, hit, whole)

    def _start(self, request: SimRequest, pooled: PoolRequest, budget: int) -> int | None:
        """Take the hit of a waiting request, and begin to load the part that another engine has."""
        connector = self.connector
        reach = None if connector is None else connector.reaches(request)
        hit = self._pool.start(pooled, budget, reach=reach, loads_states=not request.found)
        if connector is None:
            return hit
        if self._wrong_blocks and hit and self._holds_wrong_blocks(pooled, connector.pool):
            self._use_wrong_answer(request)
        if reach is None or hit is None:
            return hit
        connector.begin(request, pooled)
        if request.cached_tokens is None and (pooled.loading_to or not request.found):
            self._count_hit(request, hit, hit)
            self.stats.external_prefix_cache_queries += len(request.prompt) - hit
            self.stats.external_prefix_cache_hits += max(pooled.loading_to - hit, 0)
        return hit

    def _use_wrong_answer(self, request: SimRequest) -> None:
        if self._wrong_answer is not None:
            request.sampler = self._wrong_answer()

    def _holds_wrong_blocks(self, pooled: PoolRequest, pool: HybridBlockPool) -> bool:
        held = [block for table in pooled.tables for block in table if block in self._wrong_blocks]
        return any(self._wrong_blocks[b] == n for b, n in zip(held, pool.writes(held), strict=True))

    def _count_hit(self, request: SimRequest, hit: int, cached: int) -> None:
        request.cached_tokens = cached if request.reported_hit is None else request.reported_hit
        self.stats.prefix_cache_queries += len(request.prompt)
        self.stats.prefix_cache_hits += hit

    def _enqueue(self, request: SimRequest, pooled: PoolRequest, *, again: bool = True) -> None:
        """Queue a request; ``again``: at the front, except with priorities."""
        # PriorityRequestQueue has no front (vllm/v1/core/sched/request_queue.py).
        if self._by_priority:
            bisect.insort(self._waiting, (request, pooled), key=lambda waiting: _rank(waiting[0]))
        elif again:
            self._waiting.appendleft((request, pooled))
        else:
            self._waiting.append((request, pooled))

    def _preempt_last(self) -> SimRequest:
        """Preempt the newest request, or with priorities the one with the highest value."""
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
        """End a request that is not running."""
        pooled = self._loading.pop(request, None)
        if self.connector is not None:
            self.connector.aborted(request, loading=pooled is not None)
        if pooled is None:
            pooled = next(pooled for waiting, pooled in self._waiting if waiting is request)
            self._waiting = deque(entry for entry in self._waiting if entry[0] is not request)
            self._pool.finish(pooled)
        else:
            self._aborted_loads[request] = pooled
        self._close(request, reason)

    def _load_ended(self, request: SimRequest) -> None:
        pooled = self._aborted_loads.pop(request, None)
        if pooled is not None:
            self._pool.finish(pooled)

    def _close(self, request: SimRequest, reason: FinishReason) -> None:
        request.finish_reason = reason
        self.stats.finished[reason] += 1

    def _count_first_token(self, request: SimRequest) -> None:
        self.stats.ttft.add(self._clock() - request.arrival_s, TTFT_BUCKETS_S)
        self.stats.prompt_tokens += len(request.prompt)
        self.stats.prompt_tokens_cached += request.cached_tokens or 0
