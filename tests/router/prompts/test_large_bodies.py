"""Bodies too large to be decoded: model and stream are still found, the loop turns, affinity holds."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.router.openai import body as body_module
from kvatlas.router.openai import body as outline
from kvatlas.router.openai.apis import CHAT, COMPLETION, GENERATE, MESSAGES, RESPONSES
from kvatlas.router.openai.body import OutlineError, Peek, peek, peek_any_size, top_level
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.prompts import local_model as local_module
from kvatlas.router.prompts import reader as reader_module
from kvatlas.router.prompts.reader import ModelPrompts, TextAffinity
from kvatlas.router.prompts.settings import PromptSettings
from tests.support.examples import examples
from tests.support.prompts.readers import (
    chat,
    local_reader,
    model_dir,
    plain_tokenizer,
    read,
    read_affinity,
    read_exact,
    reader,
    say,
)
from tests.support.waiting import HANG_S


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_dir(tmp_path_factory.mktemp("m"), "thinking_tools", tokenizer=plain_tokenizer())


NAMES = ("model", "stream")
TEXT = st.text(st.sampled_from('model "\\{}[]:,\n\u00e9\U0001f600'), max_size=8) | st.sampled_from(NAMES)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=examples(300))
@given(st.dictionaries(TEXT, JSON, max_size=6), st.integers(2, 40), st.booleans())
def test_the_outline_finds_what_the_parser_finds(
    fields: dict[str, Any], window: int, ascii_only: bool
) -> None:
    body = json.dumps(fields, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outline, "_WINDOW_BYTES", window)
        found = top_level(body, NAMES)
    wanted = {name: fields[name] for name in NAMES if name in fields}
    plain = {name: value for name, value in wanted.items() if not isinstance(value, list | dict)}
    assert found.keys() == wanted.keys()
    assert {name: json.loads(found[name]) for name in plain} == plain
    assert all(found[name] in (b"[", b"{") for name in wanted.keys() - plain.keys())


SEEN = ("model", "stream", "previous_response_id", "priority", "request_id")
SPACES = st.sampled_from(("", " ", "\n\t", " " * 70))


@st.composite
def members(draw: st.DrawFn) -> str:
    """A member of a body: its key as it is or with letters as escapes, and any value."""
    key = draw(st.sampled_from((*SEEN, "x", "mode", "models", "m\u00f6del")))
    letters = [
        f"\\u{ord(letter):04x}" if ord(letter) > 127 or draw(st.booleans()) else letter for letter in key
    ]
    value = draw(
        st.sampled_from(
            ("null", "true", "-7", "8", "1.5", '"-3"', '"a"', '"\\u0061\\""', "[]", '{"model":"n"}')
        )
        | st.sampled_from(SEEN).map(json.dumps)
    )
    name = "".join(letters) if draw(st.booleans()) else key
    return f'{draw(SPACES)}"{name}"{draw(SPACES)}:{draw(SPACES)}{value}{draw(SPACES)}'


@pytest.mark.long
@settings(max_examples=examples(400))
@given(st.lists(members(), max_size=8), st.integers(2, 60))
def test_a_large_body_is_looked_at_as_a_small_one_whatever_its_keys(found: list[str], window: int) -> None:
    body = ("{" + ",".join(found) + "}").encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outline, "_WINDOW_BYTES", window)
        patch.setattr(body_module, "_INLINE_BYTES_MAX", 0)
        large = asyncio.run(peek_any_size(body))
    small = peek(body)
    assert [getattr(large, name) for name in small.__struct_fields__] == [
        getattr(small, name) for name in small.__struct_fields__
    ]


HIDDEN = [
    b'"mod\\u0065l":"z"',
    b'"\\u006D\\u006f\\u0064\\u0065\\u006c" : "z"',
    b'"model":"z",' + b",".join(b'"a%d":"model"' % n for n in range(40)),
    b'"model":"z",' + b",".join(b'"a%d":"model" ' % n for n in range(40)),
    b'"model":"z"' + b" " * 200 + b',"a":"model"' + b" " * 200,
    b'"model"' + b" " * 200 + b':"z"',
    b'"model":null',
    b'"model":{"a":1}',
    b'"model":7',
]


@pytest.mark.parametrize("hidden", HIDDEN)
def test_no_spelling_hides_a_model_in_a_body_above_4_mib(hidden: bytes) -> None:
    body = b'{"model":"m","messages":["' + b"x" * (5 << 20) + b'"],' + hidden + b"}"
    wanted = json.loads(b"{" + hidden + b"}")["model"]
    look = asyncio.run(peek_any_size(body))
    assert look.model == (wanted if isinstance(wanted, str) else None)


def test_very_many_keys_with_escapes_are_refused() -> None:
    body = b'{"model":"m","messages":["' + b"x" * (5 << 20) + b'"]' + b',"\\u0061":1' * 20_000 + b"}"
    with pytest.raises(ApiError) as caught:
        asyncio.run(peek_any_size(body))
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert "escapes" in caught.value.message


def test_of_equal_keys_the_last_one_counts_and_nested_ones_do_not() -> None:
    body = b'{"model": "a", "x": {"model": "b"}, "y": "model", "model" :\n"c", "z": ["model", "d"]}'
    assert top_level(body, NAMES) == {"model": b'"c"'}


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"a": "}', b'{"a": 1}}', b'{"a": [1}', b'{} "model"', b"{}x"]
)
def test_an_incomplete_object_has_no_outline(body: bytes) -> None:
    with pytest.raises(OutlineError):
        top_level(body, NAMES)


def test_large_and_small_bodies_are_looked_at_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = [
        b'{"messages": ["x"], "model": "m\\u00e9", "stream": true}',
        b'{"model": 5, "stream": "yes"}',
        b'{"model": null}',
        b" {} ",
    ]
    small = [peek(body) for body in bodies]
    monkeypatch.setattr(body_module, "_INLINE_BYTES_MAX", 0)
    large = [asyncio.run(peek_any_size(body)) for body in bodies]
    assert [(look.model, look.stream) for look in large] == [(look.model, look.stream) for look in small]
    assert not any(look.guarded for look in [*large, *small])
    assert small[0] == Peek("m\u00e9", True)
    with pytest.raises(ApiError) as caught:
        asyncio.run(peek_any_size(b"[1, 2]"))
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_a_name_that_no_model_has_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "_INLINE_BYTES_MAX", 0)
    found = asyncio.run(peek_any_size(b'{"model": "' + "\u00e9".encode() * 100_000 + b'"}'))
    assert found.model is not None
    assert set(found.model) == {"\u00e9"}
    assert 100 < len(found.model) < 5000


@pytest.mark.real  # CPU time
@pytest.mark.parametrize("unit", [b"[],", b'"",', b'{"":0},', b"1,", b"[[[]]],"])
async def test_the_loop_can_turn_at_every_window_of_a_large_odd_body(
    unit: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look waits at each window for a turn of the loop, which would never come were it made there."""
    body = b'{"x":[' + unit * ((6 << 20) // len(unit)) + b'0],"model":"m"}'
    windows = outline._windows
    sizes = []
    loop = asyncio.get_running_loop()

    def waiting(body: bytes) -> Iterator[tuple[int, bytes]]:
        for start, window in windows(body):
            turned = threading.Event()
            loop.call_soon_threadsafe(turned.set)
            assert turned.wait(HANG_S)
            sizes.append(len(window))
            yield start, window

    monkeypatch.setattr(outline, "_windows", waiting)
    assert (await peek_any_size(body)).model == "m"
    assert sum(sizes) == len(body)
    assert max(sizes) <= outline._WINDOW_BYTES


def test_a_model_of_a_strange_type_is_not_decoded() -> None:
    """Decoding it would build a million lists."""
    body = b'{"model":[' + b"[]," * 1000 + b'[]],"stream":[[]]}'
    seen: Any = body_module._PEEK.decode(body)
    assert [type(seen.model), type(seen.stream)] == [msgspec.Raw, msgspec.Raw]
    assert peek(body) == Peek(None, False)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/other"])
def test_nothing_above_the_limit_is_decoded(path: str) -> None:
    side = reader({"m": ModelPrompts()}, PromptSettings(prompt_bytes_max=1000))
    found = read(side, b'{"messages": [' + b"[" * 2000, path)  # no JSON: a decoder would refuse it
    assert isinstance(found, TextAffinity)
    assert found.reason == "too_large"
    assert (side.stats.not_local["too_large"], side.stats.affinity["too_large"]) == (1, 1)


LISTS = [[] for _ in range(60_000)]
COMPLEX: dict[str, tuple[str, dict[str, Any]]] = {
    "an unread field": (CHAT, chat(say("user", "x"), z=LISTS)),
    "template arguments": (CHAT, chat(say("user", "x"), chat_template_kwargs={"a": LISTS})),
    "a message": (CHAT, chat({**say("user", "x"), "z": LISTS})),
    "messages": (CHAT, chat(*[say("user", "x")] * 9000)),
    "tools": (CHAT, chat(say("user", "x"), tools=[{"a": LISTS[:12_000]}])),
    "messages of Anthropic's API": (MESSAGES, {"messages": [say("user", "x")] * 9000}),
    "input items": (RESPONSES, {"input": [say("user", "x")] * 9000}),
}


@pytest.mark.parametrize("shape", COMPLEX)
def test_bodies_that_are_slow_to_decode_are_placed_by_their_beginning(folder: Path, shape: str) -> None:
    path, body = COMPLEX[shape]
    side = local_reader(folder)
    assert read_affinity(side, body, path).reason == "too_complex"
    assert (side.stats.not_local["too_complex"], side.stats.affinity["too_complex"]) == (1, 1)


LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "turns": (MESSAGES, {"messages": [say(("user", "assistant")[n % 2], f"{n}") for n in range(601)]}),
    "items": (RESPONSES, {"input": [say("user", f"{n}") for n in range(600)]}),
    "blocks": (MESSAGES, {"messages": [say("user", [{"type": "text", "text": f"{n}"} for n in range(600)])]}),
    "tools": (
        CHAT,
        chat(
            say("user", "x"),
            tools=[{"type": "function", "function": {"name": f"{n}", "parameters": {}}} for n in range(300)],
        ),
    ),
    "prompts": (COMPLETION, {"prompt": [[n, 1] for n in range(2000)]}),
    "tokens": (GENERATE, {"token_ids": [1_000_000_000 + n for n in range(30_000)]}),
}


