"""Time to first token: the prediction part by part, and the errors of one engine's predictions.

A prediction is accurate if the measured time differs from it by at most ``HOLDS_S`` or ``HOLDS_SHARE`` of
the prediction, whichever is more. Errors are measured minus predicted seconds: above 0 the token came late.
Decisions add their margin to predictions, so they are counted at once, not by the books. Pure and bounded: at
most ``MODELS_MAX`` histograms and ``WINDOW`` errors per engine.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from itertools import islice
from statistics import median
from typing import Annotated

import msgspec

from kvatlas.router.observe.histogram import Histogram

# Several scheduler steps of an engine, which cannot be known from outside.
HOLDS_S = 0.05
HOLDS_SHARE = 0.1
WINDOW = 100
# Quantile of the errors: a first token comes later than prediction and margin in one request of twenty.
MARGIN_QUANTILE = 0.95
MODELS_MAX = 16
# The model label of an engine's further models (LoRA adapters).
OTHER = "other"
# A smaller share of accurate predictions, of at least this number, is a problem of the engine.
ACCURATE_SHARE_MIN, ACCURATE_OF_MIN = 0.5, 20
# Errors between two computations of the margin: sorting them takes 2 us.
_REFRESH_EVERY = 4
# Latest errors that the margin is taken from.
_MARGIN_OF = 40
# Of the window at least this number are predictions like one for which the margin is asked.
_ALIKE_MIN = 8
_ERRORS_S = (-30.0, -10.0, -2.5, -1.0, -0.25, -0.05, -0.01, 0.01, 0.05, 0.25, 1.0, 2.5, 10.0, 30.0, 120.0)


class FirstTokenParts(msgspec.Struct, frozen=True, gc=False):
    """Predicted seconds from the moment the engine is asked until its first token."""

    queue_s: float
    """Prefill work queued before it."""
    pages_s: float
    """Further wait until the pool has pages for the prompt."""
    load_s: float
    """Loading from memory outside the GPU."""
    prefill_s: float
    """Computing the uncached tokens."""
    engine_s: float
    """The engine's own overhead per request, and the delay by its running requests."""
    total_s: float
    """Sum of the parts."""


class FirstTokenSummary(msgspec.Struct, kw_only=True):
    """An engine's latest first tokens, predicted and measured: medians over the window, seconds."""

    guessed: bool = True
    """Predictions are a guess: too few first tokens of the engine itself were seen."""
    accurate: int = 0
    """Accurate predictions of the window."""
    compared: int = 0
    """Length of the window."""
    predicted_s: float | None = None
    measured_s: float | None = None
    margin_s: float | None = None
    """Seconds on top of a prediction within which 95 of 100 of the latest first tokens came."""


class SloStats(msgspec.Struct):
    """Counters of requests with a service level."""

    met: Annotated[dict[str, int], "kvatlas_slo_met_total{priority}"] = msgspec.field(default_factory=dict)
    """Streams whose first token came within the target of their service level, by class."""
    missed: Annotated[dict[str, int], "kvatlas_slo_missed_total{priority}"] = msgspec.field(
        default_factory=dict
    )
    """Streams whose first token came after the target of their service level, by class."""
    decisions: Annotated[int, "kvatlas_slo_decisions_total"] = 0
    """Decisions on requests with a service level; a request that waited in the queue is decided twice."""
    hopeless: Annotated[int, "kvatlas_slo_hopeless_total"] = 0
    """Of these, those for which every engine was predicted to miss the target, even without the margin for
    errors, so that the cost decided."""
    engines_skipped: Annotated[int, "kvatlas_slo_engines_skipped_total"] = 0
    """Engines left out of decisions, because the cheapest one was predicted to miss the target and others
    were not; not counted in fleets with prefill engines."""


