"""Bodies of both engines, exact to the byte."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvatlas.router.openai.apis import BATCH, CHAT, COHERE, COMPLETION, GENERATE, MESSAGES, RESPONSES
from kvatlas.router.openai.members import at_once
from kvatlas.router.pd import bodies
from kvatlas.router.pd.bodies import SplitBody, split_body

ASKS = b'{"do_remote_decode":true}'
PARAMS = b'{"do_remote_prefill":true,"remote_block_ids":[[1,2]]}'


def split(path: str, body: bytes) -> SplitBody:
    return at_once(split_body(path, body))


FRONT = b'"kv_transfer_params":' + ASKS + b","
TEXT = b'[{"role":"user","content":"Gr\xc3\xbc\xc3\x9fe \\ud83d\\ude00 \\"stream\\": true"}]'
CASES = {
    "chat": (
        CHAT,
        b'{"model": "m", "stream": true, "stream_options": {"x": 1}, "messages": %b, "max_tokens": 50}'
        % TEXT,
        b'{"model": "m", "stream": false, "stream_options": null, "messages": %b, "max_tokens": 1}' % TEXT,
    ),
    "chat of the newer field": (
        CHAT,
        b'{"max_completion_tokens":9,"messages":[],"min_tokens" : 4 }',
        b'{"max_tokens":1,"max_completion_tokens":1,"messages":[],"min_tokens" : 0 }',
    ),
    "completion without a bound": (
        COMPLETION,
        b' {"prompt":"a","seed":12345678901234567890123456789,"n":1}',
        b' {"max_tokens":1,"prompt":"a","seed":12345678901234567890123456789,"n":1}',
    ),
    "responses": (
        RESPONSES,
        b'{"input":"hi","max_output_tokens":64,"store":true,"stream":true}',
        b'{"input":"hi","max_output_tokens":1,"store":false,"stream":false}',
    ),
    "messages": (
        MESSAGES,
        b'{"max_tokens":64,"messages":[{"role":"user","content":"hi"}],"stream":true}',
        b'{"max_tokens":1,"messages":[{"role":"user","content":"hi"}],"stream":false}',
    ),
    "generate": (
        GENERATE,
        b'{"token_ids":[1,2],"sampling_params":{"max_tokens":7,"min_tokens":2,"seed":0},"stream":true}',
        b'{"token_ids":[1,2],"sampling_params":{"max_tokens":1,"min_tokens":0,"seed":0},"stream":false}',
    ),
    "generate without a bound": (
        GENERATE,
        b'{"token_ids":[1,2],"sampling_params":{ }}',
        b'{"token_ids":[1,2],"sampling_params":{"max_tokens":1 }}',
    ),
    "keys given twice and with escapes": (
        CHAT,
        b'{"stream":true,"messages":[],"str\\u0065am":true,"max_tokens":5,"max_tokens":6}',
        b'{"stream":false,"messages":[],"str\\u0065am":false,"max_tokens":1,"max_tokens":1}',
    ),
    "a field of the same name elsewhere": (
        CHAT,
        b'{"messages":[{"role":"user","content":"hi","stream":true}],"str\\u0065am":true,"max_tokens":5}',
        b'{"messages":[{"role":"user","content":"hi","stream":true}],"str\\u0065am":false,"max_tokens":1}',
    ),
    "fields within another of the same value": (
        CHAT,
        b'{"metadata":{"stream":true,"max_tokens":5},"messages":[],"max_tokens":5,"stream":true}',
        b'{"metadata":{"stream":true,"max_tokens":5},"messages":[],"max_tokens":1,"stream":false}',
    ),
    "fields behind those of another": (
        CHAT,
        b'{"stream_options":{"max_tokens":5},"messages":[],"max_tokens":5,"chat_template_kwargs":{"stream":0}}',
        b'{"stream_options":null,"messages":[],"max_tokens":1,"chat_template_kwargs":{"stream":0}}',
    ),
}
"""API, body, and the body of the prefill engine without the parameters in front."""


@pytest.mark.parametrize("case", CASES)
def test_the_prefill_engine_gets_one_token_and_no_stream(case: str) -> None:
    path, body, wanted = CASES[case]
    found = split(path, body)
    start = wanted.index(b"{") + 1
    assert found.whole == ""
    assert at_once(found.prefill(ASKS)) == wanted[:start] + FRONT + wanted[start:]
    json.loads(at_once(found.prefill(ASKS)))


@pytest.mark.parametrize("case", CASES)
def test_the_decode_engine_gets_the_clients_own_body_and_the_parameters(case: str) -> None:
    path, body, _ = CASES[case]
    start = body.index(b"{") + 1
    found = at_once(split(path, body).decode(PARAMS))
    assert found == body[:start] + b'"kv_transfer_params":' + PARAMS + b"," + body[start:]
    assert json.loads(found) == {"kv_transfer_params": json.loads(PARAMS), **json.loads(body)}


@pytest.mark.parametrize(
    ("path", "fields", "why"),
    [
        (CHAT, {"n": 2}, "n"),
        (COMPLETION, {"best_of": 3}, "best_of"),
        (COMPLETION, {"use_beam_search": True}, "use_beam_search"),
        (CHAT, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (COMPLETION, {"prompt": "a", "echo": True}, "echo"),
        (RESPONSES, {"background": True}, "background"),
        (CHAT, {"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        (GENERATE, {"sampling_params": {"n": 2}}, "n"),
        (GENERATE, {"token_ids": [1]}, "body"),
        (COMPLETION, {"prompt": ["a", "b"]}, "prompts"),
        (COMPLETION, {"prompt": ["a"]}, "prompts"),
        (COMPLETION, {"prompt": [[1, 2], [3]]}, "prompts"),
        (COMPLETION, {"prompt": [[1, 2]]}, "prompts"),
        (COMPLETION, {"prompt": [1, "a"]}, "prompts"),
        (COMPLETION, {"prompt": None}, "prompts"),
        (COMPLETION, {}, "prompts"),
        (COMPLETION, {"prompt": "a", "prompt_embeds": ["AAAA"]}, "prompt_embeds"),
        (RESPONSES, {"input": "a", "tools": [{"type": "code_interpreter"}]}, "tools"),
        (RESPONSES, {"input": "a", "tools": [{"type": "function"}, {"type": "mcp"}]}, "tools"),
        (RESPONSES, {"input": "a", "tools": [{"type": "web_search_preview"}]}, "tools"),
        (RESPONSES, {"input": "a", "tools": [{"name": "x"}]}, "tools"),
        (RESPONSES, {"input": "a", "tools": {"type": "function"}}, "tools"),
        (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        (BATCH, {}, "api"),
        (COHERE, {}, "api"),
    ],
)
@pytest.mark.parametrize("size", [0, 1 << 20], ids=["small", "large"])
def test_requests_that_one_engine_must_do_stay_whole(
    path: str, fields: dict[str, Any], why: str, size: int
) -> None:
    body = json.dumps({"model": "m" * size, **fields}).encode()
    assert split(path, body).whole == why


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETION, {"prompt": 'a ["b"]'}),
        (COMPLETION, {"prompt": [1, 2, 3]}),
        (COMPLETION, {"prompt": [1]}),
        (RESPONSES, {"input": "a"}),
        (RESPONSES, {"input": "a", "tools": None}),
        (RESPONSES, {"input": "a", "tools": []}),
        (
            RESPONSES,
            {"input": "a", "tools": [{"type": "function", "name": "f", "parameters": {"type": "x"}}]},
        ),
        (RESPONSES, {"input": "a", "tools": [{"type": "custom"}, {"type": "namespace", "tools": []}]}),
        (CHAT, {"messages": [], "prompt": ["a", "b"], "tools": [{"type": "code_interpreter"}]}),
    ],
)
@pytest.mark.parametrize("size", [0, 1 << 20], ids=["small", "large"])
def test_one_prompt_and_tools_of_the_client_may_be_split(
    path: str, fields: dict[str, Any], size: int
) -> None:
    assert split(path, json.dumps({"model": "m" * size, **fields}).encode()).whole == ""


@pytest.mark.parametrize(
    "fields", [{"n": 1}, {"n": None}, {"best_of": 1}, {"use_beam_search": False}, {"prompt_logprobs": None}]
)
def test_the_same_fields_with_harmless_values_keep_nothing_back(fields: dict[str, Any]) -> None:
    assert split(CHAT, json.dumps({"messages": [], **fields}).encode()).whole == ""


@pytest.mark.parametrize("params", [None, [1], "x", 5])
def test_a_generate_without_sampling_params_stays_whole(params: Any) -> None:
    body = {"token_ids": [1], **({} if params is None else {"sampling_params": params})}
    assert split(GENERATE, json.dumps(body).encode()).whole == "body"


@pytest.mark.parametrize("body", [b"[]", b'{"a":', b"nonsense", '{"messages":[]}'.encode("utf-16")])
def test_bodies_that_are_no_utf_8_object_stay_whole(body: bytes) -> None:
    assert split(CHAT, body).whole == "body"


_KEYS = st.sampled_from(["stream", "max_tokens", "min_tokens", "stream_options", "messages", "x", "n"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.tuples(_KEYS, _VALUES), min_size=1, max_size=6), st.booleans(), st.booleans())
def test_any_body_asks_for_one_token_and_keeps_the_rest(
    members: list[tuple[str, Any]], large: bool, escaped: bool
) -> None:
    """Also with keys given twice, of which Python takes the last one and others the first."""
    members = [(key, 1 if key == "n" else value) for key, value in members]
    texts = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=escaped)}" for key, value in members]
    texts += ['"pad": "%s"' % ("p" * (1 << 20))] if large else []
    body = ("{" + ", ".join(texts) + "}").encode()
    found = split(CHAT, body)
    assert found.whole == ""
    pairs: list[tuple[str, Any]] = json.loads(at_once(found.prefill(ASKS)), object_pairs_hook=list)
    fixed = {"stream": False, "max_tokens": 1, "min_tokens": 0, "stream_options": None}
    sent = json.loads(body, object_pairs_hook=list)
    rest = [(key, fixed.get(key, value)) for key, value in sent]
    given_bound = any(key == "max_tokens" for key, _ in members)
    front: list[tuple[str, Any]] = [("kv_transfer_params", [("do_remote_decode", True)])]
    assert pairs == front + ([] if given_bound else [("max_tokens", 1)]) + rest


_COMMAS = st.sampled_from([",", ", ", " , ", ",\n  "])


@given(
    st.lists(st.tuples(_KEYS, _VALUES), max_size=4),
    st.lists(_VALUES, min_size=1, max_size=3),
    st.lists(st.tuples(_KEYS, _VALUES), max_size=4),
    _COMMAS,
)
@example(before=[], messages=[{"stream_options": None}], behind=[("stream_options", None)], comma=",")
def test_a_chat_whose_messages_are_known_is_split_as_any_other(
    before: list[tuple[str, Any]], messages: list[Any], behind: list[tuple[str, Any]], comma: str
) -> None:
    """Also where other lists are called messages, or where others follow."""
    listed = "[" + comma.join([json.dumps(message) for message in messages]) + "]"
    around = [[f"{json.dumps(key)}:{json.dumps(value)}" for key, value in part] for part in (before, behind)]
    body = ("{" + comma.join([*around[0], f'"messages":{listed}', *around[1]]) + "}").encode()
    known = msgspec.json.decode(listed, type=list[msgspec.Raw])
    found, expected = at_once(split_body(CHAT, body, known)), split(CHAT, body)
    assert (found.text, found.whole) == (expected.text, expected.whole)
    if not found.whole:  # of an edit that changes nothing the place may differ
        assert at_once(found.prefill(ASKS)) == at_once(expected.prefill(ASKS))
        assert at_once(found.decode(PARAMS)) == at_once(expected.decode(PARAMS))


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[%b],"stream":true,"max_tokens":50}',
        b'{"model": "m", "stream": true, "messages": [%b], "max_tokens": 50}',
        b'{"model": "m", "max_tokens": 50, "messages": [%b]}',
        b'{"stream":true,"messages":[%b]}',
        b'{"messages":[%b]}',
    ],
)
@pytest.mark.parametrize("comma", [b",", b", "])
@pytest.mark.parametrize("count", [1, 3])
def test_known_messages_are_not_read_again(body: bytes, comma: bytes, count: int) -> None:
    """The text between them and around them is all that is looked at, and the edits are the same."""
    known = [
        msgspec.Raw(b'{"role":"user","content":"stream \\"max_tokens\\": %d"}' % n) for n in range(count)
    ]
    body %= comma.join(known)
    expected = at_once(bodies._scanned(body, b"max_tokens", CHAT))
    assert bodies._around(body, known, b"max_tokens") == expected
    assert bodies._quick(body, b"max_tokens", CHAT) == expected


def test_known_messages_that_do_not_stand_there_are_read() -> None:
    known = [msgspec.Raw(b'{"role":"user"}')]
    for body in (b'{"messages":{"a":1}}', b'{"messages":[{"role":"tool"}]}', b'{"prompt":[]}', b'"messages"'):
        assert bodies._around(body, known, b"max_tokens") is None


def test_the_remembered_frame_of_a_chat_holds_for_the_next_one() -> None:
    for words in ("a", "b" * 3000, "c"):
        known = [msgspec.Raw(b'{"role":"user","content":"%b"}' % words.encode()), msgspec.Raw(b"{}")]
        body = b'{"messages":[%b],"max_tokens":50,"stream":true}' % b",".join(known)
        found = at_once(split_body(CHAT, body, known))
        assert found == split(CHAT, body)
        assert at_once(found.decode(PARAMS)).endswith(body[1:])
