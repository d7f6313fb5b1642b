"""Order in engines that schedule by priority (vLLM: ``--scheduling-policy priority``): lower goes first.

    priority = class + milliseconds of arrival + engine_priority * milliseconds of uncached work

The class comes first: negative values for ``high``, from 0 for ``normal``, from ``BAND_MS`` for ``low``, so
that no request passes one of a higher class. Within a class a prompt waits for later ones that arrive
within ``engine_priority`` times its own work, and for no others: nothing starves.

Routers share engines, so arrival counts from a fixed moment of the wall clock. A router whose clock is a
second ahead loses a second to the others. It is read once per decision: the rank in the router's accounts
and the value for the engine follow from the same number, so that they never order two prompts differently.

vLLM reads a header (``ENGINE_PRIORITY``) before the body's ``priority``
(vllm/entrypoints/generate/base/serving.py ``_get_priority``, 0.32 and 0.33): bodies stay unchanged.
"""

from __future__ import annotations

from typing import Final

import msgspec

# Values of one class: 139 years of milliseconds. The three together fit the 53 bits of a JSON number.
BAND_MS: Final = 1 << 42
# 2026-01-01 UTC.
_EPOCH_S: Final = 1_767_225_600
_NORMAL: Final = 1
# Priorities are whole milliseconds.
_TIE_S: Final = 0.002


class EngineOrder(msgspec.Struct, frozen=True, gc=False):
    """The place of a request in its engine's order, apart from its work there."""

    arrived_s: float
    """Arrival by the wall clock, in Unix seconds."""
    weight: float
    """Weight of a second of uncached work, in seconds of arrival."""
    band: int = 0
    """Class: -1 is high, 0 normal, 1 low."""

    def rank_s(self, work_s: float) -> float:
        """Key in this router's accounts, for ``work_s`` of uncached work; lower goes first."""
        return self.band * (BAND_MS / 1000) + self.arrived_s + self.weight * work_s

    def work_behind(self, work_s: float, rank_s: float) -> float:
        """Work that ranks it behind a request of ``rank_s``, whose blocks it will hit, if that is of its
        class; else ``work_s``."""
        missing_s = rank_s + _TIE_S - self.rank_s(work_s)
        return work_s + missing_s / self.weight if 0 < missing_s < BAND_MS / 2000 else work_s

    def priority(self, work_s: float) -> int:
        """Value for the engine."""
        since_s = self.arrived_s - _EPOCH_S + self.weight * work_s
        return self.band * BAND_MS + min(BAND_MS - 1, max(0, round(1000 * since_s)))


def order_of(priority_class: int, arrived_s: float, weight: float) -> EngineOrder | None:
    """Order of a request of this class (``QueueTicketRequest.priority``) that arrived at this Unix time; None
    if the setting is off."""
    return EngineOrder(arrived_s, weight, priority_class - _NORMAL) if weight else None
