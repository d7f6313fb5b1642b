"""What the router remembers of its own requests: the books that a placement is entered in and taken out of.

One object, so that the parts travel together and an engine that leaves is forgotten in all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from router.observe.access_log import AccessLog, AccessLogSettings
from router.observe.receipts import ReceiptBook
from router.placement.affinity import AffinityMap
from router.placement.inflight import InflightPrefixes
from router.placement.load import LoadAccount
from router.placement.rates import RateBook
from router.placement.shadow import ShadowFleet

_NO_ACCESS_LOG = AccessLogSettings()


class Books(msgspec.Struct):
    """What the router remembers of its own requests; one object so that the parts travel together."""

    load: LoadAccount
    inflight: InflightPrefixes
    shadows: ShadowFleet
    affinity: AffinityMap
    receipts: ReceiptBook
    now: Callable[[], float]
    """The router's clock, in seconds."""
    access: AccessLog | None = None
    """Where answered requests are written down; None: nowhere."""

    @classmethod
    def empty(cls, clock: Callable[[], float], access: AccessLogSettings = _NO_ACCESS_LOG) -> Books:
        return cls(
            LoadAccount(RateBook()),
            InflightPrefixes(),
            ShadowFleet(),
            AffinityMap(),
            ReceiptBook(),
            clock,
            AccessLog(access) if access.path else None,
        )

    def forget(self, engine_id: str) -> None:
        """The engine left the fleet."""
        for book in (self.load, self.load.rates, self.inflight, self.shadows, self.affinity, self.receipts):
            book.forget(engine_id)
