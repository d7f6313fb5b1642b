"""The doctor on engines and a router that are well, and what the probe proves."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from kvatlas.router.config.schema import ModelConfig
from kvatlas.router.observe.findings import Severity
from kvatlas.router.tools.doctor.checks import names
from tests.router.tools.doctor.rig import examined
from tests.support.front import fronting
from tests.support.whole_router import LOCAL, configure, routing, running

MAMBA = ModelConfig(tokenizer=LOCAL.tokenizer, mamba_cache_mode="align")


@pytest.mark.parametrize("groups", ["full", "gptoss-like", "gemma3-like", "mamba-hybrid"])
async def test_a_healthy_engine_is_found_exact(groups: str) -> None:
    async with running({"groups": groups}) as (engine,):
        model = MAMBA if groups == "mamba-hybrid" else LOCAL
        found = await examined(engine.base_url, model=model, probe=True)
        assert found.bad() == []
        exact = found.expect("probe.exact", Severity.OK, "exact")
        assert "predicted 0," not in exact.seen
        found.expect("tokens.parity", Severity.OK, "chat of three turns", "completion, odd text")
        found.expect("cache.scheme", Severity.OK, "sha256")
        found.expect("cache.groups", Severity.OK, f"{len(engine.groups)} group(s)")
        found.expect("tokens.usage", Severity.OK)
        found.expect("events.flow", Severity.OK, "live")


async def test_an_engine_behind_the_rust_frontend_is_read_by_its_rules() -> None:
    async with running({"frontend": "rust"}, {}) as engines:
        for engine, shown in zip(engines, ("Rust frontend", "vLLM"), strict=True):
            found = await examined(engine.base_url, probe=True)
            assert found.bad() == []
            found.expect("http.version", Severity.OK, shown)
            found.expect("tokens.parity", Severity.OK, "the same tokens")
            found.expect("probe.exact", Severity.OK, "exact")


async def test_nothing_is_sent_without_probe() -> None:
    async with running({}) as (engine,):
        found = await examined(engine.base_url)
        assert found.bad() == []
        assert engine.scheduler.stats.prompt_tokens == 0
        found.expect("events.flow", Severity.INFO, "no event yet", "--probe")


async def test_the_probe_is_exact_without_a_tokenizer_of_its_own() -> None:
    async with running({"enable_scale_out": False}) as (engine,):
        found = await examined(engine.base_url, model=ModelConfig(tokenizer="off"), probe=True)
        found.expect("tokens.parity", Severity.INFO, "no tokenizer given")
        found.expect("probe.exact", Severity.OK, "exact")


async def test_blocks_larger_than_the_first_probe_are_met_with_a_longer_one() -> None:
    async with running({"groups": "full", "block_size": 512}) as (engine,):
        found = await examined(engine.base_url, probe=True)
        exact = found.expect("probe.exact", Severity.OK, "exact")
        assert "predicted 0," not in exact.seen


async def test_history_is_read_from_replay() -> None:
    async with running({}) as (engine,):
        await examined(engine.base_url, probe=True)
        found = await examined(engine.base_url)
        found.expect("events.replay", Severity.OK, "all", "since the engine's start")
        found.expect("cache.scheme", Severity.OK)


async def test_a_router_and_its_engines() -> None:
    async with running({}, {}) as engines, routing(configure(*engines)) as rig:
        for text in ("one " * 60, "one " * 70, "two " * 50):
            await rig.chat(text)
        await rig.caught_up(*engines)
        found = await examined(router=rig.ops_url)
        assert found.bad() == []
        found.expect("router.reach", Severity.OK, "ready, 2 engine(s)")
        assert {f.subject for f in found.of("router.engines")} == {e.base_url for e in engines}
        found.expect("router.predictions", Severity.OK, "100%")
        found.expect("fleet.duplicates", Severity.OK)


def test_every_check_has_an_id_of_its_own() -> None:
    assert len(names()) == len(set(names())) > 20


async def test_data_parallel_ranks_are_looked_at_one_by_one() -> None:
    ranks = ({"dp_rank": 0}, {"dp_rank": 1})
    async with running(*ranks) as engines, fronting(*engines) as front:
        sources: dict[str, Any] = {}
        async with aiohttp.ClientSession() as session:
            for engine in engines:
                async with session.get(f"{engine.base_url}/kv_event_sources") as answer:
                    sources |= await answer.json()
        front.overrides["/kv_event_sources"] = lambda: (200, sources)
        found = await examined(front.base_url, probe=True)
        assert found.bad() == []
        exact = [one for one in found.of("probe.exact") if "exact" in one.seen]
        assert [f.subject for f in exact] == [f"{front.base_url}#dp{rank}" for rank in range(2)]
        assert all(engine.scheduler.stats.prompt_tokens > 0 for engine in engines)


async def test_the_doctor_knows_whether_the_router_has_a_tokenizer() -> None:
    async with running({}) as (engine,):
        async with routing(configure(engine)) as rig:
            found = await examined(engine.base_url, model=ModelConfig(), router=rig.ops_url)
            told = found.expect("tokens.parity", Severity.INFO, "the router tokenizes with", "fastokens")
            assert "asks an engine" not in told.cause
        async with routing(configure(engine, models={})) as rig:
            found = await examined(engine.base_url, model=ModelConfig(), router=rig.ops_url)
            found.expect("tokens.parity", Severity.WARNING, "no tokenizer", "--tokenizer")
