"""One engine of the fleet: (base URL, data-parallel rank), and where its events come from."""

from __future__ import annotations

import msgspec


class Engine(msgspec.Struct, frozen=True):
    """Identity and addresses of an engine. ``events`` is None for an engine that publishes none.

    ``dp_rank`` is None for a server without data parallelism; ``topic`` is the ZMQ prefix to subscribe to.
    """

    base_url: str
    dp_rank: int | None = None
    events: str | None = None
    replay: str | None = None
    topic: str = ""

    @property
    def engine_id(self) -> str:
        """Stable name in metrics, receipts and headers: ``http://host:port`` or ``...#dp1``."""
        return self.base_url if self.dp_rank is None else f"{self.base_url}#dp{self.dp_rank}"
