"""Service levels: an engine predicted to miss a request's target is skipped while another one is not."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from kvatlas.router.placement.candidate import PolicySettings
from kvatlas.router.placement.seconds import FirstTokenWork
from kvatlas.router.reloads import apply
from kvatlas.router.tools.explain import ExplainOptions, run_explain
from tests.router.app.test_admission import ASKED, queued
from tests.router.app.test_prefill_decode import D, P, apart, prompt
from tests.router.app.test_queue import asks, busy, crowded, ended, waits
from tests.support.pairs import busy as decoding
from tests.support.waiting import until
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routed, routing, running

LEVELS = PolicySettings(service_levels=True)
REFUSING = PolicySettings(service_levels=True, slo_refuse="wait")
LONG = TEXT * 800
"""13,600 tokens: 1.7 s of prefill at the rate that is assumed at first."""
QUEUED_TOKENS = 19_200
"""2.4 s of prefill before it."""


async def placed(rig: Rig, holder: Any, target_ms: int | None = None) -> str:
    """The engine that a request goes to while the one that holds its prompt has a queue."""
    ticket = holder.load.admit(uncached_tokens=QUEUED_TOKENS, now=rig.router.clock())
    headers = {} if target_ms is None else {"x-slo-ttft-ms": str(target_ms)}
    try:
        answered, _ = await rig.streamed(LONG, extra_headers=headers)
        await until(lambda: rig.idle, "its end")
    finally:
        holder.load.fail(ticket, rig.router.clock())
    return str(answered["x-kvatlas-engine"])


@pytest.mark.parametrize("late", [0, 30])
async def test_an_engine_predicted_to_miss_the_target_is_skipped_while_another_one_is_not(late: int) -> None:
    """Also where the margin for errors leaves none that makes it surely."""
    async with routed(*[{"groups": "full"}] * 2, policy=LEVELS) as (rig, engines):
        await rig.ready()
        first = await rig.chat(LONG)
        holder = rig.router.fleet.get(first.headers["x-kvatlas-engine"])
        await rig.caught_up(*engines)
        for engine in rig.router.fleet:
            for tokens in range(1, 20_000, 100):
                at_s = rig.router.clock() - 201.0 + tokens / 100
                engine.rates.model.observe(FirstTokenWork(tokens), 0.005 + tokens / 8000, at_s)
            for _ in range(late):
                engine.first_tokens.add(MODEL, 1.0, 61.0)
        stats = rig.router.accounts.slo_stats
        assert await placed(rig, holder) == holder.engine_id, "the cost decides without a target"
        assert stats.decisions == 0
        assert await placed(rig, holder, 500) == holder.engine_id, "no engine is predicted to make it"
        assert (stats.decisions, stats.hopeless, stats.engines_skipped) == (1, 1, 0)
        assert await placed(rig, holder, 2_100) != holder.engine_id
        assert (stats.decisions, stats.hopeless, stats.engines_skipped) == (2, 1, 1)
        latest = rig.router.accounts.receipts.latest[-1]
        assert latest.missed == "slo"
        assert latest.held_tokens > 13_000
        assert latest.slo_ttft_s is not None
        assert sum(stats.met.values()) + sum(stats.missed.values()) == 2
        assert "kvatlas_slo_engines_skipped_total 1.0" in await rig.page()


async def test_targets_are_read_only_with_service_levels_and_a_reload_switches_them_on() -> None:
    async with running({}) as engines, routing(configure(*engines)) as rig:
        await rig.ready()
        wrong = {"x-slo-ttft-ms": "soon"}
        await rig.chat(TEXT, extra_headers=wrong)
        await apply(rig.router, configure(*engines, policy=LEVELS))
        with pytest.raises(openai.BadRequestError, match="x-slo-ttft-ms: 'soon'"):
            await rig.chat(TEXT, extra_headers=wrong)
        levels = PolicySettings(service_levels=True, slo_ttft_ms_normal=60_000.0)
        await apply(rig.router, configure(*engines, policy=levels))
        await rig.chat(TEXT, stream=True)
        assert rig.router.accounts.slo_stats.decisions == 1


async def test_the_queue_goes_by_deadline_within_a_class() -> None:
    async with crowded(policy=LEVELS) as (rig, _, room):
        order: list[str] = []
        async with busy(rig):
            waiting = []
            for name, headers in (
                ("none", {}),
                ("later", {"x-slo-ttft-ms": "100000"}),
                ("sooner", {"x-slo-ttft-ms": "50000"}),
                ("high", {"x-kvatlas-priority": "high"}),
            ):
                one = asks(rig, name, extra_headers=headers)
                one.add_done_callback(partial(ended, order, name))
                waiting.append(one)
                await waits(room, len(waiting))
        await asyncio.gather(*waiting)
        assert order == ["high", "sooner", "later", "none"]


async def test_a_request_that_every_engine_lets_wait_beyond_its_target_is_refused_where_that_is_set() -> None:
    async with routed(*[{"groups": "full"}] * 2, policy=REFUSING) as (rig, engines):
        await rig.ready()
        one, two = rig.router.fleet
        soon = {"x-slo-ttft-ms": "500"}
        with queued(one, two, wait_s=20.0):
            with pytest.raises(openai.RateLimitError) as refused:
                await rig.chat(TEXT, extra_headers=soon)
            assert refused.value.code == "predicted_wait"
            assert "later than its target of 0.5 s" in refused.value.message
            assert 15 <= int(refused.value.response.headers["retry-after"]) <= 20
            await rig.chat(TEXT, extra_headers={"x-slo-ttft-ms": "60000"})
            await rig.chat(TEXT)
        with queued(one, wait_s=20.0):
            await rig.chat(TEXT, extra_headers=soon)
        answer = await rig.chat(LONG, extra_headers=soon)
        assert answer.http_response.status_code == 200, "its own prefill does not count"
        assert rig.router.accounts.admission_stats.refused == {"normal": 1}
        await apply(rig.router, configure(*engines, policy=LEVELS))
        with queued(one, two, wait_s=20.0):
            await rig.chat(TEXT, extra_headers=soon)
        whole = PolicySettings(service_levels=True, slo_refuse="first-token")
        await apply(rig.router, configure(*engines, policy=whole))
        with queued(one, two, wait_s=0.4):
            with pytest.raises(openai.RateLimitError):
                await rig.chat("another " + LONG, extra_headers=soon)
            await rig.chat(TEXT, extra_headers=soon)


async def test_explain_names_the_engines_that_would_miss_the_target_and_by_how_much() -> None:
    async with routed(*[{"groups": "full"}] * 2, policy=REFUSING) as (rig, _):
        await rig.ready()
        one, two = rig.router.fleet
        with queued(one, wait_s=20.0):
            _, without = await rig.ask("POST", "/kvatlas/explain", ASKED)
            _, told = await rig.ask("POST", "/kvatlas/explain", ASKED, {"x-slo-ttft-ms": "3000"})
        assert "slo" not in without
        assert told["slo"]["left_s"] == pytest.approx(3.0, abs=0.5)
        late_s = {each["engine"]: each["late_s"] for each in told["slo"]["engines"]}
        assert late_s[one.engine_id] == pytest.approx(17.0, abs=2.0)
        assert late_s[two.engine_id] == 0.0
        assert told["choice"]["engine"] == two.engine_id


async def test_the_command_shows_which_engines_would_miss_a_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "body.json"
    file.write_text(json.dumps(ASKED))
    async with routed(*[{"groups": "full"}] * 2, policy=REFUSING) as (rig, engines):
        await rig.ready()
        one, two = rig.router.fleet
        options = ExplainOptions(file, router=rig.ops_url, slo_ttft_ms=3000.0)
        with queued(one, wait_s=20.0):
            assert await asyncio.to_thread(run_explain, options, as_json=False) == 0
        table = capsys.readouterr().out
        assert "1 of 2 would miss it" in table
        assert "refused" not in table
        rows = [line.split() for line in table.splitlines()]
        (late,) = [row[2] for row in rows if row[:1] == [one.engine_id] and len(row) == 3]
        assert 15_000 <= int(late.replace(",", "")) <= 19_000
        with queued(one, two, wait_s=20.0):
            assert await asyncio.to_thread(run_explain, options, as_json=False) == 0
        assert "2 of 2 would miss it; refused for a wait of" in capsys.readouterr().out
        await apply(rig.router, configure(*engines))
        assert await asyncio.to_thread(run_explain, options, as_json=False) == 0
        assert "set policy.service_levels = true" in capsys.readouterr().err


async def test_a_target_keeps_a_prompt_from_a_prefill_engine_that_would_miss_it() -> None:
    async with apart(P, D, policy=LEVELS) as (rig, (p, d)):
        long = {"model": MODEL, "prompt": prompt(1, 13_600), "max_tokens": 1}
        helper = rig.router.fleet.get(p.base_url)
        assert helper is not None
        told: Any = None
        for target_ms, pair in (None, True), (2200, False), (9, True):
            asked = {} if target_ms is None else {"x-slo-ttft-ms": str(target_ms)}
            # One queue for each question: it falls as time goes by.
            with decoding(rig), queued(helper, wait_s=1.0):
                _, told = await rig.ask("POST", "/kvatlas/explain", long, asked)
            assert (told["split"]["prefill"] is not None) is pair, target_ms
        late_s = {each["engine"]: each["late_s"] for each in told["slo"]["engines"]}
        assert late_s[d.base_url] == pytest.approx(1.7, abs=0.3)
        assert late_s[f"{p.base_url} -> {d.base_url}"] == pytest.approx(2.7, abs=0.3)
        stats = rig.router.accounts.slo_stats
        assert (stats.decisions, stats.hopeless) == (2, 1)


@pytest.mark.parametrize("margin_s", [0.0, 2.5])
async def test_split_requests_are_hopeless_without_their_margin_and_refused_by_their_first_token(
    margin_s: float,
) -> None:
    """1.7 s of prefill at one engine for another one, alone or behind more at both."""
    refusing = PolicySettings(service_levels=True, slo_refuse="first-token")
    async with apart(P, D, policy=refusing) as (rig, _):
        long = {"model": MODEL, "prompt": prompt(1, 13_600), "max_tokens": 1}
        engines, stats = list(rig.router.fleet), rig.router.accounts.slo_stats
        for engine in engines:
            for _ in range(20):
                engine.first_tokens.add(MODEL, 0.0, margin_s)
        for target_ms, queued_s, hopeless in (2500, 0.0, 0), (2500, 1.6, 1), (9000, 1.6, 0):
            # By their waits alone none of them would be refused.
            with queued(*engines, wait_s=queued_s), decoding(rig):
                before = stats.hopeless
                target = {"x-slo-ttft-ms": str(target_ms)}
                _, told = await rig.ask("POST", "/kvatlas/explain", long, target)
                assert stats.hopeless - before == hopeless, target_ms
                assert (told["refused"] is not None) == hopeless, target_ms
                if hopeless:
                    assert told["split"]["prefill"] is not None
                    assert told["refused"]["level_s"] == 2.5


async def test_a_target_counts_for_requests_that_are_not_split_too() -> None:
    async with apart(P, D, D, policy=LEVELS) as (rig, engines):
        await rig.ready()
        long = {"model": MODEL, "prompt": prompt(1, 13_600), "max_tokens": 1, "n": 2}
        assert (await rig.ask("POST", "/v1/completions", long))[0] == 200
        await rig.caught_up(*engines)
        _, told = await rig.ask("POST", "/kvatlas/explain", long)
        holder = rig.router.fleet.get(told["choice"]["engine"])
        found = []
        with queued(holder, wait_s=2.4):
            for target_ms in ("500", "2100"):
                _, told = await rig.ask("POST", "/kvatlas/explain", long, {"x-slo-ttft-ms": target_ms})
                assert told["split"]["why"] == "n"
                found.append(told["choice"]["engine"])
        assert found[0] == holder.engine_id, "no engine is predicted to make it: the cost decides"
        assert found[1] in {one.base_url for one in engines[1:]} - {holder.engine_id}


def test_refusing_needs_service_levels() -> None:
    with pytest.raises(ValueError, match="slo_refuse needs service_levels"):
        PolicySettings(slo_refuse="wait")
