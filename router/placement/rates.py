"""How fast each engine prefills, learned from the first tokens it delivers.

A sample is (tokens computed, seconds in service, running decodes); seconds in service exclude the queue, by
the router's own account (load.py). The model of one engine is::

    seconds = overhead + interference * running + rate * tokens

``overhead`` and ``interference`` come from prompts that were nearly all cached: a resistant line (Tukey,
1977: the slope between the medians of the lower and the upper half) through (running, seconds). ``rate`` is
the median over long prompts of what is left, per token. Medians over the last ``samples_max`` samples: an
outlier, even several in a row, moves them by a rank and no more.

An engine with fewer than ``samples_min`` samples has the fleet's median rate, a fleet without samples the
configured prior. Without news for ``stale_s`` an engine's rate moves back to the fleet's by half every
``stale_halflife_s``, so that an engine once slow is tried again. Always true: rates lie within the bounds.
"""

from __future__ import annotations

from collections import deque
from statistics import median

import msgspec


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
    """Shorter prompts say more of the overhead than of the rate."""
    cached_tokens_max: int = 64
    """Prompts with no more uncached tokens than this show the overhead alone."""
    running_spread_min: int = 4
    """Decodes between the halves' medians below which their slope is noise."""
    same_step_s: float = 0.002
    """First tokens closer than this come from one scheduler step and are one sample."""
    stale_s: float = 600.0
    stale_halflife_s: float = 600.0


class PrefillSample(msgspec.Struct, frozen=True, gc=False):
    """One first token seen: what was computed since the one before, in how long, beside how many decodes."""

    tokens: int
    service_s: float
    running: int


class EngineRates(msgspec.Struct, frozen=True, gc=False):
    """What is believed of one engine now; ``samples`` says how much of it is its own."""

    prefill_s_per_token: float
    decode_interference_s: float
    overhead_s: float
    samples: int


class _Learned:
    """The samples of one engine and the estimates drawn from them."""

    __slots__ = ("at_s", "cached", "interference_s", "long", "overhead_s", "rate", "step")

    def __init__(self, settings: RateSettings) -> None:
        self.long: deque[PrefillSample] = deque(maxlen=settings.samples_max)
        self.cached: deque[PrefillSample] = deque(maxlen=settings.samples_max)
        self.step: deque[PrefillSample] | None = None  # where the last sample went
        self.rate: float | None = None
        self.overhead_s: float | None = None
        self.interference_s: float | None = None
        self.at_s = 0.0


class RateBook:
    """The rates of every engine of the fleet. One writer; times are whatever clock the caller uses."""

    def __init__(self, settings: RateSettings | None = None) -> None:
        self.settings = settings or RateSettings()
        self._engines: dict[str, _Learned] = {}
        self._fleet_rate = self.settings.prefill_s_per_token
        self._fleet_overhead_s = 0.0
        self._fleet_interference_s = self.settings.decode_interference_s

    def observe(self, engine_id: str, sample: PrefillSample, now: float) -> None:
        """Learn from one first token. Samples that are neither long nor nearly cached are left out."""
        learned = self._engines.get(engine_id)
        if learned is None:
            learned = self._engines[engine_id] = _Learned(self.settings)
        if not self._keep(learned, sample):
            return
        learned.at_s = now
        self._fit_overhead(learned)
        self._fit_rate(learned)
        self._fit_fleet()

    def prefill_s_per_token(self, engine_id: str, now: float) -> float:
        """Seconds the engine takes for one uncached token."""
        learned = self._engines.get(engine_id)
        if learned is None or learned.rate is None:
            return self._fleet_rate
        overdue_s = now - learned.at_s - self.settings.stale_s
        if overdue_s <= 0:
            return learned.rate
        own: float = 0.5 ** (overdue_s / self.settings.stale_halflife_s)
        return own * learned.rate + (1 - own) * self._fleet_rate

    def decode_interference_s(self, engine_id: str) -> float:
        """Seconds that one running sequence adds to a prefill there."""
        learned = self._engines.get(engine_id)
        if learned is None or learned.interference_s is None:
            return self._fleet_interference_s
        return learned.interference_s

    def overhead_s(self, engine_id: str) -> float:
        """Seconds to a first token when nothing is left to compute and nothing else runs."""
        learned = self._engines.get(engine_id)
        if learned is None or learned.overhead_s is None:
            return self._fleet_overhead_s
        return learned.overhead_s

    def rates(self, engine_id: str, now: float) -> EngineRates:
        """All of it, for metrics and explanations."""
        learned = self._engines.get(engine_id)
        return EngineRates(
            self.prefill_s_per_token(engine_id, now),
            self.decode_interference_s(engine_id),
            self.overhead_s(engine_id),
            len(learned.long) if learned else 0,
        )

    def forget(self, engine_id: str) -> None:
        """The engine left the fleet, or came back as another machine."""
        if self._engines.pop(engine_id, None) is not None:
            self._fit_fleet()

    def _keep(self, learned: _Learned, sample: PrefillSample) -> bool:
        settings = self.settings
        if sample.service_s < settings.same_step_s:
            into = learned.step
            if into is None:
                return False
            before = into[-1]
            into[-1] = PrefillSample(
                before.tokens + sample.tokens, before.service_s + sample.service_s, before.running
            )
            return True
        if sample.tokens >= settings.long_tokens_min:
            learned.step = learned.long
        elif sample.tokens <= settings.cached_tokens_max:
            learned.step = learned.cached
        else:
            learned.step = None
            return False
        learned.step.append(sample)
        return True

    def _fit_overhead(self, learned: _Learned) -> None:
        settings, samples = self.settings, learned.cached
        if len(samples) < settings.samples_min:
            return
        by_running = sorted(samples, key=lambda s: s.running)
        half = len(by_running) // 2
        low, high = by_running[:half], by_running[-half:]
        low_running, high_running = median(s.running for s in low), median(s.running for s in high)
        if high_running - low_running >= settings.running_spread_min:
            rise = median(s.service_s for s in high) - median(s.service_s for s in low)
            slope = rise / (high_running - low_running)
            learned.interference_s = min(max(slope, 0.0), settings.decode_interference_s_max)
        slope = self._fleet_interference_s if learned.interference_s is None else learned.interference_s
        overhead = median(s.service_s - slope * s.running for s in samples)
        learned.overhead_s = min(max(overhead, 0.0), settings.overhead_s_max)

    def _fit_rate(self, learned: _Learned) -> None:
        settings = self.settings
        if len(learned.long) < settings.samples_min:
            return
        overhead = self._fleet_overhead_s if learned.overhead_s is None else learned.overhead_s
        slope = self._fleet_interference_s if learned.interference_s is None else learned.interference_s
        rate = median((s.service_s - overhead - slope * s.running) / s.tokens for s in learned.long)
        learned.rate = min(max(rate, settings.prefill_s_per_token_min), settings.prefill_s_per_token_max)

    def _fit_fleet(self) -> None:
        settings, engines = self.settings, self._engines.values()
        rates = [e.rate for e in engines if e.rate is not None]
        overheads = [e.overhead_s for e in engines if e.overhead_s is not None]
        slopes = [e.interference_s for e in engines if e.interference_s is not None]
        self._fleet_rate = median(rates) if rates else settings.prefill_s_per_token
        self._fleet_overhead_s = median(overheads) if overheads else 0.0
        self._fleet_interference_s = median(slopes) if slopes else settings.decode_interference_s
