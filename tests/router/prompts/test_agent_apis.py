"""Messages, Responses and batches become the tokens vLLM makes of them, or are left to others."""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.router.openai.apis import BATCH, CHAT, COMPLETION, GENERATE, MESSAGES, RESPONSES
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.prompts.chat.conversions import Conversions
from kvatlas.router.prompts.reader import ModelPrompts, Prompt, PromptReader, TextAffinity
from tests.support.examples import examples
from tests.support.paths import ROOT
from tests.support.prompts import agent_cases, cases
from tests.support.prompts.readers import (
    local_reader,
    model_dir,
    plain_tokenizer,
    read,
    read_affinity,
    read_exact,
    read_prompt,
    reader,
)

RECORDED = json.loads(
    gzip.decompress((ROOT / "tests" / "data" / "prompts" / "agent_apis.json.gz").read_bytes())
)
NOT_REPRODUCED = {"tools_shape", "message_shape", "multimodal", "earlier_response"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_dir(tmp_path_factory.mktemp("m"), "thinking_tools", tokenizer=plain_tokenizer())


@pytest.mark.parametrize("template", RECORDED["tokens"])
def test_prompts_are_those_recorded_from_vllm(template: str, tmp_path: Path) -> None:
    reader = local_reader(model_dir(tmp_path, template, tokenizer=plain_tokenizer()), max_model_len=4096)
    seen: Counter[str] = Counter()
    for (path, body), expected in zip(RECORDED["requests"], RECORDED["tokens"][template], strict=True):
        try:
            found = read(reader, body, path)
        except ApiError:
            assert expected is None, body
            continue
        if expected is None:  # not computed
            continue
        if isinstance(found, Prompt):
            assert list(found.token_ids) == expected[0], (path, body)
            assert found.num_prompts == len(expected)
            seen["exact"] += 1
        else:
            assert found.reason in NOT_REPRODUCED, (found.reason, body)
            seen["left to others"] += 1
    assert seen["exact"] > 12 * seen["left to others"]
    assert reader.stats.template_mismatches == 0


def test_a_next_turn_converts_and_tokenizes_what_is_new(folder: Path) -> None:
    reader = local_reader(folder)
    turns = [agent_cases.USER, agent_cases.CALLS, agent_cases.RESULTS]
    first = read_exact(reader, agent_cases.messages(*turns, tools=[agent_cases.PING]), MESSAGES)
    reused = reader.stats.tokens_reused
    longer = agent_cases.messages(
        *turns, agent_cases.ANSWER, agent_cases.USER, tools=[agent_cases.PING], max_tokens=7
    )
    read_exact(reader, longer, MESSAGES)
    assert reader.stats.tokens_reused - reused >= first.num_tokens - 10


def test_the_memory_of_conversions_is_bounded() -> None:
    memory = Conversions(bytes_max=20_000)
    made: list[object] = []

    def make(value: object) -> object:
        made.append(value)
        return value

    for number in range(1000):
        memory.get(make, msgspec.Raw(b'"%d"' % number))
    assert len(made) == 1000
    assert memory._bytes <= 20_000
    assert memory.get(str, msgspec.Raw(b'"' + b"x" * 100_000 + b'"')).startswith("x")
    assert memory._bytes <= 20_000


def test_given_tokens_need_no_tokenizer(folder: Path) -> None:
    reader = local_reader(folder)
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3}, "cache_salt": "s"}
    prompt = read_exact(reader, body, GENERATE)
    assert list(prompt.token_ids) == [5, 6, 7]
    assert prompt.extras.cache_salt == "s"
    places = {"mm_hashes": {"image": ["h"]}, "mm_placeholders": {"image": [{"offset": 1, "length": 2}]}}
    seen = read_exact(reader, {**body, "features": places}, GENERATE)
    assert [(i.identifier, i.offset) for i in seen.extras.multimodal] == [("h", 1)]
    for asked, skips in (
        ({"prompt_logprobs": 1}, True),
        ({"prompt_logprob_token_ids": [[1]]}, True),
        ({"skip_reading_prefix_cache": True}, True),
        ({"skip_reading_prefix_cache": False, "prompt_logprobs": 1}, False),
    ):
        assert read_exact(reader, {**body, "sampling_params": asked}, GENERATE).skips_cache is skips
    parts = {**body, "content_parts": [{"type": "image_url", "url": "http://x"}]}
    read_affinity(reader, parts, GENERATE)


