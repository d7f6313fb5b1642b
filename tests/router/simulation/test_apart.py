"""Prefill and decode apart in the simulated fleet: what engines keep and fetch, pairs, and the report."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.cli import app
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.pd.settings import PdSettings
from kvatlas.router.simulation.advice import REQUESTS_MIN, judge
from kvatlas.router.simulation.advise_trials import ALIKE, splits, trials
from kvatlas.router.simulation.fleet import FleetSim
from kvatlas.router.simulation.outcome import FleetRun, Outcome
from kvatlas.router.simulation.request_run import Fetch, RequestRun
from kvatlas.router.simulation.requests import Request, block_hashes
from kvatlas.router.simulation.setup import FleetSetup
from kvatlas.router.simulation.split_verdict import SplitVerdict, verdict
from kvatlas.router.simulation.variants import variants_of
from tests.router.simulation.support import FAST, FULL, HYBRID, Bench, fleet_run, request
from tests.router.simulation.test_advise import BASE, SETUP

ALWAYS = PdSettings(min_remote_tokens=1, decode_delay_weight=1e6)
"""A prompt beside answers costs more than any transfer."""


def run(bench: Bench, one: Request, index: int, **changes: Any) -> RequestRun:
    pooled = bench.engine.pool.request([0] * one.input_tokens, hashes=block_hashes(one, 64))
    return RequestRun(index, pooled, one.input_tokens, one.output_tokens, one.at_s, **changes)


def to_the_end(bench: Bench) -> None:
    while bench.engine.next_s < float("inf"):
        bench.engine.advance()


def test_answers_wait_while_a_prompt_is_computed_beside_them() -> None:
    bench = Bench(num_blocks=100)
    bench.run([request(0.0, 100, 100, 0), request(0.5, 500, 1, 100)])
    assert bench.time_of("ended", 0) == pytest.approx(0.1 + 99 * 0.01 + 0.49)


def test_kept_blocks_are_in_use_until_they_are_fetched() -> None:
    bench = Bench(num_blocks=20)
    first = run(bench, request(0.0, 640, 1, 0), 0, keeps=True)
    bench.engine.arrive(first, 0.0)
    bench.engine.arrive(run(bench, request(0.0, 1000, 1, 50), 1), 0.0)
    to_the_end(bench)
    assert bench.of("ended") == [0]
    assert bench.engine.pool.num_free_blocks == 19 - 10
    assert bench.of("refused") == [], "the second one waits for the room that is kept"
    bench.engine.release(first, 5.0)
    to_the_end(bench)
    assert bench.time_of("first", 1) == pytest.approx(6.0)
    assert bench.engine.pool.num_free_blocks == 19
    bench.engine.pool.check_integrity()


def test_a_fetched_prompt_takes_its_transfer_and_one_token_of_computing() -> None:
    bench = Bench(num_blocks=100)
    bench.engine.arrive(run(bench, request(0.0, 640, 3, 0), 0, fetch=Fetch(640, 0.0001, 0.5)), 0.0)
    to_the_end(bench)
    assert bench.time_of("first", 0) == pytest.approx(0.5 + 0.064 + 0.001)
    again = run(bench, request(2.0, 700, 3, 0), 1, fetch=Fetch(700, 0.0001, 0.5))
    bench.engine.arrive(again, 2.0)
    to_the_end(bench)
    assert (again.hit, again.loaded) == (700, 60), "only what is missing is fetched"
    assert bench.engine.computed_tokens == 2


def apart(requests: list[Request], prefill: int, **changes: Any) -> tuple[FleetRun, FleetSim]:
    fields: dict[str, Any] = {"groups": HYBRID, "num_blocks": 400, "engines": 3, "timing": FAST}
    setup = FleetSetup(**{**fields, "pd": ALWAYS, **changes})
    variant = variants_of([f"kvatlas:prefill={prefill}"])[f"kvatlas:prefill={prefill}"]
    sim = FleetSim(setup, variant)
    return sim.run(requests), sim


def busy(count: int) -> list[Request]:
    """Long answers that overlap, nothing shared."""
    return [request(0.7 * i, 600, 300, 1000 * i, session=i) for i in range(count)]


def test_prompts_are_computed_by_the_engines_that_prefill_while_others_answer() -> None:
    run, _ = apart(busy(12), 1)
    fetched = [row for row in run.rows if row.fetched]
    assert len(fetched) >= 8
    assert all(row.engine >= 1 for row in run.rows)
    assert all(row.fetched == row.prompt_tokens for row in fetched)
    assert run.busy_s[0] > sum(run.busy_s[1:])
    alike = fleet_run(busy(12), timing=FAST, engines=3)
    assert max(row.per_token_s for row in run.rows) < max(row.per_token_s for row in alike.rows)


def test_an_idle_engine_that_decodes_computes_itself() -> None:
    run, _ = apart([request(100.0 * i, 1000, 5, 100 * i) for i in range(6)], 1)
    assert not any(row.fetched for row in run.rows)
    assert run.busy_s[0] == 0


def test_short_prompts_stay_whole() -> None:
    floor = PdSettings(min_remote_tokens=700, decode_delay_weight=1e6)
    run, _ = apart(busy(12), 1, pd=floor)
    assert not any(row.fetched for row in run.rows)


def test_an_answer_too_long_for_its_engine_keeps_no_blocks_where_its_prompt_was_computed() -> None:
    run, sim = apart(busy(12), 1, num_blocks=12, groups=FULL)
    assert all(row.ttft_s < 0 for row in run.rows)
    assert any(row.fetched for row in run.rows)
    assert [engine.pool.num_free_blocks for engine in sim._engines] == [11] * 3


def test_rates_are_learned_once_of_each_prompt_where_it_was_computed() -> None:
    for learned in (False, True):
        run, sim = apart(busy(12), 1, learn_rates=learned)
        split = sum(row.fetched > 0 for row in run.rows)
        first, *others = [account.rates.now(sim._now).samples for account in sim._loads]
        assert (first, sum(others)) == ((split, 12 - split) if learned else (0, 0))


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 1500), st.integers(1, 80), st.floats(0, 0.5)),
        min_size=1,
        max_size=25,
    ),
    st.sampled_from([1, 2]),
    st.sampled_from([30, 60, 400]),
    st.sampled_from([FULL, HYBRID]),
)
def test_every_request_ends_once_and_nothing_stays_kept(
    asked: list[tuple[int, int, int, float]], prefill: int, num_blocks: int, groups: Any
) -> None:
    at_s, requests = 0.0, []
    for which, tokens, output, gap_s in asked:
        at_s += gap_s
        requests.append(request(at_s, tokens, output, 1000 * which))
    run, sim = apart(requests, prefill, num_blocks=num_blocks, groups=groups)
    assert [row.index for row in run.rows] == list(range(len(requests)))
    for engine in sim._engines:
        assert engine.pool.num_free_blocks == num_blocks - 1
        engine.pool.check_integrity()
    for row in run.rows:
        assert (row.ttft_s < 0) == (row.answer_s < 0)
        assert row.answer_s >= row.ttft_s


def test_a_variant_without_a_decode_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves none of 3 engines"):
        apart(busy(2), 3)
    with pytest.raises(ValueError, match="leave out prefill="):
        variants_of(["kvatlas:hold=1+prefill=2"])


def outcome(ttft_s: float, per_token_s: float, answer_s: float) -> Outcome:
    return Outcome(
        requests=1, refused=0, hit_share=0, ttft_mean_s=ttft_s, ttft_p50_s=0, ttft_p90_s=0, ttft_p99_s=0,
        busy_share=0, imbalance=1, error_mean_tokens=0, exact_share=1, regret_s=0, preemptions=0,
        answer_mean_s=answer_s, per_token_mean_s=per_token_s,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("apart_s", "word"),
    [((1.0, 0.01, 5.0), "pays"), ((2.0, 0.01, 5.0), "is a trade"), ((0.5, 0.01, 9.9), "does not pay")],
)
def test_the_report_weighs_ttft_against_itl(apart_s: tuple[float, float, float], word: str) -> None:
    found = verdict([outcome(1.0, 0.02, 10.0)] * 2, [outcome(*apart_s)] * 2)
    assert found.word == word
    luck = verdict([outcome(1.0, 0.02, 10.0)] * 2, [outcome(*apart_s), outcome(1.0, 0.02, 10.1)])
    assert luck.word == "does not pay"


def advice(**answers: SplitVerdict) -> Any:
    told = [
        msgspec.structs.replace(BASE, topic=trial.topic, value=trial.value, mean_s=1.0, p90_s=2.0)
        for trial in trials(SETUP)
    ]
    told = [msgspec.structs.replace(one, apart=answers.get(one.value.replace(" + ", "_"))) for one in told]
    found = judge(SETUP, told, reusable=0.5, num_requests=REQUESTS_MIN)
    return next((one for one in found if one.topic == "apart"), None)


def changed(first_token: float, answer: float) -> SplitVerdict:
    return SplitVerdict(first_token=first_token, per_token=-0.3, answer=answer, every_seed=True)


def test_the_ratio_is_advised_where_it_pays_and_named_where_it_is_a_trade() -> None:
    best = {"1_3": changed(0.0, -0.1), "2_2": changed(0.02, -0.2), "3_1": changed(1.0, -0.15)}
    assert advice(**best).value == "2 + 2"
    trade = advice(**{**best, "2_2": changed(0.5, -0.2)})
    assert trade.value is None
    assert "is a trade" in trade.text
    assert "2 + 2" in trade.text
    assert "does not pay" in advice(**{"1_3": changed(0.0, 0.1)}).text


def test_ratios_of_the_fleets_own_size_are_tried() -> None:
    assert [trial.value for trial in splits(SETUP)] == [ALIKE, "1 + 3", "2 + 2", "3 + 1"]
    assert [trial.variant.prefill for trial in splits(SETUP)] == [0, 1, 2, 3]
    assert splits(msgspec.structs.replace(SETUP, engines=1)) == []
    assert len(splits(msgspec.structs.replace(SETUP, engines=2))) == 2


SMALL = ["chat", "--requests", "80", "--pool", "2000", "--processes", "1"]
KVATLAS = ("--policy", "kvatlas")


def call(*words: str) -> int:
    return int(app(["simulate", *words], result_action="return_value", exit_on_error=False))


def test_the_command_compares_engines_apart_with_the_same_alike(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*SMALL, *KVATLAS, "--prefill", "1", "--decode", "2") == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in ("kvatlas:prefill=1", "answer s", "apart %", "3 engines", "1 to prefill and 2 to decode"):
        assert words in out
    assert call(*SMALL, *KVATLAS, "--prefill", "1", "--decode", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    alike, split = (one["mean"] for one in found["variants"])
    assert alike["apart_share"] == 0
    assert split["apart_share"] > 0
    assert split["per_token_mean_s"] < alike["per_token_mean_s"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--prefill", "2"), "--prefill and --decode go together"),
        (("--prefill", "2", "--decode", "2", "--engines", "8"), "make 4"),
        (("--policy", "kvatlas:prefill=8"), "leaves none of 8"),
        (("--prefill", "0", "--decode", "2"), "--prefill 0: expected 1"),
        (("--transfer-gbyte-s", "0"), "--transfer-gbyte-s 0"),
    ],
)
def test_impossible_settings_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(*SMALL, *words)
