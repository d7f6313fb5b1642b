"""Learned rates on synthetic engines: they converge under noise, and one bad sample changes little."""

from __future__ import annotations

import random

import pytest

from kvatlas.router.placement.rates import EngineRates, FleetRates, PrefillSample, RateSettings

TRUE_RATE, TRUE_OVERHEAD, TRUE_DECODE = 1 / 20_000, 0.012, 0.0008
DEFAULTS = RateSettings()


class Book:
    """The rates of a fleet, its engines by name."""

    def __init__(self, settings: RateSettings = DEFAULTS) -> None:
        self.fleet = FleetRates(settings)
        self.engines: dict[str, EngineRates] = {}

    def __getitem__(self, name: str) -> EngineRates:
        if name not in self.engines:
            self.engines[name] = self.fleet.engine()
        return self.engines[name]


def measured(rng: random.Random, tokens: int, running: int, *, noise: float = 0.2) -> PrefillSample:
    seconds = TRUE_OVERHEAD + TRUE_DECODE * running + TRUE_RATE * tokens
    return PrefillSample(tokens, seconds * rng.lognormvariate(0, noise), running)


def taught(seed: int, *, samples: int = 60, rate: float = 1.0) -> Book:
    """A book that saw long and cached prompts of one engine, ``rate`` times slower than the true one."""
    rng, book = random.Random(seed), Book()
    for i in range(samples):
        long = measured(rng, rng.randint(512, 16_000), rng.randint(0, 40))
        book["e"].observe(PrefillSample(long.tokens, long.service_s * rate, long.running), float(i))
        book["e"].observe(measured(rng, rng.randint(1, 64), rng.randint(0, 40)), float(i))
    return book


@pytest.mark.parametrize("seed", range(8))
def test_converges_on_noisy_samples(seed: int) -> None:
    rates = taught(seed)["e"].now(60.0)
    assert rates.prefill_s_per_token == pytest.approx(TRUE_RATE, rel=0.15)
    assert rates.overhead_s == pytest.approx(TRUE_OVERHEAD, abs=0.01)
    assert rates.decode_interference_s == pytest.approx(TRUE_DECODE, rel=0.5)


def test_one_outlier_does_not_spoil_it() -> None:
    book = taught(1)
    before = book["e"].prefill_s_per_token(60.0)
    book["e"].observe(PrefillSample(8000, 300.0, 3), 60.0)
    book["e"].observe(PrefillSample(8000, 0.0021, 3), 60.0)
    assert book["e"].prefill_s_per_token(60.0) == pytest.approx(before, rel=0.05)


def test_a_changed_engine_is_learned_again() -> None:
    book, rng = taught(2), random.Random(3)
    for i in range(DEFAULTS.samples_max):
        sample = measured(rng, 8000, 0)
        book["e"].observe(PrefillSample(8000, 3 * sample.service_s, 0), 100.0 + i)
    assert book["e"].prefill_s_per_token(200.0) == pytest.approx(3 * TRUE_RATE, rel=0.15)


def test_an_unknown_engine_has_the_median_of_the_fleet_or_the_prior() -> None:
    book = Book()
    assert book["new"].prefill_s_per_token(0.0) == DEFAULTS.prefill_s_per_token
    for engine, slower in (("a", 1.0), ("b", 2.0), ("c", 30.0)):
        for i in range(DEFAULTS.samples_min):
            book[engine].observe(PrefillSample(10_000, 10_000 * TRUE_RATE * slower, 0), float(i))
    assert book["new"].prefill_s_per_token(5.0) == pytest.approx(2 * TRUE_RATE)
    book["new"].observe(PrefillSample(1000, 60.0, 0), 5.0)  # one sample is not enough to be believed
    assert book["new"].prefill_s_per_token(5.0) == pytest.approx(2 * TRUE_RATE)
    book["b"].close()
    assert book["new"].prefill_s_per_token(5.0) == pytest.approx((1 + 30) / 2 * TRUE_RATE)
    assert book["new"].current(5.0)[0] == pytest.approx((1 + 30) / 2 * TRUE_RATE)


def test_a_stale_rate_moves_back_to_the_fleet() -> None:
    book = Book(RateSettings(stale_s=100, stale_halflife_s=50))
    for engine, slower in (("a", 1.0), ("b", 1.0), ("slow", 9.0)):
        for _ in range(DEFAULTS.samples_min):
            book[engine].observe(PrefillSample(10_000, 10_000 * TRUE_RATE * slower, 0), 0.0)
    assert book["slow"].prefill_s_per_token(100.0) == pytest.approx(9 * TRUE_RATE)
    assert book["slow"].prefill_s_per_token(150.0) == pytest.approx(5 * TRUE_RATE)
    assert book["slow"].current(150.0)[0] == pytest.approx(5 * TRUE_RATE)
    assert book["slow"].prefill_s_per_token(2000.0) == pytest.approx(TRUE_RATE, rel=0.01)


def test_rates_stay_within_their_bounds() -> None:
    book = Book()
    for _ in range(DEFAULTS.samples_min):
        book["slow"].observe(PrefillSample(512, 1e6, 0), 0.0)
        book["fast"].observe(PrefillSample(10**9, 0.01, 0), 0.0)
        book["decode"].observe(PrefillSample(1, 1e3, 0), 0.0)
        book["decode"].observe(PrefillSample(1, 1e6, 500), 0.0)
    assert book["slow"].prefill_s_per_token(0.0) == DEFAULTS.prefill_s_per_token_max
    assert book["fast"].prefill_s_per_token(0.0) == DEFAULTS.prefill_s_per_token_min
    assert book["decode"].decode_interference_s == DEFAULTS.decode_interference_s_max
    assert book["decode"].overhead_s <= DEFAULTS.overhead_s_max


def test_first_tokens_of_one_step_are_one_sample() -> None:
    book = Book()
    for i in range(10):
        book["e"].observe(PrefillSample(3000, 9000 * TRUE_RATE, 0), float(i))  # three prompts in one step:
        book["e"].observe(PrefillSample(3000, 0.0001, 0), float(i))  # the others at almost no time
        book["e"].observe(PrefillSample(3000, 0.0001, 0), float(i))
    assert book["e"].prefill_s_per_token(10.0) == pytest.approx(TRUE_RATE, rel=0.05)


def test_prompts_of_middling_length_teach_nothing() -> None:
    book = Book()
    for _ in range(20):
        book["e"].observe(PrefillSample(300, 5.0, 0), 0.0)
    assert book["e"].now(0.0).samples == 0
    assert book["e"].prefill_s_per_token(0.0) == DEFAULTS.prefill_s_per_token
