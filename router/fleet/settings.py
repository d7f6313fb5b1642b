"""How often engines are asked, and for how long an answer is waited for; all defaults live here."""

from __future__ import annotations

import msgspec


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds. Raises ``ValueError`` for a time that is none."""

    poll_interval_s: float = 5.0
    poll_down_interval_s: float = 0.5
    """While an engine does not answer: how quickly its return is noticed."""
    poll_timeout_s: float = 3.0
    polls_missed_max: int = 3
    """An engine is down when its port refuses, or after this many polls in a row without a sound answer."""
    gauge_interval_s: float = 2.0
    answer_bytes_max: int = 8 << 20
    warm_up_s_max: float = 30.0
    """How long /ready waits for feeds to catch up before traffic is taken without them."""

    def __post_init__(self) -> None:
        for name in ("poll_interval_s", "poll_down_interval_s", "poll_timeout_s", "gauge_interval_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
