"""Messages and Responses through a whole router before simulated engines, by their own clients."""

from __future__ import annotations

from types import ModuleType

import openai
import pytest

from tests.support.clients import anthropic_client
from tests.support.whole_router import MODEL, QUICK, TEXT, configure, routed, routing, running

TURNS = [
    {"role": "user", "content": [{"type": "text", "text": TEXT * 6}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1.50}}]},
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "found"}]},
            {"type": "text", "text": "and now?"},
        ],
    },
]


async def test_prompts_of_messages_are_known_and_their_next_turns_hit(anthropic: ModuleType) -> None:
    async with running(QUICK, QUICK) as engines, routing(configure(*engines)) as rig:
        async with anthropic_client(anthropic, rig.url) as client:
            for turns, stream in ((TURNS[:1], False), (TURNS, True), (TURNS, False)):
                answer = await client.messages.create(
                    model=MODEL,
                    max_tokens=4,
                    system="Be kind.",
                    messages=turns,
                    stream=stream,  # type: ignore[call-overload]
                )
                if stream:
                    assert [event.type async for event in answer][-1] == "message_stop"
                else:
                    assert answer.content[0].text
                await rig.caught_up(*engines)
        _, receipts = await rig.ask("GET", "/kvatlas/receipts")
        told = [r for r in receipts if r["api"] == "messages"]
        assert [r["read"] for r in told] == ["local"] * 3
        assert [r["reported_prompt_tokens"] for r in told] == [r["prompt_tokens"] for r in told]
        assert [r["actual_tokens"] for r in told] == [r["predicted_tokens"] for r in told]
        assert max(r["predicted_tokens"] for r in told) > 0


async def test_a_response_is_gone_on_from_where_it_is_kept() -> None:
    async with running(QUICK, QUICK, QUICK) as engines, routing(configure(*engines)) as rig:
        for number in range(6):
            stream = number % 2 == 1
            made = await rig.api.responses.create(
                model=MODEL, input=f"{number} {TEXT}", max_output_tokens=4, stream=stream
            )
            if stream:
                made = [event async for event in made][-1].response
            found = await rig.api.responses.retrieve(made.id)
            assert found.output_text == made.output_text
            more = await rig.api.responses.create(
                model=MODEL, input="go on", previous_response_id=made.id, max_output_tokens=4
            )
            assert more.previous_response_id == made.id
        with pytest.raises(openai.NotFoundError):
            await rig.api.responses.retrieve("resp_unknown")
        with pytest.raises(openai.NotFoundError):
            await rig.api.responses.create(model=MODEL, input="x", previous_response_id="resp_unknown")


async def test_an_unknown_model_is_an_error_in_anthropics_shape(anthropic: ModuleType) -> None:
    async with (
        routed(QUICK) as (rig, _),
        anthropic_client(anthropic, rig.url) as client,
    ):
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.messages.create(
                model="other", max_tokens=4, messages=[{"role": "user", "content": "x"}]
            )
        assert caught.value.body["error"]["code"] == "model_not_found"  # type: ignore[index,call-overload]
