"""Sums of a load: requests, tokens, hits, time to first token."""

from __future__ import annotations

import math
from typing import Any

import msgspec


class Tally(msgspec.Struct):
    """Counts of finished requests."""

    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    ttfts_s: list[float] = msgspec.field(default_factory=list)

    def add(self, prompt_tokens: int, hit_tokens: int, ttft_s: float | None) -> None:
        """One request that was answered."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.hit_tokens += hit_tokens
        if ttft_s is not None:
            self.ttfts_s.append(ttft_s)

    @property
    def hit_share(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def ttft_ms(self, quantile: float) -> float | None:
        """A quantile of the time to first token; None before the first one."""
        if not self.ttfts_s:
            return None
        ordered = sorted(self.ttfts_s)
        return round(ordered[max(0, math.ceil(quantile * len(ordered)) - 1)] * 1000, 1)

    def as_json(self) -> dict[str, Any]:
        """The figures of the demo's summary."""
        return {
            "requests": self.requests,
            "errors": self.errors,
            "hit_tokens": self.hit_tokens,
            "prompt_tokens": self.prompt_tokens,
            "ttft_p50_ms": self.ttft_ms(0.5),
            "ttft_p99_ms": self.ttft_ms(0.99),
        }
