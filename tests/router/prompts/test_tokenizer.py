"""Tokenizing piece by piece, by fastokens or not, gives exactly the ids of the whole text."""

from __future__ import annotations

import re
from array import array
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from kvatlas.router.prompts import cuts, word_cuts
from kvatlas.router.prompts import fast_tokenizer as fast_module
from kvatlas.router.prompts import tokenizer as module
from kvatlas.router.prompts.barriers import barrier_pattern, find_barriers
from kvatlas.router.prompts.cuts import Encoded
from kvatlas.router.prompts.fast_tokenizer import FastEncoder
from kvatlas.router.prompts.settings import PromptStats
from kvatlas.router.prompts.tokenizer import PromptTokenizer
from tests.support.examples import examples
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


def make(text: str, *, fast: bool = True) -> PromptTokenizer:
    return PromptTokenizer(Tokenizer.from_str(text), PromptStats(), fast=fast)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_give_the_ids_of_the_whole_text(kind: str, fast: bool) -> None:
    whole, cut = Tokenizer.from_str(KINDS[kind]), make(KINDS[kind], fast=fast)
    assert cut.cuts.barrier is not None

    @settings(max_examples=examples(150))
    @given(TEXTS)
    def check(text: str) -> None:
        expected = whole.encode(text, add_special_tokens=False).ids
        assert list(cut.encode(text)) == expected
        assert cut.prefix is not None
        assert cut.suffix is not None
        framed = whole.encode(text, add_special_tokens=True).ids
        assert [*cut.prefix, *expected, *cut.suffix] == framed

    check()


@cache
def byte_level() -> PromptTokenizer:
    return make(KINDS["byte-level"])


@given(TEXTS, st.integers(1, 9))
def test_scanning_by_windows_finds_the_same_cuts(text: str, window: int) -> None:
    tokenizer = byte_level()
    expected = tokenizer.cuts.split(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "_WINDOW_CHARS", window)
        assert tokenizer.cuts.split(text) == expected


@settings(max_examples=examples(200))
@given(st.lists(st.one_of(PIECES, st.just("word and word ")), max_size=20).map("".join), st.data())
def test_cuts_from_a_place_on_are_those_of_the_rest_alone(text: str, data: st.DataObject) -> None:
    tokenizer = byte_level()
    assert tokenizer.cuts.words
    begin = data.draw(st.integers(0, len(text)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "PIECE_CHARS", 4)
        patch.setattr(word_cuts, "PIECE_CHARS", 4)
        patch.setattr(word_cuts, "_SPREAD", 2)
        starts, found = tokenizer.encode_cut(text, begin)
        alone, expected = tokenizer.encode_cut(text[begin:])
    assert starts == [begin + start for start in alone]
    assert (found.ids, found.offsets) == (expected.ids, expected.offsets)


@given(st.sets(st.text("<|a.", min_size=1), min_size=1, max_size=12), st.text("<|a.", max_size=40))
def test_the_pattern_finds_the_longest_barrier_at_each_place(barriers: set[str], text: str) -> None:
    plain = re.compile("|".join(re.escape(one) for one in sorted(barriers, key=len, reverse=True)))
    pattern = barrier_pattern(barriers)
    assert [m.span() for m in pattern.finditer(text)] == [m.span() for m in plain.finditer(text)]


def test_barriers_nested_too_deeply_are_none() -> None:
    assert barrier_pattern(["a" * 3000, "b"]) is not None
    assert barrier_pattern("a" * length for length in range(1, 3000)) is None


def test_offsets_say_which_ids_are_whose() -> None:
    for fast in (True, False):
        tokenizer = make(KINDS["byte-level"], fast=fast)
        texts = ["<|im_start|>user\n", "", "Hello", "<|im_end|>\n"]
        found = tokenizer.encode_pieces(texts)
        assert [found.piece(n) for n in range(4)] == [tokenizer.encode(text) for text in texts]
        assert found.offsets[-1] == len(found.ids)


def test_fastokens_is_used_where_it_agrees_and_can_be_switched_off() -> None:
    assert byte_level().name.startswith("fastokens ")
    assert make(KINDS["byte-level"], fast=False).name == "tokenizers (prompts.fast_tokenizer is off)"
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    assert make(words.to_str()).name.startswith("tokenizers (fastokens cannot read this tokenizer: ")


def test_fastokens_is_not_used_where_it_is_missing_or_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: FastEncoder, texts: list[str]) -> Encoded:
        return Encoded(array("I", [7] * len(texts)), list(range(len(texts) + 1)))

    with monkeypatch.context() as patch:
        patch.setattr(FastEncoder, "encode", wrong)
        assert make(KINDS["byte-level"]).name == "tokenizers (fastokens differs for '')"
    monkeypatch.setattr(fast_module, "fastokens", None)
    assert make(KINDS["byte-level"]).name == "tokenizers (fastokens is not installed)"


