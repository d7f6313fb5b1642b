"""One engine of the fleet: (base URL, data-parallel rank), and where its events come from."""

from __future__ import annotations

import msgspec


class Engine(msgspec.Struct, frozen=True):
    """Identity and addresses of an engine. ``events`` is None for an engine that publishes none.

    ``dp_rank`` is None for a server without data parallelism; ``topic`` is the ZMQ prefix to subscribe to.
    """

    base_url: str
    """``http://host:port``, without ``/v1``."""
    dp_rank: int | None = None
    """The data-parallel rank of this entry; sent to the server as ``x-data-parallel-rank``."""
    events: str | None = None
    """ZMQ address its events are published at, e.g. ``tcp://host:5557``."""
    replay: str | None = None
    """ZMQ address that sends missed events again, e.g. ``tcp://host:5558``."""
    topic: str = ""
    """What the engine's ``--kv-events-config`` says; "" takes every topic."""
    snapshot: str | None = None
    """ZMQ address that serves snapshots, where the engine has one of its own; else ``replay`` is probed."""

    @property
    def engine_id(self) -> str:
        """Stable name in metrics, receipts and headers: ``http://host:port`` or ``...#dp1``."""
        return self.base_url if self.dp_rank is None else f"{self.base_url}#dp{self.dp_rank}"
