"""The real ``openai`` client against a simulated engine: answers, streams, usage and cache hits."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from kvatlas.publisher.block_hash import PromptExtras
from kvatlas.publisher.simulator.server import SimulatedEngine
from tests.publisher.simulator.support import LONG_TEXT, client, engine, request

MODEL = "kvatlas-demo"
IDS = {"return_token_ids": True}
SYSTEM = {"role": "system", "content": LONG_TEXT}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def chat(api: openai.AsyncOpenAI, messages: list[Any], **options: Any) -> Any:
    options = {"max_tokens": 20, "extra_body": {**IDS, "ignore_eos": True}, **options}
    return await api.chat.completions.create(model=MODEL, messages=messages, **options)


def predicted(running: SimulatedEngine, token_ids: list[int], extras: PromptExtras | None = None) -> int:
    """The hit the pool would give this prompt now."""
    return running.pool.find_hit(running.pool.request(token_ids, extras or PromptExtras()))


async def prompt_tokens(running: SimulatedEngine, messages: list[Any]) -> list[int]:
    _, body = await request(running, "POST", "/tokenize", {"messages": messages})
    return list(body["tokens"])


async def test_a_chat_reports_usage_and_its_next_turn_hits_the_cache() -> None:
    async with engine(groups="gemma3-like") as running, client(running) as api:
        first = await chat(api, [SYSTEM, user("Hello")])
        assert first.choices[0].finish_reason == "length"
        assert first.choices[0].message.role == "assistant"
        assert first.usage.completion_tokens == 20
        assert first.usage.total_tokens == first.usage.prompt_tokens + 20
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        answer = {"role": "assistant", "content": first.choices[0].message.content}
        messages = [SYSTEM, user("Hello"), answer, user("And then?")]
        tokens = await prompt_tokens(running, messages)
        assert tokens[: len(first.prompt_token_ids) + 20] == [
            *first.prompt_token_ids,
            *first.choices[0].token_ids,
        ]
        expected = predicted(running, tokens)
        second = await chat(api, messages)
        assert second.usage.prompt_tokens_details.cached_tokens == expected
        # Retention 0 keeps the window's blocks up to the last boundary of the first prompt.
        assert expected == (len(first.prompt_token_ids) - 1) // 16 * 16


@pytest.mark.parametrize("groups", ["gemma3-like", "gptoss-like", "full", "mamba-hybrid"])
@pytest.mark.parametrize("retention", [0, None])
async def test_cached_tokens_are_what_the_pool_would_have_hit(groups: str, retention: int | None) -> None:
    async with (
        engine(groups=groups, retention_interval=retention, num_blocks=700) as running,
        client(running) as api,
    ):
        hits = 0
        for number in range(12):
            messages = [SYSTEM, user(LONG_TEXT[: 150 * (number % 5)]), user(f"question {number % 4}")]
            expected = predicted(running, await prompt_tokens(running, messages))
            answer = await chat(api, messages)
            assert answer.usage.prompt_tokens_details.cached_tokens == expected
            hits += expected
        assert hits > 0


async def test_a_streamed_chat_says_what_the_whole_one_says() -> None:
    async with engine() as running, client(running) as api:
        whole = await chat(api, [user("Tell me")])
        stream = await chat(api, [user("Tell me")], stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        *parts, usage = chunks
        assert parts[0].choices[0].delta.role == "assistant"
        assert "".join(p.choices[0].delta.content for p in parts) == whole.choices[0].message.content
        assert [p.choices[0].finish_reason for p in parts[-2:]] == [None, "length"]
        assert [p for p in parts if "stop_reason" in p.choices[0].model_extra] == parts[-1:]
        assert len({chunk.id for chunk in chunks}) == 1
        assert usage.choices == []
        assert usage.usage.completion_tokens == 20
        assert usage.usage.prompt_tokens == whole.usage.prompt_tokens
        assert usage.usage.prompt_tokens_details.cached_tokens == (whole.usage.prompt_tokens - 1) // 16 * 16
        plain = [chunk async for chunk in await chat(api, [user("Tell me")], stream=True)]
        assert all(chunk.choices and chunk.usage is None for chunk in plain)
        options = {"include_usage": True, "continuous_usage_stats": True}
        stream = await chat(api, [user("Tell me")], stream=True, stream_options=options)
        assert [c.usage.completion_tokens async for c in stream] == [0, *range(1, 21), 20]
        for sent in (chunks, plain):
            assert [chunk for chunk in sent if chunk.system_fingerprint is not None] == sent[-1:]


async def test_the_id_of_an_answer_is_the_clients_or_drawn() -> None:
    async with engine() as running, client(running) as api:

        async def answered(**options: Any) -> str:
            return str((await chat(api, [user("Hi")], max_tokens=1, **options)).id)

        own = {"extra_body": {"request_id": "own"}}
        assert await answered(**own) == "chatcmpl-own"
        assert await answered(**own, extra_headers={"x-request-id": "header"}) == "chatcmpl-header"
        drawn = {await answered(), await answered()}
        assert len(drawn) == 2
        assert all(len(one) == len("chatcmpl-") + 32 for one in drawn)


async def test_completions_take_text_and_token_ids() -> None:
    async with engine() as running, client(running) as api:
        by_text = await api.completions.create(model=MODEL, prompt=LONG_TEXT, extra_body=IDS)
        tokens = by_text.choices[0].prompt_token_ids  # type: ignore[attr-defined]  # vLLM's own field
        assert tokens[0] == 1, "plain completions get the beginning-of-text token"
        assert by_text.usage is not None
        assert by_text.usage.completion_tokens <= 16
        expected = predicted(running, tokens)
        by_ids = await api.completions.create(model=MODEL, prompt=tokens)
        assert by_ids.usage is not None
        assert by_ids.usage.prompt_tokens_details is not None
        assert by_ids.usage.prompt_tokens_details.cached_tokens == expected > 0
        assert by_ids.choices[0].text == by_text.choices[0].text
        stream = await api.completions.create(model=MODEL, prompt=[LONG_TEXT], stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        assert text == by_text.choices[0].text


async def test_a_cache_salt_separates_tenants() -> None:
    async with engine(num_blocks=4096) as running, client(running) as api:

        async def cached(salt: str) -> int:
            body = {"cache_salt": salt} if salt else {}
            answer = await chat(api, [SYSTEM, user("Hi")], extra_body=body)
            return int(answer.usage.prompt_tokens_details.cached_tokens)

        assert await cached("") == 0
        assert await cached("a") == 0
        hit = await cached("a")
        assert hit > 0
        assert await cached("b") == 0
        assert await cached("") == hit


async def test_concurrent_requests_share_the_engine_and_all_get_their_own_answer() -> None:
    async with engine(max_num_seqs=4) as running, client(running) as api:
        alone = [await chat(api, [user(f"question {number}")]) for number in range(8)]
        together = await asyncio.gather(*(chat(api, [user(f"question {number}")]) for number in range(8)))
        assert [a.choices[0].message.content for a in alone] == [
            a.choices[0].message.content for a in together
        ]
        assert len({a.choices[0].message.content for a in together}) == 8


async def test_a_text_ends_by_itself_unless_told_otherwise() -> None:
    async with engine(natural_output_tokens_max=12) as running, client(running) as api:
        answer = await chat(api, [user("Hi")], max_tokens=100, extra_body={})
        assert answer.choices[0].finish_reason == "stop"
        assert 8 < answer.usage.completion_tokens <= 13
        assert "<|" not in answer.choices[0].message.content
        forced = await chat(api, [user("Hi")], max_tokens=100)
        assert forced.usage.completion_tokens == 100
