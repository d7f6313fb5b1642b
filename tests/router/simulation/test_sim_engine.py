"""The simulated engine: every request ends once, in the order it came; preemption; the model's times."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvatlas.publisher.groups import GroupSpec
from kvatlas.router.simulation.request_run import RequestRun
from kvatlas.router.simulation.requests import Request, block_hashes
from kvatlas.router.simulation.setup import Timing
from tests.router.simulation.support import FAST, FULL, HYBRID, Bench, request
from tests.support.examples import examples

Drawn = list[tuple[float, int, int, int]]
arrivals = st.lists(
    st.tuples(st.floats(0, 3), st.integers(1, 1500), st.integers(0, 400), st.integers(0, 3)),
    min_size=1,
    max_size=12,
)


def requests_of(drawn: Drawn) -> list[Request]:
    made = [request(at_s, tokens, output, 100 * head) for at_s, tokens, output, head in drawn]
    return sorted(made, key=lambda one: one.at_s)


# Its last request comes where a step ends, by rounding just before that.
_AT_AN_END: Drawn = [
    (0.0, 1, 0, 0),
    (0.0, 1, 137, 0),
    (0.0, 186, 0, 1),
    (0.0, 1275, 0, 0),
    (0.0, 227, 0, 0),
    (3.0, 1, 0, 0),
]


@settings(max_examples=examples(60))
@given(arrivals, st.sampled_from([12, 24, 40, 400]), st.sampled_from([FULL, HYBRID]))
@example(_AT_AN_END, 40, HYBRID)
def test_every_request_ends_once_and_the_pool_is_whole(
    drawn: Drawn, num_blocks: int, groups: tuple[GroupSpec, ...]
) -> None:
    bench = Bench(num_blocks=num_blocks, groups=groups)
    runs = bench.run(requests_of(drawn))
    assert sorted(bench.of("ended") + bench.of("refused")) == list(range(len(runs)))
    assert set(bench.of("first")) >= set(bench.of("ended"))
    assert len(set(bench.of("first"))) == len(bench.of("first"))
    times = [now for _, _, now in bench.told]
    assert times == sorted(times)
    bench.engine.pool.check_integrity()
    assert bench.engine.pool.num_free_blocks == num_blocks - 1, "no block is held at the end"
    for run in runs:
        if run.index in bench.of("ended"):
            assert run.arrived_s <= run.started_s < run.first_token_s <= run.ended_s
            assert 0 <= run.hit < run.input_tokens


@settings(max_examples=examples(30))
@given(arrivals, st.integers(1, 7))
def test_it_does_not_matter_how_often_it_is_advanced(drawn: Drawn, pauses: int) -> None:
    plain, paused = Bench(num_blocks=24), Bench(num_blocks=24)
    plain.run(requests_of(drawn))
    paused.run(requests_of(drawn), pauses=pauses)
    assert plain.told == paused.told


def test_prompts_are_taken_up_in_the_order_they_came() -> None:
    bench = Bench(num_blocks=400)
    runs = bench.run([request(0.1 * index, 600, 1, 10 * index) for index in range(8)])
    assert bench.of("first") == list(range(8))
    starts = [run.started_s for run in runs]
    assert starts == sorted(starts)


def test_remaining_work_shrinks_within_a_step_as_time_passes() -> None:
    engine = (bench := Bench(num_blocks=400)).engine
    pooled = engine.pool.request([0] * 1000, hashes=block_hashes(request(0.0, 1000, 1, 0), 64))
    engine.arrive(RequestRun(0, pooled, 1000, 1, 0.0), 0.0)
    ends_s = engine.next_s
    assert engine.remaining_s(0.0) - engine.remaining_s(ends_s / 2) == pytest.approx(ends_s / 2)
    engine.advance()
    assert engine.remaining_s(ends_s) < engine.remaining_s(0.0) - ends_s + 1e-9
    assert bench.told == []


def test_the_times_are_those_of_the_model() -> None:
    timing = Timing(
        prefill_s_per_token=0.001,
        chunk_s=0.25,
        interference_s=0.5,
        decode_s=0.01,
        chunk_tokens=512,
        seqs_max=4,
    )
    bench = Bench(num_blocks=400, timing=timing)
    one, two = bench.run([request(0, 600, 1001, 1), request(1.0, 100, 1, 50)])
    assert one.first_token_s == pytest.approx(2 * 0.25 + 0.6), "two chunks"
    assert one.ended_s == pytest.approx(one.first_token_s + 999 * 0.01 + 0.85), "one token beside the other"
    assert two.started_s == pytest.approx(one.first_token_s)
    assert two.first_token_s == pytest.approx(two.started_s + 0.25 + 0.1 + 0.5), "beside one that generates"
    assert bench.engine.busy_s == pytest.approx(1.1 + 0.85)
    assert bench.engine.computed_tokens == 700


def test_the_last_chunk_of_a_prompt_is_filled_up_with_the_next_ones() -> None:
    bench = Bench(num_blocks=400)
    runs = bench.run([request(0, 600, 1, 0), request(0.1, 300, 1, 10), request(0.1, 300, 1, 20)])
    assert [run.started_s for run in runs] == pytest.approx([0, 0.512, 0.512])
    ends_s = 0.512 + 0.512
    assert [run.first_token_s for run in runs] == pytest.approx([ends_s, ends_s, ends_s + 0.176])


def test_a_prompt_that_arrives_within_a_step_waits_for_its_end() -> None:
    bench = Bench(num_blocks=400)
    _, two = bench.run([request(0, 64, 200, 0), request(0.2055, 64, 1, 10)])
    assert two.started_s == pytest.approx(0.064 + 15 * 0.01)


def test_a_resend_finds_what_was_computed() -> None:
    bench = Bench(num_blocks=400)
    first, again = bench.run([request(0, 640, 2, 1), request(5, 640, 2, 1)])
    assert (first.hit, again.hit) == (0, 576), "all whole blocks but the last token's"
    assert again.first_token_s - again.started_s == pytest.approx(0.064)


def test_a_state_is_found_after_the_step_that_stored_it() -> None:
    states = GroupSpec(1, "mamba", 64, mamba_cache_mode="align")
    bench = Bench(num_blocks=400, groups=(*FULL, states))
    first, again = bench.run([request(0, 640, 200, 1), request(1, 640, 2, 1)])
    assert (first.hit, again.hit) == (0, 576)
    assert again.ended_s < first.ended_s


def test_at_most_seqs_max_are_on_the_engine() -> None:
    bench = Bench(num_blocks=400)
    runs = bench.run([request(0, 64, 500, 10 * index) for index in range(6)])
    ends = sorted(run.ended_s for run in runs)
    assert runs[4].started_s >= ends[0], "four generate; the fifth waits for one to end"
    assert FAST.seqs_max == 4


def test_generation_that_finds_no_block_preempts_the_latest_which_is_computed_again() -> None:
    bench = Bench(num_blocks=21)
    runs = bench.run([request(0, 500, 700, 1), request(0, 300, 500, 100)])
    assert bench.engine.preemptions > 0
    assert runs[0].preempted == 0
    assert runs[1].preempted > 0
    assert bench.of("ended") == [0, 1]
    assert bench.of("first") == [0, 1], "the first token is reported once"


def test_the_preempted_come_before_those_that_wait() -> None:
    bench = Bench(num_blocks=21, timing=msgspec.structs.replace(FAST, seqs_max=2))
    runs = bench.run([request(0, 500, 700, 1), request(0, 300, 500, 100), request(0, 200, 1, 200)])
    assert bench.engine.preemptions > 0
    assert runs[2].started_s >= bench.time_of("ended", 0), "the room was for the preempted one first"


def test_a_request_that_can_never_fit_is_refused_and_delays_no_other() -> None:
    bench = Bench(num_blocks=8)
    bench.run([request(0, 2000, 5, 1), request(0, 100, 5, 50)])
    assert bench.of("refused") == [0]
    assert bench.of("ended") == [1]


def test_timing_refuses_what_is_no_time() -> None:
    for field, value in (
        ("prefill_s_per_token", 0.0),
        ("chunk_s", -1.0),
        ("request_s", -1.0),
        ("seqs_max", 0),
        ("decode_s", float("nan")),
    ):
        with pytest.raises(ValueError, match=field):
            Timing(**{field: value})  # type: ignore[arg-type]


def test_with_an_order_the_first_of_those_that_wait_goes_next() -> None:
    bench = Bench(num_blocks=400)
    bench.run([request(0.0, 600, 1, 10 * index) for index in range(4)], ranks=[9.0, 5.0, 1.0, 5.0])
    assert bench.of("first") == [0, 2, 1, 3], "the first had begun"


@settings(max_examples=examples(30))
@given(arrivals, st.lists(st.floats(1, 9), min_size=12, max_size=12))
def test_with_an_order_every_request_ends_once_too(drawn: Drawn, ranks: list[float]) -> None:
    bench = Bench(num_blocks=24)
    runs = bench.run(requests_of(drawn), ranks=ranks)
    assert sorted(bench.of("ended") + bench.of("refused")) == list(range(len(runs)))
    bench.engine.pool.check_integrity()
    assert bench.engine.pool.num_free_blocks == 23


def test_with_an_order_the_last_in_rank_is_preempted_whenever_it_came() -> None:
    """By priority, regardless of state (Scheduler.schedule, vLLM 0.32)."""
    for ranks, preempted in (([9.0, 1.0], 0), ([1.0, 9.0], 1)):
        bench = Bench(num_blocks=21)
        runs = bench.run([request(0, 500, 700, 1), request(0, 300, 500, 100)], ranks=ranks)
        assert [index for index, run in enumerate(runs) if run.preempted] == [preempted]


def test_those_behind_one_that_preempts_itself_get_their_token_a_step_later() -> None:
    bench = Bench(num_blocks=8)
    _, last, behind = bench.run(
        [request(0, 64, 100, 0), request(0, 63, 100, 100), request(0.1, 64, 100, 200)], ranks=[1.0, 9.0, 5.0]
    )
    assert (last.preempted, behind.preempted, bench.of("ended")) == (1, 0, [0, 2, 1])
    # 99 steps with a token and one without; one of them computes 65 tokens of the preempted one again.
    assert behind.ended_s == pytest.approx(behind.first_token_s + 99 * 0.01 + 0.065)
