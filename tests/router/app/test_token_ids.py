"""Prompts that come as token ids need no tokenizer: they are placed and predicted with nothing configured."""

from __future__ import annotations

from typing import Any

import pytest

from kvatlas.router.openai.apis import COMPLETION, GENERATE
from tests.support.waiting import until
from tests.support.whole_router import MODEL, configure, routing, running

PROMPT = list(range(100, 300))
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": (COMPLETION, {"prompt": PROMPT, "max_tokens": 1}),
    "a list of one": (COMPLETION, {"prompt": [PROMPT], "max_tokens": 1}),
    "generate": (GENERATE, {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("mode", ["native", "learned"])
async def test_token_ids_without_a_tokenizer(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body = BODIES[name]
    monkeypatch.setattr("kvatlas.router.index.learn.hash_scheme.SEEDS_MAX", 4)
    changes = {"hash_seed": "a seed that is no number"} if mode == "learned" else {}
    async with running(changes) as (engine,), routing(configure(engine, models={})) as rig:

        def known() -> bool:
            found = rig.router.scopes.engine(engine.base_url)
            return found is not None and found.mode == mode

        for _ in range(2):
            await rig.ok("POST", path, {"model": MODEL, **body})
            await until(lambda: rig.idle, "answered")
            await rig.caught_up(engine)
            await until(known, "how it hashes is known")
        stats = rig.router.reader.stats
        assert (stats.local, stats.engine, sum(stats.affinity.values())) == (2, 0, 0)
        receipts = list(rig.router.accounts.receipts.latest)
        assert [receipt.actual_tokens for receipt in receipts] == [0, 192]
        assert receipts[-1].outcome == "exact"


async def test_several_answers_to_a_prompt_are_not_held_against_a_prediction() -> None:
    """The engine reports the cached tokens of any of them; the others hit what the first one stored."""
    async with running({}) as (engine,), routing(configure(engine, models={})) as rig:
        for count in (1, 2, 1):
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "n": count}
            status, answer = await rig.ask("POST", COMPLETION, body)
            assert status == 200, answer
            await until(lambda: rig.idle, "answered")
            await rig.caught_up(engine)
        receipts = list(rig.router.accounts.receipts.latest)
        assert [receipt.predicted_tokens for receipt in receipts] == [0, None, 192]
