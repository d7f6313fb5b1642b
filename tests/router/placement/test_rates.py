"""The model of engines' speed: it converges, one bad sample changes little, and changes are seen soon."""

from __future__ import annotations

import random
from statistics import median

import pytest

from kvatlas.router.placement.rates import EngineRates, FleetRates, PrefillSample, RateSettings

TRUE_RATE, TRUE_OVERHEAD, TRUE_DECODE = 1 / 20_000, 0.012, 0.0008
DEFAULTS = RateSettings()


class Book:
    """The rates of a fleet, its engines by name; a name before a slash is the model."""

    def __init__(self, settings: RateSettings = DEFAULTS) -> None:
        self.fleet = FleetRates(settings)
        self.engines: dict[str, EngineRates] = {}

    def __getitem__(self, name: str) -> EngineRates:
        if name not in self.engines:
            self.engines[name] = self.fleet.engine(lambda: name.rpartition("/")[0] or None)
        return self.engines[name]

    def teach(self, name: str, slower: float = 1.0, count: int = DEFAULTS.samples_min) -> None:
        """Samples of an engine that is slower than the true one by a factor."""
        for i in range(count):
            tokens = 10_000 + 1000 * (i % 5)
            self[name].observe(PrefillSample(tokens, slower * (tokens * TRUE_RATE + TRUE_OVERHEAD), 0), 0.0)


def measured(
    rng: random.Random, tokens: int, running: int, *, noise: float = 0.2, rate: float = 1.0
) -> PrefillSample:
    seconds = rate * (TRUE_OVERHEAD + TRUE_DECODE * running + TRUE_RATE * tokens)
    return PrefillSample(tokens, seconds * rng.lognormvariate(0, noise), running)


SIZES = {
    "all": (1, 16_000),
    "chats": (100, 480),
    "cached": (1, 16),
    "long": (1000, 16_000),
    "huge": (1000, 250_000),
}


def taught(
    seed: int, sizes: str = "all", *, samples: int = 100, slower: float = 1.0, noise: float = 0.2
) -> Book:
    rng, book = random.Random(seed), Book()
    least, most = SIZES[sizes]
    for i in range(samples):
        tokens = round(least * (most / least) ** rng.random())
        book["e"].observe(measured(rng, tokens, rng.randint(0, 40), noise=noise, rate=slower), float(i))
    return book


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("slower", [0.1, 1.0, 10.0])
def test_converges_on_noisy_samples_of_any_size(seed: int, sizes: str, slower: float) -> None:
    rates, rng = taught(seed, sizes, slower=slower, noise=0.1)["e"], random.Random(seed)
    assert not rates.guessed
    (least, most), ratios = SIZES[sizes], []
    for _ in range(20):
        sample = measured(rng, rng.randint(least, most), rng.randint(0, 40), noise=0.0, rate=slower)
        ratios.append(rates.expected_s(sample) / sample.service_s)
    assert median(ratios) == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("seed", range(8))
def test_parts_are_found_where_prompts_are_of_all_sizes(seed: int) -> None:
    rates = taught(seed, samples=200)["e"]
    assert rates.prefill_s_per_token(60.0) == pytest.approx(TRUE_RATE, rel=0.15)
    assert rates.overhead_s == pytest.approx(TRUE_OVERHEAD, abs=0.01)
    assert rates.decode_interference_s == pytest.approx(TRUE_DECODE, rel=0.5)


def test_attention_is_found_where_contexts_are_long() -> None:
    rng, book, rates = random.Random(1), Book(), TRUE_RATE / 50_000
    for i in range(60):
        tokens = round(1000 * 250 ** rng.random())
        seconds = TRUE_OVERHEAD + TRUE_RATE * tokens + rates * tokens * tokens / 2
        sample = PrefillSample(tokens, seconds * rng.lognormvariate(0, 0.03), 0, pairs=tokens * tokens / 2)
        book["e"].observe(sample, float(i))
    assert book["e"].attention_s == pytest.approx(rates, rel=0.2)


def test_one_outlier_does_not_spoil_it() -> None:
    book = taught(1)
    before = book["e"].prefill_s_per_token(100.0)
    book["e"].observe(PrefillSample(8000, 300.0, 3), 100.0)
    book["e"].observe(PrefillSample(8000, 0.0021, 3), 100.0)
    assert book["e"].prefill_s_per_token(100.0) == pytest.approx(before, rel=0.15)


