"""Hits of an engine whose events tell a part of its caches only: what its receipts confirmed of them.

SGLang's events show full attention; where a window's pages or a Mamba state are missing, the engine takes
less. How much less depends on the prompt: the next turn of a conversation finds its state, another prompt
with the same beginning may not. So the share of a hit that engines report is learned by class of prompt: the
length of the hit, and the part of the prompt that it covers. A class without receipts takes the share of all;
without any receipt all of a hit counts. Latest receipts count most: a class is known after some four of them.

Where SGLang's own rules say how much it is (``radix_parts.py``), that counts instead, as long as receipts
show it to be no further from the truth: the rules miss what other clients of the engine look up.
Pure; at most ``_LENGTHS * _PARTS`` classes.
"""

from __future__ import annotations

from typing import Final

# Weight that a share keeps with each further receipt of its class: the memory is some ten receipts.
_KEPT: Final = 0.9
# Classes of hits: powers of two of their tokens, and quarters of the prompt that they cover.
_LENGTHS, _PARTS = 25, 4

_Class = tuple[int, int]


class _Mean:
    """A mean of which old values fade; ``prior`` has the weight of one value."""

    __slots__ = ("_sum", "_weight")

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, value: float) -> None:
        self._sum = _KEPT * self._sum + value
        self._weight = _KEPT * self._weight + 1.0

    def of(self, prior: float) -> float:
        return (self._sum + prior) / (self._weight + 1.0)


class PartialHits:
    """Shares of one engine's hits that its receipts confirmed. Sizes in tokens."""

    __slots__ = ("_all", "_by_class", "_rules_miss", "_shares_miss")

    def __init__(self) -> None:
        self._all = _Mean()
        self._by_class: dict[_Class, _Mean] = {}
        # Distance from the truth, as a share of the hit by events.
        self._rules_miss, self._shares_miss = _Mean(), _Mean()

    @property
    def by_rules(self) -> bool:
        """Whether what the rules say counts."""
        return self._rules_miss.of(0.0) <= self._shares_miss.of(0.0)

    def expected(self, hit: int, prompt: int, alignment: int, ruled: int | None = None) -> int:
        """Return what the engine is expected to take of a hit by its events: a multiple of ``alignment``;
        ``ruled``: what its own rules say."""
        if ruled is not None and self.by_rules:
            return min(hit, ruled)
        known, share = self._by_class.get(_class(hit, prompt)), self._all.of(1.0)
        if known is not None:
            share = known.of(share)
        return min(hit, round(share * hit / alignment) * alignment)

    def add(self, hit: int, prompt: int, actual: int, ruled: int | None = None) -> None:
        """Learn from a report of ``actual`` tokens, where the rules said ``ruled``."""
        if hit <= 0:
            return
        if ruled is not None:
            self._rules_miss.add(abs(min(hit, ruled) - actual) / hit)
            self._shares_miss.add(abs(self.expected(hit, prompt, 1) - actual) / hit)
        share = min(1.0, actual / hit)
        self._all.add(share)
        self._by_class.setdefault(_class(hit, prompt), _Mean()).add(share)


def _class(hit: int, prompt: int) -> _Class:
    part = _PARTS * hit // max(prompt, hit, 1)
    return min(hit.bit_length(), _LENGTHS - 1), min(part, _PARTS - 1)
