"""One simulated engine: an exact block pool, a queue of prompts, generating sequences, and a virtual clock.

The pool gets the same calls as the cache manager from vLLM 0.32's scheduler: the hit and the first chunk when
a prompt is scheduled, further chunks, generated tokens as they fill blocks, release at the end. If generation
finds no free block, the request that came last is preempted and computed again later. Between ``arrive`` and
``advance`` nothing happens. Invariants: time does not go back; every request ends once, or is refused
immediately if it can never fit.

With memory outside the GPU (``tiers``) a scheduled prompt may have to be loaded first. With disaggregated
prefill, a prompt computed elsewhere is loaded in the same way (``Fetch``).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from operator import attrgetter

from kvatlas.publisher.block_pool import HybridBlockPool, PoolRequest
from kvatlas.router.simulation.request_run import RequestRun
from kvatlas.router.simulation.setup import Timing
from kvatlas.router.simulation.tiers import EngineTiers, Medium

Told = Callable[[RequestRun, float], None]
_rank_s = attrgetter("rank_s")


class SimEngine:
    """Calls ``first_token`` and ``ended`` for each request, or ``refused``; ``fetched`` once a prompt has
    been fetched from another engine. ``busy_s``: time spent on prompts."""

    def __init__(
        self,
        pool: HybridBlockPool,
        timing: Timing,
        *,
        first_token: Told,
        ended: Told,
        refused: Told,
        fetched: Told | None = None,
        tiers: EngineTiers | None = None,
    ) -> None:
        self.pool = pool
        self.timing = timing
        self.busy_s = 0.0
        self.preemptions = 0
        self.computed_tokens = 0
        self._tiers = tiers
        self._callbacks = first_token, ended, refused
        self._fetched = fetched
        self._num_kept = 0
        self._stalled_s = 0.0
        self._waiting: deque[RequestRun] = deque()
        self._prefilling: RequestRun | None = None
        self._chunk_ends_s = 0.0
        # In the order of their start -> number of its next event.
        self._generating: dict[RequestRun, int] = {}
        self._events: list[tuple[float, int, RequestRun]] = []
        self._loading: list[tuple[float, int, RequestRun]] = []
        self._loaded: deque[RequestRun] = deque()
        # Blocks being copied out, step by step.
        self._copying: deque[list[int]] = deque()
        # Compute time lost to loads, added to the next chunk.
        self._owed_s = 0.0
        self._order = 0
        self._block = pool.scheme.hash_block_size

    @property
    def num_running(self) -> int:
        """Number of requests that hold blocks, as vLLM's gauge counts them."""
        return len(self._generating) + (self._prefilling is not None)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait to be scheduled or for their blocks to be loaded."""
        return len(self._waiting) + len(self._loading) + len(self._loaded)

    def remaining_s(self, now: float) -> float:
        """Return the seconds of prefill left here, as far as nothing that waiting prompts hit changes."""
        tokens, chunk_s, tiers = 0, 0.0, self._tiers
        if self._prefilling is not None:
            request = self._prefilling.pool_request
            tokens, chunk_s = request.num_tokens - request.num_computed, self._chunk_ends_s - now
        for run in (*(one[2] for one in self._loading), *self._loaded):
            tokens += run.input_tokens - run.hit
        for run in self._waiting:
            end, _ = self.pool.find_prefix(run.pool_request)
            if tiers is not None:
                end = tiers.reach(run.pool_request, end, now, run.source).end
            tokens += run.input_tokens - end
        return chunk_s + self.timing.prefill_s_per_token * tokens

    @property
    def usage(self) -> float:
        """Share of the pool that is in use."""
        return self.pool.usage

    @property
    def next_s(self) -> float:
        """Return the time of the next event; infinity if there is none."""
        next_s = self._events[0][0] if self._events else float("inf")
        if self._prefilling is not None and self._chunk_ends_s < next_s:
            next_s = self._chunk_ends_s
        return min(next_s, self._loading[0][0]) if self._loading else next_s

    def arrive(self, run: RequestRun, now: float) -> None:
        """Add a request. ``advance`` must have been called for everything before ``now``."""
        self._waiting.insert(bisect_right(self._waiting, run.rank_s, key=_rank_s), run)
        self._begin(now)

    def advance(self) -> float:
        """Process the next event; returns its time."""
        now = self.next_s
        if self._prefilling is not None and self._chunk_ends_s <= now:
            self._end_chunk(self._prefilling, now)
        elif self._loading and self._loading[0][0] <= now:
            self._end_load(heapq.heappop(self._loading)[2], now)
        else:
            _, order, run = heapq.heappop(self._events)
            if self._generating.get(run) == order and not self._is_late(run, order, now):
                self._generate(run, now)
        return now

    def release(self, run: RequestRun, now: float) -> None:
        """Release the blocks of an ended request: they have been fetched."""
        self.pool.unpin(run.kept)
        run.kept = []
        self._num_kept -= 1
        self._begin(now)

    def _begin(self, now: float) -> None:
        """Schedule the next prompts, as far as there is room."""
        while self._prefilling is None and len(self._generating) < self.timing.seqs_max:
            if self._loaded:
                # Loaded prompts precede waiting ones: they already hold blocks, as after vLLM's asynchronous
                # loads.
                if not self._go_on(self._loaded[0], now):
                    return
            elif not self._waiting or not self._admit(self._waiting[0], now):
                return

    def _go_on(self, run: RequestRun, now: float) -> bool:
        """Compute what follows a load; False if there is no room now: it keeps its blocks and waits."""
        request = run.pool_request
        tokens = self.pool.next_chunk(request, self.timing.chunk_tokens)
        if tokens > 0 and self._compute(run, tokens):
            self._prefilling = self._loaded.popleft()
            self._spend(tokens, now)
            return True
        if self._generating or self._loading:
            return False
        # Every request with blocks waits for more.
        last = self._loaded.pop()
        self._preempt(last)
        if not self._others_hold_blocks:
            self._waiting.popleft()
            self._callbacks[2](last, now)
        return True

    def _admit(self, run: RequestRun, now: float) -> bool:
        """Start the first waiting request, or its load, or refuse it; False if it has to wait."""
        request, tiers = run.pool_request, self._tiers
        medium: Medium | None = None
        pulled = 0

        def reach(one: PoolRequest, known: int) -> int:
            nonlocal medium, pulled
            if run.fetch is not None:
                return max(known, run.fetch.end)
            end = known
            if tiers is not None:
                end, medium, pulled = tiers.reach(one, known, now, run.source)
            return end

        holding = [load[2] for load in self._loading] + list(self._loaded)
        # Running prompts must be able to finish, or two loads could each wait for the other's blocks.
        reserved = sum([self.pool.blocks_to_finish(one.pool_request) for one in holding])
        hit = self.pool.start(
            request,
            self.timing.chunk_tokens,
            reach=reach,
            loads_states=run.fetch is not None,
            reserved_blocks=reserved,
        )
        if hit is None and self._others_hold_blocks:
            return False  # retried when one of them ends
        self._waiting.popleft()
        # An empty engine has no room for it either.
        if hit is None:
            self._callbacks[2](run, now)
            return True
        # Counted once: a preempted request is admitted again.
        if run.started_s < 0:
            run.started_s, run.hit = now, request.loading_to or hit
            run.loaded, run.medium = run.hit - hit, medium
            run.pulled = pulled if request.loading_to else 0
        if request.loading_to and run.fetch is not None:
            missing = request.loading_to - hit
            self._load_until(now + run.fetch.fixed_s + run.fetch.s_per_token * missing, run)
        elif request.loading_to and medium is not None and tiers is not None:
            if medium == "PEER" and run.source is not None:
                ends_s, owed_s = tiers.pull(request, run.source, now, run.hint)
            else:
                ends_s, owed_s = tiers.load(request, medium, now, run.hint)
            self._owed_s += owed_s
            self._load_until(ends_s, run)
        else:
            self._end_fetch(run, now)
            self._prefilling = run
            self._next_chunk(run, now)
        return True

    @property
    def _others_hold_blocks(self) -> bool:
        return bool(self._generating or self._loading or self._loaded or self._num_kept)

    def _load_until(self, ends_s: float, run: RequestRun) -> None:
        self._order += 1
        heapq.heappush(self._loading, (ends_s, self._order, run))

    def _end_load(self, run: RequestRun, now: float) -> None:
        self.pool.loaded(run.pool_request)
        self.pool.end_step()
        self._end_fetch(run, now)
        self._loaded.append(run)
        self._begin(now)

    def _end_fetch(self, run: RequestRun, now: float) -> None:
        """Record that nothing is fetched for this request any more."""
        if run.fetch is not None and self._fetched is not None:
            self._fetched(run, now)
        run.fetch = None

    def _compute(self, run: RequestRun, tokens: int) -> bool:
        """Compute a step's tokens of one request and start to copy out filled blocks. False without room."""
        request = run.pool_request
        while not self.pool.compute(request, tokens):
            if not self._copying:
                return False
            # vLLM waits for copies before it preempts.
            self.pool.unpin(self._copying.popleft())
        self.pool.end_step()
        if self._tiers is not None:
            due = self.pool.due(request)
            run.due = [block.key for block in due]
            blocks = [block.block for block in due]
            self.pool.pin(blocks)
            self._copying.append(blocks)
        return True

    def _end_copies(self) -> None:
        """End the copies of all steps before the current one; on an idle engine also its own."""
        # A connector reports a copy with the step after it; an idle engine has no further step.
        kept = 1 if self._prefilling or self._others_hold_blocks else 0
        while len(self._copying) > kept:
            self.pool.unpin(self._copying.popleft())

    def _store(self, run: RequestRun, now: float) -> None:
        if self._tiers is not None:
            self._tiers.store(run.due, now, run.hint)

    def _next_chunk(self, run: RequestRun, now: float) -> None:
        tokens = self.pool.next_chunk(run.pool_request, self.timing.chunk_tokens)
        if tokens <= 0 or not self._compute(run, tokens):
            self._preempt(run)
            if not self._others_hold_blocks:  # no request will release blocks
                self._waiting.popleft()
                self._callbacks[2](run, now)
            return
        self._spend(tokens, now)

    def _spend(self, tokens: int, now: float) -> None:
        seconds = self.timing.chunk_seconds(tokens, len(self._generating)) + self._owed_s
        self._owed_s = 0.0
        self._chunk_ends_s = now + seconds
        self._stalled_s += self.timing.stall_s(seconds)
        self.busy_s += seconds
        self.computed_tokens += tokens

    def _preempt(self, run: RequestRun) -> None:
        """Return a request to the head of the queue with all its tokens; computed blocks may still hit."""
        self.pool.preempt(run.pool_request)
        self.pool.end_step()
        if self._prefilling is run:
            self._prefilling = None
        else:
            self._generating.pop(run, None)
        run.preempted += 1
        self.preemptions += 1
        self._waiting.insert(bisect_left(self._waiting, run.rank_s, key=_rank_s), run)

    def _end_chunk(self, run: RequestRun, now: float) -> None:
        request = run.pool_request
        self._store(run, now)
        if request.num_computed < request.num_tokens:
            self._end_copies()
            self._next_chunk(run, now)
        else:
            self._prefilling = None
            if run.first_token_s < 0:
                run.first_token_s = now
                self._callbacks[0](run, now)
            run.generated = request.num_tokens - run.input_tokens + 1
            if run.generated >= run.output_tokens:
                self._end(run, now)
            else:
                self._schedule(run, now)
            self._end_copies()
        self._begin(now)

    def _schedule(self, run: RequestRun, now: float) -> None:
        """Schedule the next event of its generation that concerns the pool: a full block, or the end."""
        # Tokens inside a block change nothing in the pool: one event per block instead of one per token.
        to_block = self._block - run.pool_request.num_computed % self._block
        run.coming = min(to_block, run.output_tokens - run.generated)
        self._order += 1
        self._generating[run] = self._order
        run.stalled_s = self._stalled_s
        heapq.heappush(self._events, (now + run.coming * self.timing.decode_s, self._order, run))

    def _is_late(self, run: RequestRun, order: int, now: float) -> bool:
        """Whether chunks have delayed this event; if so it is rescheduled."""
        owed_s, run.stalled_s = self._stalled_s - run.stalled_s, self._stalled_s
        # Chunks computed since then delayed every generating request; the event is moved instead of all of
        # them at each chunk.
        if owed_s > 0:
            heapq.heappush(self._events, (now + owed_s, order, run))
        return owed_s > 0

    def _generate(self, run: RequestRun, now: float) -> None:
        """Add the ``coming`` tokens generated since the last event."""
        if run.coming > 1:
            self._end_copies()
        self.pool.extend(run.pool_request, [0] * run.coming)
        while not self._compute(run, run.coming):
            # vLLM preempts the request that came last.
            last = self._prefilling or next(reversed(self._generating))
            # By priority, regardless of state (Scheduler.schedule, vLLM 0.32).
            if run.rank_s:
                last = max(filter(None, (*self._generating, self._prefilling)), key=_rank_s)
            self._preempt(last)
            if last is run:
                self._begin(now)
                return
        self._store(run, now)
        run.generated += run.coming
        if run.generated < run.output_tokens:
            self._schedule(run, now)
            self._end_copies()
            return
        del self._generating[run]
        self._end(run, now)
        self._end_copies()
        self._begin(now)

    def _end(self, run: RequestRun, now: float) -> None:
        if run.keeps:
            run.kept = [block for table in run.pool_request.tables for block in table if block]
            # Another engine has yet to fetch these blocks: they stay in use until ``release``, as under a
            # lease.
            self.pool.pin(run.kept)
            self._num_kept += 1
        self.pool.finish(run.pool_request)
        run.ended_s = now
        self._callbacks[1](run, now)
