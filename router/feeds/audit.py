"""Background work: searches for hash seeds, and audits of the index against the engines' pools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import structlog

from router.feeds.base import FeedState
from router.feeds.manager import FeedManager
from router.fleet.status import EngineStatus
from router.index.models import Scopes

_log = structlog.get_logger()
_DETECTION_TICK_S = 0.05
_SEARCH_SHARE = 0.25
"""Of the event loop's time, for seed searches."""
_AFTER_FAULT_S = 1.0
_AUDIT_S = 5.0
_PHANTOM_PAUSE_S = 60.0
"""Between two alarms of one engine: a cause that a re-sync does not remove must not keep it busy."""


class ResidencyAudit:
    """See the module; ``detect`` and ``audit_all`` run until cancelled."""

    def __init__(
        self,
        fleet: Iterable[EngineStatus],
        scopes: Scopes,
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
        """Continue seed searches, one slice at a time, also while no events come, and let the engines' events
        be learned from as time goes on."""
        while True:
            begun_s = self._clock()
            try:
                self._scopes.refill(begun_s)
                searching = self._scopes.advance_detection()
                took_s = self._clock() - begun_s
                pause_s = took_s * (1 / _SEARCH_SHARE - 1) if searching else _DETECTION_TICK_S
            except Exception:  # noqa: BLE001  # costs a detection; the router goes on
                _log.exception("detection failed")
                pause_s = _AFTER_FAULT_S
            await asyncio.sleep(pause_s)

    async def audit_all(self) -> None:
        """Check every engine: one that holds more blocks than its pool has is fetched again. Also expire old
        entries of shared stores."""
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
        """The engine left the fleet."""
        self._audit_after.pop(engine_id, None)
