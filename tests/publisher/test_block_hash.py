"""Block hashes: against the definition written out with the standard library, and growing chains."""

from __future__ import annotations

import hashlib
import pickle
from array import array
from typing import Any

import cbor2
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.publisher.block_hash import (
    ALGORITHMS,
    NO_EXTRAS,
    HashChain,
    HashScheme,
    MultimodalItem,
    PromptExtras,
    block_hashes,
    hash_function,
    num_hash_blocks,
)
from tests.support.event_writer import tokens

DUMPS = {
    "pickle": lambda value: pickle.dumps(value, protocol=5),
    "cbor": lambda value: cbor2.dumps(value, canonical=True),
}


def defined(prompt: list[int], scheme: HashScheme, extras: list[Any]) -> list[int]:
    """The definition: each hash covers its parent, its tokens and its extra keys (one entry per block)."""

    def digest(value: object) -> bytes:
        hasher, _, dump = scheme.algo.partition("_")
        dumped = DUMPS[dump or "pickle"](value)
        return hashlib.sha256(dumped).digest() if hasher == "sha256" else xxhash.xxh3_128_digest(dumped)

    parent, found = digest(scheme.seed), []
    for number, extra in enumerate(extras):
        block = prompt[number * scheme.hash_block_size : (number + 1) * scheme.hash_block_size]
        parent = digest((parent, tuple(block), extra))
        found.append(int.from_bytes(parent[-8:], "big"))
    return found


def text(value: str) -> str:
    """An equal string that is another object, as decoding a message makes it."""
    return value.encode().decode()


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("seed", ["vllm-none-hash", "0"])
def test_plain_prompts(algo: str, seed: str) -> None:
    scheme, prompt = HashScheme(algo, seed), tokens(100)
    assert block_hashes(prompt, scheme) == defined(prompt, scheme, [None] * 6)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_extra_keys_stand_in_the_engines_order(algo: str) -> None:
    """LoRA on every block, images where they lie, the salt on the first block only."""
    images = (MultimodalItem("cat", 10, 30), MultimodalItem("cat", 40, 5))
    extras = PromptExtras("sql", "sql", "tenant", images)
    scheme, prompt = HashScheme(algo), tokens(64)
    lora = [("lora", text("sql"), text("sql")) for _ in range(4)]
    keys = [
        (lora[0], ("mm", text("cat"), 10), ("cache_salt", "tenant")),
        (lora[1], ("mm", text("cat"), -6)),
        (lora[2], ("mm", text("cat"), -22), ("mm", text("cat"), 8)),
        (lora[3],),
    ]
    assert block_hashes(prompt, scheme, extras) == defined(prompt, scheme, keys)


def test_untagged_extra_keys_have_no_path() -> None:
    extras = PromptExtras("sql", "/adapters/sql", "tenant", (MultimodalItem("cat", 10, 10),))
    scheme, prompt = HashScheme(tagged=False), tokens(48)
    keys = [("sql", ("cat", 10), "tenant"), ("sql", ("cat", -6)), ("sql",)]
    assert block_hashes(prompt, scheme, extras) == defined(prompt, scheme, keys)


def test_look_ahead_hashes_cover_the_tokens_after_the_block() -> None:
    scheme, prompt = HashScheme(lookahead=2), tokens(50)
    ahead = [(None, *prompt[16:18]), (None, *prompt[32:34]), (None, *prompt[48:50])]
    assert block_hashes(prompt, scheme) == defined(prompt, scheme, ahead)
    assert block_hashes(prompt[:49], scheme) == defined(prompt, scheme, ahead[:2])
    salted = PromptExtras(cache_salt="tenant")
    keyed = [((("cache_salt", "tenant"),), *prompt[16:18]), *ahead[1:]]
    assert block_hashes(prompt, scheme, salted) == defined(prompt, scheme, keyed)


