"""One picture of a running router: its own endpoints' answers turned into rows and totals.

Pure: takes what ``/kvatlas/engines``, ``/kvatlas/receipts`` and ``/metrics`` answered. Fields that are
missing or of another type (an older or newer router) are left out; nothing raises because of an answer.
"""

from __future__ import annotations

from typing import Any

import msgspec

from router.tools.doctor.gather.gauges import series

_COMPARED = ("exact", "over", "under")


class EngineRow(msgspec.Struct, kw_only=True):
    """One engine. None: not known. Shares are 0..1; ``requests`` counts finished ones."""

    engine: str
    up: bool
    breaker_open: bool
    models: list[str]
    requests: int = 0
    requests_per_s: float | None = None
    hit_share: float | None = None
    """Reported cached tokens over prompt tokens, of the latest receipts."""
    exact_share: float | None = None
    """Of all compared predictions."""
    queue_s: float | None = None
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    """Share of the KV blocks that running requests use."""
    kv_cached: float | None = None
    """Share of the KV blocks that hold cached content, in use or not."""
    feed: str = ""
    feed_reason: str = ""
    lag_s: float | None = None
    mode: str = ""
    predicted_ttft_s: float | None = None
    """Median predicted time to first token of the latest streams, from asking the engine."""
    ttft_s: float | None = None
    """The same, as measured."""
    ttft_held: int = 0
    """Predictions that held (within 50 ms or 10 %), of ``ttft_compared``."""
    ttft_compared: int = 0
    drifting: bool = False
    problem: str = ""


class Totals(msgspec.Struct, kw_only=True):
    """The whole router; sums over engines, and figures of the proxy."""

    engines: int
    up: int
    requests: int
    requests_per_s: float | None
    hit_share: float | None
    exact_share: float | None
    running: int
    waiting: int
    active: int | None = None
    """Requests in the proxy now."""
    errors: int | None = None
    retries: int | None = None
    ttft_held_share: float | None = None
    """Of all engines' latest predicted times to first token, those that held."""


class RouterSnapshot(msgspec.Struct, kw_only=True):
    """All of it; ``problem`` says why there are no rows."""

    router: str
    problem: str = ""
    engines: list[EngineRow] = []
    totals: Totals | None = None


def make_picture(
    router: str,
    engines: list[Any],
    receipts: list[Any],
    metrics: str,
    *,
    before: RouterSnapshot | None = None,
    elapsed_s: float = 0.0,
) -> RouterSnapshot:
    """The picture; rates are against ``before``, taken ``elapsed_s`` earlier."""
    hits = _hit_tokens(receipts)
    earlier = {row.engine: row for row in before.engines} if before is not None else {}
    rows = [
        _row(entry, hits, earlier, elapsed_s)
        for entry in engines
        if isinstance(entry, dict) and isinstance(entry.get("engine"), str)
    ]
    return RouterSnapshot(router=router, engines=rows, totals=_totals(rows, engines, hits, _sums(metrics)))


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
        feed_reason=str(feed.get("reason", "")),
        lag_s=_number(feed.get("lag_s")),
        mode=str(entry.get("mode") or ""),
        predicted_ttft_s=_number(first_tokens.get("predicted_s")),
        ttft_s=_number(first_tokens.get("measured_s")),
        ttft_held=_whole(first_tokens.get("held")) or 0,
        ttft_compared=_whole(first_tokens.get("compared")) or 0,
        drifting=entry.get("drifting") is True,
        problem=str(entry.get("problem") or ""),
    )


def _totals(
    rows: list[EngineRow], engines: list[Any], hits: dict[str, tuple[int, int]], sums: dict[str, float]
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
        # A counter by reason has no sample before its first reason.
        errors=_whole(sums.get("kvatlas_proxy_errors_total", 0.0)) if sums else None,
        retries=_whole(sums.get("kvatlas_proxy_retries_total", 0.0)) if sums else None,
        ttft_held_share=_share(sum(row.ttft_held for row in rows), sum(row.ttft_compared for row in rows)),
    )


def _hit_tokens(receipts: list[Any]) -> dict[str, tuple[int, int]]:
    """Engine -> (cached tokens, prompt tokens) over the receipts that report both."""
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
    """Each metric summed over its labels."""
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
