"""Properties of the feed machine over a lossy network: order, exactly once, no mixing, no false READY."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.feeds.base import FeedState
from tests.feeds.network import SETTINGS, Simulation

FATES = ("ok", "ok", "ok", "drop", "late", "twice")
FAULTS = ("ok", "ok", "silent", "cut", "hole", "repeated", "shuffled")

steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.sampled_from(FATES)),
        st.tuples(st.just("publish"), st.sampled_from(FATES)),
        st.tuples(st.just("deliver_late")),
        st.tuples(st.just("serve"), st.sampled_from(FAULTS)),
        st.tuples(st.just("feed"), st.integers(1, 12)),
        st.tuples(st.just("fail")),
        st.tuples(st.just("restart"), st.integers(0, 6)),
        st.tuples(st.just("disconnect")),
        st.tuples(st.just("connect")),
        st.tuples(st.just("tick"), st.sampled_from((0.1, 1.0, 4.0, 11.0))),
    ),
    max_size=80,
)


def run(simulation: Simulation, script: list[tuple[object, ...]]) -> None:
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


@settings(deadline=None)
@given(steps, st.integers(0, 1 << 16), st.booleans())
def test_with_its_whole_history_replayable_a_feed_ends_complete(
    script: list[tuple[object, ...]], seed: int, with_ids: bool
) -> None:
    simulation = Simulation(seed, ring=100_000, with_ids=with_ids)
    run(simulation, script)
    simulation.settle()
    assert simulation.applied == simulation.expected
    assert simulation.state is FeedState.READY
    assert simulation.stats.missing_batches == 0
    assert simulation.stats.held_batches == 0


@settings(deadline=None)
@given(steps, st.integers(0, 1 << 16), st.integers(0, 8), st.booleans())
def test_with_a_short_replay_buffer_ready_still_means_complete(
    script: list[tuple[object, ...]], seed: int, ring: int, with_ids: bool
) -> None:
    simulation = Simulation(seed, ring=ring, with_ids=with_ids)
    run(simulation, script)
    simulation.settle()
    if simulation.state is FeedState.READY:
        assert simulation.applied == simulation.expected
    else:
        assert simulation.state is FeedState.DEGRADED
        missing = len(simulation.expected) - len(simulation.applied)
        assert simulation.stats.missing_batches == missing > 0
        assert {sent.process for sent in simulation.applied} <= {simulation.process}
    assert simulation.applied[-1:] == simulation.expected[-1:]


@settings(deadline=None)
@given(steps, st.integers(0, 1 << 16))
def test_small_buffers_of_our_own_lose_nothing_that_replay_still_has(
    script: list[tuple[object, ...]], seed: int
) -> None:
    tight = Simulation(seed, ring=100_000, settings=_tight())
    run(tight, [step for step in script if step not in [("serve", "shuffled")]])
    tight.settle()
    assert tight.applied == tight.expected
    assert tight.state is FeedState.READY


def _tight():  # type: ignore[no-untyped-def]
    import msgspec

    return msgspec.structs.replace(SETTINGS, hold_batches_max=2, recent_batches_max=4)


@settings(deadline=None)
@given(steps, st.integers(0, 1 << 16))
def test_a_cache_clear_ends_degraded(script: list[tuple[object, ...]], seed: int) -> None:
    simulation = Simulation(seed, ring=3)
    run(simulation, script)
    simulation.settle()
    simulation.publish("ok", clear=True)
    assert simulation.state is FeedState.READY
    assert simulation.stats.missing_batches == 0


@settings(deadline=None)
@given(steps, st.integers(0, 1 << 16))
def test_publisher_ids_alone_keep_processes_apart_without_replay(
    script: list[tuple[object, ...]], seed: int
) -> None:
    simulation = Simulation(seed, ring=0, has_replay=False, with_ids=True)
    run(simulation, script)
    simulation.settle()
    if simulation.state is FeedState.READY:
        assert simulation.applied == simulation.expected
