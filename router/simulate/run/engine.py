"""One simulated engine: an exact block pool, a queue of prompts, sequences that generate; a virtual clock.

What the pool is asked is what vLLM 0.32's scheduler asks its cache manager: the hit and the first chunk when
a prompt's turn comes, further chunks, generated tokens as they fill blocks, release at the end; the request
that came last is preempted when generation finds no block, and computed again later. Between ``arrive`` and
``advance`` nothing happens. Always true: time does not go back; every request ends once, or is refused at
once where it can never fit.

With memory outside the GPU (``tiers``) a prompt whose turn comes may have to be loaded first. It holds its
blocks meanwhile and others go ahead, as with vLLM's asynchronous loads; once loaded it comes before those
that wait. What a load takes away from computing, the next chunk takes longer.

With prefill and decode apart, a prompt that was computed elsewhere is loaded in the same way (``Fetch``), and
blocks that another engine is still to fetch stay in use after their request has ended, until ``release``.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter

from publisher.block_pool import HybridBlockPool, PoolRequest
from router.simulate.run.setup import RequestRun, Timing
from router.simulate.run.tiers import EngineTiers, Medium
from router.simulate.workload.requests import Follows, Request

Told = Callable[[RequestRun, float], None]
_rank_s = attrgetter("rank_s")


class SimEngine:
    """Tells ``first_token`` and ``ended`` of each visit, or ``refused``; ``fetched`` once a prompt has come
    from another engine. ``busy_s`` is spent on prompts."""

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
        self._told = first_token, ended, refused
        self._fetched = fetched
        self._num_kept = 0
        self._stalled_s = 0.0
        self._waiting: deque[RequestRun] = deque()
        self._prefilling: RequestRun | None = None
        self._chunk_ends_s = 0.0
        self._generating: dict[
            RequestRun, int
        ] = {}  # in the order of their start -> number of its next event
        self._events: list[tuple[float, int, RequestRun]] = []
        self._loading: list[tuple[float, int, RequestRun]] = []
        self._loaded: deque[RequestRun] = deque()
        self._copying: deque[list[int]] = deque()  # blocks that are being copied, step by step
        self._owed_s = 0.0  # that loads have taken from computing, and the next chunk pays
        self._order = 0
        self._block = pool.scheme.hash_block_size

    @property
    def num_running(self) -> int:
        """Requests that hold blocks, as vLLM's gauge counts them."""
        return len(self._generating) + (self._prefilling is not None)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn or for their blocks to be loaded."""
        return len(self._waiting) + len(self._loading) + len(self._loaded)

    @property
    def usage(self) -> float:
        """Share of the pool that is in use."""
        return self.pool.usage

    @property
    def next_s(self) -> float:
        """When something happens here next; infinity where nothing will."""
        next_s = self._events[0][0] if self._events else float("inf")
        if self._prefilling is not None and self._chunk_ends_s < next_s:
            next_s = self._chunk_ends_s
        return min(next_s, self._loading[0][0]) if self._loading else next_s

    def arrive(self, visit: RequestRun, now: float) -> None:
        """A request comes in. Everything before ``now`` must have been advanced to."""
        self._waiting.insert(bisect_right(self._waiting, visit.rank_s, key=_rank_s), visit)
        self._begin(now)

    def advance(self) -> float:
        """Let the next thing happen; returns its time."""
        now = self.next_s
        if self._prefilling is not None and self._chunk_ends_s <= now:
            self._end_chunk(self._prefilling, now)
        elif self._loading and self._loading[0][0] <= now:
            self._end_load(heapq.heappop(self._loading)[2], now)
        else:
            _, order, visit = heapq.heappop(self._events)
            if self._generating.get(visit) == order and not self._is_late(visit, order, now):
                self._generate(visit, now)
        return now

    def release(self, visit: RequestRun, now: float) -> None:
        """Release the blocks of an ended request: they have been fetched."""
        self.pool.unpin(visit.kept)
        visit.kept = []
        self._num_kept -= 1
        self._begin(now)

    def _begin(self, now: float) -> None:
        """Take up the next prompt, if there is room for it."""
        while self._prefilling is None and len(self._generating) < self.timing.seqs_max:
            if self._loaded:
                if not self._go_on(self._loaded[0], now):
                    return
            elif not self._waiting or not self._admit(self._waiting[0], now):
                return

    def _go_on(self, visit: RequestRun, now: float) -> bool:
        """Compute what follows a load; False where there is no room now: it keeps its blocks and waits."""
        request = visit.pool_request
        tokens = self.pool.next_chunk(request, self.timing.chunk_tokens)
        if tokens > 0 and self._compute(visit, tokens):
            self._prefilling = self._loaded.popleft()
            self._spend(tokens, now)
            return True
        if self._generating or self._loading:
            return False
        last = self._loaded.pop()  # all that hold blocks wait for more
        self._preempt(last)
        if not self._others_hold_blocks:
            self._waiting.popleft()
            self._told[2](last, now)
        return True

    def _admit(self, visit: RequestRun, now: float) -> bool:
        """Start the first that waits, or its load, or refuse it; False where it has to wait."""
        request, tiers = visit.pool_request, self._tiers
        medium: Medium | None = None
        pulled = 0

        def reach(one: PoolRequest, known: int) -> int:
            nonlocal medium, pulled
            if visit.fetch is not None:
                return max(known, visit.fetch.end)
            end = known
            if tiers is not None:
                end, medium, pulled = tiers.reach(one, known, now, visit.source)
            return end

        holding = [load[2] for load in self._loading] + list(self._loaded)
        reserved = sum([self.pool.blocks_to_finish(one.pool_request) for one in holding])
        hit = self.pool.start(
            request,
            self.timing.chunk_tokens,
            reach=reach,
            loads_states=visit.fetch is not None,
            reserved_blocks=reserved,
        )
        if hit is None and self._others_hold_blocks:
            return False  # tried again when one of them ends
        self._waiting.popleft()
        if hit is None:  # not even an empty engine has room for it
            self._told[2](visit, now)
            return True
        if visit.started_s < 0:
            visit.started_s, visit.hit = now, request.loading_to or hit
            visit.loaded, visit.medium = visit.hit - hit, medium
            visit.pulled = pulled if request.loading_to else 0
        if request.loading_to and visit.fetch is not None:
            missing = request.loading_to - hit
            self._load_until(now + visit.fetch.fixed_s + visit.fetch.s_per_token * missing, visit)
        elif request.loading_to and medium is not None and tiers is not None:
            if medium == "PEER" and visit.source is not None:
                ends_s, owed_s = tiers.pull(request, visit.source, now)
            else:
                ends_s, owed_s = tiers.load(request, medium, now)
            self._owed_s += owed_s
            self._load_until(ends_s, visit)
        else:
            self._end_fetch(visit, now)
            self._prefilling = visit
            self._next_chunk(visit, now)
        return True

    @property
    def _others_hold_blocks(self) -> bool:
        return bool(self._generating or self._loading or self._loaded or self._num_kept)

    def _load_until(self, ends_s: float, visit: RequestRun) -> None:
        self._order += 1
        heapq.heappush(self._loading, (ends_s, self._order, visit))

    def _end_load(self, visit: RequestRun, now: float) -> None:
        self.pool.loaded(visit.pool_request)
        self.pool.end_step()
        self._end_fetch(visit, now)
        self._loaded.append(visit)
        self._begin(now)

    def _end_fetch(self, visit: RequestRun, now: float) -> None:
        """Nothing is, or is to be, fetched for this request any more."""
        if visit.fetch is not None and self._fetched is not None:
            self._fetched(visit, now)
        visit.fetch = None

    def _compute(self, visit: RequestRun, tokens: int) -> bool:
        """A step's tokens of one request; what it fills begins to be copied out. False without room."""
        request = visit.pool_request
        while not self.pool.compute(request, tokens):
            if not self._copying:
                return False
            self.pool.unpin(self._copying.popleft())  # an engine waits for copies before it preempts
        self.pool.end_step()
        if self._tiers is not None:
            due = self.pool.due(request)
            visit.due = [block.key for block in due]
            blocks = [block.block for block in due]
            self.pool.pin(blocks)
            self._copying.append(blocks)
        return True

    def _end_copies(self) -> None:
        """A step has ended, and with it the copies of the steps before; on an idle engine its own too."""
        kept = 1 if self._prefilling or self._others_hold_blocks else 0
        while len(self._copying) > kept:
            self.pool.unpin(self._copying.popleft())

    def _store(self, visit: RequestRun, now: float) -> None:
        if self._tiers is not None:
            self._tiers.store(visit.due, now)

    def _next_chunk(self, visit: RequestRun, now: float) -> None:
        tokens = self.pool.next_chunk(visit.pool_request, self.timing.chunk_tokens)
        if tokens <= 0 or not self._compute(visit, tokens):
            self._preempt(visit)
            if not self._others_hold_blocks:  # no request will release blocks
                self._waiting.popleft()
                self._told[2](visit, now)
            return
        self._spend(tokens, now)

    def _spend(self, tokens: int, now: float) -> None:
        """Begin a chunk of ``tokens`` tokens."""
        seconds = self.timing.chunk_seconds(tokens, len(self._generating)) + self._owed_s
        self._owed_s = 0.0
        self._chunk_ends_s = now + seconds
        self._stalled_s += self.timing.stall_s(seconds)
        self.busy_s += seconds
        self.computed_tokens += tokens

    def _preempt(self, visit: RequestRun) -> None:
        """Back to the head of the queue with all tokens it has; what it computed may still be found."""
        self.pool.preempt(visit.pool_request)
        self.pool.end_step()
        if self._prefilling is visit:
            self._prefilling = None
        else:
            self._generating.pop(visit, None)
        visit.preempted += 1
        self.preemptions += 1
        self._waiting.insert(bisect_left(self._waiting, visit.rank_s, key=_rank_s), visit)

    def _end_chunk(self, visit: RequestRun, now: float) -> None:
        request = visit.pool_request
        self._store(visit, now)
        if request.num_computed < request.num_tokens:
            self._end_copies()
            self._next_chunk(visit, now)
        else:
            self._prefilling = None
            if visit.first_token_s < 0:
                visit.first_token_s = now
                self._told[0](visit, now)
            visit.generated = request.num_tokens - visit.input_tokens + 1
            if visit.generated >= visit.output_tokens:
                self._end(visit, now)
            else:
                self._schedule(visit, now)
            self._end_copies()
        self._begin(now)

    def _schedule(self, visit: RequestRun, now: float) -> None:
        """The next moment at which its generation matters to the pool: a block is full, or it ends."""
        to_block = self._block - visit.pool_request.num_computed % self._block
        visit.coming = min(to_block, visit.output_tokens - visit.generated)
        self._order += 1
        self._generating[visit] = self._order
        visit.stalled_s = self._stalled_s
        heapq.heappush(self._events, (now + visit.coming * self.timing.decode_s, self._order, visit))

    def _is_late(self, visit: RequestRun, order: int, now: float) -> bool:
        """Whether chunks have held up what was to happen now; then it happens that much later."""
        owed_s, visit.stalled_s = self._stalled_s - visit.stalled_s, self._stalled_s
        if owed_s > 0:
            heapq.heappush(self._events, (now + owed_s, order, visit))
        return owed_s > 0

    def _generate(self, visit: RequestRun, now: float) -> None:
        """``visit.coming`` tokens have been generated since the last time."""
        if visit.coming > 1:
            self._end_copies()
        self.pool.extend(visit.pool_request, [0] * visit.coming)
        while not self._compute(visit, visit.coming):
            last = self._prefilling or next(reversed(self._generating))
            if visit.rank_s:  # by priority, whatever they do (Scheduler.schedule of vLLM 0.32)
                last = max(filter(None, (*self._generating, self._prefilling)), key=_rank_s)
            self._preempt(last)
            if last is visit:
                self._begin(now)
                return
        self._store(visit, now)
        visit.generated += visit.coming
        if visit.generated < visit.output_tokens:
            self._schedule(visit, now)
            self._end_copies()
            return
        del self._generating[visit]
        self._end(visit, now)
        self._end_copies()
        self._begin(now)

    def _end(self, visit: RequestRun, now: float) -> None:
        if visit.keeps:
            visit.kept = [block for table in visit.pool_request.tables for block in table if block]
            self.pool.pin(visit.kept)
            self._num_kept += 1
        self.pool.finish(visit.pool_request)
        visit.ended_s = now
        self._told[1](visit, now)


