"""A text that was tokenized in pieces, and how much of it another text can take over.

What a tokenizer makes of a piece depends on nothing outside it (``cuts.py``). So two texts that are equal up
to a place at which both may be cut have the same tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class CutText(msgspec.Struct, frozen=True, gc=False):
    """Piece ``i`` begins at character ``starts[i]``, with ``counts[i]`` tokens before it."""

    text: str
    starts: tuple[int, ...]
    counts: tuple[int, ...]

    def num_shared(self, text: str, may_cut: Callable[[str, int], bool]) -> int:
        """How many leading pieces ``text`` begins with and may be cut behind; never the last one."""
        shared = last = len(self.starts) - 1
        at = self.starts[last]
        # Mostly all of it is there: that needs no copy of the text to be seen.
        if not text.startswith(self.text[at:], at):
            shared = self._num_equal(text, last, last + 1)
        elif not text.startswith(self.text):  # so they differ before the last piece
            shared = self._num_equal(text, last // 2, last)
        while shared and not may_cut(text, self.starts[shared]):
            shared -= 1
        return shared

    def _num_equal(self, text: str, middle: int, high: int) -> int:
        """How many leading pieces are the same in both, fewer than ``high``: ``middle`` of them, or found by
        bisection."""
        starts, own, low = self.starts, self.text, 0
        while high - low > 1:  # texts are equal up to starts[low], maybe not up to starts[high]
            if text.startswith(own[starts[low] : starts[middle]], starts[low]):
                low = middle
            else:
                high = middle
            middle = (low + high) // 2
        return low
