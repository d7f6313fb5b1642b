"""A prompt on two engines while one of them stands still, is terminated, or says one thing and does another:
no client gets a wrong answer or an engine's excuse for one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from kvatlas.publisher.simulator.kv_connector import Load
from kvatlas.publisher.simulator.model import WRONG_MARK
from kvatlas.publisher.simulator.server import SimulatedEngine
from tests.router.app.test_prefill_decode import BODIES, completion, prompt, receipts, told_alone, words
from tests.support.examples import some
from tests.support.pairs import CONNECTORS, Pair, routed_pair
from tests.support.waiting import until

PATH = "/v1/completions"
LEASE: dict[str, Any] = {"lease_s": 0.4, "lease_margin_s": 0.1}
SHORT: dict[str, Any] = {"kv_lease_s": 0.4, "num_blocks": 128, "groups": "full"}
DECODE: dict[str, Any] = {"groups": "full", "kv_lease_s": 0.4}


def stopped(engine: SimulatedEngine) -> Callable[[], None]:
    """A decode engine that stands still before it fetches anything, heartbeats included; to be called to have
    it go on."""
    link, connector = engine.link, engine.connector
    goes_on, loads = asyncio.Event(), link._load

    async def waits(load: Load) -> None:
        await goes_on.wait()
        await loads(load)

    link._load = waits  # type: ignore[method-assign]
    connector.awaited = dict  # type: ignore[method-assign, assignment]
    return goes_on.set


async def overwritten(pair: Pair) -> None:
    """The prefill engine lets go what it keeps, and computes something else there."""
    connector = pair.prefill.connector
    await until(lambda: connector.num_kept == 1, "the blocks are kept")
    await until(lambda: connector.num_kept == 0, "the lease has ended")
    request = pair.prefill.model.sim_request("x", (await _prepared(pair))[0])
    await pair.prefill.stepper.submit(request).finished()


async def _prepared(pair: Pair) -> list[Any]:
    from kvatlas.publisher.simulator.api_protocol import CompletionRequest  # noqa: PLC0415

    return await pair.prefill.model.prepare_completion(
        CompletionRequest(prompt=[*prompt(99, 1900)], max_tokens=1)
    )


CASES = [(one, stream) for one in CONNECTORS for stream in (False, True)]


@pytest.mark.parametrize("case", [*CASES[:2], *some(CASES[2:], 2)], ids=lambda case: f"{case[0]}-{case[1]}")
async def test_an_answer_that_begins_after_the_lease_is_made_again(case: tuple[str, bool]) -> None:
    """Also where the only decode engine has stored what it fetched under the prompt's hashes. With Mooncake
    and the offloading tier it is refused."""
    connector, stream = case

    alone = words(await told_alone(PATH, completion(1)))
    async with routed_pair(connector, prefill=SHORT, decode=DECODE, **LEASE) as pair:
        go_on = stopped(pair.decode)
        asked = asyncio.ensure_future(pair.ask(completion(1, stream=stream)))
        await overwritten(pair)
        go_on()
        status, answer = await asked
        assert status == 200, answer
        assert WRONG_MARK not in str(answer)
        if not stream:
            assert words(answer) == alone
        stats = pair.stats
        assert (stats.split, stats.handoffs, stats.handoffs_lost) == (1, 1, 1)
        assert stats.answers_late == (connector == "nixl")


@pytest.mark.long
async def test_an_answer_that_takes_longer_than_the_lease_is_not_made_again() -> None:
    """Its prompt was fetched in time: the prefill engine has let no lease end."""
    alone = words(await told_alone(PATH, completion(1)))
    lease: dict[str, Any] = {"lease_s": 2.0, "lease_margin_s": 1.5}
    slow = {"decode_s_per_token": 0.45}
    async with routed_pair(prefill={"kv_lease_s": 2.0}, decode=slow, **lease) as pair:
        status, answer = await pair.ask(completion(1))
        assert (status, words(answer)) == (200, alone)
        stats = pair.stats
        assert (stats.handoffs, stats.handoffs_lost, stats.answers_late) == (1, 0, 0)


async def test_a_responses_stream_begins_with_its_first_token_not_with_its_name() -> None:
    """vLLM names a response before it has looked at its prompt."""
    async with routed_pair(prefill=SHORT, decode=DECODE, **LEASE) as pair:
        go_on = stopped(pair.decode)
        body = {**BODIES["/v1/responses"], "stream": True}
        asked = asyncio.ensure_future(pair.ask(body, "/v1/responses"))
        await overwritten(pair)
        go_on()
        status, answer = await asked
        assert (status, WRONG_MARK in answer) == (200, False)
        assert answer.count("event: response.created") == 1
        assert pair.stats.answers_late == 1


async def test_a_prefill_engine_that_is_terminated_hands_nothing_over() -> None:
    """Its answer has no parameters, which an engine without connector says too."""
    alone = words(await told_alone(PATH, completion(1)))
    async with routed_pair(prefill={"prefill_s_per_token": 1.0}) as pair:
        asked = asyncio.ensure_future(pair.ask(completion(1)))
        await until(lambda: pair.prefill.scheduler.gauges().num_running == 1, "it computes the prompt")
        await pair.prefill.stop()
        status, answer = await asked
        assert (status, words(answer)) == (200, alone)
        assert pair.stats.prefill_failures == {"aborted": 1}


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_whose_prompt_could_not_be_fetched_is_made_again(path: str) -> None:
    """The decode engine says 500 behind a head of 200, Responses break off behind their name."""
    async with routed_pair(decode={"version": "0.31.0"}, mix_versions=True) as pair:
        body = {**BODIES[path], "stream": path != "/inference/v1/generate"}
        status, answer = await pair.ask(body, path)
        assert status == 200
        assert '"error"' not in str(answer).replace(" ", "").replace('"error":null', "")
        stats = pair.stats
        assert (stats.handoffs, stats.handoffs_lost) == (1, 1)
        assert pair.rig.router.proxy.stats.streams_broken == 0


@pytest.mark.parametrize("version", ["0.30.1", "0.32.0"])
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_hit_is_the_prefill_engines_not_what_was_fetched(connector: str, version: str) -> None:
    """Tenants are charged by it; clients see it where vLLM lets it be said."""
    both: dict[str, Any] = {"version": version, "groups": "full"}
    async with routed_pair(connector, prefill=both, decode=both) as pair:
        tokens = prompt(1, 640)
        await pair.ask(completion(1, prompt=tokens))
        for stream in (False, True):
            hit = len(tokens)
            tokens = [*tokens, *prompt(7 + stream, 320)]
            usage = {"stream_options": {"include_usage": True}} if stream else {}
            status, answer = await pair.ask(completion(1, prompt=tokens, stream=stream, **usage))
            assert status == 200, answer
            last = [one for one in await receipts(pair.rig) if one["leg"] == "decode"][-1]
            assert last["actual_tokens"] == hit
            if version != "0.30.1" and connector != "offloading":
                said = answer if stream else json.dumps(answer, separators=(",", ":"))
                assert f'"cached_tokens":{hit}' in said
