"""Answers of simulated engines that are cut and continued, and what vLLM's streams are made of."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.publisher.simulator.model import TextSource
from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR
from kvatlas.publisher.simulator.tokenizer import shared_tokenizer
from tests.publisher.simulator.support import engine, request
from tests.support.examples import examples

TOKENIZER = shared_tokenizer(DEMO_TOKENIZER_DIR)
MIXED = TextSource(TOKENIZER, seed=0, natural_tokens_max=64, characters=True)
CHAT = {"messages": [{"role": "user", "content": "Hello 🙂 漢字"}], "stream": True}
COMPLETION = {"prompt": "Hello 🙂 漢字", "stream": True}


async def events(running: SimulatedEngine, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, without its end."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with aiohttp.ClientSession() as session, session.post(running.base_url + path, json=body) as answer:
        pieces = (await answer.text()).strip().split("\n\n")
    assert pieces.pop() == "data: [DONE]"
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces]


def output(events: list[dict[str, Any]]) -> list[int]:
    return [token for one in events for choice in one["choices"] for token in choice.get("token_ids") or ()]


def text(events: list[dict[str, Any]]) -> str:
    choices = [choice for one in events for choice in one["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices)


def whole_characters(token_ids: list[int]) -> bool:
    return not TOKENIZER.decode(token_ids).endswith("\ufffd")


@settings(max_examples=examples(60))
@given(
    st.lists(st.integers(0, TOKENIZER.vocab_size - 1), min_size=1, max_size=40),
    st.lists(st.integers(1, 30), max_size=4),
    st.booleans(),
)
def test_a_prompt_with_the_beginning_of_its_answer_is_continued(
    prompt: list[int], cuts: list[int], ignore_eos: bool
) -> None:
    def produced(ids: list[int], count: int) -> list[int]:
        words = MIXED.continuation(ids)
        return [words.token(index, ignore_eos=ignore_eos) for index in range(count)]

    whole = produced(prompt, 90)
    if TOKENIZER.eos_id in whole:
        whole = whole[: whole.index(TOKENIZER.eos_id) + 1]
    for cut in cuts:
        assert produced([*prompt, *whole[:cut]], len(whole[cut:])) == whole[cut:]


@pytest.mark.parametrize("interval", [1, 5])
async def test_a_cut_answer_is_continued_by_its_ids(interval: int) -> None:
    async with engine(characters="mixed", stream_interval=interval) as running:
        options = {"max_tokens": 32, "ignore_eos": True, "return_token_ids": True}
        whole = await events(running, {**CHAT, **options})
        prompt, tokens = whole[0]["prompt_token_ids"], output(whole)
        sizes = [len(one["choices"][0]["token_ids"]) for one in whole[1:]]
        assert sizes == ([1] * 32 if interval == 1 else [1, *[5] * 6, 1])
        assert "🚀" in text(whole)
        repeated = 0
        for cut in range(1, 32):
            ids = [*prompt, *tokens[:cut]]
            rest = await events(running, {**COMPLETION, **options, "prompt": ids, "max_tokens": 32 - cut})
            assert output(rest) == tokens[cut:]
            assert rest[0]["choices"][0]["prompt_token_ids"] == ids
            if whole_characters(tokens[:cut]):
                assert TOKENIZER.decode(tokens[:cut]) + text(rest) == text(whole)
            else:  # vllm#48853
                repeated += text(rest).startswith(TOKENIZER.decode(prompt, skip_special_tokens=True))
        assert repeated > 5


async def test_a_prompt_that_ends_inside_a_character_is_repeated() -> None:
    prompt = TOKENIZER.encode("a word 漢", add_special_tokens=False)
    async with engine() as running:
        for cut, said in ((0, ""), (1, "a word \ufffd"), (2, "a word \ufffd")):
            one = {**COMPLETION, "prompt": prompt[: len(prompt) - cut], "max_tokens": 3}
            first = (await events(running, one))[0]["choices"][0]["text"]
            assert first.startswith(said)
            assert ("word" in first) == bool(cut)


@pytest.mark.parametrize("body", [CHAT, COMPLETION])
async def test_ids_are_null_where_they_are_not_asked_for(body: dict[str, Any]) -> None:
    async with engine() as running:
        plain = await events(running, {**body, "max_tokens": 3})
        asked = await events(running, {**body, "max_tokens": 3, "return_token_ids": True})
    for one, other in zip(plain, asked, strict=True):
        other["id"], other["created"] = one["id"], one["created"]
        for part in (other, other["choices"][0]):
            part.update(dict.fromkeys(part.keys() & {"prompt_token_ids", "token_ids"}))
        assert one == other


async def test_a_stop_string_ends_the_text_and_is_held_back() -> None:
    async with engine() as running:
        options = {**COMPLETION, "max_tokens": 40, "ignore_eos": True}
        free = await events(running, {**options, "return_token_ids": True})
        assert text(free[:20]) == TOKENIZER.decode(output(free[:20])), "nothing is held back for no string"
        whole = text(free)
        stop = whole[50:62]
        options["stop"] = ["never", stop]
        stopped = await events(running, options)
        assert text(stopped) == whole[: whole.index(stop)]
        last = stopped[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)
        sent = ""
        for one in stopped[:-1]:
            sent += one["choices"][0]["text"]
            assert whole.index(stop) >= len(sent)
            assert whole.startswith(sent)
        later = await events(running, {**options, "min_tokens": 40})
        assert text(later) == whole
        status, body = await request(
            running, "POST", "/v1/completions", {**options, "stream": False, "stop": stop}
        )
        assert (status, body["choices"][0]["text"]) == (200, text(stopped))
        assert body["choices"][0]["stop_reason"] == stop


async def test_an_answer_does_not_end_before_its_least_tokens() -> None:
    async with engine(natural_output_tokens_max=8) as running:
        ended = await events(running, {**COMPLETION, "max_tokens": 60, "return_token_ids": True})
        longer = await events(
            running, {**COMPLETION, "max_tokens": 60, "min_tokens": 30, "return_token_ids": True}
        )
    assert (len(output(ended)), len(output(longer))) == (9, 31)
    assert [one[-1]["choices"][0]["finish_reason"] for one in (ended, longer)] == ["stop"] * 2


async def test_the_end_of_the_process_is_an_abort_with_a_token() -> None:
    async with engine(decode_s_per_token=0.01) as running:
        options = {"max_tokens": 200, "ignore_eos": True, "return_token_ids": True}
        body = {**CHAT, **options}
        path = running.base_url + "/v1/chat/completions"
        async with aiohttp.ClientSession() as session, session.post(path, json=body) as answer:
            begin = b""
            while begin.count(b"data:") < 4:
                begin += await answer.content.readany()
            running.stepper.abort_all()
            rest = (begin + await answer.content.read()).decode().strip().split("\n\n")
    assert rest.pop() == "data: [DONE]"
    last = json.loads(rest[-1].removeprefix("data: "))["choices"][0]
    assert last["finish_reason"] == "abort"
    assert len(last["token_ids"]) == 1
    assert last["delta"]["content"]
