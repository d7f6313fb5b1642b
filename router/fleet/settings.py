"""How often engines are asked, and for how long an answer is waited for; all defaults live here."""

from __future__ import annotations

from pathlib import Path

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
    api_key_file: str | None = None
    """File with the key that engines started with ``--api-key`` want; sent with the router's own questions.
    Clients' requests carry their own ``Authorization``, which passes through."""

    def __post_init__(self) -> None:
        for name in ("poll_interval_s", "poll_down_interval_s", "poll_timeout_s", "gauge_interval_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")

    def headers(self) -> dict[str, str]:
        """What the router's own requests to engines carry. Raises ``ValueError`` for a key file of no use."""
        if self.api_key_file is None:
            return {}
        try:
            key = Path(self.api_key_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"fleet.api_key_file: {error}") from None
        if not key or not key.isprintable():
            raise ValueError(f"fleet.api_key_file: {self.api_key_file} does not hold one line with a key")
        return {"authorization": f"Bearer {key}"}
