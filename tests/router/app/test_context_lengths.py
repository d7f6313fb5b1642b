"""Engines of one model with different ``max_model_len``: none refuses what another one would take."""

from __future__ import annotations

from typing import Any

import pytest

from router.openai.request import CHAT, COMPLETION, GENERATE, MESSAGES, RESPONSES
from router.pd.settings import PdSettings
from tests.router.app.test_prefill_decode import D, P, apart, prompt
from tests.support.whole_router import MODEL, configure, routed, routing, running

SHORT, LONG = {"max_model_len": 256}, {"max_model_len": 4096}
TEXT = "A story that is long enough for one engine and too long for the other one. " * 20
CHATTED = [{"role": "user", "content": TEXT}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": CHATTED, "max_tokens": 4},
    COMPLETION: {"prompt": TEXT, "max_tokens": 4},
    MESSAGES: {"messages": CHATTED, "max_tokens": 4},
    RESPONSES: {"input": TEXT, "max_output_tokens": 4},
    GENERATE: {"token_ids": prompt(1), "sampling_params": {"max_tokens": 4}},
}


@pytest.mark.parametrize("read", ["here", "by nobody"])
@pytest.mark.parametrize("path", BODIES)
async def test_a_long_prompt_goes_to_an_engine_that_can_take_it(path: str, read: str) -> None:
    changes: dict[str, Any] = {} if read == "here" else {"models": {}}
    async with routed(SHORT, LONG, SHORT, **changes) as (rig, engines):
        for number in range(6):
            body = {"model": MODEL, "user": f"{number}", **BODIES[path]}
            await rig.ok("POST", path, body)
        await rig.over()
        chosen = {engine.engine_id: engine.load.last_admit_s for engine in rig.router.fleet}
        assert max(chosen, key=lambda name: chosen[name]) == engines[1].base_url
        assert rig.router.proxy.stats.retries == 0


async def test_what_no_engine_takes_is_refused_by_one_and_once() -> None:
    async with routed(SHORT, {"max_model_len": 300}) as (rig, _):
        body = {"model": MODEL, "prompt": prompt(1), "max_tokens": 4}
        status, answer = await rig.ask("POST", COMPLETION, body)
        assert status == 400
        assert "300 tokens" in answer["error"]["message"]
        assert rig.router.accounts.load_stats.admitted == 1


async def test_short_prompts_still_go_everywhere() -> None:
    async with routed(SHORT, LONG) as (rig, engines):
        for number in range(12):
            await rig.ok("POST", COMPLETION, {"model": MODEL, "prompt": prompt(number, 50), "max_tokens": 2})
        await rig.over()
        asked = {one.engine_id for one in rig.router.accounts.receipts.latest}
        assert asked == {engine.base_url for engine in engines}


@pytest.mark.parametrize(("short", "helper"), [(0, 1), (1, 0)])
async def test_both_engines_of_a_split_request_have_room_for_it(short: int, helper: int) -> None:
    """The prefill engine for the prompt and one token, the decode engine for the answer."""
    pd = PdSettings(
        min_remote_tokens=64, leg_overhead_s=0.0, transfer_s_per_token=0.0, decode_delay_weight=100.0
    )
    legs = [{**P, **(SHORT if short == 0 else {})}, D, {**D, **(SHORT if short == 1 else {})}]
    async with apart(*legs, pd=pd) as (rig, _):
        for number in range(4):
            body = {"model": MODEL, "prompt": prompt(number), "max_tokens": 4}
            await rig.ok("POST", COMPLETION, body)
        if short == 0:
            assert rig.router.proxy.pd_stats.split == 0
        assert not rig.router.proxy.pd_stats.prefill_failures
        assert helper in {0, 1}


async def test_a_picker_that_allows_only_short_engines_hears_it_from_them() -> None:
    async with running(SHORT, LONG) as engines, routing(configure(*engines)) as rig:
        planner = rig.router.planner
        short = engines[0].base_url.removeprefix("http://")
        ready = planner._eligible
        place = ready.engines

        def among(request: Any, *args: Any) -> Any:
            request.among = frozenset((short,))
            return place(request, *args)

        ready.engines = among  # type: ignore[method-assign, assignment]
        body = {"model": MODEL, "prompt": prompt(1), "max_tokens": 4}
        status, answer = await rig.ask("POST", COMPLETION, body)
        assert (status, "256 tokens" in str(answer)) == (400, True)
