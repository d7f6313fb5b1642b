r"""Cuts between words: before a space that follows an ASCII letter, for tokenizers known to separate there.

Why a text's ids are those of its two parts, in any context, by the steps of ``tokenizers``:

1. Added tokens: none has a letter and a space in this order, ends with a letter and strips white space, or
   must stand alone. So no match spans the place or depends on the other side.
2. Normalizer: none, or NFC, which changes neither an ASCII letter nor a space that follows one, and joins
   nothing to the text before a space.
3. Pre-tokenizer: a sequence of splits, each by an alternation of ``_BRANCHES``. In a match of any of these
   a space is the first character or follows only white space: so none spans the place. None looks behind,
   so matches that begin after the place are those of the second part. A match that begins before it sees,
   in the text and in the first part, the same characters up to the letter, and then something that it
   cannot take, a space or the end; the one look-ahead, for white space, sees the letter at most. So matches
   are those of both parts, and pieces too, except an unmatched one that may continue over the place: the
   next split gets it whole. A pattern with the branch ``\s+`` matches every space: after it no piece does.
   ``Digits`` is a split by ``\p{N}``. ``ByteLevel`` without a prefix space only re-encodes each piece.
4. Model: BPE, each piece separately.

Other kinds (SentencePiece, a pattern with another branch) are cut at added tokens only. At load the cuts
are also tried on probe texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer
from tokenizers.models import BPE

_PLACE: Final = re.compile(r" (?<=[A-Za-z] )")
# Shorter pieces are not cut: a cut costs 1 us when its text is first seen, a character after the last one
# that two turns share 5 ns.
PIECE_CHARS: Final = 1024
# A cut this near another one saves less than it costs: a template writes several marks around a message.
NEAR_CHARS: Final = 24
# Cuts are apart by at least this part of the text since the first start: 400 KB have a hundred, 8 MB two
# hundred.
_SPREAD: Final = 32

_MARKED: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K_WORDS: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
_GPT2: Final = (
    "'s",
    "'t",
    "'re",
    "'ve",
    "'m",
    "'ll",
    "'d",
    r" ?\p{L}+",
    r" ?\p{N}+",
    r" ?[^\s\p{L}\p{N}]+",
    r"\s+(?!\S)",
    r"\s+",
)
_BRANCHES: Final = (
    *_GPT2,
    # cl100k, Llama 3, Qwen.
    _MARKED,
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"\p{N}{1,3}",
    r"\p{N}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    # Qwen 3.5.
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    # o200k, Llama 4; tekken has them without the contractions.
    *_O200K_WORDS,
    *(word + _MARKED + "?" for word in _O200K_WORDS),
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    # DeepSeek V3.
    "[一-龥\u3040-ゟ\u30a0-ヿ]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+",
    r" ?[\p{P}\p{S}]+[\r\n]*",
)
_BRANCH: Final = "|".join(map(re.escape, _BRANCHES))
_PATTERN: Final = re.compile(rf"(?:{_BRANCH})(?:\|(?:{_BRANCH}))*")
_ALL_SPACES: Final = r"\s+"
# Behaviours of a split, and whether it is inverted: both make a piece of every match.
_KEEPING_MATCHES: Final = (("Isolated", False), ("Removed", True))


def parts_words(tokenizer: Tokenizer) -> bool:
    """Whether its texts may be cut between words."""
    if tokenizer.encode_special_tokens:
        return False
    return (
        isinstance(tokenizer.model, BPE)
        and all(step["type"] == "NFC" for step in _steps(_state(tokenizer.normalizer), "normalizers"))
        and _splits_at_spaces(_steps(_state(tokenizer.pre_tokenizer), "pretokenizers"))
        and not any(
            _reaches_over(token, tokenizer) for token in tokenizer.get_added_tokens_decoder().values()
        )
    )


def word_cuts(text: str, starts: Sequence[int]) -> Iterator[int]:
    """Yield ``starts`` (of pieces) and further cuts in long pieces."""
    for start, end in pairwise([*starts, len(text)]):
        yield start
        at = start + PIECE_CHARS
        while at + PIECE_CHARS <= end:
            found = _PLACE.search(text, at, at + PIECE_CHARS)
            if found is not None:
                yield found.start()
            # Cuts grow apart with the text, so that their number stays small in long texts.
            at += max(PIECE_CHARS, (at - starts[0]) // _SPREAD)


def between_words(text: str, at: int) -> bool:
    """Whether the text may be cut here between words."""
    return at > 0 and _PLACE.match(text, at) is not None


def _state(part: Any) -> dict[str, Any]:
    """A part of a tokenizer as in ``tokenizer.json``; a missing part is an empty sequence of steps."""
    return {"type": "Sequence"} if part is None else dict(msgspec.json.decode(part.__getstate__()))


def _steps(state: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return state.get(name, []) if state["type"] == "Sequence" else [state]


def _splits_at_spaces(steps: list[dict[str, Any]]) -> bool:
    *splits, last = steps or [{"type": ""}]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return False
    patterns = [_pattern(step) for step in splits]
    if last["use_regex"]:
        patterns.append("|".join(_GPT2))
    known = all(_PATTERN.fullmatch(pattern) for pattern in patterns)
    return known and any(_ALL_SPACES in pattern.split("|") for pattern in patterns)


def _pattern(step: dict[str, Any]) -> str:
    """The regular expression of a split, with escapes for line ends; "" for other steps."""
    if step["type"] == "Digits":
        return r"\p{N}"
    if step["type"] != "Split" or (step["behavior"], step["invert"]) not in _KEEPING_MATCHES:
        return ""
    pattern: str = step["pattern"].get("Regex", "")
    return pattern.replace("\r", r"\r").replace("\n", r"\n")


def _reaches_over(token: Any, tokenizer: Tokenizer) -> bool:
    """Whether an added token's match may span a place between words, or depend on the text behind it."""
    normalized = token.content
    if token.normalized and tokenizer.normalizer is not None:
        normalized = tokenizer.normalizer.normalize_str(token.content)
    contents = (token.content, normalized)
    if any(_PLACE.search(content) for content in contents) or token.single_word:
        return True
    return token.rstrip and any(content[-1:].isalpha() for content in contents)
