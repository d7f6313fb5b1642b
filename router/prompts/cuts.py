"""Safe cuts of a text before tokenization, and the tokens that a tokenizer adds around every text.

``tokenizers`` cuts a text at added tokens before it normalizes, pre-tokenizes and models each piece
separately. A *barrier* is an added token whose every occurrence is such a cut, in any context: it is matched
on the raw text, strips no white space, and no other added token can overlap an occurrence of it from the left
(or, if that one is matched first, from the right) or be longer at the same place. So a text may be cut before
each barrier, and a piece's ids depend only on the piece: a next turn tokenizes only the text after the last
cut it shares with the previous turn. Long pieces are also cut between words, if the kind of tokenizer
separates them anyway. Both are tried on probe texts at load; if they change any ids, they are not used.

Probing depends on the tokenizer alone and takes up to a second, so its result is cached.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias

import msgspec
from tokenizers import Tokenizer

from kvatlas.router.prompts.barriers import barrier_pattern, find_barriers
from kvatlas.router.prompts.word_cuts import NEAR_CHARS, PIECE_CHARS, between_words, parts_words, word_cuts

Ids: TypeAlias = "array[int]"
"""Token ids, an ``array`` of 4 bytes each."""


class Encoded(msgspec.Struct, frozen=True, gc=False):
    """Separately tokenized texts: all ids, and per text the number of ids before it; then the total."""

    ids: Ids
    offsets: list[int]

    def piece(self, number: int) -> Ids:
        """The ids of one text."""
        return self.ids[self.offsets[number] : self.offsets[number + 1]]


# Scanned at once, about 1 ms: a regular expression holds the GIL.
_WINDOW_CHARS: Final = 1 << 17
_PLAIN_PROBES: Final = ("", "a", "Hello world", " leading", "trailing ", "日本 é\n\n", "1234 x")
_PROBE_PIECES: Final = (
    "",
    " ",
    "\n",
    "\t",
    "  two",
    "word",
    " word ",
    "\n\n x",
    "é",
    "e\u0301",
    "日本",
    "12345",
    "'s",
    "<|",
)
_BETWEEN_WORDS: Final = [
    (f"{left}x {right}", len(left) + 1) for left in _PROBE_PIECES for right in _PROBE_PIECES
]
# Barriers differ only by their text; more would only make loading slower.
_PROBED_BARRIERS_MAX: Final = 6


class Cuts(NamedTuple):
    """Cuts of one tokenizer. ``prefix`` and ``suffix``: tokens that ``add_special_tokens`` puts before and
    after any text; None, None if it does more. ``words``: texts may be cut between words."""

    barrier: re.Pattern[str] | None
    barrier_chars_max: int
    words: bool
    prefix: Ids | None
    suffix: Ids | None

    def split(self, text: str, begin: int = 0, near_chars: int = NEAR_CHARS) -> list[int]:
        """Cuts of ``text`` from ``begin`` on: ``begin`` itself, the character offsets of barriers that are at
        least ``near_chars`` behind the cut before, and places in long pieces."""
        starts, chars = [begin], len(text) - begin
        if self.barrier is not None and chars > _WINDOW_CHARS:
            starts += self._barrier_starts(self.barrier, text, begin + near_chars, near_chars)
        elif self.barrier is not None:
            near = begin + near_chars
            for match in self.barrier.finditer(text, near):
                start = match.start()
                if start >= near:
                    starts.append(start)
                    near = start + near_chars
        return list(word_cuts(text, starts)) if self.words and chars > PIECE_CHARS else starts

    def may_cut(self, text: str, at: int) -> bool:
        """Whether ``text`` may be cut before character ``at``, independently of other cuts."""
        if self.barrier is not None and self.barrier.match(text, at) is not None:
            return True
        return self.words and between_words(text, at)

    def _barrier_starts(
        self, barrier: re.Pattern[str], text: str, begin: int, near_chars: int
    ) -> Iterator[int]:
        """Starts of barriers from ``begin`` on; window by window, so that other threads can run."""
        overlap, near = self.barrier_chars_max - 1, begin
        # A regular expression holds the GIL: window by window, other threads can run.
        # Barriers never overlap each other, so a window may begin inside one.
        while begin < len(text):
            end = begin + _WINDOW_CHARS
            matches = barrier.finditer(text, begin, end + overlap)
            for match in matches:
                start = match.start()
                if near <= start < end:
                    yield start
                    near = start + near_chars
            begin = end


@lru_cache(maxsize=4)
def cuts_of(tokenizer: Tokenizer) -> Cuts:
    """Find barriers and special tokens, and try both on probe texts."""
    barriers = find_barriers(tokenizer)
    frame = _added_around(tokenizer)
    found = Cuts(
        barrier_pattern(barriers), max(map(len, barriers), default=0), parts_words(tokenizer), *frame
    )
    if not all(_is_same(tokenizer, text, found.split(text, 0, 1)) for text in _around_barriers(barriers)):
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
    # Which tokens come before and which after a text shows only with texts between them.
    for cut in range(len(frame) + 1):
        before, after = frame[:cut], frame[cut:]
        if all(
            before + whole(tokenizer, probe) + after == whole(tokenizer, probe, special=True)
            for probe in _PLAIN_PROBES
        ):
            return array("I", before), array("I", after)
    return None, None


def _around_barriers(barriers: list[str]) -> list[str]:
    """Texts with barriers between, before and after pieces that normalizers and splitters treat specially."""
    texts = []
    for number, barrier in enumerate(barriers[:_PROBED_BARRIERS_MAX]):
        other = barriers[(number + 1) % len(barriers)]
        texts += [f"{left}{barrier}{right}{other}{left}" for left in _PROBE_PIECES for right in _PROBE_PIECES]
    return texts
