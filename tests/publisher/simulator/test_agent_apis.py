"""The simulated engine's Messages and Responses, by the clients that agents use: what is counted, rendered
and kept."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from kvatlas.publisher.simulator import http_agents
from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR
from kvatlas.publisher.simulator.tokenizer import shared_tokenizer
from tests.publisher.simulator.support import client, engine, request
from tests.support.clients import anthropic_client

MODEL = "kvatlas-demo"
USER = {"role": "user", "content": "Hello"}
TOKENIZER = shared_tokenizer(DEMO_TOKENIZER_DIR)


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


@pytest.mark.parametrize("said", [[], [{"role": "assistant", "content": "I look."}]])
async def test_calls_of_functions_belong_to_the_assistants_message_before_them(said: list[Any]) -> None:
    calls = [
        {"type": "function_call", "call_id": city, "name": "rain", "arguments": f'{{"city": "{city}"}}'}
        for city in ("Rome", "Oslo")
    ]
    result = {"type": "function_call_output", "call_id": "Rome", "output": "None"}
    body = {"model": MODEL, "input": [{"role": "user", "content": "Rain?"}, *said, *calls, result]}
    async with engine(enable_scale_out=True) as running:
        _, rendered = await request(running, "POST", "/v1/responses/render", body)
    text = TOKENIZER.decode(rendered["token_ids"])
    assert text.endswith(
        f"Rain?<|im_end|>\n<|im_start|>assistant\n{said[0]['content'] if said else ''}"
        '\ncall: {"name": "rain", "arguments": {"city": "Rome"}}'
        '\ncall: {"name": "rain", "arguments": {"city": "Oslo"}}<|im_end|>\n'
        "<|im_start|>tool\nNone<|im_end|>\n<|im_start|>assistant\n"
    ), text


async def test_streams_have_the_events_of_each_api() -> None:
    async def streamed(path: str, **fields: Any) -> list[dict[str, Any]]:
        body = {"model": MODEL, "stream": True, **fields}
        status, text = await request(running, "POST", path, body)
        assert status == 200
        events = [one.split("\n") for one in text.strip().split("\n\n")]
        shown: list[dict[str, Any]] = [json.loads(data.removeprefix("data: ")) for _, data in events]
        assert [name.removeprefix("event: ") for name, _ in events] == [one["type"] for one in shown]
        return shown

    async with engine() as running:
        events = await streamed("/v1/messages", messages=[USER], max_tokens=4)
        start, block, *deltas = events[:-3]
        ends = events[-3:]
        assert (start["type"], start["message"]["usage"]["output_tokens"]) == ("message_start", 0)
        assert (block["type"], block["index"]) == ("content_block_start", 0)
        assert [(one["type"], one["index"]) for one in deltas] == [("content_block_delta", 0)] * 4
        assert [one["type"] for one in ends] == ["content_block_stop", "message_delta", "message_stop"]
        assert ends[0]["index"] == 0
        assert ends[1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
        assert ends[1]["usage"]["output_tokens"] == 4

        events = await streamed("/v1/responses", input=[USER], max_output_tokens=4)
        assert [one["sequence_number"] for one in events] == list(range(7))
        created, going, *parts, end = events
        assert [created["type"], going["type"]] == ["response.created", "response.in_progress"]
        assert {(one["type"], one["output_index"], one["content_index"]) for one in parts} == {
            ("response.output_text.delta", 0, 0)
        }
        assert end["type"] == "response.incomplete"
        said = "".join(one["delta"] for one in parts)
        assert end["response"]["output"][0]["content"][0]["text"] == said
        assert end["response"]["usage"]["output_tokens"] == 4


async def test_a_stored_response_is_read_and_followed() -> None:
    async with engine() as running, client(running) as api:
        made = await api.responses.create(model=MODEL, input="Hi", max_output_tokens=5)
        assert await api.responses.retrieve(made.id) == made
        assert made.usage is not None
        more = await api.responses.create(
            model=MODEL, input="And?", previous_response_id=made.id, max_output_tokens=1
        )
        assert more.usage is not None
        assert more.usage.input_tokens > made.usage.total_tokens
        with pytest.raises(openai.BadRequestError, match="Unknown response_id"):
            await api.responses.retrieve(made.id, stream=True)


async def test_the_error_for_an_unknown_response_is_vllms() -> None:
    async with engine() as running, client(running) as api:
        with pytest.raises(openai.NotFoundError, match="Response with id 'resp_x' not found"):
            await api.responses.cancel("resp_x")
        made = await api.responses.create(model=MODEL, input="Hi", max_output_tokens=1)
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
            await api.responses.cancel(made.id)
        with pytest.raises(openai.BadRequestError, match="background are not simulated"):
            await api.responses.create(model=MODEL, input="Hi", background=True)
        for method, path, status in (("GET", "/cancel", 405), ("POST", "", 405), ("GET", "/other", 404)):
            assert (await request(running, method, f"/v1/responses/{made.id}{path}"))[0] == status


async def test_the_oldest_response_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_agents, "KEPT_MAX", 1)
    async with engine() as running, client(running) as api:
        first, second = [
            await api.responses.create(model=MODEL, input="Hi", max_output_tokens=1) for _ in range(2)
        ]
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(first.id)
        assert (await api.responses.retrieve(second.id)).id == second.id
