"""Sums of a load: requests, tokens, hits, time to first token, and requests on two engines."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import msgspec

from router.observe.receipts import Receipt


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
        return _quantile_ms(self.ttfts_s, quantile)

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


class LegCounts(msgspec.Struct):
    """Requests of a fleet with prefill and decode apart; the counts are by engine."""

    prefilled: Counter[str] = msgspec.field(default_factory=Counter)
    """Prompts computed for another engine."""
    fetched: Counter[str] = msgspec.field(default_factory=Counter)
    """Answers to prompts that another engine computed."""
    whole: Counter[str] = msgspec.field(default_factory=Counter)
    gaps_s: list[float] = msgspec.field(default_factory=list)
    """Between the two requests."""

    def add(self, receipt: Receipt) -> None:
        """One more request of an engine."""
        counts = {"prefill": self.prefilled, "decode": self.fetched}.get(receipt.leg, self.whole)
        counts[receipt.engine_id] += 1
        if receipt.gap_s is not None:
            self.gaps_s.append(receipt.gap_s)

    def as_json(self) -> dict[str, Any]:
        """How many requests went to two engines and to one, and the time between the two."""
        gap_ms = _quantile_ms(self.gaps_s, 0.5) if self.gaps_s else None
        return {"split": self.fetched.total(), "whole": self.whole.total(), "gap_p50_ms": gap_ms}


def _quantile_ms(seconds: list[float], quantile: float) -> float:
    ordered = sorted(seconds)
    return round(ordered[max(0, math.ceil(quantile * len(ordered)) - 1)] * 1000, 1)
