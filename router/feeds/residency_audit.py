"""Background work: searches for hash seeds, and audits of the index against the engines' pools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from kvatlas.router.feeds.base import FeedState
from kvatlas.router.feeds.manager import FeedManager, _log
from kvatlas.router.fleet.status import EngineStatus
from kvatlas.router.index.model_indexes import ModelIndexes

_DETECTION_TICK_S = 0.05
# Maximum share of the event loop's time for seed searches.
_SEARCH_SHARE = 0.25
_AFTER_FAULT_S = 1.0
_AUDIT_S = 5.0
# Pause between two alarms of one engine: a cause that a resync does not remove must not keep it busy.
_PHANTOM_PAUSE_S = 60.0


class ResidencyAudit:
    """Background checks; ``detect`` and ``audit_all`` run until cancelled."""

    def __init__(
        self,
        fleet: Iterable[EngineStatus],
        scopes: ModelIndexes,
        feeds: FeedManager,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._scopes = scopes
        self._feeds = feeds
        self._clock = clock
        self._audit_after: dict[str, float] = {}

    async def detect(self) -> None:
        """Continue seed searches, one slice at a time, even without new events, and learn from the engines'
        events periodically."""
        while True:
            begun_s = self._clock()
            try:
                self._scopes.refill(begun_s)
                searching = self._scopes.advance_detection()
                took_s = self._clock() - begun_s
                pause_s = took_s * (1 / _SEARCH_SHARE - 1) if searching else _DETECTION_TICK_S
            except Exception:  # noqa: BLE001  # the search fails, the router continues
                _log.exception("detection failed")
                pause_s = _AFTER_FAULT_S
            await asyncio.sleep(pause_s)

    async def audit_all(self) -> None:
        """Check every engine; if one holds more blocks than its pool has, fetch its residency again. Also
        expire old entries of shared stores."""
        while True:
            await asyncio.sleep(_AUDIT_S)
            self._scopes.age(self._clock())
            for status in self._fleet:
                self.audit(status)

    def audit(self, status: EngineStatus) -> None:
        """Compare one engine's residency with the size of its pool; if it is larger, fetch it again."""
        stats, engine = self._feeds.stats.get(status.engine_id), self._scopes.engine(status.engine_id)
        now = self._clock()
        if stats is None or engine is None or status.pool_blocks is None:
            return
        if stats.state is not FeedState.READY or now < self._audit_after.get(status.engine_id, now):
            return
        if not engine.audit(status.pool_blocks):
            self._audit_after[status.engine_id] = now + _PHANTOM_PAUSE_S
            stats.phantom_alarms += 1
            _log.warning(
                "index holds more blocks than the engine has",
                engine=status.engine_id,
                pool=status.pool_blocks,
            )
            self._feeds.distrust(status.engine_id, "phantom")

    def forget(self, engine_id: str) -> None:
        self._audit_after.pop(engine_id, None)
