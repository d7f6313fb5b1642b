"""Snapshot of a running router: the responses of its endpoints converted to rows and totals.

Pure functions of the responses of ``/kvatlas/engines``, ``problems``, ``history``, ``receipts`` and
``/metrics``. Fields that are missing or of an unexpected type (older or newer router) are left out; no
response raises an exception.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from kvatlas.router.tools.doctor.engine_gauges import series

_COMPARED = ("exact", "over", "under")


class EngineRow(msgspec.Struct, kw_only=True):
    """One engine. None: unknown. Shares are 0..1; ``requests`` counts finished ones."""

    engine: str
    up: bool
    breaker_open: bool
    models: list[str]
    requests: int = 0
    requests_per_s: float | None = None
    hit_share: float | None = None
    """Reported cached tokens over prompt tokens, in the latest receipts."""
    exact_share: float | None = None
    """Share of exact ones in all compared predictions."""
    queue_s: float | None = None
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    """Share of KV blocks used by running requests."""
    kv_cached: float | None = None
    """Share of KV blocks with cached content, in use or not."""
    feed: str = ""
    lag_s: float | None = None
    mode: str = ""
    predicted_ttft_s: float | None = None
    """Median predicted time to first token of the latest streams, from the request to the engine on."""
    ttft_s: float | None = None
    """Measured time to first token, over the same requests."""
    ttft_accurate: int = 0
    """Number of accurate predictions (within 50 ms or 10 %), of ``ttft_compared``."""
    ttft_compared: int = 0
    drifting: bool = False


class Problem(msgspec.Struct, frozen=True):
    """A finding of the router (``kvatlas.router.observe.findings``), as far as it is shown."""

    subject: str
    severity: str
    seen: str


class Totals(msgspec.Struct, kw_only=True):
    """Totals of the router: sums over engines, and proxy counters."""

    engines: int
    up: int
    requests: int
    requests_per_s: float | None
    hit_share: float | None
    exact_share: float | None
    running: int
    waiting: int
    active: int | None = None
    """Number of requests in the proxy now."""
    errors: int | None = None
    """Failed requests of the last five minutes, as on the status page."""
    retries: int | None = None
    """Since the router's start."""
    ttft_accurate_share: float | None = None
    """Share of accurate predictions in all engines' latest predicted times to first token."""


class RouterSnapshot(msgspec.Struct, kw_only=True):
    """State of the router; ``problem`` is the reason if there are no rows."""

    router: str
    problem: str = ""
    engines: list[EngineRow] = []
    totals: Totals | None = None
    problems: list[Problem] = []
    """The router's own list of what is wrong now."""


def make_snapshot(
    router: str,
    engines: list[Any],
    receipts: list[Any],
    metrics: str,
    *,
    problems: Any = None,
    history: Any = None,
    before: RouterSnapshot | None = None,
    elapsed_s: float = 0.0,
) -> RouterSnapshot:
    """Build the snapshot; rates are relative to ``before``, taken ``elapsed_s`` seconds earlier."""
    hits = _hit_tokens(receipts)
    earlier = {row.engine: row for row in before.engines} if before is not None else {}
    rows = [
        _row(entry, hits, earlier, elapsed_s)
        for entry in engines
        if isinstance(entry, dict) and isinstance(entry.get("engine"), str)
    ]
    totals = _totals(rows, engines, hits, _sums(metrics), _recent_errors(history))
    return RouterSnapshot(router=router, engines=rows, totals=totals, problems=list(_found(problems)))


def _found(problems: Any) -> Iterator[Problem]:
    """Yield the findings of ``/kvatlas/problems``, by subject."""
    for subject, found in _dict(problems).items():
        for one in map(_dict, _list(found)):
            yield Problem(str(subject), str(one.get("severity", "")), str(one.get("seen", "")))


def _recent_errors(history: Any) -> int | None:
    """Return the failed requests in ``/kvatlas/history``."""
    intervals = _dict(history).get("intervals")
    counts = [_whole(_dict(interval).get("errors")) for interval in _list(intervals)]
    return sum(count or 0 for count in counts) if isinstance(intervals, list) else None


