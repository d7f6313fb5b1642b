"""The table of ``kvatlas top``."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from router.tools.top.snapshot import EngineRow, RouterSnapshot, Totals

_COLUMNS = ("reqs", "req/s", "hit", "exact", "queue", "run", "wait", "KV")
_FEED_STYLES = {"ready": "green", "none": "dim", "": "dim"}


def render(picture: RouterSnapshot, *, hint: str = "") -> RenderableType:
    """The picture as it is shown; ``hint`` stands under it."""
    if picture.problem:
        return Group(Text(f"{picture.router}: {picture.problem}", style="bold red"), Text(hint, style="dim"))
    table = Table(title=f"kvatlas at {picture.router}", pad_edge=False, title_justify="left")
    table.add_column("engine", overflow="fold", min_width=14)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("feed", overflow="fold")
    table.add_column("state", overflow="fold", min_width=6)
    for row in picture.engines:
        table.add_row(row.engine.removeprefix("http://"), *_figures(row), _feed(row), _state(row))
    parts: list[RenderableType] = [table]
    if picture.totals is not None:
        table.add_section()
        table.add_row("total", *_figures(picture.totals), "", f"{picture.totals.up} up", style="bold")
        parts.append(Text(_proxy(picture.totals)))
    return Group(*parts, Text(hint, style="dim"))


def _figures(row: EngineRow | Totals) -> list[str]:
    queue_s, kv_usage = (row.queue_s, row.kv_usage) if isinstance(row, EngineRow) else (None, None)
    return [
        f"{row.requests:,}",
        "-" if row.requests_per_s is None else f"{row.requests_per_s:.1f}",
        _percent(row.hit_share),
        _percent(row.exact_share),
        _seconds(queue_s),
        _count(row.running),
        _count(row.waiting),
        _percent(kv_usage),
    ]


def _feed(row: EngineRow) -> Text:
    text = Text(row.feed or "-", style=_FEED_STYLES.get(row.feed, "yellow"))
    if row.feed_reason:
        text.append(f" ({row.feed_reason})")
    if row.lag_s is not None:
        text.append(f" {row.lag_s * 1000:.0f} ms", style="dim")
    return text


def _state(row: EngineRow) -> Text:
    if not row.up:
        return Text(f"down: {row.problem}" if row.problem else "down", style="bold red")
    words = [word for word, said in (("breaker open", row.breaker_open), ("drifting", row.drifting)) if said]
    return Text(", ".join(words), style="yellow") if words else Text(row.mode or "up")


def _proxy(totals: Totals) -> str:
    figures = (("active", totals.active), ("errors", totals.errors), ("retries", totals.retries))
    return "requests: " + ", ".join(f"{_count(value)} {name}" for name, value in figures)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"


def _count(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"
