"""Fits rates of real engines for the timing model, from a capture or an engine's metrics, with their spread.

From a capture: the seconds from placement to first token, less the work that the router believed to be queued
ahead, over the number of computed tokens. The line through the points has the median of the slopes between
pairs (Theil-Sen estimator), which tolerates up to 29 % of outliers: wrongly estimated queues. Its slope is
``prefill_s_per_token``, its value at zero tokens ``request_s``.

From metrics: sums since the engine's start (vLLM's names), so averages over all its load.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt
from prometheus_client.parser import text_string_to_metric_families

from kvatlas.router.simulation.setup import Timing
from kvatlas.router.simulation.usage_record import Captured

SAMPLES_MIN = 20
PAIRS = 20_000
RESAMPLES = 200
_Floats = npt.NDArray[np.float64]


class FitError(ValueError):
    """The data are not sufficient to fit; the message says what is missing."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """One value in seconds, with its range ``low`` to ``high`` (described by ``spread``). ``samples``: number
    of requests."""

    name: str
    value: float
    low: float
    high: float
    samples: int
    spread: str


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """``timing`` with fitted values instead of defaults; ``notes``: what could not be fitted."""

    timing: Timing
    estimates: list[Estimate]
    notes: list[str]


def fit_capture(captured: Sequence[Captured], timing: Timing) -> Fit:
    """Fit streamed requests whose engine reported the cached tokens. Raises ``FitError``."""
    points = [
        (one.asked.input_tokens - one.cached_tokens, one.ttft_s - one.queue_s, one.queue_s)
        for one in captured
        if one.cached_tokens is not None and one.ttft_s is not None
    ]
    if len(points) < SAMPLES_MIN:
        raise FitError(
            f"{len(points)} requests have both the time to their first token and their cached tokens, "
            f"{SAMPLES_MIN} are needed: requests must be streamed with stream_options.include_usage, and "
            "engines started with --enable-prompt-tokens-details"
        )
    notes = []
    alone = [point for point in points if point[2] <= 0]
    if len(alone) >= SAMPLES_MIN:
        points = alone
        notes.append(f"{len(alone)} requests without a queue were used")
    tokens, seconds, _ = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    if np.ptp(tokens) < 1:
        raise FitError("every prompt has the same number of computed tokens: no rate can be fitted")
    slopes, rests = _lines(tokens, seconds)
    spread = "95 % of resamples"
    rate = _estimate("prefill_s_per_token", slopes, len(points), spread)
    if rate.value <= 0:
        raise FitError("the time to first token does not grow with the computed tokens: nothing to fit")
    fixed = _estimate("request_s", np.maximum(rests, 0.0), len(points), spread)
    fitted = {"prefill_s_per_token": rate.value, "request_s": fixed.value}
    estimates = [rate, fixed]
    paces = np.array([pace for one in captured if (pace := one.s_per_generated_token)])
    if len(paces) >= SAMPLES_MIN:
        low, middle, high = (float(v) for v in np.percentile(paces, [10, 50, 90]))
        fitted["decode_s"] = middle
        estimates.append(
            Estimate(
                name="decode_s", value=middle, low=low, high=high, samples=len(paces), spread="10 % to 90 %"
            )
        )
    else:
        notes.append(f"decode_s: only {len(paces)} requests show it, so it stays at {timing.decode_s:g}")
    return Fit(timing=msgspec.structs.replace(timing, **fitted), estimates=estimates, notes=notes)


def _lines(tokens: _Floats, seconds: _Floats) -> tuple[_Floats, _Floats]:
    """Return slopes and intercepts: of all points first, then of resamples."""
    rng = np.random.default_rng(0)
    slopes, rests = [], []
    everything = np.arange(len(tokens))
    resamples = (rng.choice(everything, len(everything)) for _ in range(RESAMPLES))
    for chosen in chain([everything], resamples):
        x, y = tokens[chosen], seconds[chosen]
        first, second = rng.integers(0, len(x), (2, PAIRS))
        apart = x[first] != x[second]
        if not apart.any():
            continue
        first, second = first[apart], second[apart]
        slope = float(np.median((y[second] - y[first]) / (x[second] - x[first])))
        slopes.append(slope)
        rests.append(float(np.median(y - slope * x)))
    return np.array(slopes), np.array(rests)


def _estimate(name: str, values: _Floats, samples: int, spread: str) -> Estimate:
    low, high = (float(value) for value in np.percentile(values, [2.5, 97.5]))
    return Estimate(name=name, value=float(values[0]), low=low, high=high, samples=samples, spread=spread)


class _Histogram(msgspec.Struct):
    """One of vLLM's histograms, over all its labels. ``counts`` are cumulative, by upper bound."""

    sum: float = 0.0
    count: float = 0.0
    counts: dict[float, float] = msgspec.field(default_factory=dict)

    @property
    def mean(self) -> float:
        return self.sum / self.count

    def quantile(self, share: float) -> float:
        """Interpolate linearly within buckets; above the last bound, return that bound."""
        wanted, before, low = share * self.count, 0.0, 0.0
        for bound, count in sorted(self.counts.items()):
            if count >= wanted:
                if bound == float("inf") or count == before:
                    return low
                return low + (bound - low) * (wanted - before) / (count - before)
            before, low = count, bound
        return low


