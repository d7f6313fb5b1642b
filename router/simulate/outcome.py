"""What a run is worth: hit share, time to first token, balance, prediction error, regret. Tokens and seconds.

The first ``WARM_SHARE`` of the requests fills the caches and is left out of every number. Arms that ran over
the same requests are compared request by request: an arm's *regret* is how much later than at the best arm each
first token came, on average.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from router.simulate.fleet import FleetRun

WARM_SHARE = 0.2
WINDOWS = 20
Floats = npt.NDArray[np.float64]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One arm's numbers. ``exact_share`` is the share of predictions that were right to the token."""

    requests: int
    refused: int
    hit_share: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    busy_share: float
    """Of the engines' time, spent on prompts."""
    imbalance: float
    """Prompt seconds of the busiest engine over the mean."""
    error_mean_tokens: float
    """Mean of |predicted - hit|."""
    exact_share: float
    regret_s: float
    preemptions: int


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """For plots: times to first token in order, hit share over the run in ``WINDOWS`` steps, load per engine."""

    ttft_s: list[float]
    hit_shares: list[float]
    busy_shares: list[float]


def measured(run: FleetRun) -> slice:
    """The rows that count."""
    return slice(int(WARM_SHARE * len(run.rows)), None)


def outcome(run: FleetRun, best_ttft_s: Floats | None = None) -> Outcome:
    """Sum up one run. ``best_ttft_s``: per measured row the best arm's time, where others ran too."""
    rows = run.rows[measured(run)]
    ttft = np.array([row.ttft_s for row in rows])
    served = ttft >= 0
    kept = [row for row in rows if row.ttft_s >= 0]
    if not kept:
        raise ValueError("no request fits into the engines' caches: give them more blocks")
    errors = np.array([abs(row.predicted - row.hit) for row in kept])
    waits = ttft[served]
    p50, p90, p99 = (float(value) for value in np.percentile(waits, [50, 90, 99]))
    busy = np.array(run.busy_s)
    both = served if best_ttft_s is None else served & (best_ttft_s >= 0)
    regret = 0.0 if best_ttft_s is None or not both.any() else float((ttft - best_ttft_s)[both].mean())
    return Outcome(
        requests=len(kept),
        refused=len(rows) - len(kept),
        hit_share=sum(row.hit for row in kept) / sum(row.prompt_tokens for row in kept),
        ttft_mean_s=float(waits.mean()),
        ttft_p50_s=p50,
        ttft_p90_s=p90,
        ttft_p99_s=p99,
        busy_share=float(busy.mean() / run.ended_s) if run.ended_s else 0.0,
        imbalance=float(busy.max() / busy.mean()) if busy.mean() else 1.0,
        error_mean_tokens=float(errors.mean()),
        exact_share=float((errors == 0).mean()),
        regret_s=regret,
        preemptions=run.preemptions,
    )


def best_ttft(runs: Sequence[FleetRun]) -> Floats:
    """Per measured row the shortest time over all runs of the same requests; -1 where nobody served it."""
    times = np.array([[row.ttft_s for row in run.rows[measured(run)]] for run in runs])
    times[times < 0] = np.inf
    best: Floats = times.min(axis=0)
    best[np.isinf(best)] = -1.0
    return best


def compare(runs: Mapping[str, FleetRun]) -> dict[str, Outcome]:
    """Outcomes of arms that ran over the same requests, by name."""
    best = best_ttft(list(runs.values())) if len(runs) > 1 else None
    return {name: outcome(run, best) for name, run in runs.items()}


def curves(run: FleetRun) -> Curves:
    """What a plot of the run shows; the hit share over the whole run, warm-up included."""
    rows = [row for row in run.rows if row.ttft_s >= 0]
    waits = sorted(row.ttft_s for row in run.rows[measured(run)] if row.ttft_s >= 0)
    shares = []
    for part in np.array_split(np.arange(len(rows)), min(WINDOWS, len(rows))):
        piece = [rows[i] for i in part]
        shares.append(sum(row.hit for row in piece) / sum(row.prompt_tokens for row in piece))
    ended = run.ended_s or 1.0
    return Curves(ttft_s=waits, hit_shares=shares, busy_shares=[busy / ended for busy in run.busy_s])
