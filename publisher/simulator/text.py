"""What a simulated engine "generates": words, chosen by a random stream seeded with the prompt.

Only vocabulary entries that are a whole word, and that their own text tokenizes back to, are used. The
first word carries a leading space unless the prompt ends in white space or in a special token. So
``encode(decode(ids)) == ids``, also where a chat template puts the text into the next turn's prompt, and
that turn shares the generated tokens with this one's cache.
"""

from __future__ import annotations

import random
import re
from array import array
from collections.abc import Sequence
from functools import lru_cache

import xxhash

from publisher.simulator.tokenizer import ChatTokenizer

_SPACED = re.compile("Ġ[a-z]{3,}")
_PLAIN = re.compile("[a-z]{3,}")
_OUTPUT_TOKENS_MIN = 8
WRONG_MARK = "!"
"""In no right answer."""
_WRONG_ANSWER = f"{WRONG_MARK}WRONG KV CACHE{WRONG_MARK} "
"""The text of an answer made of blocks that were reused before they were read."""
_WRONG_TIMES = 4


class Continuation:
    """The token ids that follow one prompt, produced one by one; ends with the end-of-text token."""

    __slots__ = ("_length", "_rng", "_source", "_starts_bare")

    def __init__(self, source: TextSource, rng: random.Random, *, starts_bare: bool, length: int) -> None:
        self._source = source
        self._rng = rng
        self._starts_bare = starts_bare
        self._length = length

    def token(self, index: int, *, ignore_eos: bool) -> int:
        """The ``index``-th generated token; must be asked for in order, once each."""
        if index >= self._length and not ignore_eos:
            return self._source.eos_id
        words = self._source.plain if index == 0 and self._starts_bare else self._source.spaced
        return self._rng.choice(words)


class WrongContinuation:
    """What comes of KV that another prompt left behind: the same words, for everybody to see."""

    __slots__ = ("_eos_id", "_token_ids")

    def __init__(self, token_ids: list[int], eos_id: int) -> None:
        self._token_ids = token_ids
        self._eos_id = eos_id

    def token(self, index: int, *, ignore_eos: bool) -> int:
        """The ``index``-th generated token."""
        if index >= len(self._token_ids) * _WRONG_TIMES and not ignore_eos:
            return self._eos_id
        return self._token_ids[index % len(self._token_ids)]


class TextSource:
    """Makes continuations; the same prompt and seed give the same text on every engine."""

    def __init__(self, tokenizer: ChatTokenizer, *, seed: int, natural_tokens_max: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._natural_tokens_max = max(natural_tokens_max, _OUTPUT_TOKENS_MIN)
        self.eos_id = tokenizer.eos_id
        self.spaced, self.plain = _words(tokenizer, _SPACED), _words(tokenizer, _PLAIN)

    def continuation(self, prompt: Sequence[int]) -> Continuation:
        """What follows ``prompt`` (not empty); its natural length is part of it."""
        rng = random.Random(xxhash.xxh3_64_intdigest(array("I", prompt).tobytes(), seed=self._seed))
        last = prompt[-1]
        bare = last in self._tokenizer.special_ids or self._tokenizer.decode([last])[-1:].isspace()
        length = rng.randint(_OUTPUT_TOKENS_MIN, self._natural_tokens_max)
        return Continuation(self, rng, starts_bare=bare, length=length)

    def wrong(self) -> WrongContinuation:
        """An answer that is visibly none."""
        token_ids = self._tokenizer.encode(_WRONG_ANSWER, add_special_tokens=False)
        return WrongContinuation(token_ids, self.eos_id)


@lru_cache(maxsize=8)
def _words(tokenizer: ChatTokenizer, pattern: re.Pattern[str]) -> list[int]:
    """The usable entries of a vocabulary; the same for all engines that share it."""
    chosen = [
        token_id
        for word, token_id in tokenizer.vocabulary().items()
        if pattern.fullmatch(word) and _round_trips(tokenizer, token_id)
    ]
    if not chosen:
        raise ValueError("the tokenizer has no whole-word entries to generate text from")
    return sorted(chosen)


def _round_trips(tokenizer: ChatTokenizer, token_id: int) -> bool:
    text = tokenizer.decode([token_id])
    return tokenizer.encode(text, add_special_tokens=False) == [token_id]
