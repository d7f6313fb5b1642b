"""The model of an engine's first tokens: it converges, one bad sample changes little, and changes of speed
are seen soon."""

from __future__ import annotations

import math
import random
from statistics import median

import pytest

from kvatlas.router.placement.rates import EngineRates, FleetRates, PrefillSample
from kvatlas.router.placement.seconds import (
    FirstTokenModel,
    FirstTokenModels,
    FirstTokenWork,
    SecondsSettings,
    probed_parts,
)

TRUE_RATE, TRUE_OVERHEAD, TRUE_DECODE = 1 / 20_000, 0.012, 0.0008
DEFAULTS = SecondsSettings()
SIZES = {
    "all": (1, 16_000),
    "chats": (100, 480),
    "cached": (1, 16),
    "long": (1000, 16_000),
    "huge": (1000, 250_000),
}


class Book:
    """The models of a fleet, its engines by name; a name before a slash is what they serve."""

    def __init__(self) -> None:
        self.fleet = FirstTokenModels()
        self.engines: dict[str, FirstTokenModel] = {}

    def __getitem__(self, name: str) -> FirstTokenModel:
        if name not in self.engines:
            self.engines[name] = FirstTokenModel(self.fleet, lambda: name.rpartition("/")[0] or None)
        return self.engines[name]

    def teach(self, name: str, slower: float = 1.0, count: int = DEFAULTS.samples_min) -> None:
        """Samples of an engine that is slower than the true one by a factor."""
        for i in range(count):
            tokens = 10_000 + 1000 * (i % 5)
            seconds = slower * (tokens * TRUE_RATE + TRUE_OVERHEAD)
            self[name].observe(FirstTokenWork(tokens), seconds, 0.0)


def measured(
    rng: random.Random, tokens: int, running: int, *, noise: float = 0.2, rate: float = 1.0
) -> tuple[FirstTokenWork, float]:
    seconds = rate * (TRUE_OVERHEAD + TRUE_DECODE * running + TRUE_RATE * tokens)
    return FirstTokenWork(tokens, running=running), seconds * rng.lognormvariate(0, noise)


def taught(
    seed: int, sizes: str = "all", *, samples: int = 100, slower: float = 1.0, noise: float = 0.2
) -> FirstTokenModel:
    rng, book = random.Random(seed), Book()
    least, most = SIZES[sizes]
    for i in range(samples):
        tokens = round(least * (most / least) ** rng.random())
        work, seconds = measured(rng, tokens, rng.randint(0, 40), noise=noise, rate=slower)
        book["e"].observe(work, seconds, float(i))
    return book["e"]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("slower", [0.1, 1.0, 10.0])
def test_converges_on_noisy_samples_of_any_size(seed: int, sizes: str, slower: float) -> None:
    model, rng = taught(seed, sizes, slower=slower, noise=0.1), random.Random(seed)
    assert not model.guessed
    (least, most), ratios = SIZES[sizes], []
    for _ in range(20):
        work, seconds = measured(rng, rng.randint(least, most), rng.randint(0, 40), noise=0.0, rate=slower)
        ratios.append(sum(model.seconds(work)) / seconds)
    assert median(ratios) == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("seed", range(8))
def test_parts_are_found_where_prompts_are_of_all_sizes(seed: int) -> None:
    parts = taught(seed, samples=200).parts
    assert parts.prefill_s_per_token == pytest.approx(TRUE_RATE, rel=0.15)
    assert parts.overhead_s == pytest.approx(TRUE_OVERHEAD, abs=0.01)
    assert parts.decode_interference_s == pytest.approx(TRUE_DECODE, rel=0.5)


def test_attention_is_found_where_contexts_are_long() -> None:
    rng, book, rates = random.Random(1), Book(), TRUE_RATE / 50_000
    for i in range(60):
        tokens = round(1000 * 250 ** rng.random())
        pairs = tokens * tokens / 2
        seconds = TRUE_OVERHEAD + TRUE_RATE * tokens + rates * pairs
        book["e"].observe(FirstTokenWork(tokens, pairs), seconds * rng.lognormvariate(0, 0.03), float(i))
    assert book["e"].parts.attention_s == pytest.approx(rates, rel=0.2)


def test_one_outlier_does_not_spoil_it() -> None:
    model, work = taught(1), FirstTokenWork(8000, running=3)
    before = sum(model.seconds(work))
    model.observe(work, 300.0, 100.0)
    model.observe(work, 0.0021, 101.0)
    assert sum(model.seconds(work)) == pytest.approx(before, rel=0.15)


