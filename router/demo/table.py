"""The demo's live table: one row per engine, the fleet's total, and round-robin beside it."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from router.app import Router
from router.demo.summary import Tally
from router.observe.receipts import EngineReceipts


def live_table(
    router: Router, per_engine: dict[str, Tally], ours: Tally, baseline: Tally, elapsed_s: float
) -> Group:
    """The picture now."""
    table = Table(title=f"kvatlas demo: {len(router.fleet)} engines, {elapsed_s:.0f} s", pad_edge=False)
    table.add_column("engine", no_wrap=True)
    for name in ("reqs", "predicted", "actual", "exact", "KV", "TTFT p50"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("feed", no_wrap=True)
    for status in router.fleet:
        sums = router.books.receipts.engines.get(status.engine_id, EngineReceipts())
        tally = per_engine.get(status.engine_id, Tally())
        usage = "-" if status.kv_usage is None else f"{status.kv_usage:.0%}"
        table.add_row(
            status.engine_id.removeprefix("http://"),
            str(tally.requests),
            f"{sums.predicted_tokens:,}",
            f"{sums.actual_tokens:,}",
            _exact(sums),
            usage,
            _ms(tally.ttft_ms(0.5)),
            router.planner.feed_state(status.engine_id),
        )
    return Group(table, Text(_compare(ours, baseline)))


def _compare(ours: Tally, baseline: Tally) -> str:
    rows = [("kvatlas", ours), ("round-robin, same load", baseline)]
    return "\n".join(
        f"{name:<24}{tally.requests:>6} reqs  hit {tally.hit_share:>4.0%}  "
        f"TTFT p50 {_ms(tally.ttft_ms(0.5)):>7}  p99 {_ms(tally.ttft_ms(0.99)):>7}"
        for name, tally in rows
    )


def _exact(sums: EngineReceipts) -> str:
    compared = sum(sums.outcomes.get(name, 0) for name in ("exact", "over", "under"))
    return "-" if not compared else f"{sums.outcomes.get('exact', 0)}/{compared}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"
