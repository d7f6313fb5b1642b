"""Seconds until an engine's first token, predicted by one model per engine that all its first tokens teach.

Two models, for two purposes. What is *predicted* (receipts, service levels and their margin, refusals) comes
from here and follows the engine itself. What is *decided* by cost (engine, pull, prefill elsewhere) comes
from ``rates.py``, whose medians move late: with these values noise chose among equal engines (decision 046).
A change of speed that is seen here is the one thing that reaches the rates.

The model is linear; its parts are fitted together, and a prediction is their sum::

    seconds = overhead + step * waits + rate * tokens + interference * running + attention * pairs - done

``tokens``: to compute until the first token, those of prompts ahead included; ``waits``: share of a step
that must end first (1 if a prompt is being computed, half a step on average beside decodes alone); ``pairs``:
of a token to compute and one before it; ``done``: seconds that the running step had had when the engine was
asked. A Kalman filter keeps five numbers and their covariances, O(1) per first token: errors count relative
to the prediction, an outlier as if it were at the edge of what is usual, and every number may drift. No part
is negative.

A change of speed is seen from the errors of all first tokens (two-sided CUSUM of the logarithm of measured
through predicted): the whole model is scaled at once, and then learns quickly for a while.

An engine with fewer than ``samples_min`` samples guesses: it starts from the medians of its model's engines,
else from what its probe took (``probed_parts``), else from the prior."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Final, NamedTuple

import msgspec

from kvatlas.router.placement.fleet_medians import FleetMedians, Medians


class SecondsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The prior, for a model of 7-70 B parameters on one data-centre accelerator, and bounds."""

    overhead_s: float = 0.005
    step_s: float = 0.005
    prefill_s_per_token: float = 1 / 8000
    decode_interference_s: float = 0.0005
    prefill_s_per_token_min: float = 1e-7
    prefill_s_per_token_max: float = 0.1
    decode_interference_s_max: float = 0.02
    overhead_s_max: float = 1.0
    samples_min: int = 5
    """An engine with fewer samples of its own guesses."""


class FirstTokenWork(msgspec.Struct, frozen=True, gc=False):
    """Work of an engine from being asked until a first token; terms as in the module's docstring.

    ``ahead_tokens`` and ``ahead_pairs`` are those of prompts ahead; the running step has had ``begun_s``, and
    at most ``batch_tokens`` of them."""

    tokens: int
    pairs: float = 0.0
    ahead_tokens: float = 0.0
    ahead_pairs: float = 0.0
    ahead_load_s: float = 0.0
    running: int = 0
    waits: float = 0.0
    begun_s: float = 0.0
    batch_tokens: float = 0.0
    joined: bool = False
    """Once it is done: other prompts were not, and may yet come from the same step."""


class SpeedParts(NamedTuple):
    """Estimates in the order of the filter."""

    overhead_s: float
    step_s: float
    prefill_s_per_token: float
    decode_interference_s: float
    attention_s: float


class SpeedChange(NamedTuple):
    """First tokens come ``factor`` times as late as before (below 1: earlier), since ``since_s``."""

    at_s: float
    since_s: float
    factor: float