@pytest.mark.parametrize("shape", LONG)
def test_long_work_is_done_in_a_thread_with_the_same_result(
    folder: Path, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = LONG[shape]
    threaded, inline = local_reader(folder), local_reader(folder)
    found = read_exact(threaded, body, path)
    assert threaded.stats.worker_jobs >= 1
    monkeypatch.setattr(reader_module, "INLINE_VALUES_MAX", 1 << 30)
    monkeypatch.setattr(reader_module, "INLINE_BYTES_MAX", 1 << 30)
    monkeypatch.setattr(local_module, "INLINE_VALUES_MAX", 1 << 30)
    monkeypatch.setattr(local_module, "_INLINE_MESSAGES", 1 << 30)
    assert read_exact(inline, body, path).token_ids == found.token_ids


MANY_CALLS = [
    {"id": "1", "type": "function", "function": {"name": "f", "arguments": f'{{"a": [{"[]," * 600}[]]}}'}}
]


@pytest.mark.parametrize(
    ("past", "jobs"),
    [
        ([say("user", "[]{}" * 500)], 0),  # brackets of a text are no lists to a template
        ([say("user", "x"), say("assistant", "", tool_calls=MANY_CALLS)], 1),
        ([say("user", "x")] * 600, 1),
    ],
    ids=["brackets", "calls", "messages"],
)
def test_a_next_turn_is_rendered_in_a_thread_where_there_is_much_in_its_past(
    folder: Path, past: list[Any], jobs: int
) -> None:
    threaded, other = local_reader(folder), local_reader(folder)
    read_exact(threaded, chat(*past))
    before = threaded.stats.worker_jobs
    body = chat(*past, say("assistant", "Yes."), say("user", "Why?"))
    assert read_exact(threaded, body).token_ids == read_exact(other, body).token_ids
    assert threaded.stats.worker_jobs - before == jobs


@pytest.mark.parametrize(
    ("past", "new", "jobs"),
    [
        pytest.param("[{" * 900, "Why?", 0, id="what is known is not converted again"),
        pytest.param("Hello.", "[{" * 300, 1, id="much to convert"),
        pytest.param(["Hello."] * 600, "Why?", 1, id="many messages to go through"),
    ],
)
def test_a_next_turn_of_messages_is_converted_in_a_thread_where_there_is_much_new(
    folder: Path, past: str | list[str], new: str, jobs: int
) -> None:
    threaded, other = local_reader(folder), local_reader(folder)
    texts = [past] if isinstance(past, str) else past
    before = [say("user", text) for text in texts]
    read_exact(threaded, {"messages": before}, MESSAGES)
    already = threaded.stats.worker_jobs
    body = {"messages": [*before, say("assistant", "Yes."), say("user", new)]}
    assert read_exact(threaded, body, MESSAGES).token_ids == read_exact(other, body, MESSAGES).token_ids
    assert (threaded.stats.worker_jobs > already) == bool(jobs)


def test_a_next_turn_above_the_limit_goes_where_its_past_went() -> None:
    side = reader({"m": ModelPrompts()}, PromptSettings(prompt_bytes_max=1000))
    story = [say("user", "All engines are equal, but some hold more. " * 100)]

    def keys(messages: list[Any], **fields: Any) -> tuple[int, ...]:
        found = read_affinity(side, {**fields, **chat(*messages)})
        return found.keys

    first, second = (
        keys(story, seed=1),
        keys([*story, say("assistant", "Yes."), say("user", "Why?")], seed=77),
    )
    shared = len(first) - 1
    assert shared >= 5
    assert first[:shared] == second[:shared]
    assert not set(first) & set(keys([say("user", "x" * 3000)]))
