"""The cache funnel: what engines held of prompts, what was delivered, and why the rest was missed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.observe.cache_funnel import FunnelCounts
from kvatlas.router.observe.cache_worth import WORTH_HALF_LIFE_S
from kvatlas.router.observe.findings import Severity
from kvatlas.router.proxy.settings import ProxySettings
from tests.router.tools.doctor.rig import examined
from tests.support.waiting import until
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routing, running

PINNING: dict[str, Any] = {"proxy": ProxySettings(pin_header=True)}
LONG = TEXT * 80


async def chat(rig: Rig, text: str, engine: SimulatedEngine, *engines: SimulatedEngine, **extra: Any) -> None:
    """A chat on this engine; every engine's events are applied before the next one."""
    body = {"ignore_eos": True, **extra}
    seen = len(rig.router.accounts.receipts.latest)
    await rig.chat(text, extra_headers={"x-kvatlas-engine": engine.base_url}, extra_body=body)
    await until(lambda: len(rig.router.accounts.receipts.latest) > seen, "its receipt")
    await rig.caught_up(engine, *engines)


def counts(rig: Rig) -> FunnelCounts:
    (one,) = rig.router.accounts.receipts.funnel.counts.values()
    return one


async def test_tokens_that_the_chosen_engine_holds_are_delivered_and_the_rest_is_new() -> None:
    async with running({}) as (engine,), routing(configure(engine)) as rig:
        await rig.ready()
        await chat(rig, LONG, engine)
        await chat(rig, LONG + "More.", engine)
        found, (first, second) = counts(rig), rig.router.accounts.receipts.latest
        assert found.prompt == (first.prompt_tokens or 0) + (second.prompt_tokens or 0)
        assert found.held == found.chosen == found.delivered == second.actual_tokens
        assert found.delivered
        assert found.missed == {"new": found.prompt - found.delivered}
        page = (await rig.ask("GET", "/metrics"))[1]
        labels = f'model="{MODEL}",stage="delivered",tenant=""'
        assert f"kvatlas_cache_tokens_total{{{labels}}} {float(found.delivered)}" in page


async def test_tokens_that_no_engine_holds_any_more_were_evicted() -> None:
    async with running({"num_blocks": 200, "groups": "full"}) as (engine,), routing(configure(engine)) as rig:
        await rig.ready()
        for number in range(4):  # the tree of prefixes takes one prompt in four
            await chat(rig, LONG + str(number), engine)
        assert counts(rig).missed.keys() == {"new"}
        await chat(rig, "Another story. " + TEXT * 175, engine)
        await chat(rig, LONG + "again", engine)
        latest = rig.router.accounts.receipts.latest[-1]
        assert latest.held_tokens < 256 <= latest.seen_tokens
        assert counts(rig).missed["evicted"] == latest.seen_tokens - latest.held_tokens


async def test_tokens_under_another_salt_count_as_salted() -> None:
    async with running({}) as (engine,), routing(configure(engine)) as rig:
        await rig.ready()
        await chat(rig, LONG, engine)
        await chat(rig, LONG, engine, cache_salt="tenant-a")
        latest = rig.router.accounts.receipts.latest[-1]
        assert latest.salted
        assert latest.held_tokens == 0
        assert counts(rig).missed["salted"] == latest.prompt_tokens


async def test_tokens_at_a_busy_engine_are_missed_by_load_and_the_doctor_reports_the_cost() -> None:
    async with running({}, {}) as engines, routing(configure(*engines, **PINNING)) as rig:
        await rig.ready()
        holder = engines[0]
        for _ in range(2):
            await chat(rig, LONG, holder, *engines)
        busy = rig.router.fleet.get(holder.base_url)
        ticket = busy.load.admit(uncached_tokens=10**6, now=rig.router.clock(), streams=True)
        await rig.chat(LONG)
        await until(lambda: len(rig.router.accounts.receipts.latest) == 3, "its receipt")
        latest = rig.router.accounts.receipts.latest[-1]
        busy.load.fail(ticket, rig.router.clock())
        assert latest.engine_id == engines[1].base_url
        assert latest.missed == "load"
        assert latest.held_tokens > latest.predicted_tokens == 0  # type: ignore[operator]
        found = counts(rig)
        assert found.missed["load"] == latest.held_tokens
        assert found.elsewhere_s == latest.held_tokens / 8000
        findings = await examined(*(e.base_url for e in engines), router=rig.ops_url)
        finding = findings.expect("router.cache", Severity.INFO, "held by another engine")
        assert "the queue of that engine was longer (100%)" in finding.cause
        assert "a store that engines share, or a pull" in finding.remedy


async def test_the_worth_of_a_cache_is_what_no_other_engine_holds() -> None:
    async with running({}, {}) as engines, routing(configure(*engines, **PINNING)) as rig:
        await rig.ready()
        holder, other = engines
        for _ in range(2):
            await chat(rig, LONG, holder, *engines)
        latest = rig.router.accounts.receipts.latest[-1]
        shown = {one["engine"]: one for one in (await rig.ask("GET", "/kvatlas/engines"))[1]}
        worth = shown[holder.base_url]["cache_worth_s_per_minute"]
        half_lives_per_minute = 60 / WORTH_HALF_LIFE_S
        seconds = latest.held_tokens / 8000  # both engines' prefill rate before any has been learned
        assert worth == pytest.approx(seconds * math.log(2) * half_lives_per_minute, rel=0.1)
        assert shown[other.base_url]["cache_worth_s_per_minute"] == 0
        assert f'kvatlas_cache_worth_seconds_per_minute{{engine="{holder.base_url}"}} ' in await rig.page()
        await chat(rig, LONG, other, *engines)  # the holder's hit is still the longest
        before = worth_of(rig, holder)
        await chat(rig, LONG, other, *engines)  # both hold it now
        assert worth_of(rig, holder) <= before


def worth_of(rig: Rig, engine: SimulatedEngine) -> float:
    status = rig.router.fleet.get(engine.base_url)
    return status.receipts.worth.per_minute(rig.router.clock())