@pytest.mark.parametrize("sizes", ["all", "chats", "long"])
@pytest.mark.parametrize("slower", [2.0, 0.5, 4.0, 0.25])
@pytest.mark.parametrize("seed", range(3))
def test_a_change_of_speed_is_seen_within_twenty_first_tokens(seed: int, slower: float, sizes: str) -> None:
    model, rng = taught(seed, sizes), random.Random(seed + 100)
    least, most = SIZES[sizes]
    assert model.changes == 0
    for i in range(20):
        work, seconds = measured(rng, rng.randint(least, most), rng.randint(0, 40), rate=slower)
        model.observe(work, seconds, 100.0 + i)
    assert model.changes == 1
    assert model.change is not None
    assert model.change.factor == pytest.approx(slower, rel=0.4)
    assert 100.0 <= model.change.since_s <= model.change.at_s
    work, seconds = measured(rng, rng.randint(least, most), 10, noise=0.0, rate=slower)
    assert sum(model.seconds(work)) == pytest.approx(seconds, rel=0.3)


@pytest.mark.parametrize("slower", [0.5, 2.0, 3.0])
def test_the_rest_of_a_running_step_does_not_exaggerate_a_change(slower: float) -> None:
    rng, book = random.Random(5), Book()
    for i in range(230):
        factor, tokens = 1.0 if i < 200 else slower, rng.randint(100, 1000)
        whole_s = factor * (TRUE_OVERHEAD + TRUE_RATE * (4000 + tokens))
        begun_s = 0.9 * factor * TRUE_RATE * 4000
        work = FirstTokenWork(tokens, ahead_tokens=4000, waits=1.0, begun_s=begun_s, batch_tokens=4000)
        book["e"].observe(work, (whole_s - begun_s) * rng.lognormvariate(0, 0.05), float(i))
    assert book["e"].changes == 1
    assert book["e"].change is not None
    assert book["e"].change.factor == pytest.approx(slower, rel=0.1)


def test_rounding_is_no_queue() -> None:
    """Of a step that must be over by now nothing is left."""
    rng, model = random.Random(1), taught(3)
    for _ in range(200):
        ahead = rng.randint(1, 8000)
        work = FirstTokenWork(
            rng.randint(1, 8000),
            ahead_tokens=ahead,
            waits=1.0,
            begun_s=1e3,
            batch_tokens=ahead,
            running=rng.randint(0, 9),
        )
        assert model.seconds(work)[0] == 0.0


@pytest.mark.parametrize("seed", range(8))
def test_noise_is_no_change_of_speed(seed: int) -> None:
    assert taught(seed, samples=2000).changes == 0


def test_a_new_engine_starts_from_its_models_others_or_the_prior() -> None:
    book = Book()
    assert book["m/new"].parts.prefill_s_per_token == DEFAULTS.prefill_s_per_token
    for engine, slower in (("m/a", 1.0), ("m/b", 2.0), ("m/c", 30.0), ("other/d", 100.0)):
        book.teach(engine, slower)
    assert book["m/new"].guessed
    assert book["m/new"].parts.prefill_s_per_token == book["m/b"].parts.prefill_s_per_token
    book["m/b"].close()
    both = [book[name].parts.prefill_s_per_token for name in ("m/a", "m/c")]
    assert book["m/new"].parts.prefill_s_per_token == pytest.approx(sum(both) / 2)
    assert book["third/e"].parts.prefill_s_per_token == DEFAULTS.prefill_s_per_token


def probe(tokens: int, slower: float = 1.0, compiles: float = 1.0) -> tuple[int, float]:
    return tokens, compiles * slower * (TRUE_OVERHEAD + TRUE_RATE * tokens)


def probed(*timed: tuple[int, float]) -> FirstTokenModel:
    model = Book()["m/e"]
    model.probed(timed)
    return model


