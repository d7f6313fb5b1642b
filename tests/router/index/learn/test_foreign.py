"""Engines of other makers, whose hashes are not computed: prefixes are known from their first event on."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from kvatlas.publisher.block_hash import NO_EXTRAS, HashScheme, PromptExtras
from kvatlas.publisher.events import BlockStored, encode_tokens
from kvatlas.router.feeds.frames import parse_live
from kvatlas.router.index.learn import hash_scheme as detect
from kvatlas.router.index.learn.hash_scheme import Detection
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.index.query_plan import EngineHit
from tests.support.event_writer import Prompt, Writer, batch, random_chain, tokens
from tests.support.foreign_publishers import MAKERS, ForeignEngine, Maker

NO_TOKENS = encode_tokens([])

every_maker = pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.name)


@pytest.fixture(autouse=True)
def _long_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """No search ends in these tests: what is known is known beside it."""
    monkeypatch.setattr(detect, "SEEDS_MAX", 1 << 30)


def apply(fleet: FleetResidency, message: list[bytes]) -> None:
    decoded = parse_live(message).batch
    assert decoded is not None
    assert not decoded.rejected
    fleet.apply("a", decoded)


def ask(fleet: FleetResidency, prompt: list[int]) -> EngineHit:
    return fleet.predict(Prompt(prompt), ["a"])["a"]


def report(fleet: FleetResidency, prompt: list[int], cached: int) -> None:
    fleet.engine("a").learn_cached(prompt, NO_EXTRAS, cached)


def conversations(seed: int, turns: int) -> Iterator[list[int]]:
    """Prompts that continue earlier ones, branch off them, or are new."""
    rng = random.Random(seed)
    seen = [tokens(300, seed=seed)]
    for _ in range(turns):
        base = rng.choice(seen)
        prompt = base[: rng.randrange(1, len(base) + 1)] + tokens(
            rng.randrange(1, 150), rng.randrange(1 << 30)
        )
        seen.append(prompt[:600])
        yield seen[-1]


@every_maker
def test_every_hit_is_known_from_the_first_event_on(maker: Maker) -> None:
    engine, fleet = ForeignEngine(maker, blocks=120), FleetResidency(ModelFacts())
    hits = 0
    for number, prompt in enumerate(conversations(1, 60)):
        found, true = ask(fleet, prompt), engine.hit(prompt)
        assert (found.mode, found.hit_tokens) == ("learned" if number else "unknown", true)
        hits += true > 0
        apply(fleet, engine.run(prompt))
    assert hits > 20
    assert fleet.engine("a").searching, "beside the search"


@every_maker
def test_a_router_that_comes_late_knows_the_prompts_that_begin_then(maker: Maker) -> None:
    engine, fleet = ForeignEngine(maker, blocks=10_000), FleetResidency(ModelFacts())
    for prompt in (old := list(conversations(2, 20))):
        engine.run(prompt)
    for number, one in enumerate(old):
        prompt = one + tokens(100, seed=1000 + number)
        one_hit = engine.hit(prompt)
        apply(fleet, engine.run(prompt))
        found = ask(fleet, prompt)
        assert found.mode == "learned"
        assert found.hit_tokens <= (one_hit if number else 0), "no event showed the start"
        report(fleet, prompt, one_hit)
        assert ask(fleet, prompt).hit_tokens == engine.hit(prompt), "its own report did"
    engine, fleet = ForeignEngine(maker, blocks=150), FleetResidency(ModelFacts())
    for prompt in conversations(3, 20):
        engine.run(prompt)
    apply(fleet, engine.run(tokens(200)))
    for prompt in conversations(3, 60):
        found, true = ask(fleet, prompt), engine.hit(prompt)
        assert found.hit_tokens <= true
        message = engine.run(prompt)
        apply(fleet, message)
        report(fleet, prompt, true)
        decoded = parse_live(message).batch
        assert decoded is not None
        published = any(isinstance(event, BlockStored) for event in decoded.events)
        assert ask(fleet, prompt).hit_tokens == engine.hit(prompt) or not published
    last = tokens(200, seed=99)
    apply(fleet, engine.run(last))
    assert ask(fleet, last).hit_tokens == engine.hit(last) > 0


@every_maker
def test_after_a_restart_nothing_of_before_is_left(maker: Maker) -> None:
    fleet, prompt = FleetResidency(ModelFacts()), tokens(200)
    apply(fleet, ForeignEngine(maker).run(prompt))
    fleet.forget("a")
    assert ask(fleet, prompt).hit_tokens == 0
    apply(fleet, ForeignEngine(maker).run(tokens(200, seed=1)))
    assert (ask(fleet, prompt).mode, ask(fleet, prompt).hit_tokens) == ("learned", 0)


@every_maker
def test_prefixes_held_under_two_hashes_are_not_promised(maker: Maker) -> None:
    """Two tenants' salts in the hashes, and in no event: the same tokens are held under two hashes."""
    engine, fleet, prompt = ForeignEngine(maker), FleetResidency(ModelFacts()), tokens(200)
    apply(fleet, engine.run(prompt, b"one"))
    apply(fleet, engine.run(prompt, b"two"))
    assert ask(fleet, prompt).hit_tokens == 0
    learned = fleet.engine("a").learned
    assert learned is not None
    assert learned.left_out["ambiguous"] == 200 // maker.block_size