@pytest.mark.parametrize("sizes", ["all", "chats", "long"])
@pytest.mark.parametrize("slower", [2.0, 0.5, 4.0, 0.25])
@pytest.mark.parametrize("seed", range(3))
def test_a_change_of_speed_is_seen_within_twenty_first_tokens(seed: int, slower: float, sizes: str) -> None:
    book, rng = taught(seed, sizes), random.Random(seed + 100)
    rates, (least, most) = book["e"], SIZES[sizes]
    assert rates.changes == 0
    for i in range(20):
        rates.observe(measured(rng, rng.randint(least, most), rng.randint(0, 40), rate=slower), 100.0 + i)
    assert rates.changes == 1
    assert rates.change is not None
    assert rates.change.factor == pytest.approx(slower, rel=0.4)
    sample = measured(rng, rng.randint(least, most), 10, noise=0.0, rate=slower)
    assert rates.expected_s(sample) == pytest.approx(sample.service_s, rel=0.3)


@pytest.mark.parametrize("seed", range(8))
def test_noise_is_no_change_of_speed(seed: int) -> None:
    assert taught(seed, samples=2000)["e"].changes == 0


def test_a_new_engine_starts_from_its_models_others_or_the_prior() -> None:
    book = Book()
    assert book["m/new"].prefill_s_per_token(0.0) == DEFAULTS.prefill_s_per_token
    for engine, slower in (("m/a", 1.0), ("m/b", 2.0), ("m/c", 30.0), ("other/d", 100.0)):
        book.teach(engine, slower)
    assert book["m/new"].guessed
    assert book["m/new"].prefill_s_per_token(5.0) == book["m/b"].prefill_s_per_token(5.0)
    book["m/b"].close()
    both = (book["m/a"].prefill_s_per_token(5.0) + book["m/c"].prefill_s_per_token(5.0)) / 2
    assert book["m/new"].prefill_s_per_token(5.0) == pytest.approx(both)
    assert book["third/e"].prefill_s_per_token(5.0) == DEFAULTS.prefill_s_per_token


def test_an_engine_guesses_until_it_has_samples() -> None:
    book = Book()
    for count in range(DEFAULTS.samples_min):
        assert book["e"].guessed, count
        book["e"].observe(PrefillSample(300, 0.2, 0), 0.0)
    assert not book["e"].guessed
    assert book["e"].expected_s(PrefillSample(300, 0.2, 0)) == pytest.approx(0.2, rel=0.1)


def test_a_stale_rate_moves_back_to_the_fleet() -> None:
    book = Book(RateSettings(stale_s=100, stale_halflife_s=50))
    for engine, slower in (("a", 1.0), ("b", 1.0), ("slow", 9.0)):
        book.teach(engine, slower)
    slow, usual = book["slow"].prefill_s_per_token(100.0), book["a"].prefill_s_per_token(100.0)
    assert slow > 5 * usual
    assert book["slow"].prefill_s_per_token(150.0) == pytest.approx((slow + usual) / 2, rel=0.01)
    assert book["slow"].prefill_s_per_token(2000.0) == pytest.approx(usual, rel=0.01)


def test_estimates_stay_within_their_bounds() -> None:
    book = Book()
    for _ in range(10 * DEFAULTS.samples_min):
        book["slow"].observe(PrefillSample(512, 1e6, 0), 0.0)
        book["fast"].observe(PrefillSample(10**9, 0.01, 0), 0.0)
        book["decode"].observe(PrefillSample(1, 1e3, 0), 0.0)
        book["decode"].observe(PrefillSample(1, 1e6, 500), 0.0)
        book["none"].observe(PrefillSample(0, 0.0, 0, 1.0, 1e9), 0.0)
    for rates in book.engines.values():
        rate = rates.prefill_s_per_token(0.0)
        assert DEFAULTS.prefill_s_per_token_min <= rate <= DEFAULTS.prefill_s_per_token_max
        assert 0 <= rates.decode_interference_s <= DEFAULTS.decode_interference_s_max
        assert 0 <= rates.step_s <= DEFAULTS.overhead_s_max
        assert 0 < rates.overhead_s <= DEFAULTS.overhead_s_max
        assert rates.attention_s >= 0
