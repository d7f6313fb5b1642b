"""What is still to be written of one mirrored engine, and when its blocks are due to be written again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from publisher.events import BlockHash
from router.index.base import Words
from router.index.shared.registry import EngineFacts, Seat


class Pending:
    """One engine of a writer. Bounded by ``touched_max`` changed blocks, and by what memory holds."""

    __slots__ = (
        "_refresh",
        "_refreshed",
        "_round_began",
        "backlog",
        "facts",
        "facts_due",
        "in_flight",
        "seat",
        "token",
        "touched",
        "whole",
    )

    def __init__(self, token: int, *, whole: bool) -> None:
        self.token = token
        self.seat: Seat | None = None
        """None: a generation must be claimed before anything is written."""
        self.touched: set[BlockHash] = set()
        self.whole = whole
        """Without a seat: whether ``touched`` is all that memory holds of the engine."""
        self.backlog: list[BlockHash] = []
        self.facts = EngineFacts()
        self.facts_due = True
        self.in_flight = 0
        """Batches sent and not answered."""
        self._refresh: Words | None = None
        self._refreshed = 0
        self._round_began = 0.0

    @property
    def idle(self) -> bool:
        return self.seat is not None and not (self.touched or self.backlog or self.facts_due)

    @property
    def written(self) -> bool:
        """Whether the server has all that memory holds."""
        return self.seat is not None and not (self.touched or self.backlog or self.in_flight)

    @property
    def waiting(self) -> int:
        """Blocks not sent yet."""
        return len(self.touched) + len(self.backlog)

    def seated(self, seat: Seat, now: float) -> None:
        """A generation was claimed."""
        self.seat, self.facts_due = seat, True
        self._refresh, self._round_began = None, now

    def unseat(self, *, whole: bool) -> None:
        """Nothing written counts any more."""
        self.seat, self.whole = None, whole
        self.touched, self.backlog = set(), []

    def touch(self, hashes: Sequence[BlockHash], limit: int) -> bool:
        """Blocks that changed; False if that is more than can wait, so that all must be written anew."""
        if self.seat is None and not self.whole:
            return True  # the claim will look at everything
        self.touched.update(hashes)
        if len(self.touched) <= limit:
            return True
        self.unseat(whole=False)
        return False

    def take(self, limit: int) -> list[BlockHash]:
        """The next blocks to write, changes first."""
        if len(self.touched) <= limit:
            taken, self.touched = list(self.touched), set()
        else:
            taken = [self.touched.pop() for _ in range(limit)]
        rest = limit - len(taken)
        if rest and self.backlog:
            taken += self.backlog[-rest:]
            del self.backlog[-rest:]
        return taken

    def refresh(self, held: Callable[[], Words], now: float, period_s: float) -> None:
        """Move the blocks whose turn it is to the backlog; ``held`` lists all of them for the next round."""
        if self.seat is None:
            return
        share = (now - self._round_began) / period_s
        if self._refresh is not None:
            due = min(len(self._refresh), int(len(self._refresh) * share) + 1)
            self.backlog += map(BlockHash, self._refresh[self._refreshed : due].tolist())
            self._refreshed = due
        if share >= 1:
            self._refresh, self._refreshed, self._round_began = held(), 0, now
