"""Malformed bodies get a named error with the field; everything an engine might accept passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.router.openai.apis import CHAT
from kvatlas.router.openai.body import Peek, peek
from kvatlas.router.openai.errors import ApiError, model_not_found
from kvatlas.router.prompts.bodies import peek_chat
from kvatlas.router.prompts.reader import ModelPrompts, Prompt, PromptReader
from kvatlas.router.prompts.request import VALUES_MAX, ChatBody, ChatFields, decode_chat
from tests.support.examples import examples
from tests.support.prompts.readers import chat, local_reader, model_dir, read, reader, say

COMPLETION = "/v1/completions"


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> PromptReader:
    return local_reader(model_dir(tmp_path_factory.mktemp("m"), "chatml"))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model": "m", "stream": true, "messages": [{"role": "user"}]}', Peek("m", True)),
        (b'{"messages": []}', Peek(None, False)),
        (b'{"model": 5, "stream": "yes"}', Peek(None, True)),
        (b'{"model": 5, "stream": "ja"}', Peek(None, False)),
        (b'{"model": "m", "stream": null, "model": "n"}', Peek("n", False)),
        (b'{"model": "m", "temperature": NaN}', Peek("m", False)),
        ('{"model": "m", "stream": true}'.encode("utf-16"), Peek("m", True)),
        (b' \n{"stream": true}\n ', Peek(None, True)),
    ],
)
def test_peek_is_as_lenient_as_the_engine(body: bytes, expected: Peek) -> None:
    assert peek(body) == expected


_FIELDS = st.fixed_dictionaries(
    {"messages": st.just([say("user", "hello")])},
    optional={
        "model": st.sampled_from(["m", None, 5, "\ud800", ["m"]]),
        "stream": st.sampled_from([True, False, None, 1, "true"]),
        "priority": st.sampled_from([3, -1, 10**17, 10**18, 10**30, 1.0, "2", None]),
        "previous_response_id": st.just("r"),
        "kv_transfer_params": st.sampled_from([None, {}, {"x": 1}]),
        "vllm_xargs": st.sampled_from([None, {"a": "b"}]),
        "sampling_params": st.sampled_from([None, {}]),
        "max_tokens": st.sampled_from([5, None, "x"]),
        "echo": st.sampled_from([True, None]),
        "tools": st.sampled_from([None, [], "x"]),
        "temperature": st.sampled_from([0.5, float("nan"), {}]),
    },
)


@settings(max_examples=examples(500))
@given(fields=_FIELDS)
def test_a_chat_that_is_decoded_once_is_what_two_looks_see(fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()
    try:
        found = peek_chat(CHAT, body)
    except ApiError:
        with pytest.raises(ApiError):
            peek(body)
        return
    if found is None:  # to be looked at twice
        return
    seen = peek(body)
    assert (found.model, found.stream, found.guarded) == (seen.model, seen.stream, seen.guarded)
    assert found.priority == seen.priority
    chat = decode_chat(body)
    assert isinstance(found.prompt, ChatBody)
    for name in ChatBody.__struct_fields__:
        assert getattr(found.prompt, name) == getattr(chat, name)
    assert found.prompt.is_bare() == chat.is_bare() == ("tools" not in fields)


@pytest.mark.parametrize("name", ChatFields.__struct_fields__)
def test_a_chat_to_which_anything_is_given_is_not_bare(name: str) -> None:
    """Also what Python takes for equal to the default."""
    plain = {"messages": []}
    assert decode_chat(json.dumps(plain).encode()).is_bare()
    reaches_alone = ChatFields.__struct_fields__.index(name) < ChatFields.__struct_fields__.index(
        "max_tokens"
    )
    for value in (True, False, 1, 1.0, 0, 0.0, "", [], {}):
        default = value is getattr(ChatBody(messages=[]), name)
        given = decode_chat(json.dumps({**plain, name: value}).encode())
        assert given.is_bare() == (default or not reaches_alone)


def test_only_a_chat_with_nothing_unusual_is_decoded_once() -> None:
    plain = json.dumps({"model": "m", "messages": [], "priority": 2}).encode()
    found = peek_chat(CHAT, plain)
    assert (found.model, found.priority) == ("m", 2)
    assert peek_chat(COMPLETION, plain) is None
    assert peek_chat(CHAT, json.dumps({"messages": [], "kv_transfer_params": {}}).encode()) is None
    assert peek_chat(CHAT, json.dumps({"messages": ["x" * 2 * VALUES_MAX]}).encode()) is None


BROKEN = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"5",
    b'"x"',
    b"{'a': 1}",
    b'{"a": 1}}',
    b"\xff\xfe\xfd",
    b"[" * 99999,
]


@pytest.mark.parametrize("body", BROKEN, ids=range(len(BROKEN)))
def test_a_body_that_is_no_json_object_is_refused(body: bytes, local: PromptReader) -> None:
    with pytest.raises(ApiError) as peeked:
        peek(body)
    assert (peeked.value.status, peeked.value.code) == (400, "invalid_json")
    for path in ("/v1/chat/completions", COMPLETION):
        with pytest.raises(ApiError) as caught:
            read(local, body, path)
        assert caught.value.status == 400
        assert caught.value.code in {"invalid_json", "invalid_type"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "m"}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": {"role": "user"}}, "messages"),
        ({"messages": None}, "messages"),
        (chat("hello"), "messages[0]"),
        (chat(say("user", "x"), 5), "messages[1]"),
        (chat({"content": "x"}), "messages[0].role"),
        (chat(say("user", "x"), {"role": 7, "content": "x"}), "messages[1].role"),
        (chat(say("user", 5)), "messages[0].content"),
        (chat(say("user", True)), "messages[0].content"),
        (chat(say("user", {"text": "x"})), "messages[0].content"),
        (chat(say("assistant", "x", tool_calls="f")), "messages[0].tool_calls"),
    ],
)
def test_wrong_types_in_messages_are_named(body: Any, param: str, local: PromptReader) -> None:
    before = local.stats.refused
    for side in (local, reader({"m": ModelPrompts()})):  # with a tokenizer and without
        with pytest.raises(ApiError) as caught:
            read(side, body)
        error = json.loads(caught.value.body())["error"]
        assert (caught.value.status, error["code"], error["param"]) == (400, "invalid_type", param)
        assert param in error["message"]
    assert local.stats.refused == before + 1


@pytest.mark.parametrize(
    "prompt", [5, True, 1.5, {"a": 1}, [1, "a"], [1.5], [[1, "a"]], ["a", [1]], [None], [True]]
)
def test_wrong_prompt_types_are_named(prompt: Any, local: PromptReader) -> None:
    for side in (local, reader({"m": ModelPrompts()})):
        with pytest.raises(ApiError) as caught:
            read(side, {"prompt": prompt}, COMPLETION)
        assert (caught.value.code, caught.value.param) == ("invalid_type", "prompt")


def test_bodies_for_pythons_parser_only_still_give_exact_tokens(local: PromptReader) -> None:
    plain = read(local, chat(say("user", "Hello")))
    odd = read(
        local, b'{"model": "m", "temperature": NaN, "messages": [{"role": "user", "content": "Hello"}]}'
    )
    assert isinstance(plain, Prompt)
    assert isinstance(odd, Prompt)
    assert plain.token_ids == odd.token_ids


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "role",
                    "content",
                    "type",
                    "text",
                    "tool_calls",
                    "function",
                    "name",
                    "arguments",
                    "id",
                    "user",
                    "uuid",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    [
        "messages",
        "prompt",
        "tools",
        "tool_choice",
        "documents",
        "chat_template",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        "reasoning_effort",
        "add_special_tokens",
        "truncate_prompt_tokens",
        "truncation_side",
        "max_tokens",
        "cache_salt",
        "kv_transfer_params",
        "prompt_logprobs",
        "echo",
        "suffix",
        "prompt_embeds",
        "max_completion_tokens",
    ]
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"])},
        optional={"content": JSON, "tool_calls": JSON, "reasoning": JSON, "name": JSON},
    ),
    max_size=3,
)


@settings(max_examples=examples(300))
@given(
    st.dictionaries(FIELDS, JSON, max_size=4),
    st.none() | MESSAGES,
    st.sampled_from(["/v1/chat/completions", COMPLETION]),
)
def test_no_body_ever_raises_anything_else(
    local: PromptReader, fields: dict[str, Any], messages: Any, path: str
) -> None:
    body = {"model": "m", **fields, **({"messages": messages} if messages is not None else {})}
    assert outcome(lambda: read(local, body, path)) in {
        "Prompt",
        "TextAffinity",
        "invalid_json",
        "invalid_type",
    }


@settings(max_examples=examples(200))
@given(st.binary(max_size=60))
def test_no_bytes_ever_raise_anything_else(local: PromptReader, body: bytes) -> None:
    for path in ("/v1/chat/completions", COMPLETION, "/v1/other"):
        known = {"TextAffinity", "Prompt", "invalid_json", "invalid_type"}
        assert outcome(lambda path=path: read(local, body, path)) in known  # type: ignore[misc]
    assert outcome(lambda: peek(body)) in {"Peek", "invalid_json"}


def outcome(step: Callable[[], object]) -> str:
    """The type of the result, or the code of the 400."""
    try:
        return type(step()).__name__
    except ApiError as error:
        return error.code if error.status == 400 else str(error.status)


def test_deeply_nested_messages_do_no_harm(local: PromptReader) -> None:
    deep = b'{"messages": [{"role": "user", "content": ' + b"[" * 50000 + b"]" * 50000 + b"}]}"
    with pytest.raises(ApiError):
        read(local, deep)


@pytest.mark.parametrize("kind", [[], ["text"], {}, {"a": 1}, 5, True, None])
def test_content_parts_of_any_type_are_left_to_the_engine(local: PromptReader, kind: Any) -> None:
    body = chat(say("user", [{"type": kind, "text": "x"}]))
    for side in (local, reader({"m": ModelPrompts()})):
        assert outcome(lambda side=side: read(side, body)) == "TextAffinity"  # type: ignore[misc]


@pytest.mark.parametrize(
    "field", [b'"tools": ["\xff"]', b'"tools": {"\xff\xfe": 1}', b'"documents": ["\xff"]', b'"\xff": 1']
)
def test_invalid_utf8_anywhere_is_no_fault_of_ours(local: PromptReader, field: bytes) -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], ' + field + b"}"
    for side in (local, reader({"m": ModelPrompts()})):
        known = {"TextAffinity", "Prompt", "invalid_json"}
        assert outcome(lambda side=side: read(side, body)) in known  # type: ignore[misc]


def test_half_a_surrogate_pair_in_the_model_is_no_fault_of_ours(local: PromptReader) -> None:
    body = b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}'
    model = peek(body).model
    assert outcome(lambda: read(local, body, model=model)) in {"TextAffinity", "invalid_json"}
    assert b"model_not_found" in model_not_found(model or "").body()


def test_a_long_model_name_is_not_echoed() -> None:
    assert len(model_not_found("m" * 7_000_000).body()) < 1000
    assert "'m'" in model_not_found("m").message


@settings(max_examples=examples(150))
@given(
    st.lists(
        st.fixed_dictionaries(
            {"type": JSON | st.sampled_from(["text", "refusal", "thinking", "tool_reference", "image_url"])},
            optional={"text": JSON, "name": JSON, "refusal": JSON, "uuid": JSON, "x": JSON},
        ),
        max_size=3,
    ),
    st.sampled_from(["user", "system", "assistant", "tool", "developer"]),
    JSON,
    st.lists(st.fixed_dictionaries({"type": JSON, "function": JSON}) | JSON, max_size=2) | JSON,
    st.binary(max_size=4),
)
def test_no_parts_tools_or_bytes_raise_anything_else(
    local: PromptReader, parts: Any, role: str, kwargs: Any, tools: Any, junk: bytes
) -> None:
    body = chat(
        say(role, parts), tools=tools, chat_template_kwargs=kwargs, continue_final_message=kwargs == 0
    )
    data = json.dumps(body).encode()
    at = len(data) * len(junk) // 5
    for one in (data, data[:at] + junk + data[at:]):
        for side in (local, reader({"m": ModelPrompts()})):
            assert outcome(lambda side=side, one=one: read(side, one)) in {  # type: ignore[misc]
                "Prompt",
                "TextAffinity",
                "invalid_json",
                "invalid_type",
            }
