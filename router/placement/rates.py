"""Prefill speed of each engine for decisions, learned from the first tokens it delivers.

Decisions compare engines, so these values move late and by ranks; first tokens are predicted by another
model (seconds.py says why), which tells of changes of speed.

A sample is (tokens computed, seconds in service, running decodes); seconds in service exclude the queue, by
the router's own account (load.py). The model of one engine is::

    seconds = overhead + interference * running + rate * tokens

An engine with fewer than ``samples_min`` samples has the fleet's median rate, a fleet without samples the
configured prior. Invariant: rates lie within the bounds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from statistics import median
from typing import NamedTuple

import msgspec

from kvatlas.router.placement.fleet_medians import FleetMedians, Medians
from kvatlas.router.placement.seconds import (
    FirstTokenModel,
    FirstTokenModels,
    FirstTokenWork,
    SecondsSettings,
    SpeedChange,
)


class RateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Priors and bounds; the defaults suit a model of 7-70 B parameters on one data-centre accelerator."""

    prefill_s_per_token: float = 1 / 8000
    prefill_s_per_token_min: float = 1e-7
    prefill_s_per_token_max: float = 0.1
    decode_interference_s: float = 0.0005
    """Seconds that one running sequence adds to a prefill: its share of a scheduler step."""
    decode_interference_s_max: float = 0.02
    overhead_s_max: float = 1.0
    samples_max: int = 31
    samples_min: int = 5
    long_tokens_min: int = 512
    """Shorter prompts show the overhead rather than the rate."""
    cached_tokens_max: int = 64
    """Prompts with at most this many uncached tokens show the overhead alone."""
    running_spread_min: int = 4
    """Decodes between the halves' medians below which their slope is noise."""
    same_step_s: float = 0.002
    """First tokens closer than this come from one scheduler step and are one sample."""
    stale_s: float = 600.0
    stale_halflife_s: float = 600.0


class PrefillSample(msgspec.Struct, frozen=True, gc=False):
    """One observed first token: tokens computed since the previous one, the time, and the running decodes."""

    tokens: int
    service_s: float
    running: int


# A change of speed counts by at most this factor.
_FACTORS = (0.25, 4.0)

_RUNNING, _SERVICE_S = attrgetter("running"), attrgetter("service_s")


class RatesNow(NamedTuple):
    """Current estimates of one engine; ``samples``: number of its own samples behind them."""

    prefill_s_per_token: float
    decode_interference_s: float
    overhead_s: float
    samples: int


