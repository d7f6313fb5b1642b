"""The scheduler on a real block pool and a clock the test moves: batching, chunks, preemption, aborts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.block_pool import HybridBlockPool
from kvatlas.publisher.groups import GroupSpec
from kvatlas.publisher.simulator.request import SimRequest
from kvatlas.publisher.simulator.scheduler import Output, Scheduler, StepCosts
from kvatlas.publisher.simulator.settings import (
    PRESETS,
    EngineSettings,
    blocks_needed,
    model_length,
    resolve_groups,
)

EOS = 1
COSTS = StepCosts(prefill_s_per_token=0.001, decode_s_per_token=0.5)
STEPS_MAX = 10_000


class Words:
    """Output tokens that depend on the prompt and the position only; may end by itself."""

    def __init__(self, seed: int, length: int = 1 << 30) -> None:
        self._seed, self._length = seed, length

    def token(self, index: int, *, ignore_eos: bool) -> int:
        return EOS if index >= self._length and not ignore_eos else 100 + (self._seed + index) % 50


class Rig:
    """A scheduler, its pool, and simulated time that passes with the steps."""

    def __init__(
        self,
        preset: str = "gptoss-like",
        *,
        num_blocks: int = 400,
        by_priority: bool = False,
        **limits: int,
    ) -> None:
        self.now_s = 0.0
        self.num_blocks = num_blocks
        budget = limits.get("max_num_batched_tokens", 256)
        self.pool = HybridBlockPool(
            PRESETS[preset](16),
            num_blocks=num_blocks,
            scheme=HashScheme(),
            chunk_tokens_max=budget,
        )
        self.scheduler = Scheduler(
            self.pool,
            costs=COSTS,
            max_num_seqs=limits.get("max_num_seqs", 8),
            max_num_batched_tokens=budget,
            clock=lambda: self.now_s,
            by_priority=by_priority,
        )

    def add(
        self,
        prompt: list[int],
        *,
        max_tokens: int = 4,
        length: int = 1 << 30,
        name: str = "r",
        priority: int = 0,
    ) -> SimRequest:
        words = Words(sum(prompt), length)
        request = SimRequest(name, prompt, words, max_tokens=max_tokens, eos_id=EOS, priority=priority)
        self.scheduler.add(request)
        return request

    def step(self) -> list[Output]:
        step = self.scheduler.begin_step()
        self.now_s += step.duration_s
        outputs = self.scheduler.end_step(step)
        self.pool.check_integrity()
        return outputs

    def run(self) -> list[Output]:
        outputs = []
        for _ in range(STEPS_MAX):
            if not self.scheduler.has_work:
                return outputs
            outputs += self.step()
        raise AssertionError("the scheduler makes no progress")

    @property
    def all_free(self) -> bool:
        return self.pool.num_free_blocks == self.num_blocks - 1


def prompt(length: int, seed: int = 0) -> list[int]:
    return [2 + (seed * 7919 + index * 31) % 1000 for index in range(length)]


def test_a_request_takes_one_prefill_step_and_one_step_per_further_token() -> None:
    rig = Rig()
    request = rig.add(prompt(100), max_tokens=3)
    assert [output.token_id for output in rig.step()] == request.output
    assert rig.now_s == pytest.approx(100 * COSTS.prefill_s_per_token)
    rig.run()
    assert len(request.output) == 3
    assert request.finish_reason == "length"
    assert rig.now_s == pytest.approx(100 * COSTS.prefill_s_per_token + 2 * COSTS.decode_s_per_token)
    assert rig.all_free


def test_decoding_is_shared_by_the_batch_and_cached_tokens_cost_nothing() -> None:
    rig = Rig()
    for seed in range(4):
        rig.add(prompt(50, seed), max_tokens=2)
    rig.run()
    assert rig.now_s == pytest.approx(200 * COSTS.prefill_s_per_token + COSTS.decode_s_per_token)
    start_s = rig.now_s
    again = rig.add(prompt(50, 0), max_tokens=1)
    rig.run()
    assert again.cached_tokens == 48
    assert rig.now_s - start_s == pytest.approx(2 * COSTS.prefill_s_per_token)


def test_a_state_that_a_step_stores_is_used_after_it() -> None:
    rig = Rig("mamba-hybrid")
    first = rig.add(prompt(65), max_tokens=9)
    rig.step()
    again = rig.add(prompt(65), max_tokens=1)
    assert [output.request for output in rig.run() if output.finish_reason] == [again, first]
    assert again.cached_tokens == 64


def test_a_prompt_over_the_budget_is_computed_in_chunks() -> None:
    rig = Rig(max_num_batched_tokens=64)
    request = rig.add(prompt(200), max_tokens=1)
    assert [len(rig.step()) for _ in range(4)] == [0, 0, 0, 1]
    assert request.finish_reason == "length"
    for seed in (1, 2):
        rig.add(prompt(40, seed), max_tokens=1)
    assert [len(rig.step()) for _ in range(2)] == [1, 1], "the step's budget is that of all its prompts"


def test_waiting_requests_are_admitted_in_order_as_seats_allow() -> None:
    rig = Rig(max_num_seqs=2)
    requests = [rig.add(prompt(20, seed), max_tokens=2) for seed in range(3)]
    assert [output.request for output in rig.step()] == requests[:2]
    gauges = rig.scheduler.gauges()
    assert (gauges.num_running, gauges.num_waiting) == (2, 1)
    assert gauges.kv_cache_usage > 0
    finished = [output.request for output in rig.run() if output.finish_reason]
    assert finished == requests


def test_a_request_ends_at_the_end_of_text_token() -> None:
    rig = Rig()
    request = rig.add(prompt(20), max_tokens=50, length=3)
    rig.run()
    assert request.finish_reason == "stop"
    assert request.output[-1] == EOS
    assert len(request.output) == 4


def test_out_of_blocks_the_newest_gives_way_and_resumes_with_the_same_output() -> None:
    roomy = Rig("full", num_blocks=400)
    tight = Rig("full", num_blocks=12)
    expected, got = [], []
    for rig, requests in ((roomy, expected), (tight, got)):
        requests += [rig.add(prompt(64, seed), max_tokens=60) for seed in range(2)]
        rig.run()
    assert roomy.scheduler.stats.num_preemptions == 0
    assert tight.scheduler.stats.num_preemptions > 0
    assert [r.output for r in got] == [r.output for r in expected]
    assert [r.cached_tokens for r in got] == [0, 0]
    assert tight.all_free


def test_a_preempted_request_is_readmitted_before_any_other() -> None:
    rig = Rig("full", num_blocks=12)
    older, newer = (rig.add(prompt(64, seed), max_tokens=60) for seed in range(2))
    step = rig.scheduler.begin_step()
    while not rig.scheduler.stats.num_preemptions:
        rig.scheduler.end_step(step)
        late = rig.add(prompt(5, 2), max_tokens=1)
        step = rig.scheduler.begin_step()
    assert step.requests == (older,)
    rig.scheduler.end_step(step)
    finished = [output.request for output in rig.run() if output.finish_reason]
    assert finished[0] is older, "the preempted one heads the queue, so no request overtakes it"
    assert {newer, late} <= set(finished)


def test_recomputing_after_a_preemption_costs_prefill_time() -> None:
    rig = Rig("full", num_blocks=12, max_num_batched_tokens=8)
    for seed in range(2):
        rig.add(prompt(64, seed), max_tokens=60)
    recomputed = 0
    while rig.scheduler.has_work:
        before = {request: pooled.num_computed for request, pooled in rig.scheduler._running.items()}
        step = rig.scheduler.begin_step()
        running = rig.scheduler._running
        chunks = [running[request].num_computed - before.get(request, 0) for request in step.requests]
        if rig.scheduler.stats.num_preemptions and len(chunks) == 1 and step.requests[0] in before:
            decodes = chunks[0] == 1
            expected_s = COSTS.decode_s_per_token if decodes else chunks[0] * COSTS.prefill_s_per_token
            assert step.duration_s == pytest.approx(expected_s)
            recomputed += 0 if decodes else chunks[0]
        rig.scheduler.end_step(step)
    assert recomputed > 0


def test_aborting_frees_blocks_waiting_running_and_between_begin_and_end() -> None:
    rig = Rig(max_num_seqs=2)
    running, midway, waiting = (rig.add(prompt(40, seed), max_tokens=50) for seed in range(3))
    rig.step()
    rig.scheduler.abort(running)
    step = rig.scheduler.begin_step()
    rig.scheduler.abort(midway)
    assert [output.request for output in rig.scheduler.end_step(step)] == [waiting]
    rig.scheduler.abort(waiting)
    rig.scheduler.abort(waiting)
    assert rig.scheduler.stats.finished["abort"] == 3
    assert not rig.scheduler.has_work
    assert rig.all_free


def test_aborting_a_waiting_request_leaves_the_queue_in_order() -> None:
    rig = Rig(max_num_seqs=1)
    first, second, third = (rig.add(prompt(20, seed), max_tokens=1) for seed in range(3))
    rig.scheduler.abort(second)
    assert [output.request for output in rig.run()] == [first, third]
    assert second.finish_reason == "abort"


def test_a_reset_is_refused_while_a_request_runs() -> None:
    rig = Rig()
    rig.add(prompt(40), max_tokens=2)
    rig.step()
    assert not rig.scheduler.reset_prefix_cache()
    rig.run()
    assert rig.scheduler.reset_prefix_cache()
    again = rig.add(prompt(40), max_tokens=1)
    rig.run()
    assert again.cached_tokens == 0


def test_time_to_first_token_counts_from_arrival() -> None:
    rig = Rig(max_num_seqs=1)
    rig.add(prompt(100, 0), max_tokens=2)
    rig.add(prompt(100, 1), max_tokens=1)
    rig.run()
    stats = rig.scheduler.stats
    assert sum(stats.ttft.counts) == 2
    assert stats.ttft.total == pytest.approx(0.1 + (0.1 + 0.5 + 0.1))
    assert (stats.prompt_tokens, stats.generation_tokens) == (200, 3)


@pytest.mark.parametrize("wrong", [{"prompt": []}, {"prompt": [1], "max_tokens": 0}])
def test_a_request_without_work_is_a_programming_error(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="needs a prompt"):
        SimRequest("r", **{"sampler": Words(0), "max_tokens": 1, "eos_id": EOS, **wrong})  # type: ignore[arg-type]


_LOAD = st.lists(
    st.tuples(
        st.integers(0, 3),  # which shared prefix
        st.integers(0, 200),  # how much of it
        st.integers(1, 60),  # own tokens
        st.integers(1, 30),  # output tokens
        st.integers(0, 3),  # steps before the next arrives
        st.booleans(),  # aborted right after
    ),
    min_size=1,
    max_size=12,
)


@given(_LOAD, st.sampled_from(sorted(PRESETS)), st.sampled_from([32, 96, 256]), st.integers(0, 200))
def test_every_load_ends_with_every_request_done_and_every_block_free(
    load: list[tuple[int, int, int, int, int, bool]], preset: str, budget: int, spare_blocks: int
) -> None:
    groups = PRESETS[preset](16)
    rig = Rig(
        preset,
        num_blocks=blocks_needed(groups, 300, budget) + 1 + spare_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=3,
    )
    requests = []
    for number, (family, shared, own, max_tokens, pause, aborted) in enumerate(load):
        tokens = prompt(shared, family) + prompt(own, 1000 + number)
        requests.append((rig.add(tokens, max_tokens=max_tokens), aborted))
        for _ in range(pause):
            rig.step()
        if aborted:
            rig.scheduler.abort(requests[-1][0])
    rig.run()
    assert rig.all_free
    for request, aborted in requests:
        assert request.finish_reason == "length" or aborted
        assert len(request.output) == request.max_tokens or aborted
        assert request.cached_tokens is None or request.cached_tokens < len(request.prompt)


@pytest.mark.parametrize(
    ("group", "blocks"),
    [
        (GroupSpec(0, "full_attention", 16), 625),
        (GroupSpec(0, "sliding_window", 16, sliding_window=100), 12),
        (GroupSpec(0, "chunked_local_attention", 16, attention_chunk_size=128), 13),
    ],
)
def test_a_window_or_chunk_holds_its_span_the_chunk_being_computed_and_a_block(
    group: GroupSpec, blocks: int
) -> None:
    assert blocks_needed((group,), 10_000, 64) == blocks


def test_a_context_that_fits_the_pool_is_derived_or_checked() -> None:
    groups = resolve_groups(EngineSettings(groups="full"))
    assert model_length(EngineSettings(groups="full", num_blocks=101), groups) == 1600
    assert model_length(EngineSettings(groups="full", num_blocks=101, max_model_len=800), groups) == 800
    with pytest.raises(ValueError, match="at most 1600 tokens fit"):
        model_length(EngineSettings(groups="full", num_blocks=101, max_model_len=1601), groups)


def test_unknown_presets_are_named() -> None:
    with pytest.raises(ValueError, match="unknown group preset 'gpt-9'; known: gemma3-like"):
        resolve_groups(EngineSettings(groups="gpt-9"))
    with pytest.raises(ValueError, match="at least one"):
        resolve_groups(EngineSettings(groups=()))


@pytest.mark.parametrize(("by_priority", "order"), [(True, "cadb"), (False, "abcd")])
def test_by_priority_lower_values_go_first_and_equals_by_arrival(by_priority: bool, order: str) -> None:
    rig = Rig(by_priority=by_priority, max_num_seqs=1)
    for name, priority in zip("abcd", (5, 9, -3, 5), strict=True):
        rig.add(prompt(40, ord(name)), max_tokens=1, name=name, priority=priority)
    assert "".join(output.request.request_id for output in rig.run()) == order


def test_by_priority_the_highest_value_is_preempted_whatever_the_arrival() -> None:
    rig = Rig("full", num_blocks=16, by_priority=True)
    first = rig.add(prompt(100, 1), max_tokens=60, name="first", priority=7)
    second = rig.add(prompt(100, 2), max_tokens=60, name="second", priority=1)
    rig.run()
    assert rig.scheduler.stats.num_preemptions > 0
    assert (first.finish_reason, second.finish_reason) == ("length", "length")
    assert rig.all_free


def test_by_priority_every_request_ends_also_where_blocks_are_short() -> None:
    rig = Rig(num_blocks=60, by_priority=True)
    requests = [
        rig.add(prompt(60 + 7 * seed, seed), max_tokens=30, priority=seed * 5 % 7) for seed in range(9)
    ]
    rig.run()
    assert {request.finish_reason for request in requests} == {"length"}
    assert rig.all_free
