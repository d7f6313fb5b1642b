"""One simulated engine: an exact block pool, a queue of prompts, sequences that generate; a virtual clock.

What the pool is asked is what vLLM 0.32's scheduler asks its cache manager: the hit and the first chunk when
a prompt's turn comes, further chunks, generated tokens as they fill blocks, release at the end; the request
that came last is preempted when generation finds no block, and computed again later. Between ``arrive`` and
``advance`` nothing happens. Always true: time does not go back; every request ends once, or is refused at
once where it can never fit.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from publisher.block_pool import HybridBlockPool, PoolRequest
from router.simulate.timing import Timing


class RequestRun:
    """One request on its engine. Times in seconds, ``-1`` before they are known; ``hit`` in tokens."""

    __slots__ = (
        "arrived_s",
        "coming",
        "ended_s",
        "first_token_s",
        "generated",
        "hit",
        "index",
        "input_tokens",
        "output_tokens",
        "pool_request",
        "preempted",
        "started_s",
    )

    def __init__(
        self, index: int, pool_request: PoolRequest, input_tokens: int, output_tokens: int, now: float
    ) -> None:
        self.index = index
        self.pool_request = pool_request
        self.input_tokens = input_tokens
        self.output_tokens = output_tokens
        self.arrived_s = now
        self.started_s = -1.0
        self.first_token_s = -1.0
        self.ended_s = -1.0
        self.hit = 0
        self.coming = 0
        self.generated = 0
        self.preempted = 0


Told = Callable[[RequestRun, float], None]


class SimEngine:
    """Tells ``first_token`` and ``ended`` of each visit, or ``refused``. ``busy_s`` is spent on prompts."""

    def __init__(
        self, pool: HybridBlockPool, timing: Timing, *, first_token: Told, ended: Told, refused: Told
    ) -> None:
        self.pool = pool
        self.timing = timing
        self.busy_s = 0.0
        self.preemptions = 0
        self.computed_tokens = 0
        self._told = first_token, ended, refused
        self._waiting: deque[RequestRun] = deque()
        self._prefilling: RequestRun | None = None
        self._chunk_ends_s = 0.0
        self._generating: dict[
            RequestRun, int
        ] = {}  # in the order of their start -> number of its next event
        self._events: list[tuple[float, int, RequestRun]] = []
        self._order = 0
        self._block = pool.scheme.hash_block_size

    @property
    def next_s(self) -> float:
        """When something happens here next; infinity where nothing will."""
        decode_s = self._events[0][0] if self._events else float("inf")
        return min(decode_s, self._chunk_ends_s) if self._prefilling is not None else decode_s

    def arrive(self, visit: RequestRun, now: float) -> None:
        """A request comes in. Everything before ``now`` must have been advanced to."""
        self._waiting.append(visit)
        self._begin(now)

    def advance(self) -> float:
        """Let the next thing happen; returns its time."""
        now = self.next_s
        if self._prefilling is not None and self._chunk_ends_s <= now:
            self._end_chunk(self._prefilling, now)
        else:
            _, order, visit = heapq.heappop(self._events)
            if self._generating.get(visit) == order:
                self._generate(visit, now)
        return now

    def _begin(self, now: float) -> None:
        """Take up the next prompt, if there is room for it."""
        while self._prefilling is None and self._waiting:
            if len(self._generating) >= self.timing.seqs_max:
                return
            visit = self._waiting[0]
            hit = self.pool.start(visit.pool_request, self.timing.chunk_tokens)
            if hit is None and self._generating:
                return  # tried again when one that generates ends
            self._waiting.popleft()
            if hit is None:  # not even an empty engine has room for it
                self._told[2](visit, now)
                continue
            if visit.started_s < 0:
                visit.started_s, visit.hit = now, hit
            self._prefilling = visit
            self._next_chunk(visit, now)

    def _next_chunk(self, visit: RequestRun, now: float) -> None:
        tokens = self.pool.next_chunk(visit.pool_request, self.timing.chunk_tokens)
        if tokens <= 0 or not self.pool.compute(visit.pool_request, tokens):
            self._preempt(visit)
            if not self._generating:  # nobody will make room
                self._waiting.popleft()
                self._told[2](visit, now)
            return
        self.pool.end_step()
        seconds = self.timing.chunk_seconds(tokens, len(self._generating))
        self._chunk_ends_s = now + seconds
        self.busy_s += seconds
        self.computed_tokens += tokens

    def _preempt(self, visit: RequestRun) -> None:
        """Back to the head of the queue with all tokens it has; what it computed may still be found."""
        self.pool.preempt(visit.pool_request)
        self.pool.end_step()
        if self._prefilling is visit:
            self._prefilling = None
        else:
            del self._generating[visit]
        visit.preempted += 1
        self.preemptions += 1
        self._waiting.appendleft(visit)

    def _end_chunk(self, visit: RequestRun, now: float) -> None:
        request = visit.pool_request
        if request.num_computed < request.num_tokens:
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
        self._begin(now)

    def _schedule(self, visit: RequestRun, now: float) -> None:
        """The next moment at which its generation matters to the pool: a block is full, or it ends."""
        to_block = self._block - visit.pool_request.num_computed % self._block
        visit.coming = min(to_block, visit.output_tokens - visit.generated)
        self._order += 1
        self._generating[visit] = self._order
        heapq.heappush(self._events, (now + visit.coming * self.timing.decode_s, self._order, visit))

    def _generate(self, visit: RequestRun, now: float) -> None:
        """``visit.coming`` tokens have been generated since the last time."""
        request = visit.pool_request
        self.pool.extend(request, [0] * visit.coming)
        while not self.pool.compute(request, visit.coming):
            last = self._prefilling or next(reversed(self._generating))
            self._preempt(last)
            if last is visit:
                self._begin(now)
                return
        self.pool.end_step()
        visit.generated += visit.coming
        if visit.generated < visit.output_tokens:
            self._schedule(visit, now)
            return
        del self._generating[visit]
        self._end(visit, now)
        self._begin(now)

    def _end(self, visit: RequestRun, now: float) -> None:
        self.pool.finish(visit.pool_request)
        visit.ended_s = now
        self._told[1](visit, now)
