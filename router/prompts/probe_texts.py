"""Probe texts: two tokenizers of one ``tokenizer.json`` must agree on them before the faster one is used.

They cover what normalizers, splitters and models treat differently: white space and digits in runs, letters
of many scripts, combining marks, contractions, code, added tokens between and inside words, and mixtures of
the vocabulary's own tokens, which reach every script and every long merge of the tokenizer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

from tokenizers import Tokenizer

_PIECES: Final = (
    "",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    " \n ",
    "a",
    "A",
    "word",
    " Word",
    "HTTPServer2",
    "x_y-z",
    "'s",
    "I'LL",
    "don't",
    "\u2019s",
    "0",
    "7",
    "12",
    "12345",
    "3.14",
    "1,000,000",
    "...",
    "!?",
    "://",
    "é",
    "e\u0301",
    "Å",
    "ß",
    "ﬁ",
    "日本語",
    "한국어",
    "العربية",
    "हिन्दी",
    "ไทย",
    "Ωmega",
    "🙂",
    "\u200b",
    "👩\u200d👩\u200d👧",
    "#!",
    "\u00a0",
    "\u3000",
    "\u2028",
    "\u0000",
    "\u007f",
    "\ufffd",
    "\ue000",
    "<",
    "<|",
    "|>",
    "</s>",
    "{%",
    "\\n",
)
_ALPHABETS: Final = (
    "abcdefghijklmnopqrstuvwxyz",
    "ABCdef 019_-.,;:!?'\"()[]{}<>/\\|@#$%^&*+=~`\n\t",
    " \n\t\r\u00a0\u3000",
    "aàáâãäåæçèéêëìíîïñòóôõöøùúûüýÿ\u0300\u0301\u0308\u0323",
    "абвгдежзийклмнопрстуфхцчшщъыьэюя ",
    "的一是不了人我在有他这中大来上国日本語のはをが、。 ",
    "ابتثجحخدذرزسشصضطظعغفقكلمنهوي ",
    "0123456789 .,-",
    "🙂🚀❤\ufe0f👍🏽\u200d🏳🌈 ",
)
_PAIRED: Final = 24
_SOUPS: Final = 600
_FUZZ: Final = 400
_LONG: Final = "The quick brown fox, 42 of them: jumps()\n\tover {the: 'lazy'} dog — naïve café; 東京。\r\n"


def probe_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """About 2,500 texts, the same ones at every start."""
    rng = random.Random(1)
    added = _added_tokens(tokenizer)
    yield from _PIECES
    yield from (a + b for a in _PIECES for b in rng.sample(_PIECES, _PAIRED))
    for token in added:
        yield from (left + token + rng.choice(_PIECES) + rng.choice(added) for left in _PIECES[::4])
    size = tokenizer.get_vocab_size()
    for _ in range(_SOUPS):
        ids = [rng.randrange(size) for _ in range(rng.randint(1, 8))]
        yield str(tokenizer.decode(ids, skip_special_tokens=False))
    for _ in range(_FUZZ):
        alphabet = "".join(rng.sample(_ALPHABETS, 2))
        yield "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 40)))
    yield from (_LONG * 20, "a" * 300, "ab" * 200, " " * 300, "\n" * 200, "1" * 200, "日" * 200)


def _added_tokens(tokenizer: Tokenizer) -> list[str]:
    """Contents of added tokens: those with unusual flags first, since the others are all alike."""

    def plain(token: Any) -> bool:
        return not (token.lstrip or token.rstrip or token.single_word or token.normalized)

    tokens = sorted(tokenizer.get_added_tokens_decoder().values(), key=plain)
    return [token.content for token in tokens[:_PAIRED]]
