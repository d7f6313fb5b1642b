"""``kvatlas top``: polls a running router and shows its state; survives restarts of the router."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvatlas.router.config.errors import ConfigError
from kvatlas.router.http.client import HttpClient
from kvatlas.router.tools.doctor.http import Http, HttpAnswer
from kvatlas.router.tools.ops_client import (
    LIVE_STYLE,
    OPS_PORT_HINT,
    make_table,
    ops_headers,
    output_console,
    router_url,
)
from kvatlas.router.tools.top_snapshot import EngineRow, RouterSnapshot, Totals, make_snapshot

_COLUMNS = (">reqs", ">req/s", ">hit", ">exact", ">queue", ">run", ">wait", ">KV\nuse", ">KV\ncached")
_LAG_SHOWN_S = 0.1
# Severities that are shown, the worst first.
_STYLES = {"error": "bold red", "warning": "yellow"}
_PROBLEMS_MAX = 20
_FEED_STYLES = {"ready": "green", "none": "dim", "": "dim"}


def render(snapshot: RouterSnapshot, *, hint: str = "") -> RenderableType:
    """Render a snapshot for 80 columns: problems below the table, and ``hint`` last."""
    if snapshot.problem:
        return Group(
            Text(f"{snapshot.router}: {snapshot.problem}", style="bold red"), Text(hint, style="dim")
        )
    title = f"kvatlas at {snapshot.router}"
    table = make_table("engine", *_COLUMNS, "feed", "state", title=title, title_justify="left", **LIVE_STYLE)
    table.columns[0].min_width = 14
    for row in snapshot.engines:
        feed = Text(row.feed or "-", style=_FEED_STYLES.get(row.feed, "yellow"))
        table.add_row(_name(row), *_figures(row), feed, _state(row))
    parts: list[RenderableType] = [table]
    if snapshot.totals is not None:
        table.add_section()
        table.add_row("total", *_figures(snapshot.totals), "", f"{snapshot.totals.up} up", style="bold")
        parts.append(Text(_proxy(snapshot.totals)))
        if snapshot.totals.ttft_accurate_share is not None:
            parts.append(_first_tokens(snapshot))
    bad = [one for one in snapshot.problems if one.severity in _STYLES]
    if bad:
        parts.append(Text(f"problems: {describe_counts(Counter(one.severity for one in bad))}"))
    parts += [
        Text(
            f"{_short(one.subject)}: {one.seen.removeprefix(f'{one.subject}: ')}", style=_STYLES[one.severity]
        )
        for one in bad[:_PROBLEMS_MAX]
    ]
    if len(bad) > _PROBLEMS_MAX:
        parts.append(Text(f"{len(bad) - _PROBLEMS_MAX} more: kvatlas doctor --router, or the status page"))
    parts += [Text(f"{_name(row)}: {lag}", style="yellow") for row in snapshot.engines if (lag := _lag(row))]
    return Group(*parts, Text(hint, style="dim"))


def describe_counts(counts: Mapping[str, int]) -> str:
    """Describe numbers of findings by severity, errors first."""
    return ", ".join(
        f"{counts[name]} {name}{'s'[: counts[name] != 1]}" for name in _STYLES if counts.get(name)
    )


def _name(row: EngineRow) -> str:
    return _short(row.engine)


def _short(subject: str) -> str:
    return subject.removeprefix("http://")


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
    """Return a one-word state; the problems have the details."""
    if not row.up:
        return Text("down", style="bold red")
    if row.breaker_open:
        return Text("open", style="yellow")
    return Text("drift", style="yellow") if row.drifting else Text(row.mode or "up")


def _lag(row: EngineRow) -> str:
    """Describe the delay of its feed; "" if there is none to speak of."""
    late = row.lag_s is not None and row.lag_s >= _LAG_SHOWN_S
    return f"feed {row.feed} {row.lag_s * 1000:.0f} ms late" if row.lag_s is not None and late else ""


def _proxy(totals: Totals) -> str:
    errors = ("errors in 5 min", totals.errors)
    figures = (("active", totals.active), errors, ("retries since the start", totals.retries))
    return "requests: " + ", ".join(f"{_count(value)} {name}" for name, value in figures)


def _first_tokens(snapshot: RouterSnapshot) -> Table:
    """Table of predicted and measured time to first token of the latest streams, by engine."""
    table = make_table("first token", ">predicted", ">measured", ">accurate", min_width=14)
    for row in snapshot.engines:
        if row.ttft_compared:
            accurate = f"{_percent(row.ttft_accurate / row.ttft_compared)} of {row.ttft_compared}"
            table.add_row(_name(row), _seconds(row.predicted_ttft_s), _seconds(row.ttft_s), accurate)
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"


def _count(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


_TIMEOUT_S = 3.0
_HINT = "q quits"


def run_top(router: str, *, interval_s: float, once: bool, as_json: bool) -> int:
    """Returns 0, or 1 if a single snapshot is unavailable. Raises ``ConfigError`` for invalid arguments."""
    if not 0.05 <= interval_s <= 3600:
        raise ConfigError(f"--interval: {interval_s} is not 0.05 to 3600")
    url = router_url(router)
    if url is None:
        raise AssertionError("a URL was given")
    terminal = sys.stdout.isatty() and sys.stdin.isatty()
    if once or not (terminal or as_json):
        return asyncio.run(_single(url, as_json=as_json))
    if as_json:
        asyncio.run(_lines(url, interval_s))
        return 0
    stdin = sys.stdin.fileno()
    with _single_keys(stdin):
        asyncio.run(_watch(url, interval_s, stdin))
    return 0


async def _single(url: str, *, as_json: bool) -> int:
    async with contextlib.aclosing(snapshots(url, 1.0)) as stream:
        snapshot = await anext(stream)
    if as_json:
        _print_json(snapshot)
    else:
        output_console().print(render(snapshot))
    return 1 if snapshot.problem else 0


async def _lines(url: str, interval_s: float) -> None:
    async with contextlib.aclosing(snapshots(url, interval_s)) as stream:
        async for snapshot in stream:
            _print_json(snapshot)


async def _watch(url: str, interval_s: float, terminal: int) -> None:
    """Show snapshots until q is pressed on this terminal (its file descriptor)."""
    loop, quit_ = asyncio.get_running_loop(), asyncio.Event()

    def pressed() -> None:
        if os.read(terminal, 1) in {b"q", b"Q", b""}:
            quit_.set()

    with Live(screen=True, auto_refresh=False) as live:
        tasks = [asyncio.create_task(_show(url, interval_s, live)), asyncio.create_task(quit_.wait())]
        loop.add_reader(terminal, pressed)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(terminal)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _show(url: str, interval_s: float, live: Live) -> None:
    async with contextlib.aclosing(snapshots(url, interval_s)) as stream:
        async for snapshot in stream:
            live.update(render(snapshot, hint=_HINT), refresh=True)


async def snapshots(url: str, interval_s: float) -> AsyncGenerator[RouterSnapshot, None]:
    """Yield a snapshot every ``interval_s`` seconds; with a ``problem`` while the router is silent."""
    loop = asyncio.get_running_loop()
    async with HttpClient() as client:
        http = Http(client, _TIMEOUT_S)
        before: RouterSnapshot | None = None
        taken_s = 0.0
        while True:
            now = loop.time()
            snapshot = await take_snapshot(http, url, before, now - taken_s)
            before, taken_s = (None if snapshot.problem else snapshot), now
            yield snapshot
            await asyncio.sleep(max(0.0, now + interval_s - loop.time()))


async def take_snapshot(
    http: Http, url: str, before: RouterSnapshot | None = None, elapsed_s: float = 0.0
) -> RouterSnapshot:
    """Take one snapshot. Never raises because of a response or its absence."""
    paths = ("/kvatlas/engines", "/kvatlas/receipts", "/metrics", "/kvatlas/problems", "/kvatlas/history")
    engines, receipts, metrics, problems, history = await asyncio.gather(
        *(http.get(url + path, ops_headers()) for path in paths)
    )
    listed = _listed(engines)
    if listed is None:
        why = engines.description if not engines.ok else "a response that is not a kvatlas router's"
        hint = "" if engines.status else f"; {OPS_PORT_HINT}"
        return RouterSnapshot(router=url, problem=f"GET /kvatlas/engines: {why}{hint}")
    page = metrics.body.decode("utf-8", "replace") if metrics.ok else ""
    return make_snapshot(
        url,
        listed,
        _listed(receipts) or [],
        page,
        problems=problems.json(dict[str, Any]) if problems.ok else None,
        history=history.json(dict[str, Any]) if history.ok else None,
        before=before,
        elapsed_s=elapsed_s,
    )


def _listed(answer: HttpAnswer) -> list[Any] | None:
    return answer.json(list[Any]) if answer.ok else None


def _print_json(snapshot: RouterSnapshot) -> None:
    print(msgspec.json.encode(snapshot).decode(), flush=True)


@contextlib.contextmanager
def _single_keys(terminal: int) -> Iterator[None]:
    """Read keys unbuffered and without echo; restores the terminal at the end."""
    kept = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, kept)
