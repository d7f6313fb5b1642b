"""Captures read again, and rates that come out of them and out of metrics as they went in."""

from __future__ import annotations

import itertools
import json
import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.publisher.block_hash import NO_EXTRAS
from kvatlas.publisher.simulator.metrics import TTFT_BUCKETS_S, CacheConfig, EngineStats, Gauges, render
from kvatlas.router.observe.prefix_ids import START_UNIT_TOKENS, UNIT_TOKENS, prefix_ids
from kvatlas.router.observe.usage import UsageLine
from kvatlas.router.simulation.advice import doubt
from kvatlas.router.simulation.advise_trials import TrialResult, reusable_share
from kvatlas.router.simulation.fit import FitError, fit_capture, fit_metrics
from kvatlas.router.simulation.requests import Asked, WorkloadError, continued, with_start
from kvatlas.router.simulation.setup import Timing
from kvatlas.router.simulation.usage_record import asked_in, cached_share, is_capture, read_capture
from tests.router.simulation.support import line, write_lines

ASKED_S = 0.25
"""From a request's arrival until its engine was asked."""


def captured(
    *,
    timestamp: float = 0.0,
    input_length: int = 600,
    output_length: int = 5,
    hash_ids: Sequence[int] = (1, 2),
    output_reported: bool = True,
    ttft_s: float | None = 0.5,
    duration_s: float = 0.9,
    **changes: Any,
) -> dict[str, Any]:
    """A line of a usage record; times as a workload has them: of the engine, in ms and s."""
    known = UsageLine(
        arrived_s=timestamp / 1000 - ASKED_S,
        request_id="r",
        key="",
        tenant="",
        model="m",
        method="POST",
        path="/v1/chat/completions",
        engine="http://e:1",
        prefill_engine="",
        attempts=1,
        status=200,
        outcome="200",
        stream=True,
        prompt_tokens=input_length,
        cached_tokens=512,
        device_tokens=512,
        host_tokens=0,
        store_tokens=0,
        computed_tokens=input_length - 512,
        generated_tokens=output_length if output_reported else None,
        predicted_tokens=512,
        mode="exact",
        verified=True,
        waited_s=0.0,
        asked_s=ASKED_S,
        first_token_s=None if ttft_s is None else ttft_s + ASKED_S,
        duration_s=duration_s + ASKED_S,
        queue_s=0.0,
        predicted_ttft_s=None,
        hashed_tokens=input_length,
        hash_ids=list(hash_ids),
    )
    return {**msgspec.to_builtins(known), **changes}


