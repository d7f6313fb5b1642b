"""Outcome of a run: hit share, time to first token, balance, prediction error, regret. Tokens and seconds.

The first ``WARM_SHARE`` of the requests fills the caches: hits, times and predictions are counted from then
on; numbers of the engines (busy, imbalance, preemptions) cover the whole run. Variants that ran over the
same requests are compared request by request: the *regret* of a variant is how much later each first token
came than with the best variant, on average.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

WARM_SHARE = 0.2
WINDOWS = 20
Floats = npt.NDArray[np.float64]


class NothingServedError(ValueError):
    """No request of a run fits into an engine."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of one variant. ``exact_share``: share of predictions that were right to the token."""

    requests: int
    refused: int
    """Requests that fit into no engine's cache, or that ``admit`` refused; no other number includes them,
    except ``within_1_s_share`` and ``within_3_s_share``."""
    hit_share: float
    host_share: float = 0.0
    """Share of the prompt tokens that were hits loaded from host memory; ``store_share``: from the store."""
    store_share: float = 0.0
    pull_share: float = 0.0
    """Share of the prompt tokens that were pulled from other engines; ``promised_share``: share that the
    decisions expected to be pulled."""
    promised_share: float = 0.0
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    busy_share: float
    """Share of the engines' time spent on prompts."""
    imbalance: float
    """Prompt seconds of the busiest engine over the mean."""
    error_mean_tokens: float
    """Mean of |predicted - hit|."""
    exact_share: float
    regret_s: float
    preemptions: int
    answer_mean_s: float = 0.0
    """Time to the last token."""
    per_token_mean_s: float = 0.0
    """Time between two tokens of an answer, over answers with more than one."""
    per_token_p99_s: float = 0.0
    lasted_s: float = 0.0
    """From the first arrival to the end of the last answer, over the whole run."""
    apart_share: float = 0.0
    """Share of the requests whose prompt another engine computed."""
    within_1_s_share: float = 0.0
    """Share of all requests, refused ones included, whose first token came within 1 s; ``within_3_s_share``:
    within 3 s."""
    within_3_s_share: float = 0.0


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """Curves of the whole run, warm-up included: hit share in ``WINDOWS`` steps, prompt seconds per
    engine."""

    hit_shares: list[float]
    busy_s: list[float]
    lasted_s: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a run. ``ttft_s``: per measured request, -1 for one that was refused."""

    outcome: Outcome
    ttft_s: Floats
    curves: Curves


def result_of(run: FleetRun) -> Result:
    """Sum up one run; ``regret_s`` is 0 until it is compared. Raises ``NothingServedError``."""
    rows = run.rows[int(WARM_SHARE * len(run.rows)) :]
    served = [row for row in rows if row.ttft_s >= 0]
    if not served:
        raise NothingServedError("no request fits into the engines' caches: give them more blocks")
    waits = np.array([row.ttft_s for row in served])
    errors = np.array([abs(row.predicted - row.hit) for row in served])
    p50, p90, p99 = (float(value) for value in np.percentile(waits, [50, 90, 99]))
    paces = np.array([row.per_token_s for row in served if row.per_token_s >= 0] or [0.0])
    busy = np.array(run.busy_s)
    lasted_s = run.ended_s - min(row.arrived_s for row in run.rows)
    outcome = Outcome(
        requests=len(served),
        refused=len(rows) - len(served),
        hit_share=_hit_share(served),
        host_share=_share(served, "cpu"),
        store_share=_share(served, "storage"),
        pull_share=_share(served, "pulled"),
        promised_share=_share(served, "promised"),
        ttft_mean_s=float(waits.mean()),
        ttft_p50_s=p50,
        ttft_p90_s=p90,
        ttft_p99_s=p99,
        busy_share=float(busy.mean() / lasted_s) if lasted_s else 0.0,
        imbalance=float(busy.max() / busy.mean()) if busy.mean() else 1.0,
        error_mean_tokens=float(errors.mean()),
        exact_share=float((errors == 0).mean()),
        regret_s=0.0,
        preemptions=run.preemptions,
        answer_mean_s=float(np.mean([row.answer_s for row in served])),
        per_token_mean_s=float(paces.mean()),
        per_token_p99_s=float(np.percentile(paces, 99)),
        lasted_s=lasted_s,
        apart_share=sum(row.fetched > 0 for row in served) / len(served),
        within_1_s_share=float((waits <= 1.0).sum() / len(rows)),
        within_3_s_share=float((waits <= 3.0).sum() / len(rows)),
    )
    curves = Curves(hit_shares=_over_time(run), busy_s=list(run.busy_s), lasted_s=lasted_s)
    return Result(outcome=outcome, ttft_s=np.array([row.ttft_s for row in rows]), curves=curves)


def best_ttft(results: Mapping[str, Result]) -> Floats:
    """Return the shortest time over all variants per measured request; -1 if none served it."""
    times = np.array([result.ttft_s for result in results.values()])
    times[times < 0] = np.inf
    best: Floats = times.min(axis=0)
    best[np.isinf(best)] = -1.0
    return best


def compare(results: Mapping[str, Result]) -> dict[str, Outcome]:
    """Return the outcomes of variants that ran over the same requests, by name, with their regret."""
    best = best_ttft(results)
    compared = {}
    for name, result in results.items():
        served = result.ttft_s >= 0
        regret_s = float((result.ttft_s - best)[served].mean())
        compared[name] = msgspec.structs.replace(result.outcome, regret_s=regret_s)
    return compared


def _hit_share(rows: list[Row]) -> float:
    return _share(rows, "hit")


def _share(rows: list[Row], tokens: str) -> float:
    found: int = sum(getattr(row, tokens) for row in rows)
    return found / sum(row.prompt_tokens for row in rows)


def _over_time(run: FleetRun) -> list[float]:
    rows = [row for row in run.rows if row.ttft_s >= 0]
    parts = np.array_split(np.arange(len(rows)), min(WINDOWS, len(rows)))
    return [_hit_share(rows[part[0] : part[-1] + 1]) for part in parts]


class Row(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Outcome of one request. Tokens and seconds; ``ttft_s`` is -1 for one that no engine could hold."""

    index: int
    arrived_s: float
    engine: int
    prompt_tokens: int
    predicted: int
    """The variant's prediction at the decision."""
    hit: int
    ttft_s: float
    queue_s: float
    preempted: int
    cpu: int = 0
    """Part of the hit that was loaded from host memory; ``storage``: from the store."""
    storage: int = 0
    answer_s: float = -1.0
    """Time to the last token; ``per_token_s``: between two of them, -1 for an answer of one."""
    per_token_s: float = -1.0
    fetched: int = 0
    """Tokens transferred from the engine that computed the prompt."""
    promised: int = 0
    """Tokens that the decision expected to be pulled from another engine's host memory; ``pulled``:
    actual."""
    pulled: int = 0


class FleetRun(msgspec.Struct):
    """Rows in the workload's order, and numbers of the engines."""

    rows: list[Row]
    busy_s: list[float]
    computed_tokens: list[int]
    preemptions: int
    ended_s: float
    moved_bytes: int = 0
    """Tokens loaded from outside the GPUs."""
    left_out_blocks: int = 0
    """Blocks not written to the store because the queue was full."""
