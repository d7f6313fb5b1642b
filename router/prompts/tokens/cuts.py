"""Where a text may be cut before it is tokenized, and what a tokenizer puts around every text.

``tokenizers`` cuts a text at added tokens before it normalizes, pre-tokenizes and models each piece by
itself. A *barrier* is an added token whose every occurrence is such a cut, whatever stands around it: it
is matched on the raw text, takes no white space along, and no other added token can overlap an
occurrence of it from the left (or, where that one is matched first, from the right) or be longer at the same
place. So a text may be cut before each barrier, and a piece's ids depend on nothing outside it: a next turn
tokenizes only what follows the last cut it shares with the turn before. Long pieces are cut between words as
well, where the tokenizer is of a kind that parts them anyway (``word_cuts.py``). At load both are tried on
probe texts; where they change anything there are none.

Probing depends on the tokenizer alone and takes up to a second, so what is found of one is kept.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

from tokenizers import Tokenizer

from router.prompts.tokens.barriers import barrier_pattern, find_barriers
from router.prompts.tokens.ids import Ids
from router.prompts.tokens.word_cuts import PIECE_CHARS, between_words, parts_words, word_cuts

_WINDOW_CHARS: Final = 1 << 17
"""Scanned in one go, about 1 ms: a regular expression holds the GIL."""
_PLAIN_PROBES: Final = ("", "a", "Hello world", " leading", "trailing ", "日本 é\n\n", "1234 x")
_PROBE_PIECES: Final = (
    *("", " ", "\n", "\t", "  two", "word", " word ", "\n\n x"),
    *("é", "e\u0301", "日本", "12345", "'s", "<|"),
)
_BETWEEN_WORDS: Final = [
    (f"{left}x {right}", len(left) + 1) for left in _PROBE_PIECES for right in _PROBE_PIECES
]
_PROBED_BARRIERS_MAX: Final = 6
"""Barriers differ only by their text; more would only make loading slower."""


class Cuts(NamedTuple):
    """What was found of one tokenizer. ``prefix`` and ``suffix``: what ``add_special_tokens`` puts before and
    after any text; None, None where it does more. ``words``: texts may be cut between words."""

    barrier: re.Pattern[str] | None
    barrier_chars_max: int
    words: bool
    prefix: Ids | None
    suffix: Ids | None

    def split(self, text: str, begin: int = 0) -> list[int]:
        """Where ``text`` is cut from ``begin`` on: there, at the character offset of every barrier, and at
        places in long pieces."""
        starts, chars = [begin], len(text) - begin
        if self.barrier is not None and chars > _WINDOW_CHARS:
            starts += self._barrier_starts(self.barrier, text, begin + 1)
        elif self.barrier is not None:
            for match in self.barrier.finditer(text, begin + 1):
                starts.append(match.start())
        return list(word_cuts(text, starts)) if self.words and chars > PIECE_CHARS else starts

    def may_cut(self, text: str, at: int) -> bool:
        """Whether ``text`` may be cut before character ``at``, whatever it was cut at so far."""
        if self.barrier is not None and self.barrier.match(text, at) is not None:
            return True
        return self.words and between_words(text, at)

    def _barrier_starts(self, barrier: re.Pattern[str], text: str, begin: int) -> Iterator[int]:
        """Where barriers begin from ``begin`` on; window by window, so that other threads get their turn."""
        overlap = self.barrier_chars_max - 1
        while begin < len(text):  # barriers never overlap each other, so a window may begin inside one
            end = begin + _WINDOW_CHARS
            matches = barrier.finditer(text, begin, end + overlap)
            yield from (match.start() for match in matches if match.start() < end)
            begin = end


@lru_cache(maxsize=4)
def cuts_of(tokenizer: Tokenizer) -> Cuts:
    """Find barriers and special tokens, and try both on probe texts."""
    barriers = find_barriers(tokenizer)
    frame = _added_around(tokenizer)
    found = Cuts(
        barrier_pattern(barriers), max(map(len, barriers), default=0), parts_words(tokenizer), *frame
    )
    if not all(_is_same(tokenizer, text, found.split(text)) for text in _around_barriers(barriers)):
        found = found._replace(barrier=None)
    if not (found.words and all(_is_same(tokenizer, text, [0, at]) for text, at in _BETWEEN_WORDS)):
        found = found._replace(words=False)
    return found


def whole(tokenizer: Tokenizer, text: str, *, special: bool = False) -> list[int]:
    """The ids of a text in one piece."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
    return ids


def _is_same(tokenizer: Tokenizer, text: str, starts: list[int]) -> bool:
    cut = [token for a, b in pairwise([*starts, len(text)]) for token in whole(tokenizer, text[a:b])]
    return cut == whole(tokenizer, text)


def _added_around(tokenizer: Tokenizer) -> tuple[Ids | None, Ids | None]:
    frame = whole(tokenizer, "", special=True)
    for cut in range(len(frame) + 1):
        before, after = frame[:cut], frame[cut:]
        if all(
            before + whole(tokenizer, probe) + after == whole(tokenizer, probe, special=True)
            for probe in _PLAIN_PROBES
        ):
            return array("I", before), array("I", after)
    return None, None


def _around_barriers(barriers: list[str]) -> list[str]:
    """Texts with barriers between, before and after pieces that normalizers and splitters care about."""
    texts = []
    for number, barrier in enumerate(barriers[:_PROBED_BARRIERS_MAX]):
        other = barriers[(number + 1) % len(barriers)]
        texts += [f"{left}{barrier}{right}{other}{left}" for left in _PROBE_PIECES for right in _PROBE_PIECES]
    return texts
