"""When the machine asks for a snapshot, what it does with the answer, and recovery under every fault."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from kvatlas.publisher.events import BlockRemoved, DecodedBatch
from kvatlas.router.feeds.actions import Action, Adopt, Apply, Forget, RequestReplay, RequestSnapshot
from kvatlas.router.feeds.base import Cut, FeedSettings, FeedState, FeedStats
from kvatlas.router.feeds.frames import Frame
from kvatlas.router.feeds.machine import FeedMachine
from kvatlas.router.feeds.position import Position
from tests.support.examples import some
from tests.support.feed_world import run

OURS, OTHER = b"publisher number", b"another process!"


def frame(seq: int, publisher_id: bytes | None = OURS) -> Frame:
    events = [BlockRemoved([seq], "GPU", 0)]
    return Frame(seq, DecodedBatch(float(seq), list(events), 0, publisher_id, []), seq, 10, publisher_id)


class Driven:
    """A machine with a clock and the last request it made."""

    def __init__(self, *, has_replay: bool = False) -> None:
        self.stats = FeedStats()
        self.machine = FeedMachine(FeedSettings(), self.stats, has_replay=has_replay, has_snapshot=True)
        self.now = 100.0
        self.request: RequestSnapshot | RequestReplay | None = None
        self.did(self.machine.connected(self.now))

    def did(self, actions: list[Action]) -> list[type]:
        for action in actions:
            if isinstance(action, RequestSnapshot | RequestReplay):
                self.request = action
        return [type(action) for action in actions]

    def taken(self, cut: Cut) -> list[type]:
        assert isinstance(self.request, RequestSnapshot)
        return self.did(self.machine.snapshot_taken(self.now, self.request.request_id, cut))

    def live(self, seq: int, publisher_id: bytes | None = OURS) -> list[type]:
        return self.did(self.machine.live(self.now, frame(seq, publisher_id)))

    def tick(self, seconds: float) -> list[type]:
        self.now += seconds
        return self.did(self.machine.tick(self.now))


def test_a_cold_feed_asks_for_a_snapshot_before_the_history() -> None:
    driven = Driven(has_replay=True)
    assert isinstance(driven.request, RequestSnapshot)
    assert driven.stats.state is FeedState.REPLAYING
    driven.did(driven.machine.snapshot_failed(driven.now, driven.request.request_id, unsupported=True))
    assert isinstance(driven.request, RequestReplay)
    assert driven.stats.snapshot_failures == 0


def test_a_publisher_without_snapshots_is_asked_again_after_a_reconnect() -> None:
    """Another process may have come, which has them."""
    driven = Driven()
    assert isinstance(driven.request, RequestSnapshot)
    driven.did(driven.machine.snapshot_failed(driven.now, driven.request.request_id, unsupported=True))
    driven.request = None
    driven.did(driven.machine.disconnected(driven.now))
    driven.did(driven.machine.connected(driven.now))
    assert isinstance(driven.request, RequestSnapshot)


def test_live_batches_are_applied_on_top_of_the_snapshot() -> None:
    driven = Driven()
    for seq in (5, 6, 7):
        assert driven.live(seq) == []
    assert driven.taken(Cut(5, OURS))[:3] == [Adopt, Apply, Apply]
    assert driven.stats.state is FeedState.READY
    assert (driven.stats.last_seq, driven.stats.known_batches) == (7, 8)


def test_a_gap_behind_the_snapshot_is_given_up_where_nothing_can_fill_it() -> None:
    driven = Driven()
    for seq in (5, 6, 8):
        driven.live(seq)
    assert driven.taken(Cut(5, OURS))[:3] == [Adopt, Apply, Apply]
    assert driven.stats.last_seq == 8


def test_a_batch_without_room_is_given_up_with_those_that_never_came() -> None:
    position = Position(FeedSettings(hold_batches_max=1), FeedStats(), [])
    position.apply(frame(4))
    assert position.hold(frame(6))
    assert not position.hold(frame(7))
    position.skip_all("gap")
    assert (position.next_seq, position.missing, position.is_whole) == (8, 2, True)


def test_batches_before_the_cut_that_come_late_are_no_restart() -> None:
    driven = Driven()
    driven.taken(Cut(9, None))
    for seq in (7, 8, 9, 8):
        assert driven.live(seq, None) == []
    assert driven.live(10, None) == [Apply]
    assert driven.stats.restarts == 0
    assert driven.stats.duplicate_batches == 4


def test_a_void_answer_is_not_adopted() -> None:
    driven = Driven()
    request = driven.request
    assert isinstance(request, RequestSnapshot)
    driven.did(driven.machine.disconnected(driven.now))
    driven.did(driven.machine.connected(driven.now))
    assert driven.machine.snapshot_taken(driven.now, request.request_id, Cut(3, OURS)) == []


def test_after_a_reconnect_the_snapshot_tells_whether_it_is_the_same_process() -> None:
    for publisher_id, expected in ((OURS, [Adopt]), (OTHER, [Forget, Adopt])):
        driven = Driven()
        driven.taken(Cut(9, OURS))
        driven.did(driven.machine.disconnected(driven.now))
        driven.did(driven.machine.connected(driven.now))
        assert driven.stats.reason == "unverified"
        assert driven.tick(0.1) == [RequestSnapshot]
        assert driven.taken(Cut(12, publisher_id))[: len(expected)] == expected
        assert driven.stats.state is FeedState.READY
        assert driven.stats.restarts == len(expected) - 1


def test_failures_are_repeated_at_growing_distances() -> None:
    driven = Driven()
    driven.live(4)
    waits = []
    for _ in range(4):
        assert isinstance(driven.request, RequestSnapshot)
        driven.did(driven.machine.snapshot_failed(driven.now, driven.request.request_id, unsupported=False))
        began, request = driven.now, driven.request
        while driven.request is request:
            driven.tick(0.5)
        waits.append(driven.now - began)
    assert waits == [5.0, 10.0, 20.0, 40.0]
    assert driven.stats.state is FeedState.DEGRADED


def test_silence_of_a_publisher_that_beats_is_noticed() -> None:
    driven = Driven()
    driven.taken(Cut(0, OURS))
    empty = Frame(1, DecodedBatch(1.0, [], 0, OURS, []), 1, 10, OURS)
    driven.did(driven.machine.live(driven.now, empty))
    assert driven.stats.state is FeedState.READY
    driven.tick(6.0)
    assert driven.stats.state is FeedState.STALE
    driven.live(2)
    assert driven.stats.state is FeedState.READY


def test_progress_keeps_a_long_snapshot_from_being_given_up() -> None:
    driven = Driven()
    for _ in range(5):
        driven.tick(6.0)
        driven.machine.progress(driven.now, driven.request.request_id)
    assert driven.taken(Cut(2, OURS))[0] is Adopt


BLOCK = 30
SEEDS = int(os.environ.get("KVATLAS_RECOVERY_SEEDS") or 300)
ONE = os.environ.get("KVATLAS_RECOVERY_SEED")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", [int(ONE)] if ONE else some(range(0, SEEDS, BLOCK), 10))
def test_nothing_is_lost_and_nothing_is_invented(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + (1 if ONE else BLOCK)):
        try:
            world = run(seed)
        except Exception as error:
            command = f"KVATLAS_RECOVERY_SEED={seed} python -m pytest {os.path.relpath(__file__)}"
            raise AssertionError(f"seed {seed}: {error}; again with: {command}") from error
        seen[str(world.stats.state)] += 1
        seen["snapshots"] += world.stats.snapshots
        seen["replays"] += world.stats.replays
        seen["restarts"] += world.stats.restarts
        seen["gaps"] += world.stats.gaps
    if not ONE:  # the faults really happened
        assert min(seen["ready"], seen["snapshots"], seen["replays"], seen["restarts"], seen["gaps"]) > 5, (
            seen
        )