# When something happens next on each engine of a simulated fleet, and when requests come, in virtual time.
#
# Always true: an engine has one time at most, the one noted last; every request comes once, and in closed
# sessions none before the one it follows.


class Calendar:
    """Seconds of virtual time; infinity is never."""

    def __init__(self, engines: int) -> None:
        self._noted = [float("inf")] * engines
        self._heap: list[tuple[float, int]] = []

    def note(self, engine: int, at_s: float) -> None:
        """Something happens on this engine then, and not when it was said before."""
        if at_s != self._noted[engine]:
            self._noted[engine] = at_s
            if at_s < float("inf"):
                heapq.heappush(self._heap, (at_s, engine))

    def next_s(self) -> float:
        """When the next thing happens."""
        heap = self._heap
        while heap and heap[0][0] != self._noted[heap[0][1]]:
            heapq.heappop(heap)
        return heap[0][0] if heap else float("inf")

    def take(self) -> int:
        """That engine, which has no time from now on; ``next_s`` has said that there is one."""
        engine = heapq.heappop(self._heap)[1]
        self._noted[engine] = float("inf")
        return engine


class Arrivals:
    """Requests that are still to come, in the order of their times and then of the workload.

    Open: every request comes at its recorded time. Closed: a request that follows another one comes when its
    client would send it, which is known once that one has been sent or answered. Recorded times and pauses
    are divided by ``speed``.
    """

    def __init__(self, requests: Sequence[Request], *, speed: float, closed: bool) -> None:
        self._speed = speed
        self._times_s = [request.at_s / speed for request in requests]
        self._after_start: dict[int, list[tuple[int, float]]] = {}
        self._after_end: dict[int, list[tuple[int, Follows]]] = {}
        self._heap: list[tuple[float, int]] = []
        for index, request in enumerate(requests):
            follows = request.follows if closed else None
            if follows is None:
                self._heap.append((self._times_s[index], index))
            elif follows.answered:
                self._after_end.setdefault(follows.request, []).append((index, follows))
            else:
                self._after_start.setdefault(follows.request, []).append((index, follows.gap_s))
        heapq.heapify(self._heap)

    def next_s(self) -> float:
        """When the next request comes; infinity: none is known to come."""
        return self._heap[0][0] if self._heap else float("inf")

    def take(self) -> int:
        """That request, which comes now."""
        index = heapq.heappop(self._heap)[1]
        for later, gap_s in self._after_start.pop(index, ()):
            self._come(later, self._times_s[index] + gap_s / self._speed)
        return index

    def arrived_s(self, index: int) -> float:
        """When a request came that has come."""
        return self._times_s[index]

    def ended(self, index: int, now: float) -> None:
        """A request has its answer, or will never have one; those that waited for it come after a pause."""
        for later, follows in self._after_end.pop(index, ()):
            if follows.think_s is not None:
                at_s = now + follows.think_s / self._speed
            else:
                at_s = max(now, self._times_s[index] + follows.gap_s / self._speed)
            self._come(later, at_s)

    def _come(self, index: int, at_s: float) -> None:
        self._times_s[index] = at_s
        heapq.heappush(self._heap, (at_s, index))
