"""Engines of one model with different ``max_model_len``: none refuses what another one would take."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from kvatlas.router.fleet.engines import DesiredFleet, EngineAddress
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.openai.apis import CHAT, COMPLETION, GENERATE, MESSAGES, RESPONSES
from kvatlas.router.pd.settings import PdSettings
from tests.router.app.test_keys import serving
from tests.router.app.test_prefill_decode import D, P, apart, prompt
from tests.support.proxy_rig import Call, Engine, Script, answer, says
from tests.support.waiting import until
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


@pytest.mark.parametrize("read", ["here", "nowhere"])
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


def pools(length: int) -> Script:
    """A script: an engine that pools, with this context length."""
    cards = msgspec.json.encode({"object": "list", "data": [{"id": "m", "max_model_len": length}]})

    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        body = cards if call.head.first[1] == "/v1/models" else b"{}"
        writer.write(answer(200, body, "content-type: application/json"))

    return script


@pytest.mark.parametrize("given", ["ids", "texts"])
async def test_inputs_of_an_api_that_is_not_read_here_go_where_they_fit(given: str) -> None:
    inputs: list[Any] = [[7], [7] * 300] if given == "ids" else ["x", "x" * 4000]
    async with Engine(pools(256)) as short, Engine(pools(4096)) as long:
        config = configure(*(EngineAddress(one.url) for one in (short, long)))
        async with routing(config) as rig:
            await until(lambda: all(engine.up for engine in rig.router.fleet), "both are up")
            for _ in range(6):
                await rig.ok("POST", "/v1/embeddings", {"model": "m", "input": inputs})
        assert [sum(b"input" in call.body for call in one.calls) for one in (short, long)] == [0, 6]


async def test_a_prompt_too_long_for_all_is_refused_once() -> None:
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


DENSE = "".join(chr(33 + (7 * at * at + 3 * at) % 90) for at in range(900))
"""Far more tokens than a text of its size usually has."""
SELDOM = FleetSettings(poll_interval_s=600.0, gauge_interval_s=600.0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_a_text_that_turns_out_too_long_goes_to_a_longer_engine(path: str, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": DENSE}]} if path == CHAT else {"prompt": DENSE}
    async with routed(SHORT, LONG, SHORT, models={}) as (rig, _):
        for number in range(9):
            asked = {"model": MODEL, "max_tokens": 2, "stream": stream, "user": f"{number}", **body}
            status, answer = await rig.ask("POST", path, asked)
            assert status == 200, answer
        await rig.over()
        assert rig.router.proxy.stats.retries > 0, "some went to a short one first"
        assert all(engine.breaker.closed for engine in rig.router.fleet), "which is no fault of it"
        assert rig.router.proxy.stats.engines_broken == 0


async def test_an_engine_that_restarted_with_a_shorter_context_refuses_nothing_for_ever() -> None:
    async with routed(SHORT, LONG, fleet=SELDOM) as (rig, engines):
        short = rig.router.fleet.get(engines[0].base_url)
        long = rig.router.fleet.get(engines[1].base_url)
        assert short is not None
        assert long is not None
        # What it said before.
        short.models = tuple(msgspec.structs.replace(card, max_model_len=4000) for card in short.models)
        long.held = "drained"
        body = {"model": MODEL, "prompt": prompt(1), "max_tokens": 4}
        status, answer = await rig.ask("POST", COMPLETION, body)
        assert (status, answer["error"]["code"]) == (503, "no_ready_engine"), "the other one may come back"
        long.held = ""
        for number in range(4):
            await rig.ok("POST", COMPLETION, {**body, "prompt": prompt(number)})
        # Where no engine says that it has a longer context, its refusal is the client's.
        long.models = tuple(msgspec.structs.replace(card, max_model_len=4000) for card in long.models)
        rig.router.fleet.assign(DesiredFleet((EngineAddress(engines[0].base_url),)))
        status, answer = await rig.ask("POST", COMPLETION, body)
        assert (status, "context length" in answer["error"]["message"]) == (400, True)


@pytest.mark.parametrize("text", [b"temperature must be at most 2", b"", b"x" * 300_000])
async def test_other_refusals_are_passed_on_as_they_are(text: bytes) -> None:
    async with Engine(says(400, text, "content-type: application/json")) as engine:
        config = configure(EngineAddress(engine.url), models={})
        engine.script = serving("m", engine.script)
        async with routing(config) as rig:
            async with rig.session.post(rig.url + COMPLETION, json={"model": "m", "prompt": "x"}) as got:
                assert (got.status, await got.read()) == (400, text)
            assert rig.router.proxy.stats.retries == 0
