"""Time to first token: the prediction part by part, and the errors of one engine's predictions.

A prediction holds where the measured time differs from it by at most ``HOLDS_S`` or ``HOLDS_SHARE`` of the
prediction, whichever is more. Errors are measured minus predicted seconds: above 0 the token came late.
Pure and bounded: at most ``MODELS_MAX`` histograms and ``WINDOW`` errors per engine.
"""

from __future__ import annotations

from collections import deque
from statistics import median

import msgspec

from router.observe.histogram import Histogram

HOLDS_S = 0.05
"""Several scheduler steps of an engine: what no prediction from outside can know."""
HOLDS_SHARE = 0.1
WINDOW = 100
MARGIN_QUANTILE = 0.95
"""Of the errors: a first token comes later than prediction and margin in one request of twenty."""
MODELS_MAX = 16
OTHER = "other"
"""The model label of an engine's further models (LoRA adapters)."""
HELD_SHARE_MIN, HELD_OF_MIN = 0.5, 20
"""Fewer predictions that hold, of at least so many, are a problem of the engine."""
_REFRESH_EVERY = 8
"""Errors between two computations of the margin: sorting the window takes 4 us."""
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
    """Computing what is not cached."""
    engine_s: float
    """The engine's own overhead for a request, and what its running requests add."""

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.queue_s + self.pages_s + self.load_s + self.prefill_s + self.engine_s


class FirstTokenSummary(msgspec.Struct, kw_only=True):
    """An engine's latest first tokens, predicted and measured: medians over the window, seconds."""

    held: int = 0
    """Predictions of the window that held."""
    compared: int = 0
    """Length of the window."""
    predicted_s: float | None = None
    measured_s: float | None = None
    margin_s: float | None = None
    """Seconds on top of a prediction within which the first token comes in 95 of 100 requests."""


class SloStats(msgspec.Struct):
    """Counters of requests with a service level."""

    met: dict[str, int] = msgspec.field(default_factory=dict)
    """Streams whose first token came within the target of their service level, by class."""
    missed: dict[str, int] = msgspec.field(default_factory=dict)
    """Streams whose first token came after the target of their service level, by class."""
    decisions: int = 0
    """Decisions on requests with a service level; one that waited in the queue is decided twice."""
    hopeless: int = 0
    """Of these, those for which every engine was predicted to miss the target: the cost decided."""
    engines_skipped: int = 0
    """Engines left out of decisions, where the one of the lowest cost was predicted to miss the target and
    others were not."""


class FirstTokenErrors:
    """Predictions of one engine against the first tokens that came."""

    __slots__ = ("_latest", "_margin_s", "_refresh_in", "by_model", "outcomes")

    def __init__(self) -> None:
        self.by_model: dict[str, Histogram] = {}
        """Errors in seconds."""
        self.outcomes = {"held": 0, "late": 0, "early": 0}
        self._latest: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._margin_s: float | None = None
        self._refresh_in = 0

    def add(self, model: str, predicted_s: float, measured_s: float) -> None:
        """Count one first token."""
        error_s = measured_s - predicted_s
        histogram = self.by_model.get(model)
        if histogram is None:
            name = model if len(self.by_model) < MODELS_MAX else OTHER
            histogram = self.by_model.setdefault(name, Histogram(_ERRORS_S))
        histogram.observe(error_s)
        self.outcomes[_outcome(predicted_s, error_s)] += 1
        self._latest.append((predicted_s, measured_s))
        self._refresh_in -= 1

    @property
    def margin_s(self) -> float | None:
        """The error that ``MARGIN_QUANTILE`` of the window stay below, at least 0; None without errors."""
        if self._refresh_in <= 0 and self._latest:
            errors = sorted([measured - predicted for predicted, measured in self._latest])
            self._margin_s = max(0.0, errors[int(MARGIN_QUANTILE * (len(errors) - 1))])
            self._refresh_in = _REFRESH_EVERY
        return self._margin_s

    def summary(self) -> FirstTokenSummary:
        """The window in a few numbers."""
        if not self._latest:
            return FirstTokenSummary()
        return FirstTokenSummary(
            held=sum([_outcome(predicted, real - predicted) == "held" for predicted, real in self._latest]),
            compared=len(self._latest),
            predicted_s=median([predicted for predicted, _ in self._latest]),
            measured_s=median([measured for _, measured in self._latest]),
            margin_s=self.margin_s,
        )


def _outcome(predicted_s: float, error_s: float) -> str:
    allowed_s = HOLDS_SHARE * predicted_s
    allowed_s = HOLDS_S if allowed_s < HOLDS_S else allowed_s  # noqa: FURB136  # per request
    return "late" if error_s > allowed_s else "early" if error_s < -allowed_s else "held"
