"""``kvatlas advise``: what follows from outcomes, and what comes out for real models and traffic."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.router.cli import app
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.simulation.advice import REQUESTS_MIN, Advice, doubt, judge
from kvatlas.router.simulation.advise import see
from kvatlas.router.simulation.advise_trials import TrialResult, results_of, reusable_share, trials
from kvatlas.router.simulation.outcome import Outcome
from kvatlas.router.simulation.setup import FleetSetup
from kvatlas.router.simulation.tiers import TierSetup, TierSpec
from tests.router.simulation.support import FULL, HYBRID, line, request, write_lines
from tests.support.paths import DATA
from tests.support.whole_router import TEXT, configure, routing, running

CAPTURE = DATA / "captures" / "simulated.jsonl.gz"
SETUP = FleetSetup(groups=HYBRID, num_blocks=1000, engines=4)
BASE = TrialResult(
    topic="now", value="as it is", hit_share=0.4, mean_s=1.0, p90_s=2.0, p99_s=4.0, busy_share=0.5, refused=0,
    change=0.0, every_seed=False,
)  # fmt: skip
OUTCOME = Outcome(**{**dict.fromkeys(Outcome.__struct_fields__, 0.5), "refused": 0})


def told_with(setup: FleetSetup = SETUP, **means: float) -> list[TrialResult]:
    """Every trial at the base's numbers, but for those named ``topic_value``."""
    found = [BASE]
    for trial in trials(setup)[1:]:
        mean_s = means.get(f"{trial.topic}_{trial.value}".replace("-", "_").replace("%", ""), 1.0)
        one = msgspec.structs.replace(
            BASE,
            topic=trial.topic,
            value=trial.value,
            mean_s=mean_s,
            p90_s=2 * mean_s,
            change=mean_s - 1,
            every_seed=mean_s < 1,
        )
        found.append(one)
    return found


def of(advice: list[Advice], topic: str) -> Advice:
    return next(one for one in advice if one.topic == topic)


def judged(setup: FleetSetup = SETUP, target_s: float | None = None, **means: float) -> list[Advice]:
    return judge(
        setup, told_with(setup, **means), reusable=0.5, num_requests=REQUESTS_MIN, ttft_target_s=target_s
    )


def test_a_retention_that_helps_is_advised_with_those_that_do_as_well() -> None:
    found = of(judged(retention_1024=0.8, retention_4096=0.81, retention_dense=1.4), "retention")
    assert found.value == "1024"
    assert "1024 or 4096" in found.text
    assert "-20%" in found.text


def test_a_retention_that_helps_too_little_or_not_for_every_seed_is_not() -> None:
    assert of(judged(retention_1024=0.98), "retention").value is None
    results = told_with(retention_4096=0.7)
    luck = [msgspec.structs.replace(one, every_seed=False) for one in results]
    found = of(judge(SETUP, luck, reusable=0.5, num_requests=REQUESTS_MIN), "retention")
    assert found.value is None
    assert found.text.startswith("Leave prefix_cache_retention_interval at 0")


def test_a_model_of_full_attention_has_no_retention_to_set() -> None:
    setup = msgspec.structs.replace(SETUP, groups=FULL)
    assert all(trial.topic != "retention" for trial in trials(setup))
    assert "no effect" in of(judged(setup), "retention").text


def test_prefix_routing_that_does_not_pay_is_reported() -> None:
    found = of(judged(routing_least_load=1.02), "routing")
    assert found.value == "least-load"
    assert "does not pay" in found.text
    paying = of(judged(routing_least_load=1.6), "routing")
    assert (paying.value, "pays" in paying.text) == (None, True)


def test_memory_is_asked_for_where_it_pays_and_given_back_where_it_does_nothing() -> None:
    assert of(judged(memory_200=0.7, memory_50=2.0), "memory").value == "200%"
    assert of(judged(memory_200=0.99, memory_50=1.01), "memory").value == "50%"
    assert of(judged(memory_200=0.97, memory_50=1.2), "memory").value is None


def test_memory_behind_the_gpus_is_advised_where_it_pays_with_its_size() -> None:
    means = {"tiers_host memory 400": 0.8, "tiers_store, 25 Gbit/s": 1.05, "tiers_store, 100 Gbit/s": 0.79}
    one = of(judge(SETUP, told_with(**means), reusable=0.5, num_requests=500), "tiers")
    assert one.value == "host memory 400%", "of what does about as well, the first"
    assert "pays, first host memory of 24 GiB per engine:" in one.text
    assert "host memory of 24 GiB per engine brings 20% (mean 0.800 s, hit 40%)" in one.text
    assert "a shared store of 98 GiB over 25 Gbit/s costs 5% (mean 1.050 s" in one.text
    assert "a shared store of 98 GiB over 100 Gbit/s brings 21%" in one.text
    means["tiers_host memory 400"] = 0.95
    best = of(judge(SETUP, told_with(**means), reusable=0.5, num_requests=500), "tiers")
    assert best.value == "store, 100 Gbit/s"
    little = of(judge(SETUP, told_with(), reusable=0.5, num_requests=500), "tiers")
    assert little.value is None
    assert "would bring little" in little.text


