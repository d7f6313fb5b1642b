"""What became of reloads of the configuration: its own module, as the page is below the part that reloads."""

from __future__ import annotations

import msgspec


class ReloadStats(msgspec.Struct):
    """Counters for metrics."""

    reloads: dict[str, int] = msgspec.field(
        default_factory=lambda: dict.fromkeys(("applied", "unchanged", "refused"), 0)
    )
    """Reloads of the configuration (SIGHUP), by outcome."""
    waiting: int = 0
    """Gauge: settings that the configuration file has otherwise, and that need a new start."""
