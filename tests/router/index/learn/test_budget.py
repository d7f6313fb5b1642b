"""Learning an engine's hashes takes bounded work a second, and a search for a seed one slice at a time."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.router.feeds.base import FeedSettings
from kvatlas.router.feeds.manager import FeedManager
from kvatlas.router.feeds.residency_audit import ResidencyAudit
from kvatlas.router.index.learn import hash_scheme
from kvatlas.router.index.learn import learning_budget as module
from kvatlas.router.index.learn.hash_scheme import Detection
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.learn.learning_budget import BLOCKS_BURST, BLOCKS_PER_S, LearningBudget
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.index.model_indexes import ModelIndexes
from tests.support.event_writer import Prompt, Writer, batch, random_chain, tokens


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 1 << 17)), max_size=40))
def test_no_more_is_looked_at_than_the_time_allows(steps: list[tuple[float, int]]) -> None:
    budget, now, looked_at, asked = LearningBudget(), 1.0, 0, 0
    budget.refill(now)
    for pause_s, blocks in steps:
        now += pause_s
        budget.refill(now)
        looked_at += blocks if budget.take(blocks) else 0
        asked += blocks
        assert looked_at <= BLOCKS_BURST + BLOCKS_PER_S * (now - 1.0) + 1
    assert budget.skipped == asked - looked_at


def test_without_a_clock_nothing_is_skipped() -> None:
    budget = LearningBudget()
    assert all(budget.take(BLOCKS_BURST) for _ in range(3))
    assert budget.skipped == 0


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCKS_BURST", 12)
    monkeypatch.setattr(module, "BLOCKS_PER_S", 12)
    monkeypatch.setattr(hash_scheme, "SEEDS_MAX", 4)


def hit(fleet: FleetResidency, prompt: list[int]) -> int:
    return fleet.predict(Prompt(prompt), ["a"])["a"].hit_tokens


@pytest.mark.usefixtures("small")
def test_blocks_of_an_unknown_scheme_beyond_the_budget_are_held_but_not_learned() -> None:
    fleet, writer = FleetResidency(ModelFacts()), Writer(HashScheme(), chain=random_chain(9, 16))
    engine = fleet.engine("a")
    fleet.refill(1.0)
    prompts = [tokens(200, seed=n) for n in range(3)]
    fleet.apply("a", batch(*map(writer.stored, prompts)))
    fleet.engine("a").finish_detection()
    assert engine.detection is Detection.LEARNED
    assert engine.budget.skipped == 24
    assert engine.index.physical("a", "GPU") == 36
    assert [hit(fleet, prompt) for prompt in prompts] == [192, 0, 0]
    fleet.forget("a")
    fleet.apply("a", batch(writer.stored(prompts[1])))
    assert engine.budget.skipped == 36, "a restart gives no new budget"
    fleet.refill(2.0)
    fleet.apply("a", batch(writer.stored(prompts[1])))
    engine.finish_detection()
    assert (engine.budget.skipped, hit(fleet, prompts[1])) == (36, 192)


@pytest.mark.usefixtures("small")
def test_an_engine_of_a_known_scheme_needs_no_budget() -> None:
    fleet, writer = FleetResidency(ModelFacts()), Writer(HashScheme())
    fleet.refill(1.0)
    prompts = [tokens(200, seed=n) for n in range(20)]
    fleet.apply("a", batch(*map(writer.stored, prompts)))
    assert [hit(fleet, prompt) for prompt in prompts] == [192] * 20
    assert fleet.engine("a").budget.skipped == 0


def searching(scopes: ModelIndexes, count: int) -> list[str]:
    """Engines whose seed is a large number."""
    names = [f"e{number}" for number in range(count)]
    for name in names:
        scopes.assign(name, "m").apply(batch(Writer(HashScheme(seed="1000")).stored(tokens(100))))
        assert scopes.scope("m").engine(name).searching
    return names


def test_a_step_is_one_slice_of_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many engines are searched for, and however many events come."""
    scopes, slices = ModelIndexes(lambda model: ModelFacts()), []
    names = searching(scopes, 3)
    for name in names:
        engine = scopes.scope("m").engine(name)
        monkeypatch.setattr(engine, "advance_detection", lambda name=name: slices.append(name))
        engine.apply(batch(Writer(HashScheme(seed="1000")).stored(tokens(100, seed=1))))
    assert slices == []
    for _ in range(6):
        scopes.advance_detection()
    assert sorted(slices) == sorted(names * 2)


async def test_a_search_leaves_the_loop_to_others() -> None:
    """The shell sleeps three times as long as a slice took."""

    now = [0.0]
    scopes = ModelIndexes(lambda model: ModelFacts())
    searching(scopes, 1)
    engine = scopes.scope("m").engine("e0")

    def slice_of_a_second() -> None:
        now[0] += 0.01

    engine.advance_detection = slice_of_a_second  # type: ignore[method-assign]
    pauses: list[float] = []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        await real(0)

    real = asyncio.sleep
    feeds = FeedManager(scopes, clock=time.monotonic, settings=FeedSettings())
    audit = ResidencyAudit((), scopes, feeds, clock=lambda: now[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvatlas.router.feeds.manager.asyncio.sleep", sleep)
        task = asyncio.create_task(audit.detect())
        while len(pauses) < 3:
            await real(0)
        task.cancel()
    assert pauses[:3] == pytest.approx([0.03] * 3)
