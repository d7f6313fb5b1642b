"""Where a long text without added tokens may be cut so that both parts tokenize as they do in the whole.

A *soft cut* lies before a space that stands between two ASCII letters. Byte-level tokenizers split a text
into words by a regular expression and tokenize each word by itself; a word never runs from a letter over a
space into a letter, a space before a letter always begins one, and what a word is depends on nothing behind
its last character but white space. So the ids before and after such a place do not depend on each other.

That is the tokenizer's structure, and it is checked, not assumed: the pre-tokenizer must be byte-level
(alone, or after splits and digits), the normalizer must work character by character, no added token may
reach over such a place; then probe texts are tokenized whole and cut. If anything differs, there are no
soft cuts.
"""

from __future__ import annotations

import re
from itertools import product
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

_SOFT: Final = re.compile("[A-Za-z] (?=[A-Za-z])")
_CHARS: Final = 96
"""A soft cut is made at the first place past this many characters: a known piece costs about 0.5 us to
find, new text 0.5 us per character, so a changed tail costs about one piece."""
_PER_CHARACTER: Final = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_LETTER: Final = re.compile("[A-Za-z]")
_SIDES: Final = (
    *(
        "",
        " ",
        "\n",
        "  ",
        "x",
        "X1",
        "12345",
        "'s",
        "don't",
        "\t\t",
        "e\u0301",
        "日本",
        "—",
        "...",
        "A B",
        "the",
    ),
    *("I'LL", "  two", "\r\n\r\n", "#!", "_a", "Ünï", "🙂"),
)


def next_cut(text: str, begin: int, end: int) -> int | None:
    """The first soft cut in ``text`` at least ``_CHARS`` past ``begin`` and before ``end``; None if none."""
    found = _SOFT.search(text, begin + _CHARS, end)
    return None if found is None else found.start() + 1


def is_cut(text: str, at: int) -> bool:
    """Whether ``text`` may be cut before character ``at``."""
    return at > 0 and _SOFT.match(text, at - 1) is not None


def soft_cuts_hold(tokenizer: Tokenizer) -> bool:
    """Whether soft cuts are safe for this tokenizer."""
    return (
        _words_are_byte_level(tokenizer)
        and _normalizes_by_character(tokenizer)
        and not any(_reaches_over(token) for token in tokenizer.get_added_tokens_decoder().values())
        and _probes_agree(tokenizer)
    )


def _state(part: Any) -> dict[str, Any]:
    """A tokenizer part's own description."""
    state: dict[str, Any] = msgspec.json.decode(part.__getstate__())
    return state


def _words_are_byte_level(tokenizer: Tokenizer) -> bool:
    if tokenizer.pre_tokenizer is None:
        return False
    state = _state(tokenizer.pre_tokenizer)
    steps = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    *before, last = steps
    if last["type"] != "ByteLevel" or last.get("add_prefix_space"):
        return False
    splits = [step for step in before if step["type"] == "Split"]
    isolated = all(
        s["behavior"] == "Isolated" and not s["invert"] and "Regex" in s["pattern"] for s in splits
    )
    known = all(step["type"] in {"Split", "Digits"} for step in before)
    return known and isolated and (last.get("use_regex", True) or bool(splits))


def _normalizes_by_character(tokenizer: Tokenizer) -> bool:
    if tokenizer.normalizer is None:
        return True
    state = _state(tokenizer.normalizer)
    steps = state["normalizers"] if state["type"] == "Sequence" else [state]
    return all(step["type"] in _PER_CHARACTER for step in steps)


def _reaches_over(token: Any) -> bool:
    """Whether an added token could swallow the space of a soft cut, or hold one."""
    content = token.content
    takes_space = token.rstrip and content and _LETTER.match(content[-1])
    return bool(takes_space) or _SOFT.search(content) is not None


def _probes_agree(tokenizer: Tokenizer) -> bool:
    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found

    for left, right in product(_SIDES, repeat=2):
        head, tail = f"{left}alpha", f" beta{right}"
        if ids(head + tail) != ids(head) + ids(tail):
            return False
    return True
