"""The demo's live table: one row per engine, the fleet's total, and round-robin beside it. Where prefill and
decode are apart, each engine's role, and how often it did its half."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from router.app import Router
from router.demo.summary import LegCounts, Tally
from router.fleet.status import EngineStatus
from router.observe.receipts import EngineReceipts
from router.placement.engine import Engine


def live_table(
    routers: Sequence[Router],
    per_engine: dict[str, Tally],
    legs: LegCounts | None,
    ours: Tally,
    baseline: Tally,
    elapsed_s: float,
) -> Group:
    """The picture now; ``routers`` are replicas of one fleet, ``legs`` None where its engines are alike."""
    router = routers[0]
    count = f"{len(router.fleet)} engines" + (f", {len(routers)} routers" if len(routers) > 1 else "")
    table = Table(
        title=f"kvatlas demo: {count}, {elapsed_s:.0f} s",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=0,
    )
    table.add_column("engine", no_wrap=True)
    if legs is not None:
        table.add_column("role", no_wrap=True)
        for name in ("alone", "computed", "fetched"):
            table.add_column(name, justify="right", no_wrap=True)
    for name in ("reqs", "predicted", "actual", "exact", "KV held", "TTFT p50"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("feed", no_wrap=True)
    for status in router.fleet:
        same = [r.fleet.get(status.engine_id) for r in routers]
        sums = [engine.receipts for engine in same if engine is not None]
        tally = per_engine.get(status.engine_id, Tally())
        table.add_row(
            status.engine_id.removeprefix("http://"),
            *(() if legs is None else _halves(legs, status)),
            str(tally.requests),
            f"{sum(s.predicted_tokens for s in sums):,}",
            f"{sum(s.actual_tokens for s in sums):,}",
            _exact(sums),
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
    if behind > 0:  # it is run some seconds behind, when requests are known
        lines.append(f"round-robin (computed 5 s behind) has yet to answer {behind} of these requests")
    return "\n".join(lines)


def _held(routers: Sequence[Router], status: EngineStatus) -> str:
    """Share of the KV blocks that hold cached content, as the router that follows the engine knows it."""
    follower = _follower(routers, status.engine_id)
    engine = routers[follower or 0].scopes.engine(status.engine_id)
    share = None if engine is None else engine.cached_share(status.pool_blocks)
    return "-" if share is None else f"{share:.0%}"


def _feed(routers: Sequence[Router], engine: Engine) -> str:
    """State of the feed, and which of several routers follows it."""
    if len(routers) == 1:
        return engine.feed_state
    follower = _follower(routers, engine.engine_id)
    return f"{engine.feed_state} at {'nobody' if follower is None else follower + 1}"


def _follower(routers: Sequence[Router], engine_id: str) -> int | None:
    """Which of the routers has the engine's feed."""
    return next((n for n, r in enumerate(routers) if engine_id in r.following.feeds.stats), None)


def _exact(sums: list[EngineReceipts]) -> str:
    compared = sum(s.outcomes.get(name, 0) for s in sums for name in ("exact", "over", "under"))
    return "-" if not compared else f"{sum(s.outcomes.get('exact', 0) for s in sums)}/{compared}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"