class EngineRates:
    """Samples of one engine and the estimates from them; ``close`` when it leaves the fleet.

    One writer; times are the caller's clock.
    """

    __slots__ = (
        "_at_s",
        "_cached",
        "_cached_s",
        "_interference_s",
        "_long",
        "_long_s",
        "_overhead_s",
        "_own",
        "_rate",
        "_step",
        "fleet",
        "fresh_until_s",
        "model",
        "touched",
    )

    def __init__(self, fleet: FleetRates, served: Callable[[], str | None]) -> None:
        self.fleet = fleet
        self.model = FirstTokenModel(fleet.models, served)
        """Predicts its first tokens."""
        self.model.changed = self._changed
        self._long: deque[PrefillSample] = deque(maxlen=fleet.settings.samples_max)
        self._cached: deque[PrefillSample] = deque(maxlen=fleet.settings.samples_max)
        # Their times.
        self._long_s: deque[float] = deque(maxlen=fleet.settings.samples_max)
        self._cached_s: deque[float] = deque(maxlen=fleet.settings.samples_max)
        self._step: deque[PrefillSample] | None = None  # index of the last sample
        self._rate: float | None = None
        self._overhead_s: float | None = None
        self._interference_s: float | None = None
        self._at_s = 0.0
        self._own: tuple[float, float] = (0.0, 0.0)  # time until which ``at`` is cached
        self.fresh_until_s = -math.inf
        """Until then ``current`` does not depend on the fleet's ``borrowed``."""
        self.touched: Callable[[], None] = lambda: None
        """Called when its own estimates have changed."""

    def learn(
        self, sample: PrefillSample | None, timed: FirstTokenWork | None, service_s: float, now: float
    ) -> None:
        """Learn from one first token, ``service_s`` after the engine was asked: what the load account says of
        it for decisions, and for predictions."""
        if sample is not None:
            self.observe(sample, now)
        if timed is not None:
            self.model.observe(timed, service_s, now)

    def observe(self, sample: PrefillSample, now: float) -> None:
        """Learn from one first token. Samples that are neither long nor nearly cached are skipped."""
        if not self._keep(sample, now):
            return
        self._fit(now)

    def _changed(self, change: SpeedChange) -> None:
        """Follow a change of speed: what was learned before it is taken as if it came after it."""
        least, most = _FACTORS
        factor = min(max(change.factor, least), most)
        for samples, times in ((self._long, self._long_s), (self._cached, self._cached_s)):
            for at, (sample, at_s) in enumerate(zip(list(samples), times, strict=True)):
                if at_s < change.since_s:
                    samples[at] = PrefillSample(sample.tokens, factor * sample.service_s, sample.running)
        if self._rate is not None or self._overhead_s is not None:
            self._fit(change.at_s)

    def _fit(self, now: float) -> None:
        self._at_s = now
        self._fit_overhead()
        self._fit_rate()
        if self._rate is not None and self._interference_s is not None:
            self._own = self._rate, self._interference_s
            self.fresh_until_s = now + self.fleet.settings.stale_s
        self.fleet.medians.changed(self)
        self.touched()

    def prefill_s_per_token(self, now: float) -> float:
        """Seconds the engine takes for one uncached token."""
        rate, fleet = self._rate, self.fleet
        if rate is None:
            return fleet.prefill_s_per_token
        overdue_s = now - self._at_s - fleet.settings.stale_s
        if overdue_s <= 0:
            return rate
        # Without samples the rate moves back to the fleet's, so that an engine that was slow once gets
        # prompts, and so samples, again. In steps of a second: a snapshot needs constant values.
        own: float = 0.5 ** (math.floor(overdue_s) / fleet.settings.stale_halflife_s)
        return own * rate + (1 - own) * fleet.prefill_s_per_token

    def current(self, now: float) -> tuple[float, float]:
        """``prefill_s_per_token`` and ``decode_interference_s``, for decisions."""
        if now <= self.fresh_until_s:
            return self._own
        rate, slope = self._rate, self._interference_s
        medians = self.fleet.medians
        fleet_rate, _, fleet_slope = medians.kept or medians.fit()
        return (
            fleet_rate if rate is None else self.prefill_s_per_token(now),
            fleet_slope if slope is None else slope,
        )

    def constant_until(self, now: float) -> float:
        """Time until which ``current`` stays as it is, unless estimates change."""
        if now <= self.fresh_until_s:
            return self.fresh_until_s
        if self._rate is None:
            return math.inf
        stale_s = self._at_s + self.fleet.settings.stale_s
        return stale_s + math.floor(max(0.0, now - stale_s)) + 1.0

    @property
    def decode_interference_s(self) -> float:
        """Seconds that one running sequence adds to a prefill there."""
        own = self._interference_s
        return self.fleet.decode_interference_s if own is None else own

    @property
    def overhead_s(self) -> float:
        """Seconds to a first token if nothing is left to compute and nothing else runs."""
        return self.fleet.overhead_s if self._overhead_s is None else self._overhead_s

    def now(self, now: float) -> RatesNow:
        """All estimates, for metrics and explanations."""
        return RatesNow(
            self.prefill_s_per_token(now), self.decode_interference_s, self.overhead_s, len(self._long)
        )

    def close(self) -> None:
        """Remove a closed engine from the fleet's estimates."""
        self.fleet.medians.left(self)
        self.model.close()

    def _keep(self, sample: PrefillSample, now: float) -> bool:
        settings = self.fleet.settings
        if sample.service_s < settings.same_step_s:
            into = self._step
            if into is None:
                return False
            # Several prompts of one scheduler step have their first tokens together: one sample of all their
            # tokens.
            before = into[-1]
            into[-1] = PrefillSample(
                before.tokens + sample.tokens, before.service_s + sample.service_s, before.running
            )
            return True
        if sample.tokens >= settings.long_tokens_min:
            self._step = self._long
            self._long_s.append(now)
        elif sample.tokens <= settings.cached_tokens_max:
            self._step = self._cached
            self._cached_s.append(now)
        else:
            # Neither long nor cached: such a prompt shows rate and overhead mixed.
            self._step = None
            return False
        self._step.append(sample)
        return True

    def _fit_overhead(self) -> None:
        settings, samples = self.fleet.settings, self._cached
        if len(samples) < settings.samples_min:
            return
        # A resistant line (Tukey, 1977) through (running, seconds) of nearly cached prompts: its slope lies
        # between the medians of the lower and the upper half, so outliers move it by a rank and no more.
        by_running = sorted(samples, key=_RUNNING)
        half = len(by_running) // 2
        low, high = by_running[:half], by_running[-half:]
        spread = _running_between(high) - _running_between(low)
        # With nearly equal numbers of decodes the slope would be noise divided by almost nothing.
        if spread >= settings.running_spread_min:
            slope = (median(map(_SERVICE_S, high)) - median(map(_SERVICE_S, low))) / spread
            self._interference_s = min(max(slope, 0.0), settings.decode_interference_s_max)
        slope = self.decode_interference_s
        overhead = median([s.service_s - slope * s.running for s in samples])
        self._overhead_s = min(max(overhead, 0.0), settings.overhead_s_max)

    def _fit_rate(self) -> None:
        settings = self.fleet.settings
        if len(self._long) < settings.samples_min:
            return
        overhead, slope = self.overhead_s, self.decode_interference_s
        # The median over long prompts of the time per token that overhead and interference leave. A mean
        # would follow outliers, such as a first token that waited for a compilation.
        rate = median([(s.service_s - overhead - slope * s.running) / s.tokens for s in self._long])
        self._rate = min(max(rate, settings.prefill_s_per_token_min), settings.prefill_s_per_token_max)

    @property
    def learned(self) -> tuple[float | None, float | None, float | None]:
        """Own estimates of prefill, overhead and interference; None where there is none."""
        return self._rate, self._overhead_s, self._interference_s


