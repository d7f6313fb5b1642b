"""One simulated engine: an exact block pool, vLLM's steps, and a virtual clock.

A step is chosen as ``Scheduler.schedule`` of vLLM 0.32 does: those that run come first, in the order of their
admission, each with one token or the next chunk of its prompt; if one of them finds no free block, the last
one is preempted. What is left of ``chunk_tokens`` goes to waiting prompts, unless one was preempted. All
that a step computes comes at its end: answers pay for a prompt beside them. The pool gets the same calls as
vLLM's cache manager.

Steps that only generate are taken together up to the next one that concerns the pool or ends an answer; what
arrives meanwhile waits for the end of its step alone. Invariants: time does not go back; every request ends
once, or is refused immediately if it can never fit.

With memory outside the GPU (``tiers``) a scheduled prompt may have to be loaded first. With disaggregated
prefill, a prompt computed elsewhere is loaded in the same way (``Fetch``).
"""

from __future__ import annotations

import heapq
import math
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
# An arrival this share of a step after its start is at its start: sums of times are rounded.
_ROUNDING = 1e-9


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
        self._waiting: deque[RequestRun] = deque()
        # In the order of admission -> the step that next concerns the pool or ends the answer; 0: a prompt.
        self._running: dict[RequestRun, int] = {}
        self._prefilling: set[RequestRun] = set()
        # The same steps, with the order of admission.
        self._due: list[tuple[int, int, RequestRun]] = []
        self._loading: list[tuple[float, int, RequestRun]] = []
        self._loaded: deque[RequestRun] = deque()
        # Blocks being copied out, with the step that filled them.
        self._copying: deque[tuple[int, list[int]]] = deque()
        # Compute time lost to loads, added to the next step with a prompt.
        self._owed_s = 0.0
        self._order = 0
        self._block = pool.scheme.hash_block_size
        # The last step that ended; those in progress, their times, and the end of the last of them.
        self._step = 0
        self._steps, self._began_s, self._each_s, self._ends_s = 0, 0.0, 0.0, math.inf
        # Of the step in progress: tokens of each prompt in it, answers that end with it, tokens left.
        self._chunks: dict[RequestRun, int] = {}
        self._ending: list[RequestRun] = []
        self._budget = 0
        # Those that filled blocks to be copied out.
        self._filled: list[RequestRun] = []

    @property
    def num_running(self) -> int:
        """Number of requests that hold blocks, as vLLM's gauge counts them."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait to be scheduled or for their blocks to be loaded."""
        return len(self._waiting) + len(self._loading) + len(self._loaded)

    def remaining_s(self, now: float) -> float:
        """Return the seconds of prefill left here, as far as nothing that waiting prompts hit changes."""
        tokens, tiers = 0, self._tiers
        step_s = self._ends_s - now if self._chunks else 0.0
        for run in self._prefilling:
            tokens += run.pool_request.num_tokens - run.pool_request.num_computed
        for run in (*(one[2] for one in self._loading), *self._loaded):
            tokens += run.input_tokens - run.hit
        for run in self._waiting:
            end, _ = self.pool.find_prefix(run.pool_request)
            if tiers is not None:
                end = tiers.reach(run.pool_request, end, now, run.source).end
            tokens += run.input_tokens - end
        return step_s + self.timing.prefill_s_per_token * tokens

    @property
    def usage(self) -> float:
        """Share of the pool that is in use."""
        return self.pool.usage

    @property
    def next_s(self) -> float:
        """Return the time of the next event; infinity if there is none."""
        ends_s = self._ends_s
        return min(ends_s, self._loading[0][0]) if self._loading else ends_s

    def arrive(self, run: RequestRun, now: float) -> None:
        """Add a request. ``advance`` must have been called for everything before ``now``."""
        at = bisect_right(self._waiting, run.rank_s, key=_rank_s)
        self._waiting.insert(at, run)
        if not at:
            self._wake(now)

    def advance(self) -> float:
        """Process the next event; returns its time."""
        now = self.next_s
        if self._ends_s <= now:
            self._end_step(now)
        elif self._loading:
            run = heapq.heappop(self._loading)[2]
            self.pool.loaded(run.pool_request)
            self._end_fetch(run, now)
            self._loaded.append(run)
            self._wake(now)
        return now

    def release(self, run: RequestRun, now: float) -> None:
        """Release the blocks of an ended request: they have been fetched."""
        self.pool.unpin(run.kept)
        run.kept = []
        self._num_kept -= 1
        self._wake(now)

    def _wake(self, now: float) -> None:
        """Schedule again at the end of the current step: something has changed between two steps."""
        if self._ends_s == math.inf:
            self._begin_step(now)
        elif self._steps > 1:
            steps = max(1, math.ceil((now - self._began_s) / self._each_s - _ROUNDING))
            self._steps = min(self._steps, steps)
            # By rounding that may be before ``now``: no request is scheduled before it arrives.
            self._ends_s = max(now, self._began_s + self._steps * self._each_s)

    def _begin_step(self, now: float) -> None:
        """Choose the next step, or the next ones if they only generate; none if nothing can run."""
        self._ends_s = now
        while True:
            self._budget = self.timing.chunk_tokens
            preempted, missed = self._schedule_running()
            if not preempted:
                self._schedule_waiting(now)
            generating = len(self._running) - len(self._prefilling) - missed
            tokens = sum(self._chunks.values())
            if tokens or generating:
                break
            if not self._running and not preempted:
                self._ends_s = math.inf
                return
            for run in list(self._running):  # no budget allows a part of this prompt
                self._preempt(run)
                self._refuse(run, now)
        self._began_s = now
        self._each_s, self._steps = self.timing.step_s(tokens, generating), 1
        if tokens:
            self.busy_s += self.timing.chunk_seconds(tokens, generating) + self._owed_s
            self.computed_tokens += tokens
            self._each_s += self._owed_s
            self._owed_s = 0.0
        elif not (self._ending or self._prefilling or self._copying or missed or preempted):
            while self._is_stale(*self._due[0]):
                heapq.heappop(self._due)
            self._steps = self._due[0][0] - self._step - 1
        self._ends_s = now + self._steps * self._each_s

    def _schedule_running(self) -> tuple[bool, int]:
        """Schedule those that run; returns whether one was preempted, and how many answers get no token."""
        step, before, due = self._step + 1, self.preemptions, list[RequestRun]()
        while self._due and self._due[0][0] <= step:
            entry = heapq.heappop(self._due)
            if not self._is_stale(*entry):
                due.append(entry[2])
        if self._prefilling or len(self._running) > self._budget:
            ones = list(self._running)
        else:  # the others get their token without an effect on the pool
            ones = due
            self._budget -= len(self._running) - len(due)
        missed = list[RequestRun]()
        for run in ones:
            if run not in self._running:
                continue
            if not self._budget:
                missed.append(run)
            elif run in self._prefilling:
                tokens = self.pool.next_chunk(run.pool_request, self._budget)
                if tokens and self._make_room(run, tokens):
                    self._chunks[run] = tokens
                    self._budget -= tokens
            elif self._running[run] > step or self._generate(run):
                self._budget -= 1
            if run not in self._running:
                # vLLM schedules no further one where it preempts the one that it schedules.
                missed += [one for one in self._running if one.order > run.order]
                break
        missed = [run for run in missed if run in self._running and run not in self._prefilling]
        for run in missed:
            self._catch_up(run)
            run.from_step = step
            self._note_due(run, max(step, self._running[run]) + 1)
        return self.preemptions > before, len(missed)

    def _generate(self, run: RequestRun) -> bool:
        """Compute the tokens of an answer up to this step's; False if it was preempted."""
        self._catch_up(run)
        request, step = run.pool_request, self._step + 1
        # What has been generated before changes nothing in the pool; this token does.
        for tokens in (request.num_tokens - 1 - request.num_computed, 1):
            if tokens and not self._make_room(run, tokens):
                return False
        if run.input_tokens + run.output_tokens - request.num_tokens <= 1:
            self._running[run] = step
            self._ending.append(run)
        else:
            self._schedule_due(run, step)
        return True

    def _schedule_due(self, run: RequestRun, step: int, *, after_prompt: bool = False) -> None:
        """Note the next step after this one that concerns the pool or ends the answer."""
        request, size = run.pool_request, self._block
        computed = request.num_computed
        quiet_to = max(request.quiet_to, computed)
        # States and their copies change within two tokens of a block's edge, and after a prompt.
        if request.quiet_to < 0 and computed % size > 1 and not after_prompt:
            quiet_to = computed - computed % size + size - 1
        # All but the last of the tokens that are known have been computed, or will be in this step.
        left = run.input_tokens + run.output_tokens - computed - 1
        self._note_due(run, step + min(quiet_to - computed + 1, left))

    def _note_due(self, run: RequestRun, step: int) -> None:
        self._running[run] = step
        heapq.heappush(self._due, (step, run.order, run))

    def _is_stale(self, step: int, order: int, run: RequestRun) -> bool:
        return self._running.get(run) != step or run.order != order

    def _catch_up(self, run: RequestRun) -> None:
        """Add the tokens of an answer up to the last step that ended."""
        count = self._step - run.from_step
        if count > 0:
            self.pool.extend(run.pool_request, [0] * count)
            run.from_step = self._step

    def _make_room(self, run: RequestRun, tokens: int) -> bool:
        """Compute tokens of one that runs, and preempt others for it; False if it was preempted itself."""
        while not self._compute(run, tokens):
            last = next(reversed(self._running))
            # By priority, regardless of state (Scheduler.schedule, vLLM 0.32).
            if run.rank_s:
                last = max(self._running, key=lambda one: (one.rank_s, one.arrived_s))
            self._preempt(last)
            if last is run:
                return False
        return True

    def _schedule_waiting(self, now: float) -> None:
        """Admit waiting prompts, as far as there is room and budget."""
        while self._budget > 0 and len(self._running) < self.timing.seqs_max:
            if self._loaded:
                # Loaded prompts precede waiting ones: they already hold blocks, as after vLLM's asynchronous
                # loads.
                if not self._go_on(self._loaded[0], now):
                    return
            elif not self._waiting or not self._admit(self._waiting[0], now):
                return

    def _go_on(self, run: RequestRun, now: float) -> bool:
        """Compute what follows a load; False if there is no room now: it keeps its blocks and waits."""
        tokens = self.pool.next_chunk(run.pool_request, self._budget)
        if tokens > 0 and self._compute(run, tokens):
            self._enter(self._loaded.popleft(), tokens)
            return True
        if self._running or self._loading:
            return False
        # Every request with blocks waits for more.
        last = self._loaded.pop()
        self._preempt(last)
        self._refuse(last, now)
        return True

    def _enter(self, run: RequestRun, tokens: int) -> None:
        """Let a prompt run, with this chunk of it in the current step."""
        self._order += 1
        run.order = self._order
        self._running[run] = 0
        self._prefilling.add(run)
        self._chunks[run] = tokens
        self._budget -= tokens

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
            self._budget,
            reach=reach,
            loads_states=run.fetch is not None,
            reserved_blocks=reserved,
        )
        if hit is None:
            # An empty engine has no room for it either; otherwise it is tried again.
            return not self._others_hold_blocks and self._refuse(run, now)
        if not request.loading_to:
            tokens = self.pool.next_chunk(request, self._budget)
            if not self._compute(run, tokens):
                self.pool.preempt(request)
                return False
        self._waiting.popleft()
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
            self._enter(run, tokens)
            self._end_fetch(run, now)
        return True

    @property
    def _others_hold_blocks(self) -> bool:
        return bool(self._running or self._loading or self._loaded or self._num_kept)

    def _refuse(self, run: RequestRun, now: float) -> bool:
        """Refuse the first waiting request, unless others hold blocks that it may get."""
        if self._others_hold_blocks:
            return False
        self._waiting.remove(run)
        self._callbacks[2](run, now)
        return True

    def _load_until(self, ends_s: float, run: RequestRun) -> None:
        self._order += 1
        heapq.heappush(self._loading, (ends_s, self._order, run))

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
            self.pool.unpin(self._copying.popleft()[1])
        if self._tiers is not None and (due := self.pool.due(request)):
            run.due += [block.key for block in due]
            blocks = [block.block for block in due]
            self.pool.pin(blocks)
            self._copying.append((self._step + 1, blocks))
            self._filled.append(run)
        return True

    def _preempt(self, run: RequestRun) -> None:
        """Return a request to the head of the queue with all its tokens; computed blocks may still hit."""
        if run in self._running and run not in self._prefilling:
            self._catch_up(run)
        self.pool.preempt(run.pool_request)
        self._running.pop(run, None)
        self._prefilling.discard(run)
        self._budget += self._chunks.pop(run, 0)
        if run in self._ending:
            self._ending.remove(run)
        run.preempted += 1
        self.preemptions += 1
        self._waiting.insert(bisect_left(self._waiting, run.rank_s, key=_rank_s), run)

    def _end_step(self, now: float) -> None:
        """Give what the step has computed."""
        # A step in progress, so that nothing below begins another one.
        self._step, self._steps = self._step + self._steps, 0
        self.pool.end_step()
        if self._tiers is not None:
            for run in self._filled:
                self._tiers.store(run.due, now, run.hint)
                run.due = []
            self._filled.clear()
        chunks, ending = self._chunks, self._ending
        self._chunks, self._ending = {}, []
        for run in ending:
            self._end(run, now)
        for run in chunks:
            request = run.pool_request
            if request.num_computed < request.num_tokens:
                continue
            self._prefilling.remove(run)
            if run.first_token_s < 0:
                run.first_token_s = now
                self._callbacks[0](run, now)
            if request.num_tokens + 1 - run.input_tokens >= run.output_tokens:
                self._end(run, now)
            else:
                self.pool.extend(request, [0])
                run.from_step = self._step
                self._schedule_due(run, self._step, after_prompt=True)
        # A connector reports a copy with the step after it; an idle engine has no further step.
        kept_from = self._step if self._others_hold_blocks else math.inf
        while self._copying and self._copying[0][0] < kept_from:
            self.pool.unpin(self._copying.popleft()[1])
        self._begin_step(now)

    def _end(self, run: RequestRun, now: float) -> None:
        del self._running[run]
        if run.keeps:
            run.kept = [block for table in run.pool_request.tables for block in table if block]
            # Another engine has yet to fetch these blocks: they stay in use until ``release``, as under a
            # lease.
            self.pool.pin(run.kept)
            self._num_kept += 1
        self.pool.finish(run.pool_request)
        run.ended_s = now
        self._callbacks[1](run, now)
