"""Tokenizing by cached segments gives exactly the ids of the whole text, whatever the text."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from router.prompts.stats import PromptStats
from router.prompts.tokens import tokenizer as module
from router.prompts.tokens.tokenizer import SegmentTokenizer, find_barriers
from tests.support.prompts.readers import SPECIAL, byte_level_tokenizer, metaspace_tokenizer

KINDS = {
    "byte-level": byte_level_tokenizer(),
    "metaspace first": metaspace_tokenizer("first"),
    "metaspace always": metaspace_tokenizer("always"),
    "metaspace never": metaspace_tokenizer("never"),
}
PIECES = st.one_of(
    st.sampled_from(
        [*SPECIAL, "<|", "|>", "<|im_", "start|>", " ", "\n", "\n\n", "\t", "'s", "e\u0301", "é", "<think>"]
    ),
    st.text(max_size=6),
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)


def make(text: str, cache_bytes_max: int = 1 << 20) -> SegmentTokenizer:
    return SegmentTokenizer(Tokenizer.from_str(text), PromptStats(), cache_bytes_max)


@pytest.mark.parametrize("kind", KINDS)
def test_segments_give_the_ids_of_the_whole_text(kind: str) -> None:
    whole, cached = Tokenizer.from_str(KINDS[kind]), make(KINDS[kind])
    assert cached.barrier is not None

    @settings(max_examples=250, deadline=None)
    @given(TEXTS)
    def check(text: str) -> None:
        expected = whole.encode(text, add_special_tokens=False).ids
        assert list(cached.encode(text)) == expected
        assert list(cached.encode(text)) == expected  # now from the cache
        framed = whole.encode(text, add_special_tokens=True).ids
        assert list(cached.with_special_tokens(cached.encode(text))) == framed

    check()
    assert cached._stats.segment_hits > 0


@cache
def byte_level() -> SegmentTokenizer:
    return make(KINDS["byte-level"])


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.integers(1, 9))
def test_scanning_by_windows_finds_the_same_cuts(text: str, window: int) -> None:
    cached = byte_level()
    expected = cached.split(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_WINDOW_CHARS", window)
        assert cached.split(text) == expected


def test_segments_encoded_as_one_batch_agree_with_the_whole() -> None:
    cached = make(KINDS["byte-level"])
    parts = cached.split("a<|im_start|>user\nHello<|im_end|>\n" * 3)
    ids = cached.encode_missing(parts.texts, [None] * len(parts.texts))
    assert [token for part in ids for token in part] == list(cached.encode("".join(parts.texts)))


def test_tokens_that_overlap_or_take_white_space_are_no_barriers() -> None:
    tokenizer = Tokenizer.from_str(byte_level_tokenizer())
    tokenizer.add_tokens(
        [
            AddedToken("<a>", normalized=False),
            AddedToken("<a><b>", normalized=False),  # longer at the same place
            AddedToken("x<|eot|>z", normalized=False),  # starts before it and contains it
            AddedToken("y<|im_", normalized=False),  # starts before it and ends inside
            AddedToken("<aa>a", normalized=False),
            AddedToken("<l>", normalized=False, lstrip=True),
            AddedToken("<r>", normalized=False, rstrip=True),
            AddedToken("<w>", normalized=False, single_word=True),
            AddedToken("<n>", normalized=True),
            AddedToken(" <s>", normalized=False),
            AddedToken("<ok>", normalized=False),
        ]
    )
    barriers = find_barriers(tokenizer)
    assert "<ok>" in barriers
    assert "<a><b>" in barriers
    for other in ("<a>", "<|eot|>", "<|im_start|>", "<|im_end|>", "<l>", "<r>", "<w>", "<n>", " <s>"):
        assert other not in barriers


def test_overlapping_added_tokens_still_give_exact_ids() -> None:
    tokenizer = Tokenizer.from_str(byte_level_tokenizer())
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text in ("<a>", "<a><b>", "x<|eot|>z", "<ok><")]
    )
    tokenizer.add_tokens([AddedToken("<l>", normalized=False, lstrip=True, rstrip=True)])
    cached = make(tokenizer.to_str())
    pieces = st.sampled_from(
        ["<a>", "<b>", "<a><b>", "x", "z", "<|eot|>", "<ok>", "<ok><", " ", "<l>", "<|im_end|>", "<"]
    )

    @settings(max_examples=300, deadline=None)
    @given(st.lists(pieces, max_size=10).map("".join))
    def check(text: str) -> None:
        assert list(cached.encode(text)) == tokenizer.encode(text, add_special_tokens=False).ids

    check()


def test_a_failed_self_check_turns_segments_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_barriers", lambda tokenizer: ["H", "e"])
    cached = make(KINDS["byte-level"])
    assert cached.barrier is None
    assert cached.split("Hello").texts == ["Hello"]


def test_the_cache_is_bounded_and_counts_evictions() -> None:
    cached = make(KINDS["byte-level"], cache_bytes_max=2000)
    for number in range(50):
        cached.encode(f"text number {number}")
        assert cached._stats.segment_bytes <= 2000
    assert cached._stats.segment_evictions > 40
    assert len(cached._cache) < 10
