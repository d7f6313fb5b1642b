"""Where a text may be cut before it is tokenized, and what a tokenizer puts around every text.

``tokenizers`` cuts a text at added tokens before it normalizes, pre-tokenizes and models each piece by
itself. A *barrier* is an added token whose every occurrence is such a cut, whatever stands around it: it
is matched on the raw text, takes no white space along, and no other added token can overlap an
occurrence of it from the left (or, where that one is matched first, from the right) or be longer at the same
place. So a text may be cut before each barrier, and a piece's ids depend on nothing outside it: a next turn
tokenizes only what follows the last barrier it shares with the turn before. At load this is checked with
probe texts as well; where they differ there are no barriers.

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

_WINDOW_CHARS: Final = 1 << 17
"""Scanned in one go, about 1 ms: a regular expression holds the GIL."""
_PLAIN_PROBES: Final = ("", "a", "Hello world", " leading", "trailing ", "日本 é\n\n", "1234 x")
_PROBE_PIECES: Final = (
    *("", " ", "\n", "\t", "  two", "word", " word ", "\n\n x"),
    *("é", "e\u0301", "日本", "12345", "'s", "<|"),
)
_PROBED_BARRIERS_MAX: Final = 6
"""Barriers differ only by their text; more would only make loading slower."""


class Cuts(NamedTuple):
    """What was found of one tokenizer. ``prefix`` and ``suffix``: what ``add_special_tokens`` puts before and
    after any text; None, None where it does more."""

    barrier: re.Pattern[str] | None
    barrier_chars_max: int
    prefix: Ids | None
    suffix: Ids | None

    def split(self, text: str) -> list[int]:
        """Where ``text`` may be cut: 0, and the character offset of every barrier."""
        if self.barrier is None:
            return [0]
        if len(text) <= _WINDOW_CHARS:
            return [0, *[match.start() for match in self.barrier.finditer(text, 1)]]
        return [0, *self._barrier_starts(self.barrier, text)]

    def may_cut(self, text: str, at: int) -> bool:
        """Whether ``text`` may be cut before character ``at``, whatever it was cut at so far."""
        return self.barrier is not None and self.barrier.match(text, at) is not None

    def _barrier_starts(self, barrier: re.Pattern[str], text: str) -> Iterator[int]:
        """Where barriers begin, but for one at 0; window by window, so that other threads get their turn."""
        begin, overlap = 1, self.barrier_chars_max - 1
        while begin < len(text):  # barriers never overlap each other, so a window may begin inside one
            end = begin + _WINDOW_CHARS
            matches = barrier.finditer(text, begin, end + overlap)
            yield from (match.start() for match in matches if match.start() < end)
            begin = end


@lru_cache(maxsize=4)
def cuts_of(tokenizer: Tokenizer) -> Cuts:
    """Find barriers and special tokens, and try both on probe texts."""
    barriers = find_barriers(tokenizer)
    found = Cuts(barrier_pattern(barriers), max(map(len, barriers), default=0), *_added_around(tokenizer))
    return found if _probes_agree(tokenizer, found, barriers) else found._replace(barrier=None)


def whole(tokenizer: Tokenizer, text: str, *, special: bool = False) -> list[int]:
    """The ids of a text in one piece."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
    return ids


def _probes_agree(tokenizer: Tokenizer, cuts: Cuts, barriers: list[str]) -> bool:
    for text in _probe_texts(barriers):
        starts = [*cuts.split(text), len(text)]
        cut = [token for a, b in pairwise(starts) for token in whole(tokenizer, text[a:b])]
        if cut != whole(tokenizer, text):
            return False
    return True


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


def _probe_texts(barriers: list[str]) -> list[str]:
    """Texts with barriers between, before and after pieces that normalizers and splitters care about."""
    texts = []
    for number, barrier in enumerate(barriers[:_PROBED_BARRIERS_MAX]):
        other = barriers[(number + 1) % len(barriers)]
        texts += [f"{left}{barrier}{right}{other}{left}" for left in _PROBE_PIECES for right in _PROBE_PIECES]
    return texts