def test_a_prefix_that_was_evicted_may_come_back_under_another_hash() -> None:
    maker = MAKERS[0]
    engine, fleet, prompt = ForeignEngine(maker, blocks=6), FleetResidency(ModelFacts()), tokens(200)
    apply(fleet, engine.run(prompt, b"one"))
    apply(fleet, engine.run(tokens(200, seed=1)))
    apply(fleet, engine.run(prompt, b"two"))
    assert ask(fleet, prompt).hit_tokens == engine.hit(prompt, b"two") > 0


def test_tokens_that_are_no_numbers_take_nothing_else_away() -> None:
    """TensorRT-LLM's image tokens may be texts."""
    maker, fleet, prompt = MAKERS[0], FleetResidency(ModelFacts()), tokens(64)
    apply(fleet, ForeignEngine(maker).run(prompt))
    image = maker.stored([5], None, ["<image>", *range(31)], 32)  # type: ignore[list-item]
    apply(fleet, maker.message(1, [image]))
    assert ask(fleet, [*prompt, 1]).hit_tokens == 64
    learned = fleet.engine("a").learned
    assert learned is not None
    assert learned.left_out == {"unplaced": 1}


def test_prefixes_are_known_while_no_event_can_prove_a_scheme() -> None:
    """Adapters of unknown path: there is no evidence to search with."""
    writer, fleet, prompt = (
        Writer(HashScheme(), chain=random_chain(4, 16)),
        FleetResidency(ModelFacts()),
        tokens(100),
    )
    adapter = PromptExtras("unheard of", None)
    fleet.apply("a", batch(writer.stored(prompt, adapter, stop=4)))
    for number in range(20):
        fleet.apply("a", batch(writer.stored(tokens(100, seed=50 + number), adapter)))
    engine = fleet.engine("a")
    assert engine.detection is Detection.WAITING
    assert engine.assumed is not None, "the likeliest scheme, which nothing was found with"
    found = fleet.predict(Prompt(prompt, adapter), ["a"])["a"]
    assert (found.mode, found.hit_tokens) == ("learned", 64)
    assert fleet.predict(Prompt(prompt), ["a"])["a"].hit_tokens == 0
    fleet.stage("a", batch(writer.stored(prompt, adapter)))
    fleet.adopt("a")
    found = fleet.predict(Prompt(tokens(100, seed=50), adapter), ["a"])["a"]
    assert (found.mode, found.hit_tokens) == ("assumed", 0), "not in the snapshot"
    fleet.apply("a", batch(BlockStored(writer.hashes(tokens(96, seed=50), adapter), None, NO_TOKENS, 0)))
    found = fleet.predict(Prompt(tokens(100, seed=50), adapter), ["a"])["a"]
    assert (found.mode, found.hit_tokens) == ("learned", 96), "what was learned before it counts"


def test_the_search_takes_over_when_it_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "SEEDS_MAX", 4)
    writer, fleet, prompt = Writer(HashScheme(seed="3")), FleetResidency(ModelFacts()), tokens(100)
    fleet.apply("a", batch(writer.stored(prompt)))
    assert (ask(fleet, prompt).mode, ask(fleet, prompt).hit_tokens) == ("learned", 96)
    fleet.engine("a").finish_detection()
    assert (ask(fleet, prompt).mode, ask(fleet, prompt).hit_tokens) == ("native", 96)
    assert fleet.engine("a").learned is None
