"""What the router remembers of its own requests across engines: what no single engine can own.

An engine's part (load, rates, receipts, shadow) belongs to ``Engine``; here are the medians and counters of all
of them, the prompts in flight and the text affinity, which are searched for all engines at once.
"""

from __future__ import annotations

from collections.abc import Callable

from router.fleet.identity import EngineId
from router.observe.access_log import AccessLog, AccessLogSettings
from router.observe.receipts import ReceiptLog
from router.placement.affinity import AffinityMap
from router.placement.inflight import InflightPrefixes
from router.placement.load import LoadStats
from router.placement.rates import FleetRates
from router.placement.shadow import ShadowStats

_NO_ACCESS_LOG = AccessLogSettings()


class Accounts:
    """One per router. ``now`` is the router's clock in monotonic seconds; ``access`` None: nothing is logged."""

    def __init__(self, now: Callable[[], float], access: AccessLogSettings = _NO_ACCESS_LOG) -> None:
        self.now = now
        self.rates = FleetRates()
        self.load_stats = LoadStats()
        self.inflight = InflightPrefixes()
        self.affinity = AffinityMap()
        self.shadow_stats = ShadowStats()
        self.receipts = ReceiptLog()
        self.access = AccessLog(access) if access.path else None

    def leave(self, engine_id: EngineId) -> None:
        """The engine left the fleet."""
        self.inflight.forget(engine_id)
        self.affinity.forget(engine_id)
