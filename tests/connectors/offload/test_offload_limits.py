"""Bounds of the scheduler half: waits for stores, and event content of blocks announced before."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("numpy", reason="needs numpy")

from kvatlas.connectors.scheduler.plans import HINT, PlannedBlock, has_invalid_hint, retention_hint
from kvatlas.connectors.scheduler.scheduler import BLOCK_FREES_WAIT_S, OffloadScheduler
from kvatlas.connectors.settings import OffloadSettings
from kvatlas.connectors.tier.base import TierChanges
from kvatlas.connectors.tier.eviction import HintedPolicy, LruPolicy
from kvatlas.connectors.tier.host import HostTier
from kvatlas.connectors.transfer.base import Direction, StepJobs, StepResults, TransferResult
from tests.connectors.offload.model_engine import BLOCK, ModelEngine, ModelPool, ModelRequest, ModelResolver


class ForgetfulTier(HostTier):
    """Takes stores of what it was given before, and does not announce them again, as a shared store may."""

    def end_store(self, key: bytes, *, ok: bool) -> None:
        super().end_store(key, ok=ok)
        if ok:
            self.take_changes()
            super().begin_load([key])
            super().end_load(key, ok=False)
            super().take_changes()


class Log:
    """An event log that shows what it keeps."""

    def __init__(self) -> None:
        self.kept: set[bytes] = set()

    def submitted(self, request: Any, block: PlannedBlock) -> None:
        self.kept.add(block.key)

    def dropped(self, key: bytes) -> None:
        self.kept.discard(key)

    def events(self, changes: TierChanges) -> list[Any]:
        self.kept -= {key for stored, key in changes.changes if stored}
        return list(changes.changes)


class Half:
    """The scheduler's half with one request of four blocks."""

    def __init__(self, tier: HostTier, pinned_share: float = 1.0) -> None:
        self.now = 0.0
        self.log = Log()
        self.pool = ModelPool(20)
        self.half = OffloadScheduler(
            tier,
            ModelResolver(),  # type: ignore[arg-type]
            OffloadSettings(host_bytes=1, pinned_source_blocks_max=pinned_share),
            world_size=1,
            event_log=self.log,
            clock=lambda: self.now,
        )
        self.half.bind_gpu_block_pool(self.pool)
        self.names = 0

    def begin(self, first: int = 0, **fields: Any) -> tuple[ModelRequest, list[list[int]]]:
        """A new request with four blocks of each group."""
        self.names += 1
        request = ModelRequest(f"r{self.names}", list(range(first, first + 4 * BLOCK)), 4 * BLOCK, 1)
        for name, value in fields.items():
            setattr(request, name, value)
        self.half.on_new_request(request)
        return request, [self.pool.take(4) or [], self.pool.take(4) or []]

    def step(
        self, request: ModelRequest, tables: list[list[int]], tokens: int, offers: Sequence[Any] = ()
    ) -> StepJobs:
        """The jobs of a step that computes this number of tokens of this request."""
        offered = {request.request_id: list(offers)} if offers else {}
        state = SimpleNamespace(boundary_state_offloads=offered, get_block_ids=lambda _: tables)
        scheduled = {request.request_id: tokens} if tokens else {}
        return self.half.build_connector_meta(
            SimpleNamespace(kv_connector_block_state=state, num_scheduled_tokens=scheduled)
        )

    def store(self, params: dict[str, Any] | None = None, first: int = 0) -> int:
        """A new request computes its blocks and is gone; returns the job."""
        request, tables = self.begin(first, kv_transfer_params=params)
        (job,) = self.step(request, tables, 4 * BLOCK).stores
        self.half.request_finished_all_groups(request, tables)
        self.pool.free_blocks([self.pool.blocks[block] for table in tables for block in table])
        return job.job_id

    def end(self, job_id: int) -> None:
        result = TransferResult(job_id, Direction.STORE, True, 0.0, {})
        self.half.update_connector_output(StepResults([result]))


def test_blocks_over_the_limit_are_stored_by_later_steps() -> None:
    """A state that the engine offers once goes first."""
    tier = HostTier(20, LruPolicy())
    half = Half(tier, pinned_share=0.2)
    request, tables = half.begin()
    most = half.half._pins.blocks_max
    step, sizes = half.step(request, tables, 4 * BLOCK, [(1, tables[1][3], 4 * BLOCK)]), []
    request.num_computed_tokens = 4 * BLOCK - 1
    while step.stores:
        (job,) = step.stores
        sizes.append(sum(len(group.block_ids) for group in job.groups))
        assert half.half.counts()["pinned_blocks"] == sizes[-1] <= most
        half.end(job.job_id)
        step = half.step(request, tables, 1)
    assert (sizes, tier.held_keys) == ([most, most], 8)
    half.half.request_finished_all_groups(request, tables)
    assert half.half.counters.take() == {"blocks_stored": 8}


def test_blocks_that_were_never_stored_are_counted_with_the_end_of_their_request() -> None:
    half = Half(HostTier(20, LruPolicy()), pinned_share=0.2)
    most = half.half._pins.blocks_max
    half.store()
    assert half.half.counters.take() == {"blocks_refused": 8 - most}


def test_a_reset_is_over_when_no_transfer_runs() -> None:
    tier = HostTier(20, LruPolicy())
    half = Half(tier)
    half.end(half.store())
    job = half.store(first=100)
    assert not half.half.reset_cache()
    half.end(job)
    assert half.half.reset_cache()
    assert (tier.held_keys, half.half.counters.take()["blocks_removed"]) == (0, 8)


