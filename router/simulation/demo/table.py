"""The demo's live table: one row per engine, the fleet's total, and round robin. With disaggregated prefill,
also each engine's role, and how often it did its half.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Group
from rich.text import Text

from kvatlas.router.app import Router
from kvatlas.router.fleet.status import EngineStatus
from kvatlas.router.observe.receipts import EngineReceipts, Receipt
from kvatlas.router.placement.engine import Engine
from kvatlas.router.tools.ops_client import LIVE_STYLE, make_table


class Tally(msgspec.Struct):
    """Counts of finished requests."""

    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    ttfts_s: list[float] = msgspec.field(default_factory=list)

    def add(self, prompt_tokens: int, hit_tokens: int, ttft_s: float | None) -> None:
        """Add one answered request."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.hit_tokens += hit_tokens
        if ttft_s is not None:
            self.ttfts_s.append(ttft_s)

    @property
    def hit_share(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def ttft_ms(self, quantile: float) -> float | None:
        """Return a quantile of the time to first token; None without any."""
        if not self.ttfts_s:
            return None
        return _quantile_ms(self.ttfts_s, quantile)

    def as_json(self) -> dict[str, Any]:
        """Return the figures of the demo's summary."""
        return {
            "requests": self.requests,
            "errors": self.errors,
            "hit_tokens": self.hit_tokens,
            "prompt_tokens": self.prompt_tokens,
            "ttft_p50_ms": self.ttft_ms(0.5),
            "ttft_p99_ms": self.ttft_ms(0.99),
        }


class LegCounts(msgspec.Struct):
    """Requests of a fleet with disaggregated prefill; the counts are by engine."""

    prefilled: Counter[str] = msgspec.field(default_factory=Counter)
    """Prompts computed for another engine."""
    fetched: Counter[str] = msgspec.field(default_factory=Counter)
    """Answers to prompts that another engine computed."""
    whole: Counter[str] = msgspec.field(default_factory=Counter)
    gaps_s: list[float] = msgspec.field(default_factory=list)
    """Seconds between the two requests."""

    def add(self, receipt: Receipt) -> None:
        """Add one request of an engine."""
        counts = {"prefill": self.prefilled, "decode": self.fetched}.get(receipt.leg, self.whole)
        counts[receipt.engine_id] += 1
        if receipt.gap_s is not None:
            self.gaps_s.append(receipt.gap_s)

    def as_json(self) -> dict[str, Any]:
        """Return the number of requests on two engines and on one, and the time between the two."""
        gap_ms = _quantile_ms(self.gaps_s, 0.5) if self.gaps_s else None
        return {"split": self.fetched.total(), "whole": self.whole.total(), "gap_p50_ms": gap_ms}


def _quantile_ms(seconds: list[float], quantile: float) -> float:
    ordered = sorted(seconds)
    return round(ordered[max(0, math.ceil(quantile * len(ordered)) - 1)] * 1000, 1)


def live_table(
    routers: Sequence[Router],
    per_engine: dict[str, Tally],
    legs: LegCounts | None,
    ours: Tally,
    baseline: Tally,
    elapsed_s: float,
) -> Group:
    """Render the current table; ``routers`` are replicas of one fleet, ``legs`` None without roles."""
    router = routers[0]
    count = f"{len(router.fleet)} engines" + (f", {len(routers)} routers" if len(routers) > 1 else "")
    halves = () if legs is None else ("<role", ">alone", ">computed", ">fetched")
    sums = (">reqs", ">predicted", ">actual", ">exact", ">KV held", ">TTFT p50")
    title = f"kvatlas demo: {count}, {elapsed_s:.0f} s"
    table = make_table("<engine", *halves, *sums, "<feed", title=title, **LIVE_STYLE)
    for status in router.fleet:
        same = [r.fleet.get(status.engine_id) for r in routers]
        found = [engine.receipts for engine in same if engine is not None]
        tally = per_engine.get(status.engine_id, Tally())
        table.add_row(
            status.engine_id.removeprefix("http://"),
            *(() if legs is None else _halves(legs, status)),
            str(tally.requests),
            f"{sum(s.predicted_tokens for s in found):,}",
            f"{sum(s.actual_tokens for s in found):,}",
            _exact(found),
            _held(routers, status),
            _ms(tally.ttft_ms(0.5)),
            _feed(routers, status),
        )
    lines = [_compare(ours, baseline), *([] if legs is None else [_apart(legs)])]
    return Group(table, Text("\n".join(lines)))


def _halves(legs: LegCounts, engine: Engine) -> tuple[str, ...]:
    name = engine.engine_id
    counts = legs.whole[name], legs.prefilled[name], legs.fetched[name]
    return engine.engine.role or "-", *map(str, counts)


def _apart(legs: LegCounts) -> str:
    told = legs.as_json()
    split, gap = told["split"], _ms(told["gap_p50_ms"])
    return f"prompts computed elsewhere {split}, at home {told['whole']}; between the two legs p50 {gap}"


def _compare(ours: Tally, baseline: Tally) -> str:
    rows = [("kvatlas", ours), ("round-robin, same load", baseline)]
    lines = [
        f"{name:<24}{tally.requests:>6} reqs  hit {tally.hit_share:>4.0%}  "
        f"TTFT p50 {_ms(tally.ttft_ms(0.5)):>7}  p99 {_ms(tally.ttft_ms(0.99)):>7}"
        for name, tally in rows
    ]
    behind = ours.requests - baseline.requests
    # Computed some seconds later, when all earlier requests are known.
    if behind > 0:
        lines.append(f"round-robin (computed 5 s behind) has yet to answer {behind} of these requests")
    return "\n".join(lines)


def _held(routers: Sequence[Router], status: EngineStatus) -> str:
    """Return the share of KV blocks with cached content, as the router that follows the engine knows it."""
    follower = _follower(routers, status.engine_id)
    engine = routers[follower or 0].scopes.engine(status.engine_id)
    share = None if engine is None else engine.cached_share(status.pool_blocks)
    return "-" if share is None else f"{share:.0%}"


def _feed(routers: Sequence[Router], engine: Engine) -> str:
    """Return the state of the feed, and which of several routers follows the engine."""
    if len(routers) == 1:
        return engine.feed_state
    follower = _follower(routers, engine.engine_id)
    return f"{engine.feed_state} at {'none' if follower is None else follower + 1}"


def _follower(routers: Sequence[Router], engine_id: str) -> int | None:
    return next((n for n, r in enumerate(routers) if engine_id in r.lifecycle.feeds.stats), None)


def _exact(sums: list[EngineReceipts]) -> str:
    compared = sum(s.outcomes.get(name, 0) for s in sums for name in ("exact", "over", "under"))
    return "-" if not compared else f"{sum(s.outcomes.get('exact', 0) for s in sums)}/{compared}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"