def test_an_engines_render_endpoint_is_not_asked_what_it_answers_differently() -> None:
    asked: list[str] = []

    async def post(url: str, body: bytes, headers: dict[str, str], timeout_s: float) -> tuple[int, bytes]:
        asked.append(url)
        return 200, b'{"token_ids":[1,2,3]}'

    distant = reader({"m": ModelPrompts()}, post=post, engine_url=lambda _model, _frontend: "http://e")
    read_prompt(distant, agent_cases.messages(agent_cases.USER), MESSAGES)
    assert asked == ["http://e/v1/messages/render"]
    off = agent_cases.messages(agent_cases.USER, thinking={"type": "disabled"})
    read_affinity(distant, off, MESSAGES)
    assert len(asked) == 1


def test_the_effort_of_disabled_thinking_can_be_set(folder: Path) -> None:
    off = agent_cases.messages(agent_cases.USER, thinking={"type": "disabled"})
    low = agent_cases.messages(agent_cases.USER, output_config={"effort": "low"})
    told, probing = local_reader(folder, anthropic_disabled_thinking_effort="low"), local_reader(folder)
    assert read_exact(told, off, MESSAGES).token_ids == read_exact(told, low, MESSAGES).token_ids
    assert read_exact(probing, off, MESSAGES).token_ids != read_exact(probing, low, MESSAGES).token_ids


def test_every_reading_is_counted_by_api_and_way(folder: Path) -> None:
    reader = local_reader(folder)
    read(reader, agent_cases.messages(agent_cases.USER), MESSAGES)
    read(reader, agent_cases.responses("x", previous_response_id="r"), RESPONSES)
    assert reader.stats.reads["messages", "local"] == 1
    assert reader.stats.reads["responses", "affinity"] == 1
    assert sum(reader.stats.reads.values()) == 2
    assert reader.stats.affinity["earlier_response"] == 1


def test_texts_of_one_conversation_share_keys_where_tokens_are_unknown(tmp_path: Path) -> None:
    reader = local_reader(model_dir(tmp_path, None, tokenizer=plain_tokenizer()))
    long = {"role": "user", "content": "word " * 500}
    for path, first, second in (
        (MESSAGES, agent_cases.messages(long), agent_cases.messages(long, agent_cases.ANSWER, max_tokens=9)),
        (RESPONSES, agent_cases.responses(long), agent_cases.responses(long, agent_cases.ANSWER)),
        (BATCH, {"messages": [[long]]}, {"messages": [[long, agent_cases.ANSWER]]}),
    ):
        one, two = read(reader, first, path), read(reader, second, path)
        assert isinstance(one, TextAffinity)
        assert isinstance(two, TextAffinity)
        assert one.keys[:3] == two.keys[:3]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


SOUND: dict[str, list[dict[str, Any]]] = {
    CHAT: [*cases.TURNS, *cases.TOOL_CHATS],
    COMPLETION: cases.COMPLETIONS,
    MESSAGES: agent_cases.MESSAGES,
    RESPONSES: agent_cases.RESPONSES,
    BATCH: agent_cases.BATCHES,
    GENERATE: [
        {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3}, "cache_salt": "s", "features": None},
        {
            "token_ids": [5, 6, 7],
            "features": {
                "mm_hashes": {"image": ["h"]},
                "mm_placeholders": {"image": [{"offset": 1, "length": 2}]},
            },
        },
    ],
}


@settings(max_examples=examples(200))
@given(st.data())
def test_wrong_types_anywhere_are_passed_on_or_refused(folder: Path, data: st.DataObject) -> None:
    path, bodies = data.draw(st.sampled_from(sorted(SOUND.items())))
    body = copy.deepcopy(data.draw(st.sampled_from(bodies)))
    place: Any = body
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        inside = place[key]
        if not isinstance(inside, dict | list) or not inside or data.draw(st.booleans()):
            place[key] = data.draw(VALUES)
            break
        place = inside
    if folder not in _READERS:
        _READERS[folder] = local_reader(folder)
    with contextlib.suppress(ApiError):
        assert isinstance(read(_READERS[folder], body, path), Prompt | TextAffinity)


_READERS: dict[Path, PromptReader] = {}