class FirstTokenErrors:
    """Predictions of one engine compared with measured first tokens."""

    __slots__ = ("_latest", "_margin_s", "_ranked", "_refresh_in", "accurate", "by_model", "outcomes")

    def __init__(self) -> None:
        self.by_model: dict[str, Histogram] = {}
        """Errors in seconds."""
        self.outcomes = {"accurate": 0, "late": 0, "early": 0}
        self.accurate = 0
        """Accurate predictions of the window."""
        self._latest: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._margin_s: float | None = None
        self._refresh_in = 0
        # Errors with their predictions, and predictions, both ascending; None until ``margin_of`` is called,
        # which refusals by service level do.
        self._ranked: tuple[list[tuple[float, float]], list[float]] | None = None

    def add(self, model: str, predicted_s: float, measured_s: float) -> None:
        """Count one first token."""
        error_s = measured_s - predicted_s
        histogram = self.by_model.get(model)
        if histogram is None:
            name = model if len(self.by_model) < MODELS_MAX else OTHER
            histogram = self.by_model.setdefault(name, Histogram(_ERRORS_S))
        histogram.observe(error_s)
        outcome = _outcome(predicted_s, error_s)
        self.outcomes[outcome] += 1
        ranked = self._ranked
        if len(self._latest) == WINDOW:
            before_s, real_s = self._latest[0]
            self.accurate -= _outcome(before_s, real_s - before_s) == "accurate"
            if ranked is not None:
                del ranked[0][bisect_left(ranked[0], (real_s - before_s, before_s))]
                del ranked[1][bisect_left(ranked[1], before_s)]
        self.accurate += outcome == "accurate"
        self._latest.append((predicted_s, measured_s))
        if ranked is not None:
            insort(ranked[0], (error_s, predicted_s))
            insort(ranked[1], predicted_s)
        self._refresh_in -= 1

    @property
    def compared(self) -> int:
        """Length of the window."""
        return len(self._latest)

    @property
    def margin_s(self) -> float | None:
        """The error that ``MARGIN_QUANTILE`` of the latest stay below, at least 0; None without errors."""
        if self._refresh_in <= 0 and self._latest:
            # Errors from before a change of speed, or of load, say nothing of the next one.
            latest = islice(reversed(self._latest), _MARGIN_OF)
            errors = sorted([measured - predicted for predicted, measured in latest])
            self._margin_s = max(0.0, errors[_at_margin(len(errors))])
            self._refresh_in = _REFRESH_EVERY
        return self._margin_s

    def margin_of(self, predicted_s: float) -> float | None:
        """The margin of predictions like this one: long waits err by more than most first tokens do."""
        if self._ranked is None:
            errors = sorted([(real_s - found_s, found_s) for found_s, real_s in self._latest])
            self._ranked = errors, sorted([found_s for found_s, _ in self._latest])
        errors, predictions = self._ranked
        like_s = predicted_s / 2
        alike = len(predictions) - bisect_left(predictions, like_s)
        if alike < _ALIKE_MIN:
            return self.margin_s
        above = alike - 1 - _at_margin(alike)
        found = (error_s for error_s, found_s in reversed(errors) if found_s >= like_s)
        return max(0.0, next(islice(found, above, None)))

    def summary(self, *, guessed: bool = False) -> FirstTokenSummary:
        """Summarize the window."""
        if not self._latest:
            return FirstTokenSummary(guessed=guessed)
        return FirstTokenSummary(
            guessed=guessed,
            accurate=self.accurate,
            compared=len(self._latest),
            predicted_s=median([predicted for predicted, _ in self._latest]),
            measured_s=median([measured for _, measured in self._latest]),
            margin_s=self.margin_s,
        )


def _at_margin(count: int) -> int:
    return int(MARGIN_QUANTILE * (count - 1))


def _outcome(predicted_s: float, error_s: float) -> str:
    allowed_s = max(HOLDS_S, HOLDS_SHARE * predicted_s)
    return "late" if error_s > allowed_s else "early" if error_s < -allowed_s else "accurate"
