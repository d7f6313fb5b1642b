"""The table of ``kvatlas top``."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from router.tools.top.snapshot import EngineRow, RouterSnapshot, Totals

_COLUMNS = ("reqs", "req/s", "hit", "exact", "queue", "run", "wait", "KV\nuse", "KV\nheld")
_LAG_SHOWN_S = 0.1
_FEED_STYLES = {"ready": "green", "none": "dim", "": "dim"}


def render(picture: RouterSnapshot, *, hint: str = "") -> RenderableType:
    """The picture as it is shown, in 80 columns: what is amiss stands under the table, and ``hint`` last."""
    if picture.problem:
        return Group(Text(f"{picture.router}: {picture.problem}", style="bold red"), Text(hint, style="dim"))
    table = Table(
        title=f"kvatlas at {picture.router}",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=0,
    )
    table.add_column("engine", overflow="fold", min_width=14)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("feed", overflow="fold")
    table.add_column("state", overflow="fold")
    for row in picture.engines:
        feed = Text(row.feed or "-", style=_FEED_STYLES.get(row.feed, "yellow"))
        table.add_row(_name(row), *_figures(row), feed, _state(row))
    parts: list[RenderableType] = [table]
    if picture.totals is not None:
        table.add_section()
        table.add_row("total", *_figures(picture.totals), "", f"{picture.totals.up} up", style="bold")
        parts.append(Text(_proxy(picture.totals)))
        if picture.totals.ttft_held_share is not None:
            parts.append(_first_tokens(picture))
    parts += [
        Text(f"{_name(row)}: {said}", style="yellow") for row in picture.engines if (said := _amiss(row))
    ]
    return Group(*parts, Text(hint, style="dim"))


def _name(row: EngineRow) -> str:
    return row.engine.removeprefix("http://")


def _figures(row: EngineRow | Totals) -> list[str]:
    queue_s, usage, cached = None, None, None
    if isinstance(row, EngineRow):
        queue_s, usage, cached = row.queue_s, row.kv_usage, row.kv_cached
    return [
        f"{row.requests:,}",
        "-" if row.requests_per_s is None else f"{row.requests_per_s:.1f}",
        _percent(row.hit_share),
        _percent(row.exact_share),
        _seconds(queue_s),
        _count(row.running),
        _count(row.waiting),
        _percent(usage),
        _percent(cached),
    ]


def _state(row: EngineRow) -> Text:
    """One word; ``_amiss`` has the rest."""
    if not row.up:
        return Text("down", style="bold red")
    if row.breaker_open:
        return Text("open", style="yellow")
    return Text("drift", style="yellow") if row.drifting else Text(row.mode or "up")


def _amiss(row: EngineRow) -> str:
    """What is not as it should be with an engine, in words; "" where all is well."""
    words = []
    if not row.up:
        words.append(f"down: {row.problem}" if row.problem else "down")
    words += [word for word, said in (("breaker open", row.breaker_open), ("drifting", row.drifting)) if said]
    if row.feed_reason or (row.lag_s is not None and row.lag_s >= _LAG_SHOWN_S):
        reason = f" ({row.feed_reason})" if row.feed_reason else ""
        lag = "" if row.lag_s is None else f" {row.lag_s * 1000:.0f} ms"
        words.append(f"feed {row.feed}{reason}{lag}")
    return ", ".join(words)


def _proxy(totals: Totals) -> str:
    figures = (("active", totals.active), ("errors", totals.errors), ("retries", totals.retries))
    return "requests: " + ", ".join(f"{_count(value)} {name}" for name, value in figures)


def _first_tokens(picture: RouterSnapshot) -> Table:
    """Predicted against measured time to first token of the latest streams, engine by engine."""
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("first token", overflow="fold", min_width=14)
    for name in ("predicted", "measured", "held"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in picture.engines:
        if row.ttft_compared:
            held = f"{_percent(row.ttft_held / row.ttft_compared)} of {row.ttft_compared}"
            table.add_row(_name(row), _seconds(row.predicted_ttft_s), _seconds(row.ttft_s), held)
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"


def _count(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"
