"""Stop strings of an answer whose engine does not look for them: what vLLM's detokenizer does (0.32).

Text that may begin a stop string is held back (v1/engine/detokenizer.py, ``update`` and
``get_next_output_text``). One event may hold several tokens; strings count by the token that completes them,
so the ends of tokens in the text are found by decoding. Invariant: text is given once, in order. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

Decode = Callable[[Sequence[int]], str]
"""Text of ids, as the engine's detokenizer makes it."""
UNFINISHED: Final = "\ufffd"
"""The end of decoded text whose last character is not whole."""
# Of the tokens before, which show how the next ones read.
_CONTEXT_LEN: Final = 16


class StopRules(msgspec.Struct, frozen=True, gc=False):
    """Rules of one request."""

    stops: tuple[str, ...] = ()
    included: bool = False
    """The string is a part of the answer."""
    min_tokens: int = 0
    """No string ends a shorter answer, or one of this length."""

    @property
    def held_back(self) -> int:
        """Characters that the text is behind the tokens, since they may begin a stop string."""
        return max(map(len, self.stops)) - 1 if self.stops and not self.included else 0


class StopMatch(msgspec.Struct, frozen=True, gc=False):
    """The end of an answer by a stop string. ``tokens``: of the last event, up to the one that completes
    it."""

    text: str
    stop: str
    tokens: int


class StoppingText:
    """Text of an answer that goes on. ``text`` of the tokens ``ids`` is known, ``sent`` characters of it have
    been given."""

    def __init__(self, rules: StopRules, text: str, sent: int, ids: Sequence[int], decode: Decode) -> None:
        self._rules = rules
        self._text = text
        self._sent = sent
        self._ids = list(ids)
        self._whole = len(self._ids)
        """Ids whose text is whole, and is all of ``_text``."""
        self._decode = decode

    def add(self, text: str, ids: Sequence[int]) -> StopMatch | None:
        """Add the text of further tokens; the end of the answer, where it completes a stop string."""
        rules, before, old = self._rules, len(self._ids), len(self._text)
        ends = [old, *self._ends(text, ids)]
        self._text += text
        if len(self._ids) <= rules.min_tokens:
            return None
        whole, checked = self._text, ends[max(rules.min_tokens - before, 0)]
        if checked == len(whole):
            return None
        best, end = "", 0
        for stop in rules.stops:
            at = whole.find(stop, max(0, checked - len(stop) + 1))
            if at >= 0 and (not best or at + len(stop) < end):
                best, end = stop, at + len(stop)
        if not best:
            return None
        tokens = bisect_left(ends, end, lo=1)
        return StopMatch(whole[self._sent : end if rules.included else end - len(best)], best, tokens)

    def passed(self, *, flush: bool = False) -> str:
        """The text to be sent now."""
        start, end = self._sent, len(self._text) - (0 if flush else self._rules.held_back)
        self._sent = max(start, end)
        return self._text[start:end] if end > start else ""

    def _ends(self, text: str, ids: Sequence[int]) -> list[int]:
        """The ends of these tokens in the text."""
        old, known = len(self._text), self._ids[max(0, self._whole - _CONTEXT_LEN) :]
        after = old + len(text)
        ends: list[int] = []
        if len(ids) > 1:
            pending = len(self._ids) - self._whole
            prefix = len(self._decode(known[: len(known) - pending]))
            for count in range(1, len(ids) + 1):
                seen = self._decode([*known, *ids[:count]])
                whole = not seen.endswith(UNFINISHED)
                ends.append(old + len(seen) - prefix if whole else ends[-1] if ends else old)
                if whole:
                    self._whole = len(self._ids) + count
        elif text:
            self._whole = len(self._ids) + 1
        self._ids += ids
        return ends if ends and ends[-1] == after else [after] * max(1, len(ids))