def _running_between(by_running: Sequence[PrefillSample]) -> float:
    """Median number of running decodes of samples sorted by it."""
    half = len(by_running) // 2
    return (by_running[half].running + by_running[-half - 1].running) / 2


_Rates = tuple[float, float, float]
"""Prefill, overhead and interference."""


class FleetRates:
    """Estimates for engines without samples of their own: medians over the others."""

    def __init__(self, settings: RateSettings | None = None) -> None:
        self.settings = settings = settings or RateSettings()
        self.models = FirstTokenModels(
            SecondsSettings(
                prefill_s_per_token=settings.prefill_s_per_token,
                decode_interference_s=settings.decode_interference_s,
            )
        )
        self.medians = FleetMedians[EngineRates, _Rates](3, lambda engine: (None, engine.learned), self._made)

    def engine(self, served: Callable[[], str | None] = lambda: None) -> EngineRates:
        """Make the rates of one more engine; ``served``: the model that it serves."""
        return EngineRates(self, served)

    @property
    def prefill_s_per_token(self) -> float:
        """Implement ``EngineRates``."""
        return (self.medians.kept or self.medians.fit())[0]

    @property
    def overhead_s(self) -> float:
        """Implement ``EngineRates``."""
        return (self.medians.kept or self.medians.fit())[1]

    @property
    def decode_interference_s(self) -> float:
        """Implement ``EngineRates``."""
        return (self.medians.kept or self.medians.fit())[2]

    @property
    def borrowed(self) -> tuple[float, float]:
        """Prefill and interference, which stand in for missing and old estimates of engines."""
        rate, _, slope = self.medians.kept or self.medians.fit()
        return rate, slope

    def _made(self, medians: Medians) -> _Rates:
        rate, overhead_s, slope = medians.get(None, (None, None, None))
        return (
            self.settings.prefill_s_per_token if rate is None else rate,
            overhead_s or 0.0,
            self.settings.decode_interference_s if slope is None else slope,
        )
