"""The order in engines that schedule by priority (vLLM: ``--scheduling-policy priority``): lower goes first.

    priority = class + milliseconds of arrival + engine_priority * milliseconds of uncached work

The class comes first: negative values for ``high``, from 0 for ``normal``, from ``BAND_MS`` for ``low``, so
that no request passes one of a class above. Within a class a prompt waits for those that come up to
``engine_priority`` times its own work later, and for no others: nothing starves.

Routers share engines, so arrival counts from one moment of the wall clock. A router whose clock is a second
ahead loses a second to the others.

vLLM reads a header (``ENGINE_PRIORITY``) before the body's ``priority``
(vllm/entrypoints/generate/base/serving.py ``_get_priority``, 0.32 and 0.33): bodies stay as they came.
"""

from __future__ import annotations

import time
from typing import Final

import msgspec

BAND_MS: Final = 1 << 42
"""Values of one class: 139 years of milliseconds. The three together fit the 53 bits of a JSON number."""
_EPOCH_S: Final = 1_767_225_600
"""2026-01-01 UTC."""
_NORMAL: Final = 1


class EngineOrder(msgspec.Struct, frozen=True, gc=False):
    """The place of a request in its engine's order, but for its work there."""

    now: float
    """Arrival, in the router's monotonic seconds."""
    weight: float
    """What a second of uncached work counts, in seconds of arrival."""
    band: int = 0
    """Class: -1 is high, 0 normal, 1 low."""

    def rank_s(self, work_s: float) -> float:
        """Key in this router's accounts, for ``work_s`` of uncached work; lower goes first."""
        return self.band * (BAND_MS / 1000) + self.now + self.weight * work_s

    def priority(self, work_s: float, wall_s: float | None = None) -> int:
        """Value for the engine; ``wall_s``: Unix time of the arrival, now by default."""
        since_s = (time.time() if wall_s is None else wall_s) - _EPOCH_S + self.weight * work_s
        return self.band * BAND_MS + min(BAND_MS - 1, max(0, round(1000 * since_s)))


def order_of(priority_class: int, now: float, weight: float) -> EngineOrder | None:
    """EngineOrder of a request of this class (``Claim.priority``); None where engines are given none."""
    return EngineOrder(now, weight, priority_class - _NORMAL) if weight else None