@pytest.mark.parametrize("slower", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("tokens", [(1000, 40), (300, 60), (1800, 1)])
def test_a_probe_is_the_guess_of_a_models_first_engine(tokens: tuple[int, int], slower: float) -> None:
    """Of an engine that compiled for its first request, and had other requests beside a few."""
    long, few = (probe(count, slower) for count in tokens)
    model = probed(probe(tokens[0], slower, 14.0), few, long, probe(tokens[1], slower, 3.0), few, long)
    assert model.guessed
    for count in (1, 100, 4000):
        assert sum(model.seconds(FirstTokenWork(count))) == pytest.approx(probe(count, slower)[1], rel=0.05)
    for _ in range(DEFAULTS.samples_min):
        assert model.guessed
        model.observe(FirstTokenWork(100), probe(100, 2 * slower)[1], 0.0)
    assert not model.guessed
    assert sum(model.seconds(FirstTokenWork(100))) == pytest.approx(probe(100, 2 * slower)[1], rel=0.2)


@pytest.mark.parametrize("tokens", [(30,), (1000,), (400, 380, 300), (1000, 1000)])
def test_a_probe_of_one_length_scales_the_prior(tokens: tuple[int, ...]) -> None:
    model = probed(probe(1000, 2.0, 14.0), *(probe(count, 2.0) for count in tokens))
    for count in tokens:
        assert sum(model.seconds(FirstTokenWork(count))) == pytest.approx(probe(count, 2.0)[1], rel=0.4)


def test_a_probe_counts_for_less_than_the_models_other_engines() -> None:
    book = Book()
    book["m/new"].probed([probe(1000, 5.0), probe(1000, 5.0), probe(40, 5.0)])
    book.teach("m/a", 1.0)
    assert book["m/new"].parts == book["m/a"].parts
    book["m/a"].close()
    assert book["m/new"].parts.prefill_s_per_token == pytest.approx(5.0 * TRUE_RATE)


@pytest.mark.parametrize(
    "timed",
    [
        (),
        ((1000, 1.0),),
        ((1000, 1.0), (0, 1.0), (-5, 1.0), (10, 0.0), (10, -1.0), (10, math.nan), (10, math.inf)),
    ],
)
def test_a_probe_that_says_nothing_changes_nothing(timed: tuple[tuple[int, float], ...]) -> None:
    assert probed(*timed).parts == Book()["m/e"].parts


@pytest.mark.parametrize("seed", range(10))
def test_whatever_a_probe_took_is_within_bounds(seed: int) -> None:
    rng = random.Random(seed)
    timed = [(round(10 ** rng.uniform(0, 18)), 10 ** rng.uniform(-12, 12)) for _ in range(rng.randint(2, 32))]
    parts = probed_parts(timed, DEFAULTS)
    assert parts is not None
    assert 0 < parts.overhead_s <= DEFAULTS.overhead_s_max
    assert DEFAULTS.prefill_s_per_token_min <= parts.prefill_s_per_token <= DEFAULTS.prefill_s_per_token_max
    assert 0 < parts.decode_interference_s <= DEFAULTS.decode_interference_s_max


def test_an_engine_guesses_until_it_has_samples() -> None:
    book = Book()
    for count in range(DEFAULTS.samples_min):
        assert book["e"].guessed, count
        book["e"].observe(FirstTokenWork(300), 0.2, 0.0)
    assert not book["e"].guessed
    assert sum(book["e"].seconds(FirstTokenWork(300))) == pytest.approx(0.2, rel=0.1)


def test_estimates_stay_within_their_bounds() -> None:
    book = Book()
    for _ in range(10 * DEFAULTS.samples_min):
        book["slow"].observe(FirstTokenWork(512), 1e6, 0.0)
        book["fast"].observe(FirstTokenWork(10**9), 0.01, 0.0)
        book["decode"].observe(FirstTokenWork(1), 1e3, 0.0)
        book["decode"].observe(FirstTokenWork(1, running=500), 1e6, 0.0)
        book["none"].observe(FirstTokenWork(0, waits=1.0, begun_s=1e9), 0.0, 0.0)
    for model in book.engines.values():
        parts = model.parts
        rate = parts.prefill_s_per_token
        assert DEFAULTS.prefill_s_per_token_min <= rate <= DEFAULTS.prefill_s_per_token_max
        assert 0 <= parts.decode_interference_s <= DEFAULTS.decode_interference_s_max
        assert 0 <= parts.step_s <= DEFAULTS.overhead_s_max
        assert 0 < parts.overhead_s <= DEFAULTS.overhead_s_max
        assert parts.attention_s >= 0
        assert min(model.seconds(FirstTokenWork(10, 50.0, 1000.0, 5e5, begun_s=1e9, waits=1.0))) >= 0


def learned(slower: float, after: int) -> EngineRates:
    """Rates for decisions after some long prompts of an engine that became slower."""
    rates, rng = FleetRates().engine(), random.Random(5)
    for i in range(100 + after):
        # A third of the prompts is long.
        tokens = rng.choice((rng.randint(100, 480), rng.randint(1, 60), rng.randint(600, 6000)))
        work, seconds = measured(rng, tokens, 0, noise=0.05, rate=slower if i >= 100 else 1.0)
        rates.learn(PrefillSample(tokens, seconds, 0), work, seconds, float(i))
    return rates


@pytest.mark.parametrize("slower", [2.0, 0.5, 3.0])
@pytest.mark.parametrize("after", [20, 60])
def test_a_change_of_speed_moves_decisions_once(slower: float, after: int) -> None:
    """Of both kinds of samples, before and after, none counts twice."""
    rates = learned(slower, after)
    assert rates.model.changes == 1
    assert rates.prefill_s_per_token(200.0) == pytest.approx(slower * TRUE_RATE, rel=0.25)


def test_decisions_do_not_follow_noise_of_predictions() -> None:
    rates = learned(1.0, 0)
    before = rates.prefill_s_per_token(200.0)
    for i in range(40):
        rates.learn(None, FirstTokenWork(300), 0.1 if i % 2 else 0.01, 300.0 + i)
    assert rates.prefill_s_per_token(200.0) == before
