"""Long texts are cut inside sentences only where that changes nothing, for tokenizers that allow it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from router.prompts.stats import PromptStats
from router.prompts.tokens import soft_cuts
from router.prompts.tokens.soft_cuts import soft_cuts_hold
from router.prompts.tokens.tokenizer import SegmentTokenizer
from tests.support.prompts.readers import byte_level_tokenizer, metaspace_tokenizer

# The word patterns of well-known vocabularies, each under the name of one that uses it.
PATTERNS = {
    "llama-3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
WORDS = st.one_of(
    st.sampled_from(
        ["alpha", " beta", " a", "B", " I'm", "'s", " ", "  ", "\n", " 12", "3x", "é", " é", "—", "日"]
    ),
    st.text(max_size=4),
)
TEXTS = st.lists(WORDS, max_size=60).map("".join)


def tokenizer(pattern: str | None = None) -> Tokenizer:
    made = Tokenizer.from_str(byte_level_tokenizer())
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([split, rest])
    return made


@pytest.mark.parametrize("name", ["gpt-2", *PATTERNS])
def test_text_cut_often_has_the_ids_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soft_cuts, "_CHARS", 3)
    whole = tokenizer(PATTERNS.get(name))
    assert soft_cuts_hold(whole)
    cached = SegmentTokenizer(tokenizer(PATTERNS.get(name)), PromptStats(), 1 << 20)
    cuts = 0

    @settings(max_examples=300, deadline=None)
    @given(TEXTS)
    def check(text: str) -> None:
        nonlocal cuts
        cuts += len(cached.split(text).texts) - 1
        assert list(cached.encode(text)) == whole.encode(text, add_special_tokens=False).ids

    check()
    assert cuts > 30


def test_a_changed_end_of_a_long_text_tokenizes_only_its_end() -> None:
    stats = PromptStats()
    cached = SegmentTokenizer(tokenizer(), stats, 1 << 20)
    text = "the router asks which engine holds the prefix " * 200
    cached.encode(text + "first end")
    missed = stats.segment_misses
    cached.encode(text + "another end")
    assert stats.segment_misses == missed + 1


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_tokenizers_that_do_not_split_words_have_no_soft_cuts(scheme: str) -> None:
    assert not soft_cuts_hold(Tokenizer.from_str(metaspace_tokenizer(scheme)))


def test_structures_that_join_words_have_no_soft_cuts() -> None:
    prefixed = tokenizer()
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    unsplit = tokenizer()
    unsplit.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    stripped = tokenizer()
    stripped.normalizer = normalizers.Strip()
    over_words = tokenizer(r"\p{L}+(?: \p{L}+)?|\s+|[^\s\p{L}]+")
    for joined in (prefixed, unsplit, stripped, over_words):
        assert not soft_cuts_hold(joined)


@pytest.mark.parametrize(
    "token",
    [AddedToken("New York", normalized=False), AddedToken("stop", normalized=False, rstrip=True)],
    ids=["with a space inside", "taking the space after it"],
)
def test_added_tokens_that_reach_over_a_cut_forbid_it(token: AddedToken) -> None:
    made = tokenizer()
    made.add_tokens([token])
    assert not soft_cuts_hold(made)