def drawn(
    count: int, *, rate_s: float, fixed_s: float, pace_s: float, wild: float = 0.0
) -> list[dict[str, Any]]:
    """Lines of an engine with these rates; ``wild``: share with a queue that was believed wrongly."""
    rng = random.Random(1)
    lines = []
    for _ in range(count):
        tokens = rng.randint(100, 5000)
        cached = tokens // 64 * 64 // 2
        queue_s = rng.choice([0.0, 0.3])
        ttft_s = queue_s + fixed_s + rate_s * (tokens - cached) + rng.gauss(0, 0.002)
        if rng.random() < wild:
            ttft_s += rng.uniform(0.5, 20.0)
        output = rng.randint(2, 50)
        lines.append(
            captured(
                input_length=tokens,
                hash_ids=list(range(-(-tokens // 512))),
                cached_tokens=cached,
                output_length=output,
                queue_s=queue_s,
                ttft_s=ttft_s,
                duration_s=ttft_s + (output - 1) * pace_s,
            )
        )
    return lines


def test_a_capture_is_distinguished_from_a_trace(tmp_path: Path) -> None:
    assert is_capture(write_lines(tmp_path / "a.jsonl", captured()))
    assert not is_capture(write_lines(tmp_path / "b.jsonl", line()))
    (tmp_path / "c.json").write_text(json.dumps({"id": "a session", "requests": []}, indent=1))
    assert not is_capture(tmp_path / "c.json")


def test_a_capture_that_was_turned_over_is_read_whole_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_lines(tmp_path / "a.jsonl.1", captured(timestamp=5000), captured(timestamp=1000))
    write_lines(path, captured(timestamp=9000))
    assert [one.at_s for one in asked_in(read_capture(path))] == [0.0, 4.0, 8.0]


def test_answers_of_unknown_length_are_guessed_from_their_time(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl",
        captured(output_length=11, ttft_s=0.5, duration_s=1.5),
        captured(output_length=0, output_reported=False, ttft_s=0.5, duration_s=2.5),
        captured(output_length=0, output_reported=False, ttft_s=None, duration_s=0.3),
    )
    assert [one.asked.output_tokens for one in read_capture(path)] == [11, 21, 4]


def test_requests_that_are_no_workload_are_left_out(tmp_path: Path) -> None:
    refused = captured(status=429, asked_s=None) | {"hash_ids": None}
    failed = captured(status=502)
    untold = captured() | {"hash_ids": None}
    path = write_lines(tmp_path / "a.jsonl", refused, captured(), failed, untold)
    assert len(read_capture(path)) == 1
    with pytest.raises(WorkloadError, match="no answered request whose prompt the router tokenized"):
        read_capture(write_lines(tmp_path / "b.jsonl", refused, failed))


def test_models_are_not_mixed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", captured(model="a"), captured(model="b"))
    with pytest.raises(WorkloadError, match="requests of 2 models, a, b"):
        read_capture(path)
    assert [one.model for one in read_capture(path, "b")] == ["b"]
    with pytest.raises(WorkloadError, match="no request of model 'c'; there are a, b"):
        read_capture(path, "c")


def test_a_spoilt_capture_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", captured(), captured() | {"first_token_s": "soon"})
    with pytest.raises(WorkloadError, match=r"a\.jsonl:2: not a line of a usage record: .*first_token_s"):
        read_capture(path)


@pytest.mark.parametrize("wild", [0.0, 0.2])
def test_rates_come_out_of_a_capture_as_they_went_in(tmp_path: Path, wild: float) -> None:
    path = write_lines(tmp_path / "a.jsonl", *drawn(400, rate_s=2e-4, fixed_s=0.03, pace_s=0.015, wild=wild))
    fit = fit_capture(read_capture(path), Timing())
    assert fit.timing.prefill_s_per_token == pytest.approx(2e-4, rel=0.05)
    assert fit.timing.request_s == pytest.approx(0.03, abs=0.02)
    assert fit.timing.decode_s == pytest.approx(0.015, rel=0.01)
    for one in fit.estimates:
        assert one.low <= one.value <= one.high
    assert fit.timing.seqs_max == Timing().seqs_max, "what cannot be seen stays"


def test_queues_are_taken_off(tmp_path: Path) -> None:
    lines = [
        one | {"queue_s": one["queue_s"] + 2.0, "first_token_s": one["first_token_s"] + 2.0}
        for one in drawn(100, rate_s=2e-4, fixed_s=0.03, pace_s=0.015)
    ]
    fit = fit_capture(read_capture(write_lines(tmp_path / "a.jsonl", *lines)), Timing())
    assert fit.timing.request_s == pytest.approx(0.03, abs=0.02)
    assert not any("no queue" in note for note in fit.notes), "no request was alone"


def test_a_capture_that_tells_too_little_says_what_is_missing(tmp_path: Path) -> None:
    few = read_capture(write_lines(tmp_path / "a.jsonl", captured(cached_tokens=None)))
    with pytest.raises(FitError, match=r"0 requests .* stream_options.include_usage"):
        fit_capture(few, Timing())
    same = read_capture(write_lines(tmp_path / "b.jsonl", *[captured()] * 30))
    with pytest.raises(FitError, match="same number of computed tokens"):
        fit_capture(same, Timing())


def histogram(name: str, buckets: dict[str, float], total: float) -> str:
    lines = [f"# TYPE {name} histogram"]
    lines += [f'{name}_bucket{{le="{bound}",engine="0"}} {count}' for bound, count in buckets.items()]
    return "\n".join(
        [*lines, f'{name}_sum{{engine="0"}} {total}', f'{name}_count{{engine="0"}} {buckets["+Inf"]}', ""]
    )


PREFILL = histogram("vllm:request_prefill_time_seconds", {"0.1": 25, "0.3": 75, "+Inf": 100}, 20.0)
COMPUTED = histogram("vllm:request_prefill_kv_computed_tokens", {"1000": 50, "+Inf": 100}, 100_000.0)
PACE = histogram("vllm:inter_token_latency_seconds", {"0.01": 500, "0.02": 1000, "+Inf": 1000}, 10.0)


def test_rates_come_out_of_metrics() -> None:
    fit = fit_metrics(PREFILL + COMPUTED + PACE, Timing())
    assert fit.timing.prefill_s_per_token == pytest.approx(20 / 100_000)
    assert fit.timing.decode_s == pytest.approx(0.01)
    rate = fit.estimates[0]
    assert (rate.low, rate.high) == (pytest.approx(0.1 / 1000), pytest.approx(0.3 / 1000))
    assert fit.notes == []


def test_older_engines_are_read_by_their_first_tokens() -> None:
    counters = "".join(
        f"# TYPE vllm:{name}_total counter\nvllm:{name}_total {value}\n"
        for name, value in (("prompt_tokens", 150_000), ("prefix_cache_hits", 50_000))
    )
    ttft = histogram("vllm:time_to_first_token_seconds", {"1.0": 100, "+Inf": 100}, 30.0)
    fit = fit_metrics(ttft + counters, Timing())
    assert fit.timing.prefill_s_per_token == pytest.approx(30 / 100_000)
    assert any("upper bound" in note for note in fit.notes)
    queue = histogram("vllm:request_queue_time_seconds", {"1.0": 100, "+Inf": 100}, 10.0)
    assert fit_metrics(ttft + counters + queue, Timing()).timing.prefill_s_per_token == pytest.approx(
        20 / 100_000
    )


def test_metrics_that_tell_nothing_are_refused() -> None:
    for page in ("", "vllm:x{ 1", COMPUTED):
        with pytest.raises(FitError):
            fit_metrics(page, Timing())


def test_rates_come_out_of_a_simulated_engines_page() -> None:
    stats = EngineStats(prompt_tokens=9000, prompt_tokens_cached=1000)
    for _ in range(40):
        stats.ttft.add(0.02, TTFT_BUCKETS_S)
    cache = CacheConfig(
        block_size=16,
        num_gpu_blocks=64,
        prefix_caching_hash_algo="sha256",
        prefix_cache_retention_interval=0,
    )
    page = render(stats, Gauges(0, 0, 0.0), cache, model="m", dp_rank=0).decode()
    assert fit_metrics(page, Timing()).timing.prefill_s_per_token == pytest.approx(0.8 / 8000)


SHARED_TOKENS, OWN_TOKENS = 200, 85


def short_chats(count: int, *, told: bool) -> list[dict[str, Any]]:
    """Chats of fewer tokens than a unit of ids, with one system prompt, 70 % of which were cached."""
    lines = []
    for number in range(count):
        tokens = array("q", [*range(SHARED_TOKENS), *range(1000 * number, 1000 * number + OWN_TOKENS)])
        ids = prefix_ids(tokens, "m", NO_EXTRAS, b"k" * 32)
        start = prefix_ids(tokens, "m", NO_EXTRAS, b"k" * 32, START_UNIT_TOKENS) if told else None
        cached = SHARED_TOKENS if number else 0
        lines.append(
            captured(timestamp=900 * number, input_length=len(tokens), hash_ids=ids)
            | {"cached_tokens": cached, "start_ids": start}
        )
    return lines


def test_prefixes_below_a_unit_of_ids_are_seen_by_the_ids_of_the_start(tmp_path: Path) -> None:
    read = read_capture(write_lines(tmp_path / "a.jsonl", *short_chats(300, told=True)))
    assert {one.asked.unit_tokens for one in read} == {START_UNIT_TOKENS}
    requests = continued(asked_in(read))
    reusable, recorded = reusable_share(requests), cached_share(read)
    assert reusable == pytest.approx(192 / 285, abs=0.01)
    assert recorded == pytest.approx(200 / 285, abs=0.01)
    assert doubt([told_base()], 300, reusable, recorded) == ""


def test_advice_is_withheld_where_engines_cached_what_no_id_shows(tmp_path: Path) -> None:
    read = read_capture(write_lines(tmp_path / "a.jsonl", *short_chats(300, told=False)))
    reusable, recorded = reusable_share(continued(asked_in(read))), cached_share(read)
    assert reusable == 0
    text = doubt([told_base()], 300, reusable, recorded)
    assert text.startswith("the engines reported 70% of the prompt tokens as cached, and the ids")


def told_base() -> TrialResult:
    return TrialResult(
        topic="now",
        value="",
        hit_share=0.0,
        mean_s=1.0,
        p90_s=1.0,
        p99_s=1.0,
        busy_share=0.1,
        refused=0,
        change=0.0,
        every_seed=False,
    )


@given(st.lists(st.tuples(st.integers(1, 1500), st.booleans()), min_size=1, max_size=6), st.integers(0, 40))
def test_ids_of_starts_go_on_in_the_next_turn_of_a_chat(turns: list[tuple[int, bool]], answer: int) -> None:
    """Each turn continues the one before it exactly if a whole unit of that is known, at any length."""
    lengths = list(itertools.accumulate((more + answer for more, _ in turns)))
    asked = []
    for at, (length, (_, told)) in enumerate(zip(lengths, turns, strict=True)):
        tokens = array("q", range(length))
        start = prefix_ids(tokens[:UNIT_TOKENS], "m", NO_EXTRAS, b"k" * 32, START_UNIT_TOKENS)
        ids = tuple(prefix_ids(tokens, "m", NO_EXTRAS, b"k" * 32))
        one = Asked(at_s=float(at), input_tokens=length, output_tokens=answer, ids=ids)
        asked.append(with_start(one, start if told else None, "here"))
    for one, request in zip(asked, continued(asked), strict=True):
        assert len(request.ids) == -(-(one.input_tokens + answer) // START_UNIT_TOKENS)
        assert len(one.ids) == -(-one.input_tokens // START_UNIT_TOKENS)
    for (before, after), ((_, told), (_, next_told)) in zip(
        itertools.pairwise(asked), itertools.pairwise(turns), strict=True
    ):
        if told == next_told:
            assert after.ids[: len(before.lasting_ids)] == before.lasting_ids
