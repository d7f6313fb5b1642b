"""Speed of each engine, learned from all first tokens that it delivers.

The model of one engine is linear; its parts are fitted together, and a prediction is their sum::

    seconds = overhead + step * waits + rate * tokens + interference * running + attention * pairs - done

``tokens``: to compute until the first token, those of prompts ahead included; ``waits``: share of a step
that must end first (1 if a prompt is being computed, half a step on average beside decodes alone); ``pairs``:
of a token to compute and one before it; ``done``: seconds for which the engine had been at it when it was
asked. A Kalman filter keeps five numbers and their covariances, O(1) per first token: errors count relative
to the prediction, an outlier as if it were at the edge of what is usual, and every number may drift. No part
is negative.

A change of speed is seen from the errors of all first tokens (two-sided CUSUM of the logarithm of measured
through predicted): the whole model is scaled at once, and then learns quickly for a while.

An engine with fewer than ``samples_min`` samples guesses: it starts from the medians of its model's
engines, or the prior. Invariant: rates lie within the bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import mul
from statistics import median
from typing import Final, NamedTuple

import msgspec


class RateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Priors and bounds; the defaults suit a model of 7-70 B parameters on one data-centre accelerator."""

    prefill_s_per_token: float = 1 / 8000
    prefill_s_per_token_min: float = 1e-7
    prefill_s_per_token_max: float = 0.1
    decode_interference_s: float = 0.0005
    """Seconds that one running sequence adds to a prefill: its share of a scheduler step."""
    decode_interference_s_max: float = 0.02
    overhead_s: float = 0.005
    """Seconds to a first token if nothing is left to compute and nothing else runs."""
    overhead_s_max: float = 1.0
    samples_min: int = 5
    """An engine with fewer samples of its own guesses."""
    stale_s: float = 600.0
    stale_halflife_s: float = 600.0


class PrefillSample(msgspec.Struct, frozen=True, gc=False):
    """One observed first token, ``service_s`` after the engine was asked; the rest as in the module's
    docstring."""

    tokens: int
    service_s: float
    running: int
    waits: float = 0.0
    done_s: float = 0.0
    pairs: float = 0.0


class Parts(NamedTuple):
    """Estimates in the order of the filter."""

    overhead_s: float
    step_s: float
    prefill_s_per_token: float
    decode_interference_s: float
    attention_s: float


class SpeedChange(NamedTuple):
    """All first tokens of an engine come ``factor`` times as late as before (below 1: earlier)."""

    at_s: float
    factor: float


# For so long a change of speed is a finding.
CHANGE_SHOWN_S: Final = 600.0
# Deviations of a guess, relative to its values, and at least.
_PRIOR_SD: Final = (4.0, 4.0, 10.0, 2.0, 2.0)
_PRIOR_SD_MIN: Final = (0.01, 0.01, 1e-6, 1e-4, 1e-8)
# Tokens of context after which attention takes at least as long as all else.
_CONTEXT_MIN: Final = 4000
# Drift of every value from sample to sample.
_DRIFT: Final = 0.02
# Deviations of values after a change of speed, relative to themselves.
_CHANGED_SD: Final = (0.4,) * 5
# Errors beyond this many deviations count as if they were at it (Huber, 1964).
_HUBER: Final = 1.5
# Relative error of predictions: at the start, at least, at most, and how fast its estimate follows.
_NOISE_START, _NOISE_MIN, _NOISE_MAX, _NOISE_NEWS = 0.1, 0.02, 0.4, 0.05
# CUSUM: what is usual for an error, its bound for a single error, and the sum that is a change.
_SLACK, _ERROR_MAX, _CHANGE_AT = 0.25, 0.7, 2.4
_FACTOR_MAX: Final = 2.0
# Samples after which the model is the one that errors are compared with, if there is no sign of a change.
_USUAL_FOR: Final = 16
_LATELY_NEWS: Final = 0.3
# Values that fall to this part of themselves at most with one sample, by their place: an engine has both.
_FALL_MAX: Final = 0.3
_POSITIVE: Final = (0, 2)
# A guess that is off by more is scaled at once; downwards sooner, as no value falls below 0.
_GUESS_FACTORS: Final = (1 / 3, 10.0)
# A smaller change is learned, but no news, nor is one of a model that is not known well, which takes this
# multiple of the samples that end the guess.
_NEWS_FACTOR: Final = 1.3
_KNOWN: Final = 10


