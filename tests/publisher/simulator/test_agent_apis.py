"""The simulated engine's Messages and Responses, by the clients that agents use: what is counted, rendered,
kept, made in the background and cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from kvatlas.publisher.simulator import http_agents
from tests.publisher.simulator.support import all_blocks_free, client, engine, request
from tests.support.clients import anthropic_client
from tests.support.waiting import until

MODEL = "kvatlas-demo"
ENDLESS: dict[str, Any] = {"model": MODEL, "input": "at length", "background": True, "max_output_tokens": 20}
SLOW: dict[str, Any] = {"decode_s_per_token": 5.0}
"""No such response ends within a test."""


async def test_counted_rendered_and_answered_prompts_have_the_same_tokens(anthropic: Any) -> None:
    async with engine(enable_scale_out=True) as running:
        url = running.base_url
        asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
        async with anthropic_client(anthropic, url) as api:
            counted = await api.messages.count_tokens(system="Be brief.", **asked)
            answer = await api.messages.create(system="Be brief.", max_tokens=3, **asked)
        body = {**asked, "system": "Be brief.", "max_tokens": 3}
        _, rendered = await request(running, "POST", "/v1/messages/render", body)
        usage = answer.usage
        told = usage.input_tokens + (usage.cache_read_input_tokens or 0)
        assert counted.input_tokens == told == len(rendered["token_ids"]) > 5
        said: dict[str, Any] = {"model": MODEL, "input": "Hello", "instructions": "Be brief."}
        _, rendered = await request(running, "POST", "/v1/responses/render", said)
        async with client(running) as responses:
            made = await responses.responses.create(**said)
        assert made.usage is not None
        assert made.usage.input_tokens == len(rendered["token_ids"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_background_response_is_made_without_its_client(stream: bool) -> None:
    async with engine(decode_s_per_token=0.02) as running, client(running) as api:
        async with client(running) as leaving:
            asked: Any = await leaving.responses.create(**ENDLESS, stream=stream)
            response_id = (await anext(asked)).response.id if stream else asked.id
            assert stream or asked.status == "queued"

        async def made() -> bool:
            return (await api.responses.retrieve(response_id)).status == "incomplete"

        await until(made)
        whole = await api.responses.retrieve(response_id)
        assert whole.output_text
        more = await api.responses.create(
            model=MODEL, input="And?", previous_response_id=response_id, max_output_tokens=1
        )
        assert more.usage is not None
        assert whole.usage is not None
        assert more.usage.input_tokens > whole.usage.total_tokens


async def test_a_background_stream_can_be_read_again_from_any_event() -> None:
    async with engine() as running, client(running) as api:
        stream = await api.responses.create(
            model=MODEL, input="Hi", background=True, stream=True, max_output_tokens=5
        )
        events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        last: Any = events[-1]
        for first, since in ((0, {}), (3, {"starting_after": 2})):
            fields: dict[str, Any] = {"stream": True, **since}
            again: Any = await api.responses.retrieve(last.response.id, **fields)
            assert [event async for event in again] == events[first:]
        plain = await api.responses.create(model=MODEL, input="Hi", max_output_tokens=1)
        with pytest.raises(openai.BadRequestError, match="Unknown response_id"):
            await api.responses.retrieve(plain.id, stream=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_response_stops_and_frees_its_blocks(stream: bool) -> None:
    async with engine(**SLOW) as running, client(running) as api:
        asked: Any = await api.responses.create(**ENDLESS, stream=stream)
        made = (await anext(asked)).response if stream else asked
        assert (await api.responses.cancel(made.id)).status == "cancelled"
        await until(lambda: all_blocks_free(running))
        assert (await api.responses.retrieve(made.id)).status == "cancelled"
        if stream:
            assert "response.completed" not in [event.type async for event in asked]
        with pytest.raises(openai.BadRequestError, match="Cannot cancel"):
            await api.responses.cancel(made.id)


async def test_the_error_for_an_unknown_response_is_vllms() -> None:
    async with engine() as running, client(running) as api:
        with pytest.raises(openai.NotFoundError, match="Response with id 'resp_x' not found"):
            await api.responses.cancel("resp_x")
        made = await api.responses.create(model=MODEL, input="Hi", max_output_tokens=1)
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
            await api.responses.cancel(made.id)
        with pytest.raises(openai.BadRequestError, match="background can only be used when"):
            await api.responses.create(**{**ENDLESS, "store": False})
        for method, path, status in (("GET", "/cancel", 405), ("POST", "", 405), ("GET", "/other", 404)):
            assert (await request(running, method, f"/v1/responses/{made.id}{path}"))[0] == status


def test_responses_that_make_room_are_not_made_any_further(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with engine(decode_s_per_token=0.3) as running, client(running) as api:
            first = await api.responses.create(**ENDLESS)
            await api.responses.create(model=MODEL, input="Hi", max_output_tokens=1)
            with pytest.raises(openai.NotFoundError):
                await api.responses.retrieve(first.id)
            await until(lambda: all_blocks_free(running))

    monkeypatch.setattr(http_agents, "KEPT_MAX", 1)
    asyncio.run(scenario())
