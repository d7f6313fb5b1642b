"""Engines as plain ``vllm serve MODEL`` starts them: without KV events, without reports of cached tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR
from kvatlas.router.config.schema import ModelConfig
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.placement.shadow import ShadowSettings
from tests.support.front import fronting
from tests.support.waiting import until
from tests.support.whole_router import MODEL, Rig, configure, routing, running

TEXT = "a plain engine tells nothing of its blocks "
EVENTS, REPORTS = "--kv-events-config", "--enable-prompt-tokens-details"


async def outcomes(rig: Rig) -> dict[str, int]:
    _, receipts = await rig.ask("GET", "/kvatlas/receipts")
    names = [one["outcome"] for one in receipts]
    return {name: names.count(name) for name in set(names)}


async def findings(rig: Rig, engine: Any) -> dict[str, dict[str, Any]]:
    _, problems = await rig.ask("GET", "/kvatlas/problems")
    return {one["check"]: one for one in problems[engine.base_url]}


async def sized(rig: Rig) -> Any:
    (status,) = rig.router.fleet
    await until(lambda: status.shadow is not None and status.stated is not None, "sized")
    return status


@pytest.mark.parametrize("block_size", [16, 64])
async def test_a_plain_engine_is_sized_by_its_metrics(block_size: int) -> None:
    """40 of 40 were too high with the assumed pool of 16,384 blocks."""
    settings = {"publish_events": False, "num_blocks": 200 * 16 // block_size, "block_size": block_size}
    with capture_logs() as lines:
        async with running(settings) as (engine,), routing(configure(engine)) as rig:
            status = await sized(rig)
            spec = status.shadow.spec
            assert (spec.block_size, spec.num_blocks) == (block_size, settings["num_blocks"])
            for turn in range(2):
                for number in range(12):
                    await rig.chat(f"{number} " + TEXT * 20 + "again " * turn)
            found = await outcomes(rig)
            assert found.get("over", 0) <= 1, found
            problem = (await findings(rig, engine))["predictions.estimate"]
            assert problem["seen"].startswith("estimate: ")
            assert f"num_blocks {settings['num_blocks']}, block_size {block_size}" in problem["seen"]
            assert "(assumed)" not in problem["seen"]
            assert EVENTS in problem["remedy"]
            _, ready = await rig.ask("GET", "/ready")
            assert [one["check"] for one in ready["problems"]] == ["predictions.estimate"]
    (line,) = [line for line in lines if line["event"].startswith("estimate: start the engine with ")]
    assert (line["engine"], EVENTS in line["event"]) == (engine.base_url, True)


@pytest.mark.real  # a process that tries the tokenizer
async def test_windows_come_from_the_models_file(tmp_path: Path) -> None:
    shutil.copytree(DEMO_TOKENIZER_DIR, folder := tmp_path / "model")
    content = {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"] * 4}
    (folder / "config.json").write_text(json.dumps(content))
    settings = {"publish_events": False, "num_blocks": 150, "root": str(folder)}
    async with running(settings) as (engine,), routing(configure(engine, models={})) as rig:
        status = await sized(rig)
        await until(lambda: len(status.shadow.spec.groups) == 2, "groups")
        assert "windows 64" in (await findings(rig, engine))["predictions.estimate"]["seen"]


async def test_a_configured_size_is_used() -> None:
    model = ModelConfig(shadow=ShadowSettings(num_blocks=77, block_size=32))
    async with (
        running({"publish_events": False}) as (engine,),
        routing(configure(engine, models={"*": model}), wait=False) as rig,
    ):
        status = await sized(rig)
        assert (status.shadow.spec.num_blocks, status.shadow.spec.block_size) == (77, 32)


async def test_wrong_estimates_are_not_blamed_on_the_tokenizer() -> None:
    """Another client resets the cache between the requests; the router does not see it."""
    async with running({"publish_events": False}) as (engine,), routing(configure(engine)) as rig:
        await sized(rig)
        for _ in range(30):
            await rig.chat(TEXT * 20)
            engine.pool.reset()
        drift = (await findings(rig, engine))["predictions.drift"]
        assert "tokenizer" not in drift["cause"] + drift["remedy"]
        assert EVENTS in drift["remedy"]


async def test_answers_without_cached_tokens_are_named_with_the_flag() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
    choice = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}
    answer = {"id": "c", "object": "chat.completion", "created": 1, "model": MODEL, "choices": [choice]}
    async with running({}) as (engine,), fronting(engine) as front:
        front.overrides["/v1/chat/completions"] = lambda: (200, {**answer, "usage": usage})
        async with routing(configure(front)) as rig:  # type: ignore[arg-type]  # it has a base_url
            for number in range(3):
                assert "predictions.unreported" not in await findings(rig, front)
                await rig.chat(TEXT * (number + 1))
            problem = (await findings(rig, front))["predictions.unreported"]
            assert problem["seen"].startswith("estimate: the latest 3 response(s)")
            assert REPORTS in problem["remedy"]


async def test_an_idle_engine_without_a_replay_socket_is_ready_once_subscribed() -> None:
    """33 s before: its feed counted as still catching up until the time for that was over."""
    async with running({}) as (engine,):
        address = EngineAddress(engine.base_url, events=engine.publisher.endpoint)
        fleet = FleetSettings(warm_up_s_max=3600.0)
        async with routing(configure(address, fleet=fleet), wait=False) as rig:
            (status,) = rig.router.fleet
            await until(lambda: rig.router.readiness().ready, "ready")
            assert (str(status.feed_state), status.feed.reason) == ("degraded", "history_unknown")


async def test_events_that_are_not_used_are_named() -> None:
    stored = {"block_hashes": [1], "parent_block_hash": None, "token_ids": list(range(16)), "block_size": 16}
    shared = {"type": "BlockStored", "medium": "SHARED_STORAGE", **stored}
    async with running({}) as (engine,), routing(configure(engine)) as rig:
        await rig.chat(TEXT)
        await rig.caught_up(engine)
        assert await findings(rig, engine) == {}
        engine.publisher._ledger = None  # it would refuse what it cannot read
        events = [shared, shared, {"type": "CacheEvicted", "key": "k"}]
        engine.publisher.publish_payload(msgspec.msgpack.encode([1.0, events, 0]))
        (status,) = rig.router.fleet
        await until(lambda: len(status.residency.writer.unused) == 2, "seen")
        found = (await findings(rig, engine))["feed.unused"]
        assert found["seen"].endswith("not used: medium SHARED_STORAGE 2, type CacheEvicted 1")
        await rig.chat(TEXT)
        assert "feed.unusable" not in await findings(rig, engine)
