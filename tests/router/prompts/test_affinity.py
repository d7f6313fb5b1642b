"""Affinity keys, paths of LoRA adapters, and text in common with an earlier one."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvatlas.router.prompts.adapter_paths import AdapterPaths
from kvatlas.router.prompts.conversation import CutText
from kvatlas.router.prompts.prompt import CHUNK_BYTES, KEYS_MAX, Prompt, affinity_keys
from kvatlas.router.prompts.reader import ModelPrompts
from kvatlas.router.prompts.settings import ANY_MODEL
from tests.support.examples import examples
from tests.support.prompts.readers import chat, read, read_affinity, reader, say

LONG = "All engines are equal, but some hold more blocks than others. " * 30


def keys(body: Any, path: str = "/v1/chat/completions", model: str = "m") -> tuple[int, ...]:
    found = read_affinity(reader({"m": ModelPrompts(), "n": ModelPrompts()}), body, path, model=model)
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


CONFIGURED = {"m": {"sql": "/here"}, ANY_MODEL: {}}


def test_configured_models_are_not_replaced_and_stay_when_engines_leave() -> None:
    adapters = AdapterPaths(CONFIGURED)
    adapters.learn("m", {"sql": "/there", "law": "/law"})
    assert adapters.paths_of_model("m") == {"sql": "/here", "law": "/law"}
    adapters.keep("m", ["other"])
    assert adapters.paths_of_model("m") == {"sql": "/here"}
    assert CONFIGURED["m"] == {"sql": "/here"}


def test_models_that_are_not_named_share_theirs() -> None:
    adapters = AdapterPaths(CONFIGURED)
    adapters.learn("other", {"law": "/law"})
    assert adapters.paths_of_model("another") == adapters.paths_of_model(ANY_MODEL) == {"law": "/law"}
    assert "law" not in adapters.paths_of_model("m")


def test_a_shared_dict_shows_the_next_configuration() -> None:
    adapters = AdapterPaths(CONFIGURED)
    named, rest = adapters.paths_of_model("m"), adapters.paths_of_model("other")
    soon = adapters.named("new", {"sql": "/new"})  # read before it is configured
    adapters.learn("m", {"law": "/law"})
    adapters.configure({"new": {"sql": "/newer"}, ANY_MODEL: {"tax": "/tax"}})
    assert (named, rest, soon) == ({}, {"tax": "/tax"}, {"sql": "/newer"})
    assert adapters.paths_of_model("new") is soon
    assert adapters.paths_of_model("m") is rest


def test_unnamed_models_have_separate_memories() -> None:
    """Their tokenizers may differ: an adapter's prompts are made with its own model's."""
    adapters = AdapterPaths(CONFIGURED)
    one, another = adapters.own_paths("one"), adapters.own_paths("another")
    adapters.learn("one", {"law": "/law"})
    adapters.learn("another", {"tax": "/tax"})
    assert (one, another) == ({"law": "/law"}, {"tax": "/tax"})
    assert adapters.own_paths("m") is adapters.paths_of_model("m")
    adapters.keep("one", [])
    assert (one, another) == ({}, {"tax": "/tax"})
    adapters.configure({ANY_MODEL: {"sql": "/here"}})
    assert (one, another) == ({"sql": "/here"}, {"sql": "/here"})


PIECES = st.lists(st.text("ab\uff5c", max_size=3).map("|".__add__), min_size=1, max_size=9)


def cut(pieces: list[str]) -> CutText:
    starts = [sum(map(len, pieces[:number])) for number in range(len(pieces))]
    return CutText("".join(pieces), tuple(starts), tuple(starts))


@settings(max_examples=examples(500))
@given(PIECES, PIECES, st.integers(0, 9), st.integers(0, 9), st.booleans())
@example(["|a", "|b", "|"], ["|b", "|b", "|"], 0, 3, False)
@example(["|a", "|b"], ["a"], 1, 1, True)
@example(["|a", "|b", "|"], ["|c"], 1, 2, False)
def test_all_pieces_that_both_begin_with_and_none_more(
    own: list[str], new: list[str], same: int, rejoins: int, glued: bool
) -> None:
    """The other text shares some pieces, goes its own way, and may come back to the same."""
    text = "".join([*own[:same], *new, *own[rejoins:]])
    text = text.replace("|", "", 1) if glued else text
    before = cut(own)
    expected = max(
        number
        for number, start in enumerate(before.starts)
        if text.startswith(before.text[:start]) and (not number or text.startswith("|", start))
    )
    assert before.num_shared(text, lambda at_text, at: at_text.startswith("|", at)) == expected
