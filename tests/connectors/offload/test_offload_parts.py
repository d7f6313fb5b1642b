"""The parts of both halves, each alone; needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("numpy", reason="needs numpy")

from kvatlas.connectors.group_shapes import GroupKind, GroupShape
from kvatlas.connectors.layout import CacheView, LayoutError
from kvatlas.connectors.scheduler.open_jobs import OpenJobs
from kvatlas.connectors.scheduler.plans import (
    PlannedBlock,
    RequestState,
    StoreThreshold,
    make_job,
    plan_load,
    plan_states,
    plan_store,
)
from kvatlas.connectors.scheduler.source_pins import SourcePins
from kvatlas.connectors.settings import ConfigError
from kvatlas.connectors.transfer.base import (
    CLOSE_S,
    Counts,
    Direction,
    StepJobs,
    StepResults,
    TransferJob,
    TransferResult,
)
from kvatlas.connectors.worker.worker import EngineWithPool, OffloadWorker, device_of, make_engine, slots_of
from tests.connectors.offload.model_engine import BLOCK, ModelEngine, ModelPool, ModelRequest, ModelResolver

RESOLVER: Any = ModelResolver()


def request(tokens: int) -> ModelRequest:
    return ModelRequest("r", list(range(tokens)), tokens, 1)


def block(index: int, group: int = 0) -> PlannedBlock:
    return PlannedBlock((index + 1) * BLOCK, group, index * BLOCK, 10 + index, b"key%d-%d" % (index, group))


def answer(job_id: int, *, ok: bool = True, keys: tuple[bytes, ...] = ()) -> TransferResult:
    return TransferResult(job_id, Direction.STORE, ok, 0.1, {}, "" if ok else "broken", keys)


class TestPlans:
    def test_a_load_fills_what_the_engine_allocated(self) -> None:
        table = [[1, 2, 3, 4], [0, 0, 5, 6]]
        blocks = plan_load(RESOLVER, request(17), table, 0, 16)
        assert blocks is not None
        assert [(b.group_idx, b.block_id) for b in blocks] == [(0, 1), (0, 2), (0, 3), (1, 5), (0, 4), (1, 6)]

    @pytest.mark.parametrize(
        "table",
        [
            [[1, 2, 3, 4], [0, 9, 5, 6]],  # a block that nothing would fill
            [[1, 2, 3, 4], [0, 0, 0, 6]],  # no block where one is needed
            [[1, 2, 3], [0, 0, 5]],  # too short
        ],
    )
    def test_a_table_that_does_not_fit_its_hit_is_not_loaded_into(self, table: list[list[int]]) -> None:
        assert plan_load(RESOLVER, request(17), table, 0, 16) is None

    def test_a_store_names_no_null_block(self) -> None:
        state = RequestState(request(17), next_token=4)
        blocks = plan_store(RESOLVER, state, [[1, 2, 3, 4], [0, 0, 5, 6]], 16)
        assert [(b.end_token, b.group_idx, b.block_id) for b in blocks] == [
            (8, 0, 2), (12, 0, 3), (12, 1, 5), (16, 0, 4), (16, 1, 6)
        ]  # fmt: skip

    def test_groups_of_other_blocks_and_partial_tails(self) -> None:
        class Uneven(ModelResolver):
            group_shapes = (GroupShape(0, GroupKind.FULL, BLOCK), GroupShape(1, GroupKind.FULL, 2 * BLOCK))

            def store_mask(self, *_: Any, **__: Any) -> dict[int, list[int]]:
                return {0: [2], 1: [0]}

            def partial_tail(self, *_: Any) -> dict[int, tuple[int, int]]:
                return {0: (0, BLOCK), 1: (1, 3 * BLOCK)}

        resolver: Any = Uneven()
        state = RequestState(request(17), next_token=BLOCK)
        blocks = plan_store(resolver, state, [[1, 2, 3, 4], [5, 6]], 3 * BLOCK)
        assert [(b.end_token, b.group_idx, b.start_token, b.block_id) for b in blocks] == [
            (8, 1, 0, 5), (12, 0, 8, 3), (12, 1, 8, 6)
        ]  # fmt: skip

    def test_a_block_is_stored_after_enough_requests_offered_it(self) -> None:
        threshold = StoreThreshold(2, remembered_max=2)
        first, second = RequestState(request(17)), RequestState(request(17))
        blocks = [block(0), block(1)]
        for _ in range(2):  # what is tried again counts once
            assert threshold.admit(first, blocks) == []
        assert threshold.admit(second, blocks) == blocks
        assert threshold.admit(RequestState(request(17)), [block(2)]) == []
        assert len(threshold) == 2
        assert threshold.admit(RequestState(request(17)), [block(0)]) == [], "forgotten first"

    def test_states_without_a_hash_or_a_block_are_left_out(self) -> None:
        offers = [(0, 7, 8), (0, 0, 8), (0, 7, 9), (0, 7, 20), (9, 7, 8), (1, 8, 4)]
        blocks = plan_states(RESOLVER, request(17), offers, 100)
        assert [(b.end_token, b.group_idx, b.block_id) for b in blocks] == [(4, 1, 8), (8, 0, 7)]
        assert plan_states(RESOLVER, request(17), offers, 4) == blocks[:1]

    def test_a_job_keeps_block_slot_and_key_together(self) -> None:
        job = make_job(3, Direction.LOAD, [block(0), block(0, 1), block(1)], [30, 31, 32])
        first, second = job.groups
        assert (first.block_ids.tolist(), first.slots.tolist(), first.keys) == (
            [10, 11], [30, 32], (b"key0-0", b"key1-0")
        )  # fmt: skip
        assert (second.group_idx, second.slots.tolist()) == (1, [31])


class TestPins:
    def test_a_pinned_block_returns_to_the_pool_with_its_last_pin(self) -> None:
        pool, pins = ModelPool(10), SourcePins(0.5)
        pins.bind(pool)
        taken = pool.take(2)
        assert taken is not None
        pins.pin(taken)
        pins.pin(taken[:1])
        assert (pins.count, pins.room) == (2, 3)
        assert not pins.frees_on_completion()
        pool.free_blocks([pool.blocks[b] for b in taken])
        assert pins.frees_on_completion()
        pins.unpin(taken)
        assert len(pool.free) == 8
        pins.unpin(taken[:1])
        assert (pins.count, len(pool.free)) == (0, 9)

    def test_giving_back_too_much_is_an_error(self) -> None:
        pins = SourcePins(0.5)
        pins.bind(ModelPool(10))
        with pytest.raises(RuntimeError, match="not pinned"):
            pins.unpin([3])

    def test_even_the_smallest_share_lets_one_block_be_pinned(self) -> None:
        pins = SourcePins(0.001)
        pins.bind(ModelPool(10))
        assert pins.blocks_max == 1


class TestJobBook:
    def test_a_job_ends_with_its_last_rank_and_is_good_only_if_all_are(self) -> None:
        book = OpenJobs(2)
        first, second = (book.open(Direction.STORE, "r", [block(0), block(1)]) for _ in range(2))
        assert book.take(StepResults([answer(first)])) == []
        [job] = book.take(StepResults([answer(first), answer(second, ok=False, keys=(b"key1-0",))]))
        assert not job.failed
        [job] = book.take(StepResults([answer(second)]))
        assert job.failed
        assert [job.good(b) for b in job.blocks] == [True, False]
        assert len(book) == 0

    def test_a_rank_that_names_nothing_blames_everything(self) -> None:
        book = OpenJobs(2)
        job_id = book.open(Direction.LOAD, "r", [block(0)])
        [job] = book.take(StepResults([answer(job_id, ok=False), answer(job_id)]))
        assert not job.good(job.blocks[0])

    def test_discarded_jobs_fail_even_if_all_ranks_succeed(self) -> None:
        book = OpenJobs(1)
        job_id = book.open(Direction.STORE, "r", [block(0)])
        book.discard_all()
        later = book.open(Direction.STORE, "r", [block(1)])
        discarded, good = book.take(StepResults([answer(job_id), answer(later)]))
        assert (discarded.failed, good.failed) == (True, False)

    def test_an_answer_to_no_job_changes_nothing(self) -> None:
        assert OpenJobs(1).take(StepResults([answer(5)])) == []


class TestWorker:
    class Engine:
        def __init__(self) -> None:
            self.submitted: list[TransferJob] = []
            self.results: list[TransferResult] = []
            self.reached = True
            self.closed = False

        def mark(self) -> None:
            return None

        def submit(self, job: TransferJob, after: object = None) -> None:
            self.submitted.append(job)

        def poll(self) -> list[TransferResult]:
            results, self.results = self.results, []
            return results

        def wait(self, job_ids: Any, timeout_s: float) -> bool:
            return self.reached

        def close(self, timeout_s: float = CLOSE_S) -> bool:
            self.closed = True
            return True

    @pytest.fixture
    def engine(self) -> Engine:
        return self.Engine()

    @pytest.fixture
    def worker(self, engine: Engine) -> OffloadWorker:
        worker = OffloadWorker(None, lambda view, device: engine)
        worker.use_engine(engine)
        return worker

    def test_a_load_is_reported_once_and_with_its_result(self, worker: OffloadWorker, engine: Engine) -> None:
        job = make_job(1, Direction.LOAD, [block(0)], [0])
        worker.start_load_kv(StepJobs(loads=[job], load_requests={1: "a"}))
        assert worker.poll() == (set(), set())
        assert worker.take_results() is None
        engine.results = [TransferResult(1, Direction.LOAD, False, 0.5, {})]
        assert worker.poll() == ({"a"}, {"a"})
        results = worker.take_results()
        assert results is not None
        assert [result.job_id for result in results.results] == [1]
        assert worker.poll() == (set(), set())

    def test_a_load_without_blocks_fails_without_reaching_the_engine(
        self, worker: OffloadWorker, engine: Engine
    ) -> None:
        worker.start_load_kv(StepJobs(loads=[TransferJob(1, Direction.LOAD, ())], load_requests={1: "a"}))
        assert engine.submitted == []
        assert worker.poll() == ({"a"}, {"a"})

    def test_before_registration_there_is_no_engine(self) -> None:
        worker = OffloadWorker(None, lambda view, device: self.Engine())
        worker.start_load_kv(StepJobs())
        worker.wait_for_save(StepJobs())
        assert worker.poll() == (set(), set())
        worker.shutdown()
        with pytest.raises(RuntimeError, match="register_kv_caches"):
            worker.wait_for_save(StepJobs(stores=[make_job(1, Direction.STORE, [block(0)], [0])]))

    def test_the_device_is_that_of_the_first_cache(self) -> None:
        tensor = SimpleNamespace(device="cuda:1")
        assert device_of({"a": tensor}) == device_of({"a": [tensor, tensor]}) == "cuda:1"
        with pytest.raises(ValueError, match="no KV caches"):
            device_of({})


class TestEngines:
    CONFIG = SimpleNamespace(
        num_blocks=10, kv_cache_tensors=[SimpleNamespace(size=10240, host_resident=False)]
    )

    def test_rows_are_the_ranks_share(self) -> None:
        assert slots_of(self.CONFIG, 64 * 1024, 2, "host_bytes") == 32

    def test_too_little_memory_is_refused_with_what_it_takes(self) -> None:
        with pytest.raises(ConfigError, match="give 4096 or more"):
            slots_of(self.CONFIG, 4095, 2, "host_bytes")

    def test_devices_without_an_engine_and_rows_too_small_are_refused(self) -> None:
        view = CacheView((), 10, 1024)
        with pytest.raises(ConfigError, match="device = 'xpu'"):
            make_engine(view, "xpu", slots=4, row_bytes=1024)
        with pytest.raises(LayoutError, match="1024 bytes"):
            make_engine(view, "cpu", slots=4, row_bytes=512)

    def test_memory_is_given_back_once_the_engine_is_closed(self) -> None:
        told: list[str] = []
        engine = TestWorker.Engine()
        pool: Any = SimpleNamespace(close=lambda: told.append("pool"))
        whole = EngineWithPool(engine, pool)

        def close(timeout_s: float = CLOSE_S) -> bool:
            told.append("engine")
            return len(told) > 1

        engine.close = close  # type: ignore[method-assign]
        for _ in range(3):
            whole.close()
        assert told == ["engine", "engine", "pool"], "a job ran at first"

    def test_the_cpu_engine_gives_its_memory_back(self) -> None:
        engine = make_engine(CacheView((), 10, 1024), "cpu", slots=4, row_bytes=1024)
        engine.submit(TransferJob(1, Direction.STORE, ()))
        assert engine.wait([1], 10)
        assert [result.job_id for result in engine.poll()] == [1]
        engine.close()
        engine.close()


def test_a_tally_is_empty_after_it_was_taken() -> None:
    counters = Counts()
    counters.transfer(TransferResult(1, Direction.LOAD, True, 0.3, {0: 100, 5: 200}))
    counters.add("nothing", 0)
    sums = counters.take()
    assert sums.pop("seconds/load/0") == pytest.approx(0.1)
    assert sums.pop("seconds/load/5") == pytest.approx(0.2)
    assert sums == {"jobs/load/ok": 1, "bytes/load/0": 100, "bytes/load/5": 200}
    assert counters.take() == {}


def test_a_preempted_request_stores_again_what_the_tier_lost_meanwhile() -> None:
    engine = ModelEngine(1, gpu_blocks=40, host_blocks=60, pinned_share=1.0)
    engine.add(list(range(3 * BLOCK)), 8)
    for _ in range(4):
        engine.step(32)
    engine.preempt(engine.requests[0])
    while engine.half.counts()["jobs"]:
        engine.step(0)
    assert engine.half.reset_cache()
    engine.settle()
    assert engine.tier.held_keys > 4


def test_generated_blocks_can_be_left_out() -> None:
    def held(*, store_generated: bool) -> int:
        engine = ModelEngine(1, gpu_blocks=40, host_blocks=60, pinned_share=1.0)
        object.__setattr__(engine.half._settings, "store_generated", store_generated)
        engine.add(list(range(2 * BLOCK)), 2 * BLOCK + 1)
        engine.settle()
        return engine.tier.held_keys

    assert held(store_generated=True) == 8
    assert held(store_generated=False) == 4


def test_small_hits_are_computed() -> None:
    engine = ModelEngine(1, gpu_blocks=40, host_blocks=60, pinned_share=1.0)
    object.__setattr__(engine.half._settings, "load_min_tokens", 2 * BLOCK + 1)
    for tokens in (2 * BLOCK + 1, 2 * BLOCK + 1, 3 * BLOCK + 1, 3 * BLOCK + 1):
        engine.add(list(range(tokens)), 1)
        engine.settle()
    assert engine.counts["loads"] == 1
