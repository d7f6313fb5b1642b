"""The demo's live table: one row per engine, the fleet's total, and round-robin beside it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from router.app import Router
from router.demo.summary import Tally
from router.observe.receipts import EngineReceipts
from router.placement.engine import Engine


def live_table(
    routers: Sequence[Router], per_engine: dict[str, Tally], ours: Tally, baseline: Tally, elapsed_s: float
) -> Group:
    """The picture now; ``routers`` are replicas of one fleet."""
    router = routers[0]
    count = f"{len(router.fleet)} engines" + (f", {len(routers)} routers" if len(routers) > 1 else "")
    table = Table(title=f"kvatlas demo: {count}, {elapsed_s:.0f} s", pad_edge=False)
    table.add_column("engine", no_wrap=True)
    for name in ("reqs", "predicted", "actual", "exact", "KV", "TTFT p50"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("feed", no_wrap=True)
    for status in router.fleet:
        same = [r.fleet.get(status.engine_id) for r in routers]
        sums = [engine.receipts for engine in same if engine is not None]
        tally = per_engine.get(status.engine_id, Tally())
        usage = "-" if status.kv_usage is None else f"{status.kv_usage:.0%}"
        table.add_row(
            status.engine_id.removeprefix("http://"),
            str(tally.requests),
            f"{sum(s.predicted_tokens for s in sums):,}",
            f"{sum(s.actual_tokens for s in sums):,}",
            _exact(sums),
            usage,
            _ms(tally.ttft_ms(0.5)),
            _feed(routers, status),
        )
    return Group(table, Text(_compare(ours, baseline)))


def _compare(ours: Tally, baseline: Tally) -> str:
    rows = [("kvatlas", ours), ("round-robin, same load", baseline)]
    return "\n".join(
        f"{name:<24}{tally.requests:>6} reqs  hit {tally.hit_share:>4.0%}  "
        f"TTFT p50 {_ms(tally.ttft_ms(0.5)):>7}  p99 {_ms(tally.ttft_ms(0.99)):>7}"
        for name, tally in rows
    )


def _feed(routers: Sequence[Router], engine: Engine) -> str:
    """State of the feed, and which of several routers follows it."""
    if len(routers) == 1:
        return engine.feed_state
    who = next((str(n) for n, r in enumerate(routers, 1) if engine.engine_id in r.followers.stats), "nobody")
    return f"{engine.feed_state} at {who}"


def _exact(sums: list[EngineReceipts]) -> str:
    compared = sum(s.outcomes.get(name, 0) for s in sums for name in ("exact", "over", "under"))
    return "-" if not compared else f"{sum(s.outcomes.get('exact', 0) for s in sums)}/{compared}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"
