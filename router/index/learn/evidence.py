"""What the long search for a seed may begin with, where no event shows all that its hashes cover.

One piece is kept, the surest seen and of equals the cheapest. Those that most likely show everything are
searched with at once, others after 8 pieces and again after 64. Every kind has searches of its own, so that
what is wrong with one leaves those of the others; and nothing is searched with twice.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum

from router.index.learn.root_events import PendingRoots, RootEvent

PATIENCE = 64
_WEAK_PATIENCE = 8
_SEARCHES_MAX = 2
"""With evidence of each trust."""
_SEARCHED_MAX = 16

_SEARCH_TOKENS_MAX = 4096
"""A span is searched with only if it is this short: every seed hashes it whole."""

_CHEAP_TOKENS = 512
"""One longer than this has to wait until ``PATIENCE`` pieces of evidence proved nothing."""


class Trust(IntEnum):
    """How surely a piece of evidence shows all that its hashes cover; the surest first."""

    PLACED = 0
    """A placed prompt that begins as the event does; nothing else tells how far multimodal items reach."""
    LEGIBLE = 1
    """An event whose first block shows all of its extra keys."""
    JOINED = 2
    """The block stands in a placed prompt, but the engine may have told of it after another beginning."""
    HIDDEN = 3


class SearchEvidence:
    """The evidence of one engine, and how often it was searched with."""

    def __init__(self) -> None:
        self._best: RootEvent | None = None
        self._trust = Trust.HIDDEN
        self._seen = 0
        self._searches = dict.fromkeys(Trust, 0)
        self._searched: deque[RootEvent] = deque(maxlen=_SEARCHED_MAX)

    def keep(self, root: RootEvent, *, placed: bool) -> None:
        """Look at a span that lists hashes; ``placed``: its tokens are a prompt's that is to be placed."""
        if root.full:
            root = root.first_block
        if root.cost > _SEARCH_TOKENS_MAX or root in self._searched:
            return
        self._seen += 1
        trust = _trust(root, placed=placed)
        if self._best is None or (trust, root.cost) < (self._trust, self._best.cost):
            self._best, self._trust = root, trust

    def drop(self) -> None:
        """Nothing is to be searched for any more."""
        self._best = None

    def take(self, pending: PendingRoots, unmatched: int) -> RootEvent | None:
        """What to search with now; None where it is too early. ``unmatched`` events proved nothing so far."""
        seen = max(self._seen, unmatched)
        trust = Trust.HIDDEN if self._best is None else self._trust
        if self._searches[trust] >= _SEARCHES_MAX:
            trust = Trust.HIDDEN
        hidden = self._searches[Trust.HIDDEN]
        early = seen < _WEAK_PATIENCE ** (1 + hidden)
        if trust is Trust.HIDDEN and (early or hidden >= _SEARCHES_MAX):
            return None
        evidence = self._best or pending.evidence()
        if evidence is None or evidence.cost > (_CHEAP_TOKENS if seen < PATIENCE else _SEARCH_TOKENS_MAX):
            return None
        self._best, self._seen = None, 0
        self._searched.append(evidence)
        pending.tried(evidence)
        self._searches[trust] += 1
        return evidence


def _trust(root: RootEvent, *, placed: bool) -> Trust:
    if placed:
        return Trust.JOINED if root.joined else Trust.PLACED
    return Trust.LEGIBLE if root.legible else Trust.HIDDEN
