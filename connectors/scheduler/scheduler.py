"""The scheduler half of a connector: chooses loads and stores, and tracks every job to its end.

Methods have vLLM's names and take its objects, of which only attributes are read, so that this half runs
without vLLM. Only the engine core's thread calls it; no call blocks.

Invariants: a job ends when every rank has answered, and succeeds only if all did; its pins in the tier and in
the GPU's pool are released then and not before. A request whose load failed is computed next: it gets no load
until it was admitted without one. Stores never delay a step and never fail a request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvatlas.connectors.scheduler.hit_cache import Lookups
from kvatlas.connectors.scheduler.open_jobs import OpenJob, OpenJobs
from kvatlas.connectors.scheduler.pending_events import EventLog, PendingEvents
from kvatlas.connectors.scheduler.plans import (
    EngineRequest,
    PlannedBlock,
    RequestState,
    StoreThreshold,
    has_invalid_hint,
    make_job,
    plan_load,
    plan_states,
    plan_store,
    retention_hint,
)
from kvatlas.connectors.scheduler.source_pins import SourcePins
from kvatlas.connectors.settings import OffloadSettings
from kvatlas.connectors.tier.base import Tier, TierChanges
from kvatlas.connectors.transfer.base import Counts, Direction, Rates, StepJobs, StepResults

if TYPE_CHECKING:
    from kvatlas.connectors.hits import HitResolver

log = logging.getLogger(__name__)

# How long an engine without free blocks waits for running stores before it preempts.
BLOCK_FREES_WAIT_S = 0.25


class OffloadScheduler:
    """Scheduler half over one tier. Call ``bind_gpu_block_pool`` before the first step."""

    def __init__(
        self,
        tier: Tier,
        resolver: HitResolver,
        settings: OffloadSettings,
        *,
        world_size: int,
        event_log: EventLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the scheduler half.

        ``world_size``: number of ranks that answer each job. ``event_log``: None if KV events are off.
        """
        self.counters = Counts()
        self._tier = tier
        self._resolver = resolver
        self._settings = settings
        self._events = PendingEvents(event_log)
        self._clock = clock
        self._pins = SourcePins(settings.pinned_source_blocks_max)
        self._threshold = StoreThreshold(settings.store_threshold)
        self._requests: dict[str, RequestState] = {}
        self._jobs = OpenJobs(world_size)
        self._rates = Rates()
        self._next = StepJobs()
        self._lookups = Lookups(
            resolver, tier, self.counters, deadline_s=settings.lookup_deadline_s, clock=clock
        )
        # The tier's changes since events were taken.
        self._changes: list[tuple[bool, bytes]] = []
        # Time at which the engine began to wait for a store; None after a store has ended.
        self._frees_awaited_since: float | None = None

    # -- requests ----------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, pool: Any) -> None:
        """Use the engine's pool, whose reference counts protect the sources of stores."""
        self._pins.bind(pool)

    def on_new_request(self, request: EngineRequest) -> None:
        self._requests[request.request_id] = RequestState(request)
        if has_invalid_hint(request):
            self.counters.add("hints_invalid")

    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded after the local ones; None: not known in this step.

        It only caches results, so it may be called any number of times.
        """
        state = self._requests.get(request.request_id)
        # A failed load is not tried again before the request was admitted without one: it could fail forever.
        if state is None or state.must_compute or request.skip_reading_prefix_cache:
            return 0, False
        state.num_local_tokens = num_computed_tokens
        hit = self._lookups.hit(request, num_computed_tokens)
        if hit is None:
            return None, False
        external = hit - num_computed_tokens
        # A short load costs more than computing: the request waits for the link for a step.
        if external < self._settings.load_min_tokens:
            return 0, False
        return external, True

    def update_state_after_alloc(self, request: EngineRequest, blocks: Any, num_external_tokens: int) -> None:
        """Handle the admission of a request; with external tokens, its blocks are filled before it runs."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        self._lookups.forget(request.request_id)
        if num_external_tokens == 0:
            if request.num_computed_tokens == 0:  # a load was counted when it began
                self.counters.add("lookups/computed")
            state.must_compute = False
            return
        self.counters.add("lookups/loaded")
        self.counters.add("hit_tokens", num_external_tokens)
        self._begin_load(state, blocks.get_block_ids(), num_external_tokens)

    def request_finished_all_groups(
        self, request: EngineRequest, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Returns False: the engine may free the blocks now; stores pin their sources by reference count."""
        del block_ids
        state = self._requests.pop(request.request_id, None)
        if state is not None:
            self.counters.add("blocks_refused", state.refused_blocks)
            self._lookups.forget(request.request_id)
            self._tier.forget_request(request.request_id)
        # False: the engine frees the blocks at once. Running stores hold their sources by reference count.
        return False, None

    # -- steps -------------------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> StepJobs:
        """Jobs of this step: loads of the admitted requests, stores of the blocks that the step fills."""
        step, self._next = self._next, StepJobs()
        block_state = scheduler_output.kv_connector_block_state
        offers: dict[str, list[tuple[int, int, int]]] = {}
        if block_state is not None:
            offers = block_state.boundary_state_offloads
        scheduled = scheduler_output.num_scheduled_tokens
        # Boundary states are offered also for requests that this step does not schedule.
        for request_id in [*scheduled, *(i for i in offers if i not in scheduled)]:
            state = self._requests.get(request_id)
            if state is None or block_state is None:
                continue
            blocks = self._due_blocks(state, scheduled.get(request_id, 0), block_state)
            states = plan_states(
                self._resolver, state.request, offers.get(request_id, ()), self._storable_tokens(state)
            )
            blocks = self._threshold.admit(state, blocks)
            refused = self._begin_store(step, state.request, blocks, states)
            # Over the limit of pinned blocks: tried again in a later step, while the blocks are still held.
            if refused:
                state.refused_blocks = len(refused)
                state.next_token = min(block.start_token for block in refused)
        self._note_changes()
        return step

    def update_connector_output(self, results: StepResults) -> None:
        """Process the ranks' results; jobs that every rank has answered end here."""
        self._rates.add(results.results)
        for job in self._jobs.take(results):
            if job.direction is Direction.STORE:
                self._end_store(job)
            else:
                self._end_load(job)
        self._note_changes()

    def take_events(self) -> list[Any]:
        """KV events of the blocks that became loadable or were removed since the last call."""
        self._note_changes()
        changes, self._changes = TierChanges(tuple(self._changes)), []
        return self._events.take(changes)

    def has_pending_push_work(self) -> bool:
        """Whether the engine must keep stepping: results arrive only with steps."""
        # Results arrive only with steps, and an idle engine makes none: a store would pin its blocks until
        # the next request.
        return bool(self._jobs) or bool(self._next.loads) or self._tier.busy()

    def has_pending_block_frees(self) -> bool:
        """Whether the engine should wait for blocks that running stores free soon, instead of preempting."""
        if not self._pins.frees_on_completion():
            return False
        if self._frees_awaited_since is None:
            self._frees_awaited_since = self._clock()
        # Bounded: a store that hangs must not stop the engine, which can still preempt.
        return self._clock() - self._frees_awaited_since < BLOCK_FREES_WAIT_S

    def reset_cache(self) -> bool:
        """Drop all held blocks and running stores. False while transfers run; call it again."""
        self._jobs.discard_all()
        gone = self._tier.reset()
        self._note_changes()
        return gone and not self._jobs

    def gauges(self) -> dict[str, float]:
        """Current values by the names of ``kvatlas.connectors.reports``."""
        rates = {f"bandwidth_bytes_per_second/{way}": r for way, r in self._rates.bytes_per_second().items()}
        waiting = {f"jobs_waiting/{way.value}": self._jobs.waiting(way) for way in Direction}
        return {**rates, **waiting, "blocks_pinned": self._pins.count}

    def counts(self) -> dict[str, int]:
        """Numbers of tracked objects, for tests."""
        pinned = self._pins.count
        return {"requests": len(self._requests), "jobs": len(self._jobs), "pinned_blocks": pinned}

    def _note_changes(self) -> None:
        """Take the tier's changes immediately, so that no request is offered a removed block."""
        changes = self._tier.take_changes().changes
        if not changes:
            return
        self._changes += changes
        # Cached lookups must not promise a removed block: its load would fail and the prompt be computed
        # late.
        removed = frozenset(key for stored, key in changes if not stored)
        self.counters.add("blocks_removed", sum(not stored for stored, _ in changes))
        self.counters.add("blocks_stored", sum(stored for stored, _ in changes))
        self._lookups.removed(removed)

    # -- loads -------------------------------------------------------------------------------------------

    def _begin_load(self, state: RequestState, table: Sequence[Sequence[int]], num_external: int) -> None:
        request, local = state.request, state.num_local_tokens
        blocks = plan_load(self._resolver, request, table, local, local + num_external)
        slots = self._tier.begin_load([block.key for block in blocks]) if blocks else None
        if blocks is None or slots is None:
            # The engine already waits for this load: send a job without blocks, which every rank fails.
            log.warning("request %s: its hit can no longer be loaded", request.request_id)
            blocks, slots = [], []
        self._retain(request, blocks)
        job_id = self._jobs.open(Direction.LOAD, request.request_id, blocks)
        self._next.loads.append(make_job(job_id, Direction.LOAD, blocks, slots))
        self._next.load_requests[job_id] = request.request_id

    def _retain(self, request: EngineRequest, blocks: list[PlannedBlock]) -> None:
        """Apply the request's hint to those of these blocks, in prompt order, that it covers."""
        hint = retention_hint(request)
        if hint is not None and blocks:
            covered = [block.key for block in blocks if hint.tokens is None or block.end_token <= hint.tokens]
            self._tier.retain(covered, hint)

    # -- stores ------------------------------------------------------------------------------------------

    def _storable_tokens(self, state: RequestState) -> int:
        request = state.request
        if self._settings.store_generated:
            return request.num_tokens
        return request.num_prompt_tokens

    def _due_blocks(self, state: RequestState, num_scheduled: int, block_state: Any) -> list[PlannedBlock]:
        """Blocks of this request that are full and hashed after this step, and were not tried before."""
        request, unit = state.request, self._resolver.hash_block_tokens
        # Start again: the blocks offered before may have been freed.
        if request.num_computed_tokens < state.next_token:  # preempted, or its load failed
            self.counters.add("blocks_refused", state.refused_blocks)
            state.next_token = state.refused_blocks = 0
        computed = min(
            request.num_computed_tokens + num_scheduled,
            len(request.block_hashes) * unit,
            self._storable_tokens(state),
        )
        if not num_scheduled or computed < state.next_token // unit * unit + unit:
            return []
        if state.refused_blocks and self._pins.room < 1:
            return []
        table = block_state.get_block_ids(request.request_id)
        if table is None:
            return []
        blocks = plan_store(self._resolver, state, table, computed)
        state.next_token, state.refused_blocks = computed, 0
        return blocks

    def _begin_store(
        self, step: StepJobs, request: EngineRequest, blocks: list[PlannedBlock], states: list[PlannedBlock]
    ) -> list[PlannedBlock]:
        """Reserve rows for the blocks that are new to the tier and pin them; returns those over the limit."""
        if not blocks and not states:
            return []
        if not self._pins.bound:
            raise RuntimeError("stores need the engine's block pool: bind_gpu_block_pool was never called")
        chosen: list[PlannedBlock] = []
        slots: list[int] = []
        # States first: the engine offers them once, while blocks are tried again.
        refused_states = self._reserve(request, states, chosen, slots)
        refused = self._reserve(request, blocks, chosen, slots)
        self.counters.add("blocks_refused", len(refused_states))
        self._retain(request, sorted([*blocks, *states]))
        if not chosen:
            return refused
        self._events.begun(request, chosen)
        # Before the job is sent: the engine may free the request's blocks in this very step.
        self._pins.pin([block.block_id for block in chosen])
        job_id = self._jobs.open(Direction.STORE, request.request_id, chosen)
        step.stores.append(make_job(job_id, Direction.STORE, chosen, slots))
        return refused

    def _reserve(
        self,
        request: EngineRequest,
        blocks: list[PlannedBlock],
        chosen: list[PlannedBlock],
        slots: list[int],
    ) -> list[PlannedBlock]:
        """Extend ``chosen`` and ``slots`` by the blocks that the tier accepts; returns those over the
        limit."""
        at = 0
        while at < len(blocks) and (room := self._pins.room - len(chosen)) > 0:
            part = {block.key: block for block in blocks[at : at + room]}
            at += room
            for key, slot in self._tier.begin_store(list(part), request.block_hashes):
                chosen.append(part[key])
                slots.append(slot)
        return blocks[at:]

    # -- the end of jobs ---------------------------------------------------------------------------------

    def _end_store(self, job: OpenJob) -> None:
        for block in job.blocks:
            good = job.good(block)
            self._events.ended(block.key, ok=good)
            self._tier.end_store(block.key, ok=good)
            self.counters.add("blocks_bad/store", not good)
        self._pins.unpin([block.block_id for block in job.blocks])
        self._frees_awaited_since = None

    def _end_load(self, job: OpenJob) -> None:
        for block in job.blocks:
            good = job.good(block)
            self._tier.end_load(block.key, ok=good)
            self.counters.add("blocks_bad/load", not good)
        if job.failed and (state := self._requests.get(job.request_id)) is not None:
            state.must_compute = True