def _expected_s(parts: Parts | list[float], sample: PrefillSample) -> float:
    overhead_s, step_s, rate, interference_s, attention_s = parts
    whole_s = (
        overhead_s
        + step_s * sample.waits
        + rate * sample.tokens
        + interference_s * sample.running
        + attention_s * sample.pairs
    )
    # What was done by then cannot be more than what precedes the prompt.
    return max(whole_s - sample.done_s, 0.25 * overhead_s, 0.1 * whole_s, 1e-4)


def _within(value: float, most: float) -> float:
    return most if value > most else max(value, -most)


def _summed(before: tuple[float, int, float], more: float, error: float) -> tuple[float, int, float]:
    """One sum of the CUSUM: sum, number of the errors in it, and theirs."""
    total, count, errors = before
    total += more
    return (total, count + 1, errors + error) if total > 0 else (0.0, 0, 0.0)


class EngineRates:
    """The model of one engine; ``close`` when it leaves the fleet.

    One writer; times are the caller's clock. ``model``: name of what it serves, None while unknown.
    """

    __slots__ = (
        "_at_s",
        "_cov",
        "_down",
        "_lately",
        "_model",
        "_noise",
        "_own",
        "_up",
        "_usual",
        "_value",
        "change",
        "changes",
        "fleet",
        "fresh_until_s",
        "samples",
        "touched",
    )

    def __init__(self, fleet: FleetRates, model: Callable[[], str | None]) -> None:
        self.fleet = fleet
        self._model = model
        self._value: list[float] = []
        self._cov: list[list[float]] = []
        self._noise = _NOISE_START
        # Sums of the CUSUM, upwards and downwards, and the estimates whose errors are in them.
        self._up = self._down = (0.0, 0, 0.0)
        self._usual: Parts | None = None
        # Mean of the latest errors of the model.
        self._lately = 0.0
        self.samples = 0
        """First tokens learned from."""
        self.change: SpeedChange | None = None
        """The latest change of speed."""
        self.changes = 0
        """Number of changes of speed."""
        self._at_s = 0.0
        self._own: tuple[float, float] = (0.0, 0.0)  # time until which ``current`` is cached
        self.fresh_until_s = -math.inf
        """Until then ``current`` does not depend on the fleet's ``borrowed``."""
        self.touched: Callable[[], None] = lambda: None
        """Called when its own estimates have changed."""

    def observe(self, sample: PrefillSample, now: float) -> None:
        """Learn from one first token."""
        if not self._value:
            self._begin()
        # Relative to the prediction, the errors of long and short ones are alike; a guess is no measure.
        expected_s = self.expected_s(sample)
        if self._watch(sample, expected_s, now):
            expected_s = self.expected_s(sample)
        scale = 1 / (max(sample.service_s, 1e-4) if self.guessed else expected_s)
        inputs = (
            scale,
            sample.waits * scale,
            sample.tokens * scale,
            sample.running * scale,
            sample.pairs * scale,
        )
        error = (sample.service_s - expected_s) * scale
        value, cov = self._value, self._cov
        gains = [sum(map(mul, row, inputs)) for row in cov]
        # Rounding could make it negative, after samples that no engine gives.
        own, noise = max(0.0, sum(map(mul, gains, inputs))), self._noise * self._noise
        bound = _HUBER * math.sqrt(own + noise)
        error = bound if error > bound else max(error, -bound)
        share = 1 / (own + noise)
        self._noise += _NOISE_NEWS * (max(_NOISE_MIN, 1.25 * min(abs(error), _NOISE_MAX)) - self._noise)
        for at, row in enumerate(cov):
            part = gains[at] * share
            cov[at] = [one - part * gain for one, gain in zip(row, gains, strict=True)]
            found, least = value[at] + part * error, _FALL_MAX * value[at]
            if found < least and at in _POSITIVE:
                # Nothing would be left: the errors were those of another part, so it is doubted instead.
                found, cov[at][at] = least, cov[at][at] + value[at] * value[at]
            value[at] = found
        self._bound()
        settings = self.fleet.settings
        self._at_s, self.samples = now, self.samples + 1
        if self.samples >= settings.samples_min:
            self._own = value[2], value[3]
            self.fresh_until_s = now + settings.stale_s
        self.fleet.learned(self)
        self.touched()

    def expected_s(self, sample: PrefillSample) -> float:
        """Seconds to this first token by the present estimates."""
        return _expected_s(self._parts, sample)

    def _begin(self) -> None:
        """Start from a guess."""
        self._value = list(self._borrowed)
        self._doubt(_PRIOR_SD)

    def _doubt(self, deviations: Sequence[float]) -> None:
        """Set the covariances by deviations relative to the values."""
        self._cov = [[0.0] * len(deviations) for _ in deviations]
        for at, (value, deviation) in enumerate(zip(self._value, deviations, strict=True)):
            self._cov[at][at] = max(value * deviation, _PRIOR_SD_MIN[at]) ** 2

    def _bound(self) -> None:
        """Keep all values within their bounds, and let them drift."""
        value, cov, settings = self._value, self._cov, self.fleet.settings
        rate = min(max(value[2], settings.prefill_s_per_token_min), settings.prefill_s_per_token_max)
        value[0] = min(max(value[0], 1e-5), settings.overhead_s_max)
        value[1] = min(max(value[1], 0.0), settings.overhead_s_max)
        value[2] = rate
        value[3] = min(max(value[3], 0.0), settings.decode_interference_s_max)
        value[4] = min(max(value[4], 0.0), rate / _CONTEXT_MIN)
        typical_s = value[0] + value[1]
        sizes = (typical_s, typical_s, rate, value[3] + rate, value[4] + rate / 1e5)
        for at, size in enumerate(sizes):
            cov[at][at] += (_DRIFT * size) ** 2

    def _watch(self, sample: PrefillSample, expected_s: float, now: float) -> bool:
        """Look for a change of speed since the model was last known to hold. Returns whether the model was
        scaled."""
        measured_s, usual, value = max(sample.service_s, 1e-4), self._usual, self._value
        if self.guessed:
            # Of a guess that is far off, the proportions may still hold.
            if not _GUESS_FACTORS[0] < measured_s / expected_s < _GUESS_FACTORS[1]:
                self._scale(measured_s / expected_s)
                return True
            return False
        if usual is None:
            usual = self._usual = Parts(*value)
        # The model itself follows a change soon, so that its own errors would end before they are many.
        now_error = _within(math.log(measured_s / expected_s), _FACTOR_MAX)
        self._lately += _LATELY_NEWS * (now_error - self._lately)
        if now - self._at_s < value[0]:
            # First tokens of one step have one reason to be late.
            return False
        error = _within(math.log(measured_s / _expected_s(usual, sample)), _FACTOR_MAX)
        counted, slack = _within(error, _ERROR_MAX), _SLACK + 0.5 * self._noise
        self._up = _summed(self._up, counted - slack, error)
        self._down = _summed(self._down, -counted - slack, error)
        found = max(self._up, self._down)
        if found[0] <= _CHANGE_AT:
            calm = found[0] < _CHANGE_AT / 3 and not self.samples % _USUAL_FOR
            if calm or not self._known:
                self._usual = Parts(*value)
            return False
        self._changed(math.exp(found[2] / found[1]), now)
        return True

    def _scale(self, factor: float) -> None:
        """Scale the model, and doubt each of its values."""
        self._value = [value * factor for value in self._value]
        self._bound()
        self._doubt(_PRIOR_SD if self.guessed else _CHANGED_SD)

    def _changed(self, factor: float, now: float) -> None:
        """Note a change of speed by a factor; scale the model by what it has not learned of it yet."""
        self._scale(math.exp(self._lately))
        self._up = self._down = (0.0, 0, 0.0)
        self._lately, self._usual = 0.0, Parts(*self._value)
        if self._known and not 1 / _NEWS_FACTOR < factor < _NEWS_FACTOR:
            self.change = SpeedChange(now, factor)
            self.changes += 1

    @property
    def _known(self) -> bool:
        return self.samples >= _KNOWN * self.fleet.settings.samples_min

    @property
    def _borrowed(self) -> Parts:
        """Estimates of its model's engines, for missing and old ones; the prior without any."""
        # Without a further call: each decision asks seven times of an engine that is not learned.
        fleet = self.fleet
        return (fleet.borrowed if fleet.medians is None else fleet.medians).get(self._model(), fleet.prior)

    @property
    def _parts(self) -> Parts | list[float]:
        return self._value or self._borrowed

    @property
    def guessed(self) -> bool:
        """Whether the estimates are a guess: too few samples."""
        return self.samples < self.fleet.settings.samples_min

    def prefill_s_per_token(self, now: float) -> float:
        """Seconds the engine takes for one uncached token."""
        if not self._value:
            return self._borrowed.prefill_s_per_token
        rate, settings = self._value[2], self.fleet.settings
        overdue_s = now - self._at_s - settings.stale_s
        if overdue_s <= 0:
            return rate
        # Without samples the rate moves back to the fleet's, so that an engine that was slow once gets
        # prompts, and so samples, again. In steps of a second: a snapshot needs constant values.
        own: float = 0.5 ** (math.floor(overdue_s) / settings.stale_halflife_s)
        return own * rate + (1 - own) * self._borrowed.prefill_s_per_token

    def current(self, now: float) -> tuple[float, float]:
        """``prefill_s_per_token`` and ``decode_interference_s``, for decisions."""
        if now <= self.fresh_until_s:
            return self._own
        return self.prefill_s_per_token(now), (self._value or self._borrowed)[3]

    def beside_s(self, interference_s: float, running: int, waiting: int) -> float:
        """``interference_s`` with the wait for the step of the ``running``, if no prompt is being computed:
        half of it is left on average."""
        return interference_s + self.step_s / (2 * running) if running and not waiting else interference_s

    def constant_until(self, now: float) -> float:
        """Time until which ``current`` stays as it is, unless estimates change."""
        if now <= self.fresh_until_s:
            return self.fresh_until_s
        if not self._value:
            return math.inf
        stale_s = self._at_s + self.fleet.settings.stale_s
        return stale_s + math.floor(max(0.0, now - stale_s)) + 1.0

    @property
    def decode_interference_s(self) -> float:
        """Seconds that one running sequence adds to a prefill there."""
        return self._parts[3]

    @property
    def overhead_s(self) -> float:
        """Seconds to a first token if nothing is left to compute and nothing else runs."""
        return (self._value or self._borrowed)[0]

    @property
    def step_s(self) -> float:
        """Seconds of a step beside those of its tokens."""
        return self._parts[1]

    @property
    def attention_s(self) -> float:
        """Seconds that each token of context adds to a token's computing."""
        return (self._value or self._borrowed)[4]

    @property
    def context_share(self) -> float:
        """Part of a token's time without context that each token of context adds to it."""
        parts = self._value or self._borrowed
        return parts[4] / parts[2]

    def close(self) -> None:
        """Remove a closed engine from the fleet's estimates."""
        self.fleet.left(self)

    @property
    def learned(self) -> tuple[str | None, Parts]:
        """Its model, and its own estimates."""
        return self._model(), Parts(*self._value)