def _row(
    entry: dict[str, Any], hits: dict[str, tuple[int, int]], earlier: dict[str, EngineRow], elapsed_s: float
) -> EngineRow:
    engine = entry["engine"]
    outcomes = _counts(entry.get("receipts"))
    load, feed = _dict(entry.get("load")), _dict(entry.get("feed"))
    first_tokens = _dict(entry.get("first_tokens"))
    requests = sum(outcomes.values())
    rate = None
    if engine in earlier and elapsed_s > 0 and requests >= earlier[engine].requests:
        rate = (requests - earlier[engine].requests) / elapsed_s
    return EngineRow(
        engine=engine,
        up=entry.get("up") is True,
        breaker_open=entry.get("available") is False,
        models=[str(model) for model in _list(entry.get("models"))],
        requests=requests,
        requests_per_s=rate,
        hit_share=_share(*hits.get(engine, (0, 0))),
        exact_share=_exact_share(outcomes),
        queue_s=_number(load.get("queue_s")),
        running=_whole(load.get("running")),
        waiting=_whole(load.get("waiting")),
        kv_usage=_number(entry.get("kv_usage")),
        kv_cached=_number(entry.get("kv_cached")),
        feed=str(entry.get("feed_state", "")),
        lag_s=_number(feed.get("lag_s")),
        mode=str(entry.get("mode") or ""),
        predicted_ttft_s=_number(first_tokens.get("predicted_s")),
        ttft_s=_number(first_tokens.get("measured_s")),
        ttft_accurate=_whole(first_tokens.get("accurate")) or 0,
        ttft_compared=_whole(first_tokens.get("compared")) or 0,
        drifting=entry.get("drifting") is True,
    )


def _totals(
    rows: list[EngineRow],
    engines: list[Any],
    hits: dict[str, tuple[int, int]],
    sums: dict[str, float],
    errors: int | None,
) -> Totals:
    outcomes: dict[str, int] = {}
    for entry in engines:
        for name, count in _counts(_dict(entry).get("receipts")).items():
            outcomes[name] = outcomes.get(name, 0) + count
    rates = [row.requests_per_s for row in rows if row.requests_per_s is not None]
    pairs = list(hits.values())
    return Totals(
        engines=len(rows),
        up=sum(row.up for row in rows),
        requests=sum(outcomes.values()),
        requests_per_s=sum(rates) if rates else None,
        hit_share=_share(sum(cached for cached, _ in pairs), sum(prompt for _, prompt in pairs)),
        exact_share=_exact_share(outcomes),
        running=sum(row.running or 0 for row in rows),
        waiting=sum(row.waiting or 0 for row in rows),
        active=_whole(sums.get("kvatlas_proxy_requests_active")),
        errors=errors,
        # A counter by reason has no sample before its first event.
        retries=_whole(sums.get("kvatlas_proxy_retries_total", 0.0)) if sums else None,
        ttft_accurate_share=_share(
            sum(row.ttft_accurate for row in rows), sum(row.ttft_compared for row in rows)
        ),
    )


def _hit_tokens(receipts: list[Any]) -> dict[str, tuple[int, int]]:
    """Return engine -> (cached tokens, prompt tokens) over the receipts that report both."""
    sums: dict[str, tuple[int, int]] = {}
    for receipt in receipts:
        fields = _dict(receipt)
        cached, prompt = _whole(fields.get("actual_tokens")), _whole(fields.get("prompt_tokens"))
        if cached is None or prompt is None:
            continue
        engine = str(fields.get("engine_id"))
        had = sums.get(engine, (0, 0))
        sums[engine] = had[0] + cached, had[1] + prompt
    return sums


def _sums(metrics: str) -> dict[str, float]:
    """Sum each metric over its labels."""
    sums: dict[str, float] = {}
    for name, _, value in series(metrics):
        if name.startswith("kvatlas_proxy_"):
            sums[name] = sums.get(name, 0.0) + value
    return sums


def _exact_share(outcomes: dict[str, int]) -> float | None:
    return _share(outcomes.get("exact", 0), sum(outcomes.get(name, 0) for name in _COMPARED))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole > 0 else None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _counts(value: Any) -> dict[str, int]:
    return {name: count for name, count in _dict(value).items() if type(count) is int}


def _number(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15
    return float(value) if good else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else int(number)