@pytest.mark.parametrize("tables", [[[1, 2, 3, 4], [0, 0, 5, 6]], [[1], []]], ids=["gone", "does not fit"])
def test_a_hit_that_cannot_be_loaded_fails_at_every_rank(tables: list[list[int]]) -> None:
    half = Half(HostTier(20, LruPolicy()))
    request, _ = half.begin()
    half.half.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: tables), 4 * BLOCK)
    assert half.half.has_pending_push_work()
    step = half.step(request, tables, 0)
    (job,) = step.loads
    assert (job.groups, step.load_requests) == ((), {job.job_id: request.request_id})
    assert not half.half.reset_cache(), "a job runs, though of no block"


def test_nothing_is_kept_of_a_store_that_ended_without_an_event() -> None:
    half = Half(ForgetfulTier(20, LruPolicy()))
    for _ in range(3):
        job = half.store()
        assert half.log.kept
        half.end(job)
        assert half.half.take_events() == []
        assert half.log.kept == set()


def test_blocks_stored_again_before_events_are_taken_keep_their_event() -> None:
    half = Half(ForgetfulTier(20, LruPolicy()))
    half.end(half.store())
    job = half.store()
    half.half.take_events()
    assert half.log.kept
    half.end(job)
    half.half.take_events()
    assert half.log.kept == set()


def test_an_engine_short_of_blocks_waits_for_a_store_that_hangs_only_briefly() -> None:
    half = Half(HostTier(20, LruPolicy()))
    job = half.store()
    assert half.half.has_pending_block_frees()
    half.now += BLOCK_FREES_WAIT_S / 2
    assert half.half.has_pending_block_frees()
    half.now += BLOCK_FREES_WAIT_S
    assert not half.half.has_pending_block_frees()
    half.end(job)
    assert half.half.counts()["pinned_blocks"] == 0


def test_every_store_that_ends_is_worth_waiting_for_the_next() -> None:
    half = Half(HostTier(20, LruPolicy()))
    first = half.store()
    assert half.half.has_pending_block_frees()
    half.now += 2 * BLOCK_FREES_WAIT_S
    half.end(first)
    half.half.reset_cache()
    half.store()
    assert half.half.has_pending_block_frees()


def test_a_pause_without_shortage_does_not_count_as_waiting() -> None:
    half = Half(HostTier(20, LruPolicy()))
    half.store()
    half.now += 10 * BLOCK_FREES_WAIT_S
    assert half.half.has_pending_block_frees()


def test_the_model_engine_needs_no_more_than_its_blocks() -> None:
    engine = ModelEngine(5, gpu_blocks=12, host_blocks=60, pinned_share=1.0)
    for _ in range(4):
        engine.add(list(range(3 * BLOCK)), 4)
    engine.settle()
    assert engine.half.counts() == {"requests": 0, "jobs": 0, "pinned_blocks": 0}


def test_a_hint_in_the_transfer_parameters_keeps_the_blocks_of_its_request() -> None:
    tier = HostTier(16, HintedPolicy(16, 0.5, lambda: 0.0))
    half = Half(tier)
    for number, params in enumerate([{HINT: {"ttl_s": 30.0, "owner": "a"}}, None, None, None]):
        half.end(half.store(params, first=1000 * number))
    assert tier.hint_counters is not None
    assert tier.hint_counters.retained == 8
    stored = [key for added, key in half.half.take_events() if added]
    assert tier.held("", stored[:8]) == frozenset(stored[:8])
    assert not tier.held("", stored[8:16])


@pytest.mark.parametrize(
    "fields",
    [
        None,
        3,
        {},
        {"ttl_s": 0},
        {"ttl_s": -1.0},
        {"ttl_s": float("nan")},
        {"ttl_s": "9"},
        {"ttl_s": True},
        {"ttl_s": 9, "value": 2},
        {"ttl_s": 9, "value": None},
        {"ttl_s": 9, "owner": 7},
        {"ttl_s": 9, "owner": "x" * 65},
        {"ttl_s": 9, "tokens": 0},
        {"ttl_s": 9, "tokens": 8.0},
        {"ttl_s": 9, "tokens": True},
    ],
)
def test_an_invalid_hint_counts_as_none_and_is_counted(fields: object) -> None:
    tier = HostTier(16, HintedPolicy(16, 0.5, lambda: 0.0))
    half = Half(tier)
    half.end(half.store({HINT: fields}))
    assert tier.num_hinted == 0
    assert half.half.counters.take().get("hints_invalid", 0) == (fields is not None)


def test_transfer_parameters_without_a_hint_are_none() -> None:
    request = ModelRequest("r", [1], 1, 1)
    for params in (None, {}, {"do_remote_decode": True}, [HINT]):
        request.kv_transfer_params = params  # type: ignore[assignment]
        assert retention_hint(request) is None
        assert not has_invalid_hint(request)


def test_a_hint_covers_the_start_of_a_prompt() -> None:
    tier = HostTier(16, HintedPolicy(16, 0.5, lambda: 0.0))
    half = Half(tier)
    for number, params in enumerate([{HINT: {"ttl_s": 30.0, "tokens": 3 * BLOCK - 1}}, None, None, None]):
        half.end(half.store(params, first=1000 * number))
    stored = [key for added, key in half.half.take_events() if added]
    assert tier.held("", stored[:8]) == frozenset(stored[:4])  # two blocks of two groups each


def test_a_hint_is_bounded_to_a_day() -> None:
    request = ModelRequest("r", [1], 1, 1)
    request.kv_transfer_params = {HINT: {"ttl_s": 10**400, "value": 1}}
    assert retention_hint(request) == (86_400.0, 1.0, "", None)
    request.kv_transfer_params = None
    assert retention_hint(request) is None