def test_existing_memory_behind_the_gpus_is_not_tried_again() -> None:
    spec = TierSpec(blocks=100, bytes_per_s=1e9)
    has_host = msgspec.structs.replace(SETUP, tiers=TierSetup(block_bytes=1 << 20, host=spec))
    named = [trial.value for trial in trials(has_host) if trial.topic == "tiers"]
    assert named == ["store, 25 Gbit/s", "store, 100 Gbit/s"]
    has_both = msgspec.structs.replace(SETUP, tiers=TierSetup(block_bytes=1 << 20, host=spec, store=spec))
    advice = judge(has_both, told_with(has_both), reusable=0.5, num_requests=500)
    assert "tiers" not in [one.topic for one in advice]


def pulled(*seeds: tuple[float, float, float], setup: FleetSetup = SETUP) -> Advice:
    """The advice on pulls; by seed: the means without, over 25 and over 100 Gbit/s. The base has 1 s."""
    found = trials(setup)
    outcomes = {}
    for seed, means in enumerate(seeds):
        links = iter(means)
        for trial in found:
            mean_s = next(links) if trial.topic == "pull" else 1.0
            outcomes[trial.job(seed)] = msgspec.structs.replace(OUTCOME, ttft_mean_s=mean_s)
    results = results_of(found, outcomes, range(len(seeds)))
    return of(judge(setup, results, reusable=0.5, num_requests=REQUESTS_MIN), "pull")


def test_pulls_are_advised_where_they_beat_the_host_memory_that_they_need() -> None:
    pays = pulled((0.8, 0.79, 0.6), (0.8, 0.79, 0.6))
    assert (pays.setting, pays.value) == ("pull.enabled", "true")
    assert "pays over 100 Gbit/s: 25 Gbit/s brings 1%" in pays.text
    assert "100 Gbit/s brings 25%" in pays.text
    assert "With host memory of 400% alone: mean 0.800 s" in pays.text
    assert "pays over 25 Gbit/s" in pulled((0.8, 0.6, 0.6)).text, "the slower link does as well"


def test_pulls_that_bring_less_than_noise_or_not_for_every_seed_are_not_advised() -> None:
    little = pulled((0.5, 0.49, 0.49))
    assert little.value is None, "the gain over the base is that of the host memory"
    assert "would bring little" in little.text
    assert pulled((0.8, 0.9, 0.5), (0.8, 0.9, 0.81)).value is None
    assert "costs" in pulled((0.5, 0.6, 0.7)).text


def test_pulls_use_the_host_memory_that_a_fleet_has_and_need_two_engines() -> None:
    spec = TierSpec(blocks=100, bytes_per_s=1e9)
    has_host = msgspec.structs.replace(SETUP, tiers=TierSetup(block_bytes=1 << 20, host=spec))
    tiers = [trial.setup.tiers for trial in trials(has_host) if trial.topic == "pull"]
    assert [one.host for one in tiers if one is not None] == [spec] * 3
    assert [one.pull_bytes_per_s * 8 / 1e9 for one in tiers if one is not None] == [0, 25, 100]
    alone = msgspec.structs.replace(SETUP, engines=1)
    assert not [trial for trial in trials(alone) if trial.topic == "pull"]


def test_the_fewest_engines_that_keep_the_target() -> None:
    means = {"engines_2": 5.0, "engines_3": 1.4, "engines_6": 0.5, "engines_8": 0.4}
    assert of(judged(target_s=3.0, **means), "engines").value == "3"
    assert of(judged(target_s=2.0, **means), "engines").value is None  # as it is
    assert of(judged(target_s=1.0, **means), "engines").value == "6"
    assert of(judged(target_s=0.1, **means), "engines").text.startswith("Not even 8 engines")


def test_hits_of_an_endless_cache() -> None:
    first = request(0, 1024, 512, 0)
    again = request(1, 1025, 10, 0)
    other = request(2, 1024, 10, 100)
    assert reusable_share([first, other]) == 0
    assert reusable_share([first, again]) == pytest.approx(1024 / 2049)


def test_an_endless_cache_is_held_against_the_same_requests_as_the_fleet() -> None:
    """The first fifth fills the caches of both; else a fleet could hit more than a cache without end."""
    filling = [request(at, 1024, 1, 0) for at in range(2)]
    asking = [request(at, 1024, 1, 0) for at in range(2, 10)]
    assert reusable_share(filling + asking) == pytest.approx(1023 / 1024)