class FleetRates:
    """Estimates for engines without samples of their own: medians over the others of their model, computed on
    demand."""

    def __init__(self, settings: RateSettings | None = None) -> None:
        self.settings = settings or RateSettings()
        # Engines that have learned something.
        self._engines: dict[EngineRates, None] = {}
        self.prior = Parts(
            self.settings.overhead_s,
            self.settings.overhead_s,
            self.settings.prefill_s_per_token,
            self.settings.decode_interference_s,
            0.0,
        )
        self.medians: dict[str | None, Parts] | None = None
        """By model; None: not computed (``borrowed``)."""

    def engine(self, model: Callable[[], str | None] = lambda: None) -> EngineRates:
        """Make the rates of one more engine."""
        return EngineRates(self, model)

    def learned(self, engine: EngineRates) -> None:
        """Note changed estimates of an engine."""
        self._engines[engine] = None
        self.medians = None

    def left(self, engine: EngineRates) -> None:
        """Remove an engine."""
        if engine in self._engines:
            del self._engines[engine]
            self.medians = None

    @property
    def borrowed(self) -> dict[str | None, Parts]:
        """``medians``, computed if need be."""
        if self.medians is None:
            by_model: dict[str | None, list[Parts]] = {}
            for engine in self._engines:
                if not engine.guessed:
                    model, parts = engine.learned
                    by_model.setdefault(model, []).append(parts)
            self.medians = {
                model: Parts(*map(median, zip(*found, strict=True))) for model, found in by_model.items()
            }
        return self.medians