# For so long a change of speed is a finding.
CHANGE_SHOWN_S: Final = 600.0
# Deviations of a guess, relative to its values, and at least.
_PRIOR_SD: Final = (4.0, 4.0, 10.0, 2.0, 2.0)
_PROBED_SD: Final = (0.5, 0.5, 0.5, 2.0, 2.0)
_PRIOR_SD_MIN: Final = (0.01, 0.01, 1e-6, 1e-4, 1e-8)
# Tokens of context after which attention takes at least as long as all else.
_CONTEXT_MIN: Final = 4000
# Drift of every value from sample to sample.
_DRIFT: Final = 0.02
# Deviations of values after a change of speed, relative to themselves.
_CHANGED_SD: Final = (0.4,) * 5
# Errors beyond this many deviations count as if they were at it (Huber, 1964).
_HUBER: Final = 1.5
# Of an engine that is known well, one first token in this many is learned from, chosen by its number alone:
# the filter costs 3 us, and all are watched for a change of speed. All are for a while after a change.
_ONE_IN, _ALL_FOR = 4, 100
# Relative error of predictions: at the start, at least, at most, and how fast its estimate follows.
_NOISE_START, _NOISE_MIN, _NOISE_MAX, _NOISE_NEWS = 0.1, 0.02, 0.4, 0.05
# CUSUM: what is usual for an error, its bound for a single error, and the sum that is a change.
_SLACK, _ERROR_MAX, _CHANGE_AT = 0.25, 0.7, 2.4
_FACTOR_MAX: Final = 2.0
_STEP_FACTOR_MAX: Final = math.exp(_FACTOR_MAX)
# Samples after which the model is the one that errors are compared with, if there is no sign of a change.
_USUAL_FOR: Final = 16
_LATELY_NEWS: Final = 0.3
# Values that fall to this part of themselves at most with one sample, by their place: an engine has both.
_FALL_MAX: Final = 0.3
_POSITIVE: Final = (0, 2)
# A guess that is too long by more than this factor is scaled at once, one that is too short if that is so of
# two first tokens: one may be late by chance (the engine compiled, or a longer prompt joined the step), and
# would spoil what follows.
_GUESS_FACTOR: Final = 3.0
# First tokens closer than this come from one step, and have one reason to be late.
_SAME_STEP_S: Final = 0.002
# A change is news if it is of this factor and of this number of deviations of the mean error, and if the
# model is known well, which takes this multiple of the samples that end the guess.
_NEWS_FACTOR, _NEWS_SD, _KNOWN = 1.25, 3.0, 10
# Of answers to a probe, those with fewer tokens by this factor show what does not depend on them.
_SLOPE_FACTOR: Final = 4
_NOT_BEGUN: Final = (0.0, 0, 0.0, 0.0)


def _expected_s(parts: SpeedParts | list[float], work: FirstTokenWork) -> float:
    overhead_s, step_s, rate, interference_s, attention_s = parts
    whole_s = (
        overhead_s
        + step_s * work.waits
        + rate * (work.tokens + work.ahead_tokens)
        + interference_s * work.running
        + attention_s * (work.pairs + work.ahead_pairs)
    )
    if work.begun_s:
        # What was done by then cannot be more than what precedes the prompt.
        whole_s -= min(work.begun_s, _running_step_s(parts, work))
    least_s = 0.25 * overhead_s + 1e-4
    return whole_s if whole_s > least_s else least_s  # noqa: FURB136


def probed_parts(timed: Sequence[tuple[int, float]], settings: SecondsSettings) -> SpeedParts | None:
    """Parts of an engine by the answers to its probe, in their order: tokens computed for each, and seconds
    until it came, with nothing else there. None: they say nothing.

    The first one is left out: the engine may have compiled for it. Of the rest the fastest count, of those
    with many tokens and of those with few: nothing makes an answer early. Without both no slope is seen, and
    the prior is scaled."""
    sure = [(tokens, seconds) for tokens, seconds in timed[1:] if tokens > 0 and 0.0 < seconds < math.inf]
    if not sure:
        return None
    most = max(sure)[0]
    tokens, seconds = min((one for one in sure if 2 * one[0] > most), key=lambda one: one[1] / one[0])
    rate, overhead_s = settings.prefill_s_per_token, settings.overhead_s
    factor = seconds / (overhead_s + rate * tokens)
    rate, overhead_s = factor * rate, factor * overhead_s
    few = [one for one in sure if _SLOPE_FACTOR * one[0] <= most]
    if few:
        few_tokens, few_s = min(few, key=itemgetter(1))
        slope = (seconds - few_s) / (tokens - few_tokens)
        rate = slope if slope > 0.0 else rate
        overhead_s = max(few_s - rate * few_tokens, 0.1 * few_s)
    rate = min(max(rate, settings.prefill_s_per_token_min), settings.prefill_s_per_token_max)
    overhead_s = min(overhead_s, settings.overhead_s_max)
    # A step of decodes has the fixed part too, and computes a token for each of them.
    return SpeedParts(overhead_s, overhead_s, rate, min(rate, settings.decode_interference_s_max), 0.0)


