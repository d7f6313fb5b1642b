"""Updates that no decision reads are applied after the answers, many at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import structlog

_log = structlog.get_logger()


DEFERRED_MAX = 512
"""Three of each request; together they take about 4 ms."""
_DEFERRED_S = 0.05


class DeferredStats(msgspec.Struct):
    """Counters for metrics."""

    full: Annotated[int, "kvatlas_deferred_updates_full_total"] = 0
    """Times that updates of receipts and counts were applied while a request waited, since too many of them
    had been deferred."""


class DeferredUpdates:
    """Updates of receipts, counts and hot prefixes: applied in their order within ``_DEFERRED_S``, and before
    anyone reads what they change.

    At most ``DEFERRED_MAX`` wait: the last one applies all. Without a running event loop none waits.
    """

    __slots__ = ("_applying", "_timer", "_waiting", "stats")

    def __init__(self) -> None:
        self.stats = DeferredStats()
        self._waiting: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._applying = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, update: Callable[..., None], args: tuple[Any, ...] = ()) -> None:
        """Defer ``update(*args)``."""
        self._waiting.append((update, args))
        if self._timer is None:
            self._schedule()
        elif len(self._waiting) >= DEFERRED_MAX:
            self.stats.full += 1
            self.apply()

    def apply(self) -> None:
        """Apply all updates; to be called before anyone reads what they change."""
        # An update may read what others change.
        if self._applying:
            return
        self._applying, waiting = True, self._waiting
        try:
            while waiting:
                update, args = waiting.popleft()
                try:
                    update(*args)
                except Exception:  # noqa: BLE001  # no reader and no request may fail with it
                    _log.exception("deferred update failed")
        finally:
            # Also after what no update may catch (``KeyboardInterrupt``): the next reader goes on.
            self._applying = False

    def _schedule(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.apply()
        else:
            self._timer = loop.call_later(_DEFERRED_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.apply()
