"""Affinity keys: the same text the same keys, a shared beginning shared keys, anything else none."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.prompts.prompt import CHUNK_BYTES, KEYS_MAX, Prompt, affinity_keys
from router.prompts.reader import ModelPrompts, TextAffinity
from tests.support.prompts.readers import chat, read, reader, say

LONG = "All engines are equal, but some hold more blocks than others. " * 30


def keys(body: Any, path: str = "/v1/chat/completions", model: str = "m") -> tuple[int, ...]:
    found = read(reader({"m": ModelPrompts(), "n": ModelPrompts()}), body, path, model=model)
    assert isinstance(found, TextAffinity)
    return found.keys


def test_a_next_turn_shares_the_keys_of_its_past() -> None:
    first = keys(chat(say("system", LONG), say("user", "Hello")))
    second = keys(
        chat(say("system", LONG), say("user", "Hello"), say("assistant", LONG), say("user", "More"))
    )
    assert len(first) >= 3
    assert first[:-1] == second[: len(first) - 1]
    assert len(second) > len(first)


def test_form_does_not_matter_but_content_does() -> None:
    plain = keys(chat(say("system", LONG), say("user", "Hello")))
    parts = keys(chat({"content": [{"text": LONG, "type": "text"}], "role": "system"}, say("user", "Hello")))
    assert plain == parts
    assert not set(plain) & set(keys(chat(say("user", LONG), say("user", "Hello"))))
    assert not set(plain) & set(keys(chat(say("system", LONG), say("user", "Hello")), model="n"))
    salted = keys(chat(say("system", LONG), say("user", "Hello"), cache_salt="s"))
    assert not set(plain) & set(salted)


def test_completions_by_text_and_by_ids() -> None:
    path = "/v1/completions"
    assert keys({"prompt": LONG}, path) == keys({"prompt": [LONG, "other"]}, path)
    by_ids = read(reader({"m": ModelPrompts()}), {"prompt": list(range(2000))}, path, model="m")
    assert isinstance(by_ids, Prompt)  # needs no tokenizer


@given(st.lists(st.binary(max_size=3 * CHUNK_BYTES), max_size=6), st.integers(0, 5))
def test_keys_do_not_depend_on_how_the_text_arrives(pieces: list[bytes], at: int) -> None:
    whole = affinity_keys([b"".join(pieces)], b"s")
    assert affinity_keys(pieces, b"s") == whole
    assert len(whole) == max(1, -(-sum(map(len, pieces)) // CHUNK_BYTES))
    assert whole != affinity_keys(pieces, b"t")


def test_keys_are_bounded() -> None:
    assert len(affinity_keys([bytes(CHUNK_BYTES * KEYS_MAX * 2)], b"")) == KEYS_MAX