def test_few_requests_give_hints_and_no_advice() -> None:
    results = told_with(retention_1024=0.5, memory_200=0.5)
    few = judge(SETUP, results, reusable=0.5, num_requests=REQUESTS_MIN - 1)
    assert {(one.value, one.firm) for one in few} == {(None, False)}
    enough = judge(SETUP, results, reusable=0.5, num_requests=REQUESTS_MIN)
    assert (of(enough, "retention").value, of(enough, "retention").firm) == ("1024", True)


def test_where_requests_do_not_fit_the_pool_is_named_and_nothing_is_advised() -> None:
    results = [msgspec.structs.replace(one, refused=7) for one in told_with(retention_1024=0.5)]
    assert doubt(results, 1000) == "7 requests fit no engine's cache and are left out: --pool is too small"
    assert not any(one.firm for one in judge(SETUP, results, reusable=0.5, num_requests=1000))


def call(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    status = app(
        ["advise", *words, "--json", "--processes", "1", "--seeds", "1"],
        result_action="return_value",
        exit_on_error=False,
    )
    assert status == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def advised(report: dict[str, Any], topic: str) -> Any:
    return next(one["value"] for one in report["advice"] if one["topic"] == topic)


SAMPLE = ("chat", "--engines", "2", "--load")


@pytest.mark.long
def test_small_windows_want_retention_and_large_ones_are_left_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = call(capsys, *SAMPLE, "0.85", "--model", "gpt-oss-like", "--pool", "50%", "--requests", "200")
    assert advised(small, "retention") in {"1024", "4096", "dense"}
    large = call(capsys, *SAMPLE, "0.4", "--model", "gemma3-like", "--pool", "100%", "--requests", "400")
    assert advised(large, "retention") is None
    assert advised(large, "routing") is None
    assert small["facts"]["requests"] == 200


@pytest.mark.long
def test_the_same_words_for_the_same_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("tenants", "--requests", "80", "--engines", "2", "--pool", "4000")
    assert call(capsys, *words) == call(capsys, *words)


@pytest.mark.long
def test_traffic_that_shares_nothing_needs_no_prefix_routing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 500 * i,
            "input_length": 2000,
            "output_length": 5,
            "hash_ids": list(range(9 * i, 9 * i + 4)),
        }
        for i in range(200)
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    report = call(capsys, str(path), "--engines", "2", "--pool", "2000")
    assert advised(report, "routing") == "least-load"
    assert report["facts"]["reusable_share"] == 0


def test_a_table_and_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["advise", "chat", "--requests", "50", "--seeds", "1", "--engines", "2", "--pool", "4000"]
    assert (
        app(
            [*words, "--ttft-target", "1", "--processes", "1"],
            result_action="return_value",
            exit_on_error=False,
        )
        == 0
    )
    out = capsys.readouterr().out
    for word in ("what is changed", "retention", "memory", "engines", "p90 within 1 s"):
        assert word in out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["nowhere"], "workload: nowhere"),
        (["chat", "--engines", "0"], "--engines 0"),
        (["chat", "--requests", "3"], "--requests 3"),
        (["chat", "--ttft-target", "0"], "--ttft-target 0"),
        (["chat", "--retention", "0,1024"], "one current value"),
        (
            [str(CAPTURE)],
            "a capture of KV events .*, which holds no requests; name the router's usage record",
        ),
        (["chat", "--router", "http://127.0.0.1:9"], "--router http://127.0.0.1:9"),
        (["--router", "nonsense"], "--router 'nonsense': expected http://HOST:PORT"),
    ],
)
def test_an_unsuitable_record_is_refused(words: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        app(["advise", *words], result_action="return_value", exit_on_error=False)


def test_a_pool_too_small_for_every_prompt_is_named(tmp_path: Path) -> None:
    lines = [line(timestamp=900 * i, input_length=90_000, hash_ids=list(range(176))) for i in range(60)]
    path = write_lines(tmp_path / "w.jsonl", *lines)
    with pytest.raises(ConfigError, match="--pool 100: no request fits into the engines' caches"):
        app(
            ["advise", str(path), "--pool", "100", "--processes", "1"],
            result_action="return_value",
            exit_on_error=False,
        )


async def test_the_fleet_of_a_running_router() -> None:
    """Groups as the router learned them."""

    settings = {"groups": "gptoss-like", "num_blocks": 300}
    async with running(settings, settings) as engines, routing(configure(*engines)) as rig:
        for number in range(6):
            await rig.chat(f"{number} {TEXT * 6}", max_tokens=2)
        await rig.caught_up(*engines)
        seen = await asyncio.to_thread(see, rig.ops_url)
        assert (seen.engines, seen.blocks) == (2, 300)
        assert seen.groups is not None
        assert {group.sliding_window for group in seen.groups} == {None, 128}
