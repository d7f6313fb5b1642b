"""Facts that are not configured: an engine with a drafter is predicted exactly, and the router says why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from publisher.events import GroupSpec
from publisher.simulator.server import SimulatedEngine
from tests.support.front import fronting
from tests.support.waiting import until
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routing, running

DRAFTED = {"groups": (GroupSpec(0, "full_attention", 16, is_eagle=True),)}
"""An engine whose look-ups drop the last block, as with EAGLE in vLLM before 0.33."""
PLAIN = {"groups": (GroupSpec(0, "full_attention", 16),)}


async def twice(rig: Rig, engine: SimulatedEngine, count: int) -> Sequence[str]:
    """Outcomes of the second request for each of some prompts, in order."""
    publisher, (status,) = engine.publisher, rig.router.fleet
    assert publisher is not None
    feed = rig.router.lifecycle.feeds.stats[status.engine_id]
    for number in range(count):
        body = {"model": MODEL, "prompt": f"{number} {TEXT * 3}", "max_tokens": 2}
        for _ in range(2):
            assert (await rig.ask("POST", "/v1/completions", body))[0] == 200
            await until(lambda: feed.last_seq == publisher.next_seq - 1, "every batch applied")
    return [one.outcome for one in rig.router.accounts.receipts.latest][1::2]


async def found(rig: Rig) -> dict[str, Any]:
    """The fact about dropped blocks, as the status page and explain show it."""
    _, engines = await rig.ask("GET", "/kvatlas/engines")
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 1}
    _, explained = await rig.ask("POST", "/kvatlas/explain?path=/v1/completions", body)
    assert explained["engines"][0]["facts"] == engines[0]["facts"]
    (fact,) = [fact for fact in engines[0]["facts"] if fact["name"] == "eagle_groups"]
    return fact


async def test_a_drafter_in_the_metrics_is_reckoned_with_from_the_first_request() -> None:
    async with running(DRAFTED) as (engine,), routing(configure(engine)) as rig:
        (status,) = rig.router.fleet
        await until(lambda: status.stated is not None, "metrics")
        assert await found(rig) == fact("all", "metrics", "assumed")
        assert set(await twice(rig, engine, 9)) == {"exact"}
        assert await found(rig) == fact("all", "metrics", "confirmed")


@pytest.mark.parametrize(("settings", "wrong", "value"), [(DRAFTED, "over", "all"), (PLAIN, "under", [])])
async def test_receipts_overrule_metrics(settings: dict[str, Any], wrong: str, value: object) -> None:
    """The page hides the drafter, or tells of one that holds no KV (n-gram)."""

    async with running(settings) as (engine,), fronting(engine) as front:
        drafts = b'vllm:spec_decode_num_drafts_total{engine="0"} 1.0\n' if wrong == "under" else b""
        labels = b'vllm:cache_config_info{block_size="16",engine="0"} 1.0\n'
        gauges = b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n"
        front.overrides["/metrics"] = lambda: (200, labels + gauges + drafts)
        async with routing(configure(front)) as rig:  # type: ignore[arg-type]  # it has a base_url
            (status,) = rig.router.fleet
            await until(lambda: status.stated is not None, "metrics")
            outcomes = await twice(rig, engine, 8)
            assert outcomes == [wrong] * 4 + ["exact"] * 4
            assert await found(rig) == fact(value, "receipts", "likely")


async def test_server_info_says_it_at_once() -> None:
    async with running(PLAIN) as (engine,), fronting(engine) as front:
        config = {"cache_config": {"block_size": 16}, "speculative_config": {"method": "ngram"}}
        front.overrides["/server_info"] = lambda: (200, {"vllm_config": config})
        async with routing(configure(front)) as rig:  # type: ignore[arg-type]  # it has a base_url
            assert set(await twice(rig, engine, 3)) == {"exact"}
            assert await found(rig) == fact([], "server_info", "certain")


def fact(value: object, source: str, certainty: str) -> dict[str, object]:
    return {"name": "eagle_groups", "value": value, "source": source, "certainty": certainty}
