"""A prompt behind others in a short pool is predicted to hit what these leave of its prefix."""

from __future__ import annotations

import asyncio

from router.observe.receipts import Receipt
from tests.support.waiting import until
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routing, running

SHORT = {"groups": "full", "num_blocks": 64, "decode_s_per_token": 4e-3}


async def streamed(rig: Rig, text: str, tokens: int) -> None:
    """Send a chat and read its answer."""
    answer = await rig.chat(text, max_tokens=tokens, stream=True, stream_options={"include_usage": True})
    async for _ in answer.parse():
        pass


async def test_what_prompts_ahead_evict_is_taken_off_the_hit() -> None:
    first, second, third = (f"{name} {TEXT * count}" for name, count in (("a", 18), ("b", 35), ("c", 30)))

    async with running(SHORT) as engines, routing(configure(*engines)) as rig:
        (engine,) = rig.router.fleet
        await streamed(rig, first, 1)
        await rig.caught_up(*engines)
        await until(lambda: engine.evictions.blocks == 63, "the pool is known")
        await streamed(rig, first, 1)
        assert (latest(rig).evicted_tokens, latest(rig).outcome) == (0, "exact")
        whole = latest(rig).predicted_tokens
        assert whole is not None
        assert whole > 200

        ahead = asyncio.create_task(streamed(rig, second, 120))
        await until(lambda: engine.load.current(rig.router.accounts.now()).running == 1, "it runs")
        behind = asyncio.create_task(streamed(rig, third, 1))
        await until(lambda: engine.load.current(rig.router.accounts.now()).waiting == 1, "it was sent")
        body = {"model": MODEL, "messages": [{"role": "user", "content": first}]}
        _, shown = await rig.ask("POST", "/kvatlas/explain", body)
        (entry,) = shown["engines"]
        assert entry["evicted_tokens"] > 0
        assert shown["choice"]["hit_tokens"] + entry["evicted_tokens"] == whole
        await streamed(rig, first, 1)
        await asyncio.gather(ahead, behind)
        (receipt,) = [found for found in rig.router.accounts.receipts.latest if found.evicted_tokens]
        assert receipt.outcome == "exact", receipt
        assert engine.evictions.check_integrity() == []


def latest(rig: Rig) -> Receipt:
    """The last receipt."""
    return rig.router.accounts.receipts.latest[-1]
