"""Books: what requests leave behind that no decision reads, entered many at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import structlog

_log = structlog.get_logger()
ENTRIES_MAX = 512
"""Two of each request; together they take about 4 ms."""
_TICK_S = 0.05


class BooksStats(msgspec.Struct):
    """Counters for metrics."""

    full: Annotated[int, "kvatlas_deferred_updates_full_total"] = 0
    """Times that updates of receipts and counts were applied while a request waited, since too many of them
    had been deferred."""


class Books:
    """Entries wait until they are settled, in their order: once per tick, and before anyone reads the books.

    At most ``ENTRIES_MAX`` wait: the last one settles all. Without a running event loop none waits.
    """

    __slots__ = ("_settling", "_timer", "_waiting", "stats")

    def __init__(self) -> None:
        self.stats = BooksStats()
        self._waiting: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._settling = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, settle: Callable[..., None], *entry: Any) -> None:
        """Have ``settle(*entry)`` called."""
        self._waiting.append((settle, entry))
        if self._timer is None:
            self._schedule()
        elif len(self._waiting) >= ENTRIES_MAX:
            self.stats.full += 1
            self.settle()

    def settle(self) -> None:
        """Settle all entries; to be called before anyone reads the books."""
        # An entry may read what others change.
        if self._settling:
            return
        self._settling, waiting = True, self._waiting
        try:
            while waiting:
                settle, entry = waiting.popleft()
                try:
                    settle(*entry)
                except Exception:  # noqa: BLE001  # no reader and no request may fail with it
                    _log.exception("entry not settled")
        finally:
            # Also after what no entry may catch (``KeyboardInterrupt``): the next reader goes on.
            self._settling = False

    def _schedule(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.settle()
        else:
            self._timer = loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.settle()