def fit_metrics(text: str, timing: Timing) -> Fit:
    """Fit an engine's ``/metrics`` page. Raises ``FitError``."""
    histograms, counters = _read(text)
    notes: list[str] = []
    prefill = _prefill(histograms, notes)
    tokens = _computed_tokens(histograms, counters)
    if tokens <= 0 or prefill.sum <= 0 or prefill.count < SAMPLES_MIN:
        raise FitError(
            f"the engine has reported {prefill.count:.0f} prompts and {tokens:.0f} computed tokens; "
            f"{SAMPLES_MIN} prompts are needed"
        )
    mean_tokens = tokens / prefill.count
    spread = "quartiles of requests"
    rate = Estimate(
        name="prefill_s_per_token",
        value=prefill.sum / tokens,
        low=prefill.quantile(0.25) / mean_tokens,
        high=prefill.quantile(0.75) / mean_tokens,
        samples=int(prefill.count),
        spread=spread,
    )
    fitted, estimates = {"prefill_s_per_token": rate.value}, [rate]
    pace = _first(
        histograms,
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
        "vllm:request_time_per_output_token_seconds",
    )
    if pace is not None and pace.sum > 0:
        fitted["decode_s"] = pace.mean
        low, high = pace.quantile(0.25), pace.quantile(0.75)
        estimates.append(
            Estimate(
                name="decode_s", value=pace.mean, low=low, high=high, samples=int(pace.count), spread=spread
            )
        )
    else:
        notes.append(f"decode_s: not reported, so it stays at {timing.decode_s:g}")
    return Fit(timing=msgspec.structs.replace(timing, **fitted), estimates=estimates, notes=notes)


def _prefill(histograms: dict[str, _Histogram], notes: list[str]) -> _Histogram:
    """Return the seconds from schedule to first token."""
    found = _first(histograms, "vllm:request_prefill_time_seconds")
    if found is not None:
        return found
    ttft = _first(histograms, "vllm:time_to_first_token_seconds")
    if ttft is None:
        raise FitError("vllm:time_to_first_token_seconds is missing or empty")
    queue = _first(histograms, "vllm:request_queue_time_seconds")
    if queue is None:
        notes.append("prefill_s_per_token: times to first token, queues included: an upper bound")
    else:
        ttft.sum = max(0.0, ttft.sum - queue.sum)
    return ttft


def _computed_tokens(histograms: dict[str, _Histogram], counters: dict[str, float]) -> float:
    computed = _first(histograms, "vllm:request_prefill_kv_computed_tokens")
    if computed is not None:
        return computed.sum
    cached = counters.get("vllm:prompt_tokens_cached", counters.get("vllm:prefix_cache_hits", 0.0))
    return counters.get("vllm:prompt_tokens", 0.0) - cached


def _first(histograms: dict[str, _Histogram], *names: str) -> _Histogram | None:
    return next((histograms[name] for name in names if name in histograms and histograms[name].count), None)


def _read(text: str) -> tuple[dict[str, _Histogram], dict[str, float]]:
    histograms: dict[str, _Histogram] = {}
    counters: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if family.type == "histogram":
                    _add(
                        histograms.setdefault(family.name, _Histogram()),
                        sample.name,
                        sample.labels,
                        sample.value,
                    )
                elif family.type == "counter" and sample.name.endswith("_total"):
                    counters[family.name] = counters.get(family.name, 0.0) + sample.value
    except ValueError as error:
        raise FitError(f"not a page of metrics: {error}") from None
    return histograms, counters


def _add(histogram: _Histogram, sample: str, labels: dict[str, str], value: float) -> None:
    if sample.endswith("_sum"):
        histogram.sum += value
    elif sample.endswith("_count"):
        histogram.count += value
    elif sample.endswith("_bucket"):
        bound = float(labels["le"])
        histogram.counts[bound] = histogram.counts.get(bound, 0.0) + value
