"""Properties of the feed machine over a lossy network: order, exactly once, no mixing, no false READY."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.feeds.base import FeedState
from tests.router.feeds.feed_network import SETTINGS, Simulation
from tests.support.examples import some

FATES = ("ok", "ok", "ok", "drop", "late", "twice")
FAULTS = ("ok", "ok", "silent", "cut", "hole", "repeated", "shuffled")
TIGHT = msgspec.structs.replace(SETTINGS, hold_batches_max=2, recent_batches_max=4)

Step = tuple[object, ...]

STEPS: dict[str, tuple[int, st.SearchStrategy[Step]]] = {
    "publish": (40, st.tuples(st.just("publish"), st.sampled_from(FATES))),
    "deliver_late": (8, st.tuples(st.just("deliver_late"))),
    "serve": (12, st.tuples(st.just("serve"), st.sampled_from(FAULTS))),
    "feed": (12, st.tuples(st.just("feed"), st.integers(1, 30))),
    "fail": (2, st.tuples(st.just("fail"))),
    "restart": (2, st.tuples(st.just("restart"), st.integers(0, 12))),
    "disconnect": (2, st.tuples(st.just("disconnect"))),
    "connect": (4, st.tuples(st.just("connect"))),
    "tick": (6, st.tuples(st.just("tick"), st.sampled_from((0.1, 1.0, 4.0, 11.0)))),
}
weighted = st.sampled_from([name for name, (weight, _) in STEPS.items() for _ in range(weight)])
steps = st.lists(weighted.flatmap(lambda name: STEPS[name][1]), max_size=150)


def settled(seed: int, script: list[Step], **options: Any) -> Simulation:
    """The network after these steps and a calm time."""
    simulation = Simulation(seed, **options)
    run(simulation, script)
    simulation.settle()
    return simulation


def run(simulation: Simulation, script: list[Step]) -> None:
    for step in script:
        match step:
            case ("publish", str(fate)):
                simulation.publish(fate)
            case ("deliver_late",):
                simulation.deliver_late()
            case ("serve", str(fault)):
                simulation.serve_replay(fault)
            case ("feed", int(count)):
                simulation.feed_replay(count)
            case ("fail",):
                simulation.fail_replay()
            case ("restart", int(unheard)):
                simulation.restart(unheard=unheard)
            case ("disconnect",):
                simulation.disconnect()
            case ("connect",):
                simulation.connect()
            case ("tick", float(seconds)):
                simulation.tick(seconds)


@given(steps, st.integers(0, 1 << 16), st.booleans())
def test_with_its_whole_history_replayable_a_feed_ends_complete(
    script: list[Step], seed: int, with_ids: bool
) -> None:
    simulation = settled(seed, script, ring=100_000, with_ids=with_ids)
    assert simulation.applied == simulation.expected
    assert simulation.state is FeedState.READY
    assert simulation.stats.missing_batches == 0
    assert simulation.stats.held_batches == 0


@given(steps, st.integers(0, 1 << 16), st.integers(0, 8), st.booleans())
def test_with_a_short_replay_buffer_ready_still_means_complete(
    script: list[Step], seed: int, ring: int, with_ids: bool
) -> None:
    simulation = settled(seed, script, ring=ring, with_ids=with_ids)
    if simulation.state is FeedState.READY:
        assert simulation.applied == simulation.expected
    else:
        assert simulation.state is FeedState.DEGRADED
        missing = len(simulation.expected) - len(simulation.applied)
        assert simulation.stats.missing_batches == missing > 0
        assert {sent.process for sent in simulation.applied} <= {simulation.process}
    assert simulation.applied[-1:] == simulation.expected[-1:]


@given(steps, st.integers(0, 1 << 16))
def test_small_buffers_of_our_own_lose_nothing_that_replay_still_has(script: list[Step], seed: int) -> None:
    # With room for two batches a shuffled answer cannot be put in order: it looks like a rolled-past buffer.
    ordered = [step for step in script if step != ("serve", "shuffled")]
    tight = settled(seed, ordered, ring=100_000, settings=TIGHT)
    assert tight.applied == tight.expected
    assert tight.state is FeedState.READY


@given(steps, st.integers(0, 1 << 16))
def test_a_cache_clear_ends_degraded(script: list[Step], seed: int) -> None:
    simulation = settled(seed, script, ring=3)
    simulation.publish("ok", clear=True)
    assert simulation.state is FeedState.READY
    assert simulation.stats.missing_batches == 0


@given(steps, st.integers(0, 1 << 16))
def test_publisher_ids_alone_keep_processes_apart_without_replay(script: list[Step], seed: int) -> None:
    simulation = settled(seed, script, ring=0, has_replay=False, with_ids=True)
    if simulation.state is FeedState.READY:
        assert simulation.applied == simulation.expected


@given(steps, st.integers(0, 1 << 16))
def test_with_neither_replay_nor_ids_what_may_be_mixed_up_is_not_ready(script: list[Step], seed: int) -> None:
    simulation = settled(seed, script, ring=0, has_replay=False)
    if simulation.state is FeedState.READY:
        assert not simulation.mixed
        assert simulation.applied == simulation.expected


@given(steps, st.integers(0, 1 << 16), st.integers(0, 5), st.booleans())
def test_batches_that_a_new_connection_misses_at_its_beginning_are_found(
    script: list[Step], seed: int, unheard: int, with_ids: bool
) -> None:
    simulation = settled(seed, script, ring=100_000, with_ids=with_ids)
    simulation.disconnect()
    simulation.connect()
    simulation.serve_replay("ok")
    simulation.feed_replay(10_000)
    for _ in range(unheard):
        simulation.publish("drop")
    simulation.settle(batches=0)
    assert simulation.applied == simulation.expected
    assert simulation.state is FeedState.READY


def random_script(rng: random.Random) -> list[Step]:
    """Longer and more wearing than what hypothesis draws."""
    arguments = {"publish": FATES, "serve": FAULTS, "feed": range(1, 31), "restart": range(13)}
    script: list[Step] = [("connect",)] if rng.random() < 0.7 else []
    names = [name for name, (weight, _) in STEPS.items() for _ in range(weight)]
    for name in rng.choices(names, k=rng.randint(5, 250)):
        if name == "tick":
            script.append((name, rng.choice((0.1, 1.0, 4.0, 11.0))))
        else:
            script.append((name, rng.choice(arguments[name])) if name in arguments else (name,))
    return script


@pytest.mark.parametrize("first_seed", some(range(0, 1000, 250), 4))
def test_many_random_histories(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 250):
        rng = random.Random(seed)
        ring, with_ids = rng.choice((100_000, 100_000, 0, 3, 10, 40)), rng.random() < 0.3
        bounds = rng.choice((SETTINGS, TIGHT))
        has_replay = rng.random() < 0.85
        script = random_script(rng)
        if bounds is TIGHT:
            script = [step for step in script if step != ("serve", "shuffled")]
        options = {"ring": ring, "with_ids": with_ids, "has_replay": has_replay, "settings": bounds}
        simulation = settled(seed, script, **options)
        context = f"seed {seed}: {simulation.stats}"
        if simulation.state is FeedState.READY:
            assert simulation.applied == simulation.expected, context
        else:
            assert simulation.state is FeedState.DEGRADED, context
            assert not (has_replay and ring == 100_000), context
        if not simulation.mixed:
            missing = len(simulation.expected) - len(simulation.applied)
            assert simulation.stats.missing_batches == missing, context
