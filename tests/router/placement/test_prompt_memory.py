"""Remembered prompts: which prefixes are the hottest, and what is forgotten."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from publisher.block_hash import NO_EXTRAS, HashScheme, MultimodalItem, PromptExtras
from router.observe.history import FIRST_TOKENS, HALF_LIFE_S
from router.placement.affinity import PROMPTS_MAX, PromptMemory
from router.prompts.prompt import Prompt
from router.prompts.prompt_cache import Entry
from router.prompts.settings import PromptStats

SCHEME = HashScheme()
UNIT = SCHEME.hash_block_size


def prompt(*parts: tuple[int, int], extras: PromptExtras = NO_EXTRAS, **fields: Any) -> Prompt:
    """A prompt of parts: a number that stands for the text, and its tokens."""
    ids = array("I", [number * 1000 + at % 997 for number, tokens in parts for at in range(tokens)])
    return Prompt(Entry((), b"", ids, extras), PromptStats(), "local", **fields)


def add(memory: PromptMemory, one: Prompt, now: float = 0.0, model: str = "m") -> None:
    memory.add(model, one, one.hashes(SCHEME), UNIT, now)


def hottest(memory: PromptMemory, tokens: int = 1 << 30, now: float = 0.0) -> list[tuple[list[int], int]]:
    """Texts and tokens of the hottest prefixes."""
    found = memory.hottest(tokens, now, lambda model: model == "m")
    return [
        (sorted({token // 1000 for token in hot.prompt.token_ids[: hot.tokens]}), hot.tokens) for hot in found
    ]


def test_the_most_requested_prefix_comes_first() -> None:
    memory = PromptMemory(100_000)
    for number in (1, 2, 3, 2, 2, 3):
        add(memory, prompt((number, 1024)))
    assert hottest(memory) == [([2], 1024), ([3], 1024), ([1], 1024)]
    assert hottest(memory, 2048) == [([2], 1024), ([3], 1024)]


def test_a_shared_prefix_counts_once_and_for_all_its_prompts() -> None:
    memory = PromptMemory(100_000)
    for number in range(2, 6):
        add(memory, prompt((1, 2048), (number, 512)))
    add(memory, prompt((7, 2048)))
    add(memory, prompt((7, 2048)))
    assert hottest(memory, 2048) == [([1], 2048)]
    assert hottest(memory, 2048 + 512) == [([1, 5], 2560)] or hottest(memory, 2048 + 512)[0][1] >= 2048
    whole = hottest(memory)
    assert sum(tokens for _, tokens in whole) == 4 * 2560 + 2048
    assert hottest(memory, 2048 + 4 * 512 + 2048) == whole, "the common part was counted once"


def test_a_next_turn_replaces_the_one_before() -> None:
    memory = PromptMemory(100_000)
    for turns in (1, 2, 3):
        add(memory, prompt(*((turn, 600) for turn in range(1, turns + 1))))
    add(memory, prompt((8, 1600)))
    assert len(memory) == 2
    assert memory.tokens == 1792 + 1600
    assert hottest(memory) == [([1, 2, 3], 1792), ([8], 1600)]


def test_rates_decay() -> None:
    memory = PromptMemory(100_000)
    for _ in range(3):
        add(memory, prompt((1, 1024)))
    later = 2 * HALF_LIFE_S
    add(memory, prompt((2, 1024)), later)
    assert hottest(memory, now=later)[0] == ([2], 1024)


def test_only_prompts_that_can_be_asked_for_by_their_tokens_are_remembered() -> None:
    memory = PromptMemory(100_000)
    add(memory, prompt((1, FIRST_TOKENS - 1)))
    add(memory, prompt((1, 1024), num_prompts=2))
    add(memory, prompt((1, 1024), skips_cache=True))
    image = PromptExtras(multimodal=(MultimodalItem("image", 3, 4),))
    add(memory, prompt((1, 1024), extras=image))
    assert not len(memory)


def test_prompts_of_another_salt_are_others() -> None:
    memory = PromptMemory(100_000)
    for salt in ("a", "b"):
        add(memory, prompt((1, 1024), extras=PromptExtras(cache_salt=salt)))
    found = memory.hottest(10_000, 0.0, lambda _: True)
    assert [hot.prompt.extras.cache_salt for hot in found] == ["a", "b"]


def test_only_models_that_are_served_are_given() -> None:
    memory = PromptMemory(100_000)
    add(memory, prompt((1, 1024)), model="other")
    assert hottest(memory) == []


texts = st.lists(st.tuples(st.integers(1, 4), st.integers(100, 900)), min_size=1, max_size=4)


@given(st.lists(texts, max_size=30), st.integers(300, 6000), st.integers(0, 8000))
def test_it_stays_within_its_bounds(prompts: list[list[tuple[int, int]]], kept: int, wanted: int) -> None:
    memory = PromptMemory(kept)
    for now, parts in enumerate(prompts):
        add(memory, prompt(*parts), float(now))
        assert memory.tokens <= kept
        assert len(memory) <= PROMPTS_MAX
    assert memory.tokens == sum(one.ends[-1][0] for one in memory._prompts.values())
    users: dict[object, int] = {}
    for one in memory._prompts.values():
        for _, key in one.ends:
            users[key] = users.get(key, 0) + 1
    assert {key: node.users for key, node in memory._nodes.items()} == users
    distinct: set[tuple[int, ...]] = set()
    for hot in memory.hottest(wanted, 100.0, lambda _: True):
        ids = tuple(hot.prompt.token_ids[: hot.tokens])
        assert hot.tokens % UNIT == 0
        distinct |= {ids[:end] for end in range(UNIT, len(ids) + 1, UNIT)}
    assert UNIT * len(distinct) <= wanted


@pytest.mark.parametrize("tokens", [FIRST_TOKENS, 1 << 20])
def test_a_prompt_longer_than_all_it_may_remember_is_not_kept(tokens: int) -> None:
    memory = PromptMemory(FIRST_TOKENS)
    add(memory, prompt((1, tokens)))
    assert len(memory) == (tokens == FIRST_TOKENS)
    assert memory.tokens <= FIRST_TOKENS