@pytest.mark.parametrize(
    ("num_tokens", "lookahead", "expected"),
    [(0, 0, 0), (15, 0, 0), (16, 0, 1), (16, 1, 0), (17, 1, 1), (32, 1, 1), (33, 1, 2), (2, 3, 0)],
)
def test_a_hash_exists_once_its_look_ahead_does(num_tokens: int, lookahead: int, expected: int) -> None:
    assert num_hash_blocks(num_tokens, HashScheme(lookahead=lookahead)) == expected


@given(
    st.integers(0, 200),
    st.lists(st.integers(0, 200), max_size=4),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([NO_EXTRAS, PromptExtras("a", "b", "c", (MultimodalItem("cat", 30, 40),))]),
)
def test_a_chain_grown_in_steps_or_forked_is_the_chain_of_the_whole(
    count: int, steps: list[int], lookahead: int, extras: PromptExtras
) -> None:
    scheme, prompt = HashScheme(lookahead=lookahead), tokens(count)
    whole, chain = block_hashes(prompt, scheme, extras), HashChain(scheme, extras)
    for step in sorted(steps):
        chain.extend(prompt[:step])
    assert chain.extend(prompt) == whole
    forked = chain.fork(len(whole) // 2)
    assert forked.extend(prompt) == whole
    assert len(chain.whole()) == len(chain.hashes) == len(whole)


@given(
    st.sampled_from(ALGORITHMS),
    st.sampled_from([1, 3, 4, 16, 17, 272]),
    st.lists(st.sampled_from([0, 23, 24, 127, 128, 255, 256, 65535, 65536, 2**31 - 1]), min_size=9),
    st.sampled_from([0, 2**31, 2**64]),
)
def test_many_blocks_hash_as_each_by_itself(algo: str, size: int, some: list[int], odd: int) -> None:
    """Numbers of every length, and such as are hashed one block at a time only."""
    scheme = HashScheme(algo, hash_block_size=size)
    prompt = [some[place % len(some)] + (place % 3 == 0 and place % 7) for place in range(80 * size)]
    prompt = [min(token, 2**31 - 1) for token in prompt]
    prompt[39] = odd or prompt[39]
    assert block_hashes(prompt, scheme) == defined(prompt, scheme, [None] * 80)


@given(
    st.sampled_from(ALGORITHMS),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([0, 2]),
    st.sampled_from([NO_EXTRAS, PromptExtras("a", "b", "c", (MultimodalItem("cat", 30, 40),))]),
    st.lists(st.integers(0, 2**32 - 1), max_size=80),
)
def test_an_array_of_tokens_has_the_hashes_of_a_list(
    algo: str, size: int, lookahead: int, extras: PromptExtras, prompt: list[int]
) -> None:
    scheme = HashScheme(algo, hash_block_size=size, lookahead=lookahead)
    assert block_hashes(array("I", prompt), scheme, extras) == block_hashes(prompt, scheme, extras)


def test_blocks_behind_the_last_extra_key_hash_together() -> None:
    extras = PromptExtras(cache_salt="tenant", multimodal=(MultimodalItem("cat", 20, 13),))
    scheme, prompt = HashScheme(), tokens(3000)
    keys = [(("cache_salt", "tenant"),), (("mm", text("cat"), 4),), (("mm", text("cat"), -12),)]
    assert block_hashes(prompt, scheme, extras) == defined(prompt, scheme, [*keys, *[None] * 184])


@given(st.integers(0, 99), st.integers(1, 5))
def test_a_changed_token_changes_its_block_and_all_after(place: int, change: int) -> None:
    prompt = tokens(100)
    changed = [*prompt[:place], prompt[place] + change, *prompt[place + 1 :]]
    before, after = block_hashes(prompt, HashScheme()), block_hashes(changed, HashScheme())
    same = min(place // 16, 6)
    assert before[:same] == after[:same]
    assert not set(before[same:]) & set(after[same:])


def test_an_unknown_algorithm_is_named() -> None:
    with pytest.raises(ValueError, match="md5"):
        hash_function("md5")
