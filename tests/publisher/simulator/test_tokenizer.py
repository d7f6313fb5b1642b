"""The shipped tokenizer, prompt rendering, and the text a simulated engine makes up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.publisher.simulator.model import TextSource
from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR
from kvatlas.publisher.simulator.tokenizer import AnswerText, ChatTokenizer, TemplateError
from tests.support.scripts import script

TOKENIZER = ChatTokenizer(DEMO_TOKENIZER_DIR)
SOURCE = TextSource(TOKENIZER, seed=0, natural_tokens_max=64)
USER = {"role": "user", "content": "Hello there"}


@pytest.mark.long
def test_the_shipped_files_are_what_the_training_script_writes(tmp_path: Path) -> None:
    script("train_demo_tokenizer").main(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads(
            (DEMO_TOKENIZER_DIR / name).read_text()
        )


def test_the_shipped_tokenizer_is_small() -> None:
    assert sum(path.stat().st_size for path in DEMO_TOKENIZER_DIR.iterdir()) < 200_000
    assert 2000 <= TOKENIZER.vocab_size <= 4096


def test_special_tokens_are_added_only_where_asked_for() -> None:
    bare = TOKENIZER.encode("hello", add_special_tokens=False)
    assert TOKENIZER.encode("hello", add_special_tokens=True) == [
        *TOKENIZER.encode("<|bos|>", add_special_tokens=False),
        *bare,
    ]


def test_text_goes_on_after_bytes_that_are_no_characters() -> None:
    class Broken:
        def step(self, *_: object) -> str:
            raise ValueError("no characters")

    answer = AnswerText(TOKENIZER._tokenizer, [5], (), 0)
    answer._stream = Broken()  # type: ignore[assignment]
    for token_id in (*TOKENIZER.encode("one two", add_special_tokens=False), TOKENIZER.eos_id):
        assert not answer.add(token_id)
    assert answer.take(finished=True) == "one two"


def test_a_conversation_renders_with_one_beginning_of_text() -> None:
    text = TOKENIZER.render([{"role": "system", "content": "Be brief."}, USER])
    assert text == (
        "<|bos|><|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
    )


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "user\none\ntwo<|im_end|>" in TOKENIZER.render([{"role": "user", "content": parts}])


def test_tools_and_tool_calls_reach_the_template_in_validated_form() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    text = TOKENIZER.render(
        [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "<2>"}],
        tools=[{"function": {"parameters": {"b": 1}, "name": "add", "unknown": 1}, "type": "function"}],
    )
    tool = '{"type": "function", "function": {"name": "add", "description": null, "parameters": {"b": 1}}}'
    assert f"tools\n{tool}\n" in text
    assert 'call: {"arguments": {"a": 1}, "name": "add"}<|im_end|>' in text
    assert "tool\n<2><|im_end|>" in text


def test_a_final_message_can_be_left_open() -> None:
    text = TOKENIZER.render(
        [USER, {"role": "assistant", "content": "Well, "}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert text.endswith("assistant\nWell, ")


@pytest.mark.parametrize(
    "message",
    [
        {"content": "no role"},
        {"role": "user", "content": 3},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "assistant", "tool_calls": [1]},
    ],
)
def test_an_unrenderable_chat_is_refused(message: dict[str, object]) -> None:
    with pytest.raises(TemplateError):
        TOKENIZER.render([message])


@given(st.text(max_size=40), st.integers(1, 40))
def test_generated_text_keeps_its_token_ids_in_the_next_turn(user_text: str, count: int) -> None:
    messages = [{"role": "user", "content": user_text}]
    prompt = TOKENIZER.encode(TOKENIZER.render(messages), add_special_tokens=False)
    continuation = SOURCE.continuation(prompt)
    output = [continuation.token(index, ignore_eos=True) for index in range(count)]
    messages += [{"role": "assistant", "content": TOKENIZER.decode(output)}, USER]
    again = TOKENIZER.encode(TOKENIZER.render(messages), add_special_tokens=False)
    assert again[: len(prompt) + count] == prompt + output


def test_the_same_prompt_gives_the_same_text_and_ends_by_itself() -> None:
    first, second = SOURCE.continuation([5, 6, 7]), SOURCE.continuation([5, 6, 7])
    tokens = [first.token(index, ignore_eos=False) for index in range(65)]
    assert tokens == [second.token(index, ignore_eos=False) for index in range(65)]
    assert tokens[-1] == TOKENIZER.eos_id
    other = SOURCE.continuation([5, 6, 8])
    assert tokens[:8] != [other.token(index, ignore_eos=False) for index in range(8)]


def say(role: str, content: str, **fields: object) -> dict[str, object]:
    return {"role": role, "content": content, **fields}


@pytest.mark.parametrize(
    ("messages", "rendered_as"),
    [
        ([say("developer", "a"), USER], [say("system", "a"), USER]),
        ([say("developer", "a", tools=[]), USER], [say("system", "a"), USER]),
        ([say("system", "a"), say("developer", "b"), USER], [say("system", "a\n\nb"), USER]),
        ([USER, say("developer", "late")], [say("system", "late"), USER]),
        ([USER, say("system", "kept where it is")], [USER, say("system", "kept where it is")]),
    ],
)
def test_developers_become_one_system_message(messages: list[object], rendered_as: list[object]) -> None:
    assert TOKENIZER.render(messages) == TOKENIZER.render(rendered_as)  # type: ignore[arg-type]
