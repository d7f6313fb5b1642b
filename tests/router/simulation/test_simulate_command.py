"""``kvatlas simulate`` as it is called: tables, JSON, pictures, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.publisher.simulator.settings import EngineSettings
from kvatlas.router.cli import app
from kvatlas.router.config.errors import ConfigError
from tests.router.simulation.support import line, write_lines
from tests.router.simulation.test_capture_and_fit import COMPUTED, PACE, PREFILL, captured, drawn

SMALL = ["chat", "--requests", "60", "--engines", "2", "--pool", "2000", "--processes", "1"]


def call(*words: str) -> int:
    status = app(["simulate", *words], result_action="return_value", exit_on_error=False)
    assert isinstance(status, int)
    return status


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert call(*words, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_table_with_every_policy_and_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*SMALL, "--policy", "kvatlas,round-robin", "--retention", "0,dense", "--seeds", "2") == 0
    out = capsys.readouterr().out
    for words in (
        "kvatlas",
        "round-robin",
        "hit %",
        "p99 s",
        "regret s",
        "retention 0",
        "retention dense",
    ):
        assert words in out
    assert re.search(r"\d ±\d", out)
    assert " 2 seeds\n" in out
    assert call(*SMALL, "--policy", "kvatlas", "--seeds", "1") == 0
    one = capsys.readouterr().out
    assert " 1 seed\n" in one
    assert ("±" in out, "±" in one) == (True, False)


def test_the_pool_and_the_load_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "chat",
        "--requests",
        "60",
        "--engines",
        "2",
        "--processes",
        "1",
        "--policy",
        "kvatlas,round-robin",
    ]
    assert call(*words, "--pool", "50%") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "the fleet 50% of what these 60 requests fill" in out
    report = told(capsys, *words, "--pool", "50%")
    busy = {
        variant["policy"]: f"{variant['policy']} {100 * variant['mean']['busy_share']:.0f} %"
        for variant in report["variants"]
    }
    assert "85 % of the time in which requests come" in out
    assert (
        f"Busy with prompts, of the whole run until the last answer: {busy['kvatlas']}, {busy['round-robin']}"
        in out
    )


def test_json_holds_what_was_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--policy", "kvatlas,least-load", "--seeds", "2", "--sensitivity", "--load", "0.5"]
    report = told(capsys, *words)
    assert [(variant["policy"], variant["prefill_rate_factor"]) for variant in report["variants"]] == [
        (name, factor) for factor in (0.8, 1.0, 1.25) for name in ("kvatlas", "least-load")
    ]
    variant = report["variants"][0]
    assert len(variant["seeds"]) == 2
    assert variant["mean"]["ttft_mean_s"] == pytest.approx(
        sum(s["ttft_mean_s"] for s in variant["seeds"]) / 2
    )
    assert variant["ci95"]["ttft_mean_s"] > 0
    assert (report["facts"]["blocks_per_engine"], report["facts"]["load"]) == (2000, 0.5)
    assert report == told(capsys, *words), "the same seeds, the same numbers"


def test_a_file_is_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line(timestamp=500 * index, hash_ids=[1, index]) for index in range(20)]
    path = write_lines(tmp_path / "w.jsonl", *lines)
    report = told(
        capsys, str(path), "--engines", "1", "--model", "full", "--pool", "100%", "--policy", "hash"
    )
    assert report["facts"]["requests"] == 20
    hit_share = report["variants"][0]["mean"]["hit_share"]
    assert hit_share == pytest.approx(512 / 600), "all share their first unit"


def test_a_usage_record_is_a_workload_and_tells_its_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = drawn(60, rate_s=2e-4, fixed_s=0.0, pace_s=0.015)
    for index, one in enumerate(lines):
        one["arrived_s"] = 1e9 + 0.9 * index
    path = write_lines(tmp_path / "log.jsonl", *lines)
    words = [str(path), "--fit", str(path), "--pool", "2000", "--policy", "kvatlas"]
    report = told(capsys, *words, "--speed", "2")
    assert report["timing"]["decode_s"] == pytest.approx(0.015, rel=0.01)
    assert report["timing"]["prefill_s_per_token"] == pytest.approx(2e-4, rel=0.05)
    assert report["facts"]["speeds"] == [2.0]
    assert report["fit"]["estimates"][0]["samples"] > 0
    faster = told(capsys, *words, "--prefill-tokens-per-s", "4000")
    assert faster["timing"]["prefill_s_per_token"] == 1 / 4000, "a flag goes before the fit"


def test_rates_from_a_saved_page_of_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "metrics.txt"
    page.write_text(PREFILL + COMPUTED + PACE)
    assert call(*SMALL, "--policy", "kvatlas", "--fit", str(page)) == 0
    assert "fitted prefill_s_per_token = 0.0002 s (0.0001 to 0.0003" in capsys.readouterr().out


async def test_rates_from_a_running_engine() -> None:
    engine = SimulatedEngine(EngineSettings(prefill_s_per_token=1e-6, decode_s_per_token=1e-5))
    await engine.start()
    try:
        with pytest.raises(ConfigError, match="time_to_first_token_seconds is missing or empty"):
            await asyncio.to_thread(call, *SMALL, "--fit", engine.base_url)
    finally:
        await engine.stop()
    with pytest.raises(ConfigError, match=f"--fit {engine.base_url}"):
        await asyncio.to_thread(call, *SMALL, "--fit", engine.base_url)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "nowhere: neither a file nor one of chat, tenants, agents"),
        (["nowhere.jsonl"], "nowhere.jsonl: the file does not exist"),
        ([*SMALL, "--retention", "100"], "--retention 100: .* no multiple of 64"),
        ([*SMALL, "--retention", "often"], "--retention 'often': expected tokens, or dense"),
        ([*SMALL, "--model", "full", "--retention", "4096"], "--retention 4096: .* no effect"),
        ([*SMALL, "--model", "gpt5"], "--model: gpt5: neither a file nor one of full"),
        ([*SMALL, "--policy", "kvatlas,best"], "--policy: unknown policy 'best'; expected one of kvatlas"),
        (["chat", "--requests", "9", "--pool", "10"], "--pool 10: expected at least 64 blocks"),
        (["chat", "--requests", "9", "--pool", "much"], "--pool 'much': expected blocks per engine"),
        (["chat", "--requests", "9", "--pool", "nan%"], "--pool 'nan%': expected blocks per engine"),
        (["chat", "--requests", "9", "--engines", "0"], "--engines 0: expected 1 to 1024"),
        ([*SMALL, "--seeds", "0"], "--seeds 0: expected 1 to 100"),
        ([*SMALL, "--load", "-1"], "--load -1.0: expected a number above 0"),
        ([*SMALL, "--block-tokens", "48"], "block_size = 48; a workload identifies tokens in units of 512"),
        (
            [*SMALL, "--served-model", "m", "--fit", "nowhere"],
            "--fit nowhere: no such file; give an engine's URL",
        ),
    ],
)
def test_impossible_arguments_are_named(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        call(*words)


def test_a_pool_too_small_for_every_prompt_is_refused(tmp_path: Path) -> None:
    lines = [line(timestamp=900 * i, input_length=90_000, hash_ids=list(range(176))) for i in range(3)]
    path = write_lines(tmp_path / "w.jsonl", *lines)
    with pytest.raises(ConfigError, match="--pool 100: no request fits into the engines' caches"):
        call(str(path), "--pool", "100", "--processes", "1")


def test_a_trace_has_no_rates(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "w.jsonl", line())
    with pytest.raises(ConfigError, match="a trace has no response times"):
        call(*SMALL, "--fit", str(path))
    with pytest.raises(ConfigError, match="0 requests have both"):
        call(*SMALL, "--fit", str(write_lines(tmp_path / "a.jsonl", captured(cached_tokens=None))))