def test_a_sample_that_differs_takes_fastokens_out_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, reference = make(KINDS["byte-level"]), Tokenizer.from_str(KINDS["byte-level"])
    monkeypatch.setattr(module, "CHECK_EVERY", 4)
    text = "Hello there, and more of it"
    start = tokenizer._jobs
    for _ in range(8):
        tokenizer.encode(text)
    assert tokenizer._jobs == start + 8
    assert (tokenizer._stats.tokenizer_checks, tokenizer._stats.tokenizer_mismatches) == (2, 0)
    right = FastEncoder.encode

    def wrong(self: FastEncoder, texts: list[str]) -> Encoded:
        found = right(self, texts)
        return Encoded(found.ids[::-1], found.offsets)

    monkeypatch.setattr(FastEncoder, "encode", wrong)
    for _ in range(3):
        tokenizer.encode(text)
    assert list(tokenizer.encode(text)) == reference.encode(text).ids  # the sampled one is right already
    assert tokenizer._stats.tokenizer_mismatches == 1
    assert not tokenizer.is_fast
    assert tokenizer.name == "tokenizers (fastokens gave other tokens for a prompt)"


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


def test_normalized_tokens_are_barriers_where_nothing_is_normalized() -> None:
    tokenizer = Tokenizer.from_str(byte_level_tokenizer())
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.add_tokens([AddedToken(text, normalized=True) for text in ("<u>", "<v>", "<w>", "<y>", "<y>z")])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("v>2", "x<w", "<u>>")])
    cut = make(tokenizer.to_str())
    barriers = find_barriers(Tokenizer.from_str(tokenizer.to_str()))
    assert {"<think>", "<y>z", "v>2"} <= set(barriers)
    assert not {"<u>", "<v>", "<w>", "<y>"} & set(barriers)

    pieces = st.sampled_from(
        ["<u>", "<v>", "<w>", "<y>", "<y>z", ">v", "x<w", "<think>", ">", "v", "x", " ", "a"]
    )

    @settings(max_examples=examples(200))
    @given(st.lists(pieces, max_size=10).map("".join))
    def check(text: str) -> None:
        assert list(cut.encode(text)) == tokenizer.encode(text, add_special_tokens=False).ids

    check()


def test_overlapping_added_tokens_still_give_exact_ids() -> None:
    tokenizer = Tokenizer.from_str(byte_level_tokenizer())
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text in ("<a>", "<a><b>", "x<|eot|>z", "<ok><")]
    )
    tokenizer.add_tokens([AddedToken("<l>", normalized=False, lstrip=True, rstrip=True)])
    cut = make(tokenizer.to_str())
    pieces = st.sampled_from(
        ["<a>", "<b>", "<a><b>", "x", "z", "<|eot|>", "<ok>", "<ok><", " ", "<l>", "<|im_end|>", "<"]
    )

    @settings(max_examples=examples(300))
    @given(st.lists(pieces, max_size=10).map("".join))
    def check(text: str) -> None:
        assert list(cut.encode(text)) == tokenizer.encode(text, add_special_tokens=False).ids

    check()


def test_a_failed_self_check_turns_segments_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "find_barriers", lambda tokenizer: ["H", "e"])
    cut = make(KINDS["byte-level"])
    assert cut.cuts.barrier is None
    assert cut.cuts.split("Hello") == [0]