def _running_step_s(parts: SpeedParts | list[float], work: FirstTokenWork) -> float:
    _, step_s, rate, _, attention_s = parts
    batch, ahead = work.batch_tokens, work.ahead_tokens
    return step_s + rate * batch + (attention_s * work.ahead_pairs * batch / ahead if ahead else 0.0)


def _log_error(
    parts: SpeedParts | list[float], work: FirstTokenWork, measured_s: float, expected_s: float
) -> float:
    """Logarithm of measured through expected, within ``_FACTOR_MAX``, both since the running step began: at
    an engine that is twice as slow, what is left of that step takes more than twice as long."""
    if work.begun_s:
        step_s = _running_step_s(parts, work)
        expected_s += min(work.begun_s, step_s)
        measured_s += min(work.begun_s, _STEP_FACTOR_MAX * step_s)
    found = math.log(measured_s / expected_s)
    return min(max(found, -_FACTOR_MAX), _FACTOR_MAX) if abs(found) > _FACTOR_MAX else found


class FirstTokenModel:
    """The model of one engine; ``close`` when it leaves the fleet.

    One writer; times are the caller's clock. ``model``: name of what it serves, None while unknown.
    """

    __slots__ = (
        "_all_until",
        "_before",
        "_closed",
        "_cov",
        "_down",
        "_fleet",
        "_last_s",
        "_lately",
        "_model",
        "_noise",
        "_probed",
        "_up",
        "_usual",
        "_value",
        "change",
        "changed",
        "changes",
        "samples",
    )

    def __init__(self, fleet: FirstTokenModels, model: Callable[[], str | None]) -> None:
        self._fleet, self._model = fleet, model
        self._value: list[float] = []
        # What its probe took says of it.
        self._probed: SpeedParts | None = None
        self._cov: list[list[float]] = []
        self._noise = _NOISE_START
        # Sums of the CUSUM, upwards and downwards, each with the number and sum of the errors in it and the
        # time of the first, and the estimates whose errors they are.
        self._up = self._down = _NOT_BEGUN
        self._usual: SpeedParts | None = None
        # Mean of the latest errors of the model, and time of the last one.
        self._lately, self._last_s = 0.0, -math.inf
        # A first token that may not be the last one of its step.
        self._before: tuple[FirstTokenWork, float, float] | None = None
        self._closed = False
        self._all_until = _ALL_FOR
        self.samples = 0
        """Number of its first tokens so far."""
        self.change: SpeedChange | None = None
        """The latest change of speed."""
        self.changes = 0
        """Number of changes of speed."""
        self.changed: Callable[[SpeedChange], None] = lambda change: None
        """Called with each of them."""

    def seconds(self, work: FirstTokenWork) -> tuple[float, float, float]:
        """Predicted seconds of what is ahead, of the prompt itself, and of what the engine adds."""
        parts = self._value or self._borrowed
        overhead_s, step_s, rate, interference_s, attention_s = parts
        prefill_s = rate * work.tokens + attention_s * work.pairs
        engine_s, ahead = overhead_s + interference_s * work.running, work.ahead_tokens
        if not ahead:
            return 0.0, prefill_s, engine_s + step_s * work.waits
        queue_s = _expected_s(parts, work) - prefill_s - engine_s
        # Rounding is no wait: it would decide whether a request is refused (``late_first_token``).
        return (queue_s if queue_s > 1e-9 else 0.0) + work.ahead_load_s, prefill_s, engine_s

    def probed(self, timed: Sequence[tuple[int, float]]) -> None:
        """Take the answers to its probe (``probed_parts``) as the guess that it begins with, if no first
        token has come yet, and no other engine of its model is known."""
        self._probed = probed_parts(timed, self._fleet.settings)

    def observe(self, work: FirstTokenWork, service_s: float, now: float) -> None:
        """Learn from one first token, ``service_s`` after the engine was asked.

        Those of one step were late for each other's tokens, and only the last one knows of all: it is
        learned from, once a later step's shows that it was the last."""
        if not self._value:
            self._begin()
        if self.guessed:
            self._learn(work, service_s, now)
            return
        before, self._before = self._before, (work, service_s, now)
        if before is not None and now - before[2] >= min(self._value[0], _SAME_STEP_S):
            self._learn(*before)
        if not work.joined:
            self._before = None
            self._learn(work, service_s, now)

    def _learn(self, work: FirstTokenWork, service_s: float, now: float) -> None:
        measured_s = service_s if service_s > 1e-4 else 1e-4  # noqa: FURB136
        expected_s = _expected_s(self._value, work)
        if self._watch(work, measured_s, expected_s, now):
            expected_s = _expected_s(self._value, work)
        elif self.samples >= self._all_until and self.samples % _ONE_IN:
            self.samples += 1
            self._last_s = now
            return
        # Relative to the prediction, the errors of long and short ones are alike; a guess is no measure.
        scale = 1 / (measured_s if self.samples < self._fleet.settings.samples_min else expected_s)
        tokens, pairs = work.tokens + work.ahead_tokens, work.pairs + work.ahead_pairs
        # Written out: calls per product would take longer than the products.
        i0, i1, i2, i3, i4 = scale, work.waits * scale, tokens * scale, work.running * scale, pairs * scale
        error = (measured_s - expected_s) * scale
        value, cov = self._value, self._cov
        gains = [c0 * i0 + c1 * i1 + c2 * i2 + c3 * i3 + c4 * i4 for c0, c1, c2, c3, c4 in cov]
        g0, g1, g2, g3, g4 = gains
        # Rounding could make it negative, after samples that no engine gives.
        own = max(0.0, g0 * i0 + g1 * i1 + g2 * i2 + g3 * i3 + g4 * i4)
        noise = self._noise * self._noise
        bound = _HUBER * math.sqrt(own + noise)
        error = bound if error > bound else max(error, -bound)
        share = 1 / (own + noise)
        self._noise += _NOISE_NEWS * (max(_NOISE_MIN, 1.25 * min(abs(error), _NOISE_MAX)) - self._noise)
        for at, (c0, c1, c2, c3, c4) in enumerate(cov):
            part = gains[at] * share
            cov[at] = [c0 - part * g0, c1 - part * g1, c2 - part * g2, c3 - part * g3, c4 - part * g4]
            found, least = value[at] + part * error, _FALL_MAX * value[at]
            if found < least and at in _POSITIVE:
                # Nothing would be left: the errors were those of another part, so it is doubted instead.
                found, cov[at][at] = least, cov[at][at] + value[at] * value[at]
            value[at] = found
        self._bound()
        self.samples += 1
        self._last_s = now
        if not self._closed:
            self._fleet.medians.changed(self)

    def _begin(self) -> None:
        """Start from a guess."""
        start = self._borrowed
        self._value = list(start)
        self._doubt(_PROBED_SD if start is self._probed else _PRIOR_SD)

    def _doubt(self, deviations: Sequence[float]) -> None:
        """Set the covariances by deviations relative to the values."""
        self._cov = [[0.0] * len(deviations) for _ in deviations]
        for at, (value, deviation) in enumerate(zip(self._value, deviations, strict=True)):
            self._cov[at][at] = max(value * deviation, _PRIOR_SD_MIN[at]) ** 2

    def _bound(self) -> None:
        """Keep all values within their bounds, and let them drift."""
        value, cov, settings = self._value, self._cov, self._fleet.settings
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

    def _watch(self, work: FirstTokenWork, measured_s: float, expected_s: float, now: float) -> bool:
        """Look for a change of speed since the model was last known to hold. Returns whether the model was
        scaled."""
        usual, value, before = self._usual, self._value, self._lately
        now_error = _log_error(value, work, measured_s, expected_s)
        if self.guessed:
            if now - self._last_s < min(value[0], _SAME_STEP_S):
                return False
            self._lately = now_error
            # Of a guess that is far off, the proportions may still hold.
            if now_error > 0.0:
                now_error = min(before, now_error)
            if -math.log(_GUESS_FACTOR) < now_error < math.log(_GUESS_FACTOR):
                return False
            self._lately = 0.0
            self._scale(math.exp(now_error))
            return True
        if usual is None:
            usual, before = SpeedParts(*value), 0.0
            self._usual = usual
        # The model itself follows a change soon, so that its own errors would end before they are many.
        self._lately = before + _LATELY_NEWS * (now_error - before)
        error = _log_error(usual, work, measured_s, _expected_s(usual, work))
        counted, slack = min(max(error, -_ERROR_MAX), _ERROR_MAX), _SLACK + 0.5 * self._noise
        found, sign = _NOT_BEGUN, 1.0
        # Most errors begin nothing.
        usually = -slack <= counted <= slack and self._up is self._down is _NOT_BEGUN
        for before_sum, count, errors, since_s in () if usually else (self._up, self._down):
            total, since = before_sum + sign * counted - slack, since_s if count else now
            after = (total, count + 1, errors + error, since) if total > 0 else _NOT_BEGUN
            if sign > 0:
                self._up = after
            else:
                self._down = after
            found, sign = max(found, after), -1.0
        if found[0] <= _CHANGE_AT:
            calm = found[0] < _CHANGE_AT / 3 and not self.samples % _USUAL_FOR
            if calm or not self._known:
                self._usual = SpeedParts(*value)
            return False
        self._changed(found, now)
        return True

    def _scale(self, factor: float) -> None:
        """Scale the model, and doubt each of its values."""
        self._value = [value * factor for value in self._value]
        self._bound()
        self._doubt(_PRIOR_SD if self.guessed else _CHANGED_SD)
        self._all_until = self.samples + _ALL_FOR

    def _changed(self, found: tuple[float, int, float, float], now: float) -> None:
        """Note a change of speed; scale the model by what it has not learned of it yet."""
        _, count, errors, since_s = found
        self._scale(math.exp(self._lately))
        self._up = self._down = _NOT_BEGUN
        self._lately, self._usual = 0.0, SpeedParts(*self._value)
        mean = errors / count
        clear = max(math.log(_NEWS_FACTOR), _NEWS_SD * self._noise / math.sqrt(count))
        if self._known and abs(mean) > clear:
            self.change = SpeedChange(now, since_s, math.exp(mean))
            self.changes += 1
            self.changed(self.change)

    @property
    def _known(self) -> bool:
        return self.samples >= _KNOWN * self._fleet.settings.samples_min

    @property
    def guessed(self) -> bool:
        """Whether predictions are a guess: too few samples."""
        return self.samples < self._fleet.settings.samples_min

    @property
    def parts(self) -> SpeedParts:
        """The present estimates."""
        return SpeedParts(*(self._value or self._borrowed))

    @property
    def learned(self) -> tuple[str | None, SpeedParts] | None:
        """Name of its model, and its own estimates; None while they are a guess."""
        return None if self.guessed else (self._model(), self.parts)

    @property
    def _borrowed(self) -> SpeedParts:
        return self._fleet.of_model(self._model(), self._probed)

    def close(self) -> None:
        """Remove a closed engine from the fleet's estimates."""
        self._closed = True
        self._fleet.medians.left(self)


_ByModel = dict[str | None, SpeedParts]


def _by_model(medians: Medians) -> _ByModel:
    return {name: SpeedParts(*[part or 0.0 for part in parts]) for name, parts in medians.items()}


class FirstTokenModels:
    """Estimates for engines without samples of their own: medians over the others of their model (which is
    that of an engine's latest sample)."""

    def __init__(self, settings: SecondsSettings | None = None) -> None:
        self.settings = settings = settings or SecondsSettings()
        self._prior = SpeedParts(
            settings.overhead_s,
            settings.step_s,
            settings.prefill_s_per_token,
            settings.decode_interference_s,
            0.0,
        )
        self.medians = FleetMedians[FirstTokenModel, _ByModel](
            len(self._prior), attrgetter("learned"), _by_model
        )

    def of_model(self, model: str | None, probed: SpeedParts | None) -> SpeedParts:
        """Estimates for an engine that serves this; ``probed``: its own by its probe."""
        medians = self.medians.kept
        if medians is None:
            medians = self.medians.fit()
        return medians.get(model, probed or self._prior)
