"""Hits on engines with host memory, and behind other prompts of a short pool, as predicted."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from kvatlas.router.observe.receipts import Receipt
from kvatlas.router.placement.candidate import PolicySettings
from tests.router.app.test_exact import Load
from tests.support.clients import openai_client
from tests.support.examples import some
from tests.support.waiting import until
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routing, running

SMALL: dict[str, Any] = {"groups": "gptoss-like", "num_blocks": 120, "max_num_batched_tokens": 256}
STORY = "A long story about a garden that an engine keeps, word by word, block by block. " * 25


async def ask(rig: Any, messages: list[dict[str, str]]) -> tuple[str, int, int]:
    """Engine, predicted and reported hit of one chat."""
    raw = await rig.api.chat.completions.with_raw_response.create(
        model=MODEL, messages=messages, max_tokens=2, extra_body={"ignore_eos": True}
    )
    usage = raw.parse().usage
    predicted = int(raw.headers["x-kvatlas-hit-tokens"])
    return raw.headers["x-kvatlas-engine"], predicted, usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize("preset", some(["gptoss-like", "full", "gemma3-like", "mamba-hybrid"], 3))
async def test_every_load_is_predicted(preset: str) -> None:
    blocks = {"full": 60, "gptoss-like": 120, "gemma3-like": 320, "mamba-hybrid": 200}[preset]
    settings = {**SMALL, "groups": preset, "num_blocks": blocks, "host_blocks": 4 * blocks}

    policy = PolicySettings(spread=0.0)  # one engine overflows its pool, the other idles
    async with running(settings, settings) as engines, routing(configure(*engines, policy=policy)) as rig:
        load = Load(seed=3)
        wrong = []
        for number in range(80):
            chat = load.chat()
            _, predicted, reported = await ask(rig, chat)
            load.chats.append([*chat, {"role": "assistant", "content": "It goes on."}])
            if predicted != reported:
                wrong.append((number, predicted, reported))
            await rig.caught_up(*engines)
        assert wrong == []
        sums = [engine.receipts for engine in rig.router.fleet]
        loaded = sum(s.predicted_by_medium.get("CPU", 0) for s in sums)
        on_gpu = sum(engine.scheduler.stats.prefix_cache_hits for engine in engines)
        assert loaded > 200, "else the load proves nothing"
        assert sum(s.predicted_by_medium.get("GPU", 0) for s in sums) == on_gpu
        assert sum(s.by_medium.get(("CPU", "exact"), 0) for s in sums) > 0
        rig.check_books()


async def test_an_engine_that_offloaded_the_prompt_is_chosen_and_the_receipt_says_why() -> None:
    chat = [{"role": "user", "content": STORY}]
    others = [[{"role": "user", "content": f"{number} {STORY[number:]}"}] for number in range(6)]
    async with running({**SMALL, "host_blocks": 2000}, SMALL) as engines, routing(configure(*engines)) as rig:
        for engine in engines:  # both read the story, and then so much else that none of it stays
            async with openai_client(engine.base_url) as direct:
                for messages in (chat, *others):
                    await direct.chat.completions.create(model=MODEL, messages=messages, max_tokens=2)
        await rig.caught_up(*engines)
        loads = [engine.load for engine in rig.router.fleet]
        await until(
            lambda: not any(load.current(time.monotonic()).foreign for load in loads), "seen to be idle"
        )
        host, plain = (engine.base_url for engine in engines)

        _, told = await rig.ask("POST", "/kvatlas/explain", {"model": MODEL, "messages": chat})
        shown = {entry["engine"]: entry["hit_tokens"] for entry in told["engines"]}
        tokens = shown[host]["CPU"]
        assert tokens > 300
        assert shown[host] == {"GPU": 0, "CPU": tokens, "STORAGE": 0, "offloaded": tokens}
        assert shown[plain] == {"GPU": 0, "CPU": 0, "STORAGE": 0, "offloaded": 0}
        costs = {entry["engine"]: entry["cost"] for entry in told["engines"]}
        assert costs[host]["load_s"] == pytest.approx(2e-6 * tokens)
        assert costs[host]["prefill_s"] < costs[plain]["prefill_s"]

        assert await ask(rig, chat) == (host, tokens, tokens)
        _, receipts = await rig.ask("GET", "/kvatlas/receipts")
        assert receipts[-1]["hit_by_medium"] == {"GPU": 0, "CPU": tokens, "STORAGE": 0}
        assert (receipts[-1]["outcome"], receipts[-1]["actual_tokens"]) == ("exact", tokens)
        _, page = await rig.ask("GET", "/metrics")
        labels = f'{{engine="{host}",medium="CPU"'
        assert f"kvatlas_predicted_hit_medium_tokens_total{labels}}} {float(tokens)}" in page
        assert f'kvatlas_predictions_compared_total{labels},outcome="exact"}} 1.0' in page


def test_policy_settings_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match="storage_load_s_per_token"):
        PolicySettings(storage_load_s_per_token=-1.0)


SHORT = {"groups": "full", "num_blocks": 64, "decode_s_per_token": 4e-3}


async def test_evictions_by_prompts_ahead_reduce_the_hit() -> None:
    first, second, third = (f"{name} {TEXT * count}" for name, count in (("a", 18), ("b", 35), ("c", 30)))
    async with running(SHORT) as engines, routing(configure(*engines)) as rig:
        (engine,) = rig.router.fleet
        await rig.streamed(first, max_tokens=1)
        await rig.caught_up(*engines)
        await until(lambda: engine.evictions.blocks == 63, "the pool is known")
        await rig.streamed(first, max_tokens=1)
        assert (latest(rig).evicted_tokens, latest(rig).outcome) == (0, "exact")
        whole = latest(rig).predicted_tokens
        assert whole is not None
        assert whole > 200

        ahead = asyncio.create_task(rig.streamed(second, max_tokens=120))
        await until(lambda: engine.load.current(rig.router.accounts.now()).running == 1, "it runs")
        behind = asyncio.create_task(rig.streamed(third, max_tokens=1))
        await until(lambda: engine.load.current(rig.router.accounts.now()).waiting == 1, "it was sent")
        body = {"model": MODEL, "messages": [{"role": "user", "content": first}]}
        _, shown = await rig.ask("POST", "/kvatlas/explain", body)
        (entry,) = shown["engines"]
        assert entry["evicted_tokens"] > 0
        assert shown["choice"]["hit_tokens"] + entry["evicted_tokens"] == whole
        await rig.streamed(first, max_tokens=1)
        await asyncio.gather(ahead, behind)
        (receipt,) = [found for found in rig.router.accounts.receipts.latest if found.evicted_tokens]
        assert receipt.outcome == "exact", receipt
        assert engine.evictions.check_integrity() == []


def latest(rig: Rig) -> Receipt:
    """The last receipt."""
    return rig.router.accounts.receipts.latest[-1]
