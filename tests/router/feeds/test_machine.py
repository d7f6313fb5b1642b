"""The feed machine case by case: what it does for each thing that can happen to a stream."""

from __future__ import annotations

import msgspec
import pytest

from kvatlas.publisher.events import BlockStored, DecodedBatch, Event, encode_tokens
from kvatlas.router.feeds.actions import Action, Apply, Forget, Reconnect, RequestReplay, StateChanged
from kvatlas.router.feeds.base import FeedSettings, FeedState, FeedStats
from kvatlas.router.feeds.frames import UNNUMBERED, Frame
from kvatlas.router.feeds.machine import FeedMachine
from kvatlas.router.feeds.position import HeldBatches, expected_share
from kvatlas.router.feeds.recovery import (
    RECONNECT_PAUSE_S,
    REPLAY_ATTEMPTS_MAX,
    RESTART_PAUSE_S,
    SUBSCRIBED_S,
)
from tests.router.feeds.feed_network import make_frame

SETTINGS = FeedSettings(hold_batches_max=8, recent_batches_max=16)


class Driver:
    """A machine with a clock, the batches it applied (by time stamp) and the actions it asked for."""

    def __init__(self, settings: FeedSettings = SETTINGS, *, has_replay: bool = True) -> None:
        self.stats = FeedStats()
        self.machine = FeedMachine(settings, self.stats, has_replay=has_replay)
        self.now = 0.0
        self.applied: list[float] = []
        self.forgets = self.reconnects = 0
        self.requests: list[RequestReplay] = []
        self.states: list[tuple[FeedState, str]] = []
        self.machine.changed = self._changed
        self._told = self.stats.state, self.stats.unconfirmed

    def _changed(self) -> None:
        self._told = self.stats.state, self.stats.unconfirmed

    def do(self, actions: list[Action]) -> None:
        assert self._told == (self.stats.state, self.stats.unconfirmed), "decisions have not been told"
        for action in actions:
            match action:
                case Apply(batch=batch):
                    self.applied.append(batch.ts)
                case Forget():
                    self.applied.clear()
                    self.forgets += 1
                case RequestReplay():
                    self.requests.append(action)
                case Reconnect():
                    self.reconnects += 1
                case StateChanged():
                    self.states.append((action.state, action.reason))

    def connected(self) -> None:
        self.do(self.machine.connected(self.now))

    def suspect(self) -> None:
        self.do(self.machine.suspect(self.now))

    def disconnected(self) -> None:
        self.do(self.machine.disconnected(self.now))

    def live(self, *frames: Frame) -> None:
        for frame in frames:
            self.do(self.machine.live(self.now, frame))

    def replay(self, *frames: Frame, end: bool = True) -> None:
        request_id = self.requests[-1].request_id
        for frame in frames:
            self.do(self.machine.replayed(self.now, request_id, frame))
        if end:
            self.do(self.machine.replay_ended(self.now, request_id))

    def fail(self) -> None:
        self.do(self.machine.replay_failed(self.now, self.requests[-1].request_id))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.machine.tick(self.now))

    @property
    def state(self) -> tuple[FeedState, str]:
        return self.stats.state, self.stats.reason


def frame(seq: int, process: int = 0, publisher_id: bytes | None = None, *, clear: bool = False) -> Frame:
    """Batch ``seq`` of a process; its time stamp is ``1000 * process + seq``."""
    return make_frame(process, seq, 1000.0 * process + seq, publisher_id, clear=clear)


def frames(start: int, stop: int, process: int = 0) -> list[Frame]:
    return [frame(seq, process) for seq in range(start, stop)]


def ready(*, upto: int = 3, settings: FeedSettings = SETTINGS) -> Driver:
    """A driver whose feed is READY after the batches before ``upto``."""
    driver = Driver(settings)
    driver.connected()
    driver.replay(*frames(0, upto))
    assert driver.state == (FeedState.READY, "")
    return driver


def gap_given_up() -> Driver:
    """A READY feed that missed batches 3 and 4, whose repair has timed out."""
    driver = ready()
    driver.live(frame(5))
    driver.tick(SETTINGS.hold_s_max)
    return driver


def reconnected() -> Driver:
    """A READY feed whose connection was lost and is there again."""
    driver = ready()
    driver.disconnected()
    driver.connected()
    return driver


def started(*, has_replay: bool = True) -> Driver:
    """A feed that has connected, and has heard nothing."""
    driver = Driver(has_replay=has_replay)
    driver.connected()
    return driver


def test_connecting_asks_for_the_history_and_holds_live_batches_until_it_is_there() -> None:
    driver = Driver()
    assert driver.state == (FeedState.COLD, "")
    driver.connected()
    assert driver.requests[0].from_seq == 0
    driver.live(frame(3))
    assert driver.applied == []
    driver.replay(*frames(0, 4))
    assert driver.applied == [0.0, 1.0, 2.0, 3.0]
    assert [state for state, _ in driver.states] == [FeedState.REPLAYING, FeedState.READY]


def test_an_engine_that_has_said_nothing_is_ready() -> None:
    driver = started()
    driver.replay()
    assert driver.state == (FeedState.READY, "")


def test_the_first_batch_heard_live_needs_no_replay_answer() -> None:
    driver = started()
    driver.live(frame(0), frame(1))
    assert driver.applied == [0.0, 1.0]
    assert driver.state == (FeedState.READY, "")
    driver.replay(*frames(0, 2))  # the answer comes anyway, and changes nothing
    assert driver.applied == [0.0, 1.0]


@pytest.mark.parametrize("upto", [0, 3])
def test_batches_sent_before_the_subscription_was_read_are_asked_for(upto: int) -> None:
    driver = ready(upto=upto)
    driver.tick(SUBSCRIBED_S)
    assert [request.from_seq for request in driver.requests] == [0, max(upto - 1, 0)]
    driver.live(*frames(upto, upto + 1))
    assert driver.applied == [float(seq) for seq in range(upto + 1)]  # it does not wait
    driver.replay(*frames(max(upto - 1, 0), upto + 3))
    assert driver.applied == [float(seq) for seq in range(upto + 3)]
    driver.tick(SUBSCRIBED_S)
    assert len(driver.requests) == 2  # once per connection
    assert [state for state, _ in driver.states] == [FeedState.REPLAYING, FeedState.READY]


def test_a_second_look_without_an_answer_costs_nothing() -> None:
    driver = ready()
    driver.tick(SUBSCRIBED_S)
    driver.fail()
    driver.tick(SETTINGS.hold_s_max)
    assert (driver.state, len(driver.requests)) == ((FeedState.READY, ""), 2)
    slow = ready()
    slow.tick(SUBSCRIBED_S)
    slow.tick(SETTINGS.hold_s_max)
    slow.live(frame(3))
    assert (slow.state, len(slow.requests)) == ((FeedState.READY, ""), 2)


def test_a_gap_does_not_wait_for_the_second_look() -> None:
    driver = ready()
    driver.tick(SUBSCRIBED_S)
    driver.live(frame(5))
    assert driver.state == (FeedState.DEGRADED, "gap")
    driver.replay(*frames(2, 6))
    assert driver.applied == [float(seq) for seq in range(6)]


@pytest.mark.parametrize("first", [2, 3])
def test_a_second_look_that_meets_another_process_starts_again(first: int) -> None:
    driver = ready()
    driver.tick(SUBSCRIBED_S)
    driver.replay(*frames(first, 6, process=1))
    if first > 2:  # nothing that is known came back: is it the same process?
        assert driver.state == (FeedState.DEGRADED, "check")
        driver.replay(*frames(3, 6, process=1))
    driver.replay(*frames(0, 6, process=1))
    assert driver.applied == [1000.0 + seq for seq in range(6)]
    assert driver.state == (FeedState.READY, "")


def test_a_history_rolled_past_is_degraded_but_used_until_a_cache_clear() -> None:
    driver = started()
    driver.replay(*frames(5, 8))
    assert driver.applied == [5.0, 6.0, 7.0]
    assert driver.state == (FeedState.DEGRADED, "history_rolled")
    assert (driver.stats.missing_batches, driver.stats.lost_batches) == (5, 0)
    driver.tick(1000)
    assert [one.from_seq for one in driver.requests] == [0, 7]  # seq 0 is gone for good: no re-sync is tried
    driver.replay(frame(7))
    driver.tick(1000)
    assert len(driver.requests) == 2
    driver.live(frame(8, clear=True))
    assert driver.state == (FeedState.READY, "")
    assert driver.stats.missing_batches == 0


def test_a_cache_clear_does_not_make_up_for_losses_once_offload_tiers_were_seen() -> None:
    driver = started()
    stored: list[Event] = [BlockStored([1], None, encode_tokens([1]), 1, None, "CPU", None)]
    offload = msgspec.structs.replace(frame(5), batch=DecodedBatch(5.0, stored, 0, None, []))
    driver.replay(offload)
    driver.live(frame(6, clear=True))
    assert driver.state == (FeedState.DEGRADED, "history_rolled")


def test_a_gap_is_repaired_in_order_from_the_batch_before_it() -> None:
    driver = ready()
    driver.live(frame(5), frame(6))
    assert driver.state == (FeedState.DEGRADED, "gap")
    assert driver.requests[-1].from_seq == 2
    driver.replay(*frames(2, 6))
    assert driver.applied == [float(seq) for seq in range(7)]
    assert driver.state == (FeedState.READY, "")
    assert (driver.stats.gaps, driver.stats.lost_batches, driver.stats.held_batches) == (1, 0, 0)
    assert (driver.stats.replays, driver.stats.replay_failures) == (2, 0)


def test_a_gap_that_closes_by_itself_needs_no_answer() -> None:
    driver = ready()
    driver.live(frame(4), frame(3))
    assert driver.applied == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert driver.state == (FeedState.READY, "")
    assert not driver.machine.wants(driver.requests[-1].request_id)


def test_a_second_gap_behind_the_first_is_repaired_too() -> None:
    driver = ready()
    driver.live(frame(5))
    driver.replay(*frames(2, 4), end=False)
    driver.live(frame(9))
    driver.replay(*frames(4, 7))
    assert driver.applied[-1] == 6.0
    assert driver.requests[-1].from_seq == 6
    driver.replay(*frames(6, 10))
    assert driver.applied == [float(seq) for seq in range(10)]
    assert driver.state == (FeedState.READY, "")


def test_an_answer_cut_short_is_continued_where_it_ended() -> None:
    driver = ready()
    driver.live(frame(9))
    driver.replay(*frames(2, 6), end=False)
    driver.fail()
    assert (driver.requests[-1].from_seq, driver.requests[-1].delay_s) == (5, 0.0)
    driver.replay(*frames(5, 10))
    assert driver.applied == [float(seq) for seq in range(10)]


@pytest.mark.parametrize("order", ["reversed", "repeated"])
def test_a_disordered_answer_is_put_in_order(order: str) -> None:
    driver = ready()
    driver.live(frame(6))
    answer = frames(2, 6)[::-1] if order == "reversed" else [f for f in frames(2, 6) for _ in range(3)]
    driver.replay(*answer)
    assert driver.applied == [float(seq) for seq in range(7)]


def test_batches_missing_in_a_replay_are_counted_as_lost_and_live_ones_continue() -> None:
    driver = ready()
    driver.live(frame(5))
    for _ in range(REPLAY_ATTEMPTS_MAX):
        assert driver.applied == [0.0, 1.0, 2.0]
        driver.fail()
    assert driver.applied == [0.0, 1.0, 2.0, 5.0]
    assert driver.state == (FeedState.DEGRADED, "replay_failed")
    assert (driver.stats.lost_batches, driver.stats.missing_batches) == (2, 2)
    driver.live(frame(6))
    assert driver.applied[-1] == 6.0
    driver.live(frame(8))  # replay has just failed: no waiting for it again so soon
    assert driver.applied[-1] == 8.0
    assert driver.stats.missing_batches == 3


def test_repeated_requests_back_off() -> None:
    driver = ready()
    driver.live(frame(5))
    driver.fail()
    driver.fail()
    assert [request.delay_s for request in driver.requests[-3:]] == [0.0, 0.2, 0.4]


def test_a_repair_without_progress_ends_by_the_clock() -> None:
    driver = ready()
    driver.live(frame(5))
    driver.tick(SETTINGS.hold_s_max - 0.1)
    assert driver.applied[-1] == 2.0
    driver.tick(0.2)
    assert driver.applied[-1] == 5.0


def test_after_a_loss_a_full_resync_is_tried_and_makes_the_feed_ready() -> None:
    driver = gap_given_up()
    driver.tick(SETTINGS.resync_backoff_s)
    assert driver.requests[-1].from_seq == 0
    driver.live(frame(6))  # live goes on meanwhile
    assert driver.applied == [0.0, 1.0, 2.0, 5.0, 6.0]
    driver.replay(*frames(0, 6))
    assert driver.applied == [float(seq) for seq in range(6)]
    assert driver.requests[-1].from_seq == 5  # seq 6 had been heard, so it is still wanted
    driver.replay(*frames(5, 7))
    assert driver.applied == [float(seq) for seq in range(7)]
    assert driver.state == (FeedState.READY, "")
    assert (driver.stats.resyncs, driver.stats.restarts) == (1, 0)


def test_no_resync_is_tried_when_the_history_is_known_to_be_gone() -> None:
    driver = started()
    driver.replay(*frames(5, 8))
    driver.live(frame(9))
    driver.tick(SETTINGS.hold_s_max)
    assert driver.applied == [5.0, 6.0, 7.0, 9.0]
    asked = len(driver.requests)
    driver.tick(10_000)
    assert all(request.from_seq for request in driver.requests[asked:])


def test_attempts_are_counted_again_after_progress() -> None:
    driver = ready()
    driver.live(frame(9))
    driver.fail()
    driver.fail()
    driver.replay(*frames(2, 5), end=False)
    driver.fail()
    driver.fail()
    driver.fail()
    assert driver.applied[-1] == 4.0
    driver.replay(*frames(4, 10))
    assert driver.applied[-1] == 9.0


def test_a_resync_that_cannot_reach_the_start_changes_nothing_and_is_not_repeated() -> None:
    driver = gap_given_up()
    driver.tick(SETTINGS.resync_backoff_s)
    driver.replay(*frames(1, 6))
    assert driver.applied == [0.0, 1.0, 2.0, 5.0]
    asked = len(driver.requests)
    driver.tick(10_000)
    assert all(request.from_seq for request in driver.requests[asked:])


def test_an_empty_or_failed_resync_is_tried_again_later() -> None:
    driver = gap_given_up()
    driver.tick(SETTINGS.resync_backoff_s)
    driver.replay()
    driver.tick(1000)
    driver.fail()
    driver.tick(1000)
    driver.replay(*frames(0, 6))
    assert driver.state == (FeedState.READY, "")
    assert driver.forgets == 1


def test_more_live_batches_than_fit_are_fetched_again() -> None:
    driver = ready()
    driver.live(*frames(4, 20))
    assert driver.stats.buffer_overflows == 8
    assert driver.stats.held_batches == 8
    driver.replay(*frames(2, 4))
    assert driver.applied[-1] == 11.0
    driver.replay(*frames(11, 20))
    assert driver.applied == [float(seq) for seq in range(20)]
    assert driver.state == (FeedState.READY, "")


def test_a_hole_in_an_answer_with_more_behind_it_than_fits_is_asked_for_again() -> None:
    """vLLM's replay socket drops what a slow reader's queue does not take, and goes on behind it."""
    driver = started()
    driver.replay(*frames(0, 3), *frames(5, 40))
    assert driver.states[-1][0] is FeedState.REPLAYING
    assert driver.requests[-1].from_seq == 2  # the last one applied, to know the process by
    driver.replay(*frames(2, 40))
    assert driver.applied == [float(seq) for seq in range(40)]
    assert driver.state == (FeedState.READY, "")
    assert driver.stats.lost_batches == 0


def test_an_answer_that_begins_late_with_more_than_fits_shows_that_the_history_rolled() -> None:
    driver = started()
    driver.replay(*frames(5, 40), end=False)
    assert driver.applied == [float(seq) for seq in range(5, 13)], "what fits, while the answer goes on"
    driver.replay()
    driver.replay(*frames(driver.requests[-1].from_seq, 40))
    assert driver.applied == [float(seq) for seq in range(5, 40)]
    assert driver.state == (FeedState.DEGRADED, "history_rolled")


def test_frames_of_an_earlier_connection_are_not_awaited_from_the_next_one() -> None:
    driver = started()
    driver.live(frame(3))
    driver.disconnected()
    driver.connected()
    driver.replay()
    assert driver.state == (FeedState.READY, "")


def test_a_history_that_does_not_come_is_unknown() -> None:
    driver = started()
    for _ in range(REPLAY_ATTEMPTS_MAX):
        driver.fail()
    assert driver.state == (FeedState.DEGRADED, "history_unknown")


def test_a_new_process_is_asked_for_a_gap_though_the_old_one_had_no_answer() -> None:
    driver = gap_given_up()
    driver.live(frame(0, process=1), frame(1, process=1))
    driver.live(frame(3, process=1))
    assert driver.requests[-1].from_seq == 1
    driver.replay(*frames(1, 4, process=1))
    assert driver.state == (FeedState.READY, "")


def test_rejected_and_unknown_events_are_counted() -> None:
    driver = ready()
    odd = DecodedBatch(3.0, [], 0, None, ["no hash", "no tokens"], ["Defragmented"])
    driver.live(msgspec.structs.replace(frame(3), batch=odd))
    stats = driver.stats
    assert (stats.rejected_events, stats.last_rejection, stats.unknown_events) == (2, "no tokens", 1)


def test_room_of_held_batches_is_free_again_once_they_are_applied() -> None:
    held = HeldBatches(batches_max=8, bytes_max=250)
    assert [held.put(frame(seq)) for seq in (1, 2, 3)] == [True, True, False], "100 bytes each"
    assert held.pop(3) is None
    assert held.pop(1) == frame(1)
    assert held.put(frame(3))
    assert not held.put(frame(4))
    assert held.frames() == [frame(2), frame(3)]


def test_a_repeated_live_batch_is_left_out() -> None:
    driver = ready()
    driver.live(frame(2), frame(0), frame(3), frame(3))
    assert driver.applied == [0.0, 1.0, 2.0, 3.0]
    assert (driver.stats.duplicate_batches, driver.stats.restarts) == (3, 0)


def test_a_batch_given_up_for_lost_that_comes_after_all_is_left_out() -> None:
    driver = ready()
    driver.live(frame(4))
    driver.tick(SETTINGS.hold_s_max)
    driver.live(frame(3))
    assert driver.applied == [0.0, 1.0, 2.0, 4.0]
    assert (driver.stats.late_batches, driver.stats.restarts) == (1, 0)


def test_a_slow_reader_that_a_replay_went_past_takes_nothing_for_a_restart() -> None:
    """Live batches 11..99 wait in the socket's queue while the replay that mends a gap brings them all."""
    driver = ready()
    driver.live(frame(10))
    driver.replay(*frames(2, 100))
    assert driver.state == (FeedState.READY, "")
    driver.live(*frames(11, 101))
    assert driver.applied == [float(seq) for seq in range(101)]
    assert (driver.stats.restarts, driver.state) == (0, (FeedState.READY, ""))
    driver.live(frame(0, process=1))
    assert driver.stats.restarts == 1


def test_a_new_process_far_behind_is_a_restart_though_its_seqs_rise() -> None:
    driver = ready(upto=100)
    driver.live(frame(5, process=1))
    assert (driver.stats.restarts, driver.forgets) == (1, 1)


def test_a_seq_that_goes_back_is_a_restart() -> None:
    driver = ready()
    driver.live(frame(2, process=1))
    assert driver.forgets == 1
    assert driver.requests[-1].from_seq == 0
    assert driver.state == (FeedState.REPLAYING, "history")
    driver.replay(*frames(0, 3, process=1))
    assert driver.applied == [1000.0, 1001.0, 1002.0]
    assert driver.state == (FeedState.READY, "")
    assert driver.stats.restarts == 1


def test_engines_that_take_turns_at_one_address_are_not_asked_at_every_batch() -> None:
    driver = ready()
    for process in (1, 2, 1, 2):
        driver.live(frame(1, process))
        driver.replay(*frames(0, 2, process))
        driver.now += RESTART_PAUSE_S / 2
    assert driver.stats.restarts == 4
    assert [one.delay_s for one in driver.requests[-4:]] == [0.0, *[RESTART_PAUSE_S] * 3]
    driver.now += RESTART_PAUSE_S
    driver.live(frame(1, 3))
    assert driver.requests[-1].delay_s == 0.0


def test_a_restart_heard_from_its_first_batch_needs_no_replay() -> None:
    driver = ready()
    asked = len(driver.requests)
    driver.live(frame(0, process=1))
    assert driver.applied == [1000.0]
    assert driver.state == (FeedState.READY, "")
    assert len(driver.requests) == asked


def test_a_restart_behind_a_gap_shows_in_the_replay() -> None:
    driver = ready()
    driver.live(frame(7, process=1))
    driver.replay(*frames(2, 8, process=1))
    assert driver.forgets == 1
    driver.replay(*frames(0, 8, process=1))
    assert driver.applied == [1000.0 + seq for seq in range(8)]


def test_after_a_reconnect_nothing_is_applied_before_the_process_is_known() -> None:
    driver = ready()
    driver.disconnected()
    assert driver.state == (FeedState.DEGRADED, "disconnected")
    driver.connected()
    driver.live(frame(3, process=1))  # fits, by its seq
    assert driver.applied == [0.0, 1.0, 2.0]
    assert driver.state == (FeedState.DEGRADED, "check")
    driver.replay(*frames(2, 4, process=1))
    assert driver.forgets == 1
    driver.replay(*frames(0, 4, process=1))
    assert driver.applied == [1000.0, 1001.0, 1002.0, 1003.0]


def test_a_reconnect_to_the_same_process_fetches_what_was_missed() -> None:
    driver = reconnected()
    driver.replay(*frames(2, 5))
    assert driver.applied == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert driver.state == (FeedState.READY, "")
    assert (driver.stats.restarts, driver.stats.disconnects) == (0, 1)


def test_from_the_loss_of_the_connection_on_nothing_counts_until_the_process_is_confirmed() -> None:
    driver = ready()
    assert not driver.stats.unconfirmed
    driver.tick(1000.0)
    assert not driver.stats.unconfirmed  # silence alone says nothing
    driver.disconnected()
    assert driver.stats.unconfirmed
    assert expected_share(driver.stats) == 0
    driver.connected()
    assert driver.stats.unconfirmed
    driver.live(frame(3))  # fits by its number only
    assert driver.stats.unconfirmed
    driver.replay(frame(2), end=False)
    assert not driver.stats.unconfirmed
    driver.replay(frame(3))
    assert driver.state == (FeedState.READY, "")


def test_a_restart_ends_it_too_and_so_does_a_batch_where_there_is_no_replay() -> None:
    driver = reconnected()
    driver.replay()
    assert (driver.stats.restarts, driver.stats.unconfirmed) == (1, False)
    driver = started(has_replay=False)
    driver.live(frame(0), frame(1))
    driver.disconnected()
    driver.connected()
    assert (driver.state, driver.stats.unconfirmed) == ((FeedState.DEGRADED, "unverified"), True)
    driver.live(frame(2))
    assert not driver.stats.unconfirmed
    assert 0 < expected_share(driver.stats) < 1  # it may be a coincidence


def test_a_check_without_an_answer_confirms_nothing() -> None:
    driver = reconnected()
    for _ in range(REPLAY_ATTEMPTS_MAX):
        driver.fail()
    assert driver.stats.unconfirmed
    driver = reconnected()
    driver.live(frame(7))
    for _ in range(REPLAY_ATTEMPTS_MAX):
        driver.fail()
    assert (driver.stats.restarts, driver.forgets) == (1, 1), "what came live is that of a new process"


def test_a_suspect_process_is_checked_by_replay() -> None:
    driver = ready()
    driver.suspect()
    assert driver.stats.unconfirmed
    assert driver.state == (FeedState.DEGRADED, "check")
    asked = len(driver.requests)
    driver.suspect()
    assert len(driver.requests) == asked  # one question at a time
    driver.replay(frame(2))
    assert not driver.stats.unconfirmed
    assert (driver.state, driver.stats.restarts) == ((FeedState.READY, ""), 0)
    empty = Driver()
    empty.suspect()
    assert not empty.stats.unconfirmed  # there is nothing to count on


@pytest.mark.parametrize("answer", [[], frames(50, 60), frames(0, 3, 1)], ids=["empty", "ahead", "other"])
@pytest.mark.parametrize("asks", ["suspect", "late", "silent"])
def test_a_connection_to_a_process_that_an_answer_shows_to_have_ended_is_made_again(
    asks: str, answer: list[Frame]
) -> None:
    """It is half open: the machine lost power, and nothing tells when the new process started."""
    driver = ready()
    if asks == "suspect":
        driver.suspect()
    elif asks == "late":
        driver.tick(SUBSCRIBED_S)
    else:
        driver.tick(SUBSCRIBED_S)
        driver.replay(*frames(2, 3))
        driver.do(driver.machine.computed(driver.now + 1.0, driver.now + 1.0))
        driver.tick(SETTINGS.stale_after_s + 1.0)
    driver.replay(*answer)
    if driver.stats.restarts == 0:  # after the second look, a check
        driver.replay(*answer)
    assert driver.reconnects == 1
    driver.disconnected()
    driver.connected()
    driver.replay(*frames(0, 3, 1))
    assert (driver.state, driver.reconnects) == ((FeedState.READY, ""), 1)

    # Where one engine publishes at the address and another replays, it is not made again and again.
    driver.suspect()
    driver.replay()
    driver.replay(*frames(0, 3))
    assert (driver.stats.restarts, driver.reconnects) == (2, 1)
    driver.tick(RECONNECT_PAUSE_S)
    driver.suspect()
    driver.replay()
    assert (driver.stats.restarts, driver.reconnects) == (3, 2)


def test_a_connection_that_has_brought_the_new_process_is_kept() -> None:
    driver = ready()
    driver.live(frame(4, process=1))
    driver.replay(*frames(2, 5, 1))
    assert (driver.stats.restarts, driver.reconnects) == (1, 0)


@pytest.mark.parametrize("answer", [[], frames(50, 60)], ids=["behind", "far ahead"])
def test_a_reconnect_to_a_process_that_does_not_have_our_last_batch_is_a_restart(answer: list[Frame]) -> None:
    driver = reconnected()
    driver.replay(*answer)
    assert (driver.forgets, driver.stats.restarts, driver.reconnects) == (1, 1, 0)
    assert driver.requests[-1].from_seq == 0


def test_a_reconnect_that_cannot_be_checked_credits_nothing_old() -> None:
    driver = reconnected()
    for _ in range(REPLAY_ATTEMPTS_MAX):
        driver.fail()
    assert driver.state == (FeedState.DEGRADED, "unverified")
    assert driver.applied == [0.0, 1.0, 2.0]
    driver.live(frame(3))
    driver.tick(SETTINGS.hold_s_max)
    assert driver.applied == [3.0]
    assert driver.state == (FeedState.DEGRADED, "replay_failed")


def test_publisher_ids_decide_about_restarts() -> None:
    driver = started()
    driver.live(frame(0, publisher_id=b"a"), frame(1, publisher_id=b"a"), frame(0, 9, publisher_id=b"a"))
    assert (driver.applied, driver.stats.duplicate_batches) == ([0.0, 1.0], 1)
    driver.live(frame(2, 1, publisher_id=b"b"))
    assert driver.forgets == 1
    driver.replay(*[frame(seq, 1, publisher_id=b"b") for seq in range(3)])
    assert driver.applied == [1000.0, 1001.0, 1002.0]


def test_without_replay_the_first_seq_says_whether_history_is_known() -> None:
    fresh, late = Driver(has_replay=False), Driver(has_replay=False)
    for driver in (fresh, late):
        assert driver.state == (FeedState.COLD, "")
        for _ in range(2):
            driver.connected()
            assert driver.state == (FeedState.DEGRADED, "history_unknown"), "subscribed, and nothing to ask"
            driver.disconnected()
        driver.connected()
        assert driver.state == (FeedState.DEGRADED, "history_unknown"), "nothing that could be unverified"
    fresh.live(frame(0))
    assert fresh.state == (FeedState.READY, "")
    late.live(frame(4))
    assert late.state == (FeedState.DEGRADED, "history_unknown")
    assert (late.applied, late.stats.missing_batches, late.stats.lost_batches) == ([4.0], 4, 0)


def test_without_replay_a_gap_is_lost_immediately_and_a_restart_starts_over() -> None:
    driver = Driver(has_replay=False)
    driver.live(frame(0), frame(2))
    assert driver.applied == [0.0, 2.0]
    assert (driver.state, driver.stats.lost_batches) == ((FeedState.DEGRADED, "gap"), 1)
    driver.live(frame(0, process=1))
    assert (driver.applied, driver.state) == ([1000.0], (FeedState.READY, ""))
    assert driver.requests == []


def test_without_replay_a_reconnect_leaves_doubt_and_with_a_gap_starts_over() -> None:
    driver = started(has_replay=False)
    driver.live(frame(0))
    driver.disconnected()
    driver.connected()
    driver.live(frame(1))
    assert driver.applied == [0.0, 1.0]
    assert driver.state == (FeedState.DEGRADED, "unverified")
    driver.disconnected()
    driver.connected()
    driver.live(frame(5))
    assert driver.applied == [5.0]
    assert driver.stats.restarts == 1


def unusable(seq: int) -> Frame:
    return Frame(seq, None, 1, 10, None, "payload_undecodable")


def test_an_undecodable_batch_spends_its_seq_and_shows() -> None:
    driver = ready()
    driver.live(unusable(3), frame(4))
    assert driver.applied == [0.0, 1.0, 2.0, 4.0]
    assert driver.state == (FeedState.DEGRADED, "payload_undecodable")
    assert (driver.stats.lost_batches, driver.stats.gaps) == (1, 0)


def test_undecodable_noise_with_any_other_seq_changes_nothing() -> None:
    driver = ready()
    driver.live(unusable(0), unusable(2), unusable(99), unusable(2**62))
    assert driver.state == (FeedState.READY, "")
    assert (driver.forgets, driver.stats.lost_batches, driver.stats.held_batches) == (0, 0, 0)


def test_an_undecodable_batch_in_an_answer_does_not_stop_the_repair() -> None:
    driver = ready()
    driver.live(frame(6))
    driver.replay(frame(2), frame(3), unusable(4), frame(5))
    assert driver.applied == [0.0, 1.0, 2.0, 3.0, 5.0, 6.0]


def test_silence_is_stale_only_where_it_means_something() -> None:
    driver = ready()
    driver.tick(1000)
    assert driver.state == (FeedState.READY, "")
    driver.do(driver.machine.computed(driver.now, since=driver.now - 1))
    driver.tick(SETTINGS.stale_after_s / 2)
    assert driver.state == (FeedState.READY, "")  # the events may be on their way
    driver.do(driver.machine.computed(driver.now, since=driver.now - 1))  # more answers put nothing off
    driver.tick(SETTINGS.stale_after_s / 2)
    assert driver.state == (FeedState.STALE, "silent")
    assert driver.requests[-1].from_seq == 2  # is the engine there, and did we miss anything?
    driver.replay(*frames(2, 5))
    assert driver.state == (FeedState.READY, "")
    assert driver.applied == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("upto", [0, 3], ids=["never published", "published"])
def test_a_connection_that_does_not_bring_what_was_published_is_made_again(upto: int) -> None:
    driver = ready(upto=upto)
    driver.tick(SUBSCRIBED_S)
    driver.replay(*frames(max(upto - 1, 0), upto))
    driver.tick(10)
    driver.do(driver.machine.computed(driver.now, since=driver.now - 1))
    driver.tick(SUBSCRIBED_S)
    driver.replay(*frames(max(upto - 1, 0), upto + 2))
    assert driver.applied == [float(seq) for seq in range(upto + 2)]
    assert (driver.state, driver.reconnects) == ((FeedState.READY, ""), 1)
    driver.disconnected()
    driver.connected()
    driver.replay(*frames(upto + 1, upto + 2))
    assert (driver.state, driver.reconnects) == ((FeedState.READY, ""), 1)


def test_a_connection_is_kept_without_proof_that_it_brings_nothing() -> None:
    driver = ready(upto=0)
    driver.do(driver.machine.computed(driver.now + 0.5, since=driver.now + 0.1))  # before it was subscribed
    driver.tick(SUBSCRIBED_S)
    driver.replay(*frames(0, 2))
    for answer in ([], frames(2, 3)):
        driver.tick(10)
        driver.do(driver.machine.computed(driver.now, since=driver.now - 1))
        driver.tick(SUBSCRIBED_S)
        driver.live(*answer)  # late
        driver.replay(*frames(1, 2), *answer)
    assert (driver.state, driver.reconnects, len(driver.applied)) == ((FeedState.READY, ""), 0, 3)


def test_events_that_come_a_little_late_are_not_asked_for() -> None:
    driver = ready()
    driver.tick(SUBSCRIBED_S)
    driver.replay(*frames(2, 3))
    asked = len(driver.requests)
    for seq in (3, 4):
        driver.tick(0.1)
        driver.do(driver.machine.computed(driver.now, since=driver.now - 0.05))
        driver.tick(0.1)
        driver.live(frame(seq))
        driver.tick(SUBSCRIBED_S)
    assert (len(driver.requests), driver.reconnects) == (asked, 0)


@pytest.mark.parametrize("heard", [False, True])
def test_without_replay_a_silent_connection_is_made_again_if_nothing_is_known(heard: bool) -> None:
    driver = started(has_replay=False)
    if heard:
        driver.live(frame(0))
    driver.tick(10)
    driver.do(driver.machine.computed(driver.now, since=driver.now - 1))
    driver.tick(SETTINGS.stale_after_s)
    assert driver.state == (FeedState.STALE, "silent")
    assert driver.reconnects == (0 if heard else 1)


def test_an_engine_whose_events_came_owes_nothing() -> None:
    driver = ready()
    before = driver.now
    driver.tick(1)
    driver.live(frame(3))  # the request's events, heard before its answer was whole
    driver.tick(1)
    driver.do(driver.machine.computed(driver.now, since=before))
    driver.tick(1000)
    assert driver.state == (FeedState.READY, "")
    driver.do(driver.machine.computed(driver.now, since=driver.now - 1))
    driver.live(frame(4))  # a little late
    driver.tick(1000)
    assert driver.state == (FeedState.READY, "")


def test_a_live_batch_ends_stale() -> None:
    driver = ready(settings=msgspec.structs.replace(SETTINGS, heartbeats=True))
    driver.tick(SETTINGS.stale_after_s)
    for _ in range(REPLAY_ATTEMPTS_MAX):
        driver.fail()
    assert driver.state == (FeedState.STALE, "silent")
    driver.live(frame(3))
    assert driver.state[0] is FeedState.DEGRADED  # checking that it is still the same process
    driver.replay(*frames(2, 4))
    assert driver.state == (FeedState.READY, "")
    assert driver.applied == [0.0, 1.0, 2.0, 3.0]


def unnumbered(ts: float) -> Frame:
    return make_frame(0, UNNUMBERED, ts)


@pytest.mark.parametrize("has_replay", [False, True])
def test_batches_without_numbers_are_applied_in_the_order_of_arrival(has_replay: bool) -> None:
    driver = started(has_replay=has_replay)
    driver.live(*map(unnumbered, (0.0, 1.0, 1.0)))
    for _ in driver.requests and range(REPLAY_ATTEMPTS_MAX):
        driver.fail()
    driver.live(unnumbered(2.0))
    assert driver.applied == [0.0, 1.0, 1.0, 2.0]
    assert driver.state == (FeedState.DEGRADED, "unnumbered"), "a loss would not show"
    assert expected_share(driver.stats) == 1.0


def test_after_a_disconnect_a_batch_without_a_number_is_one_of_a_new_process() -> None:
    driver = started(has_replay=False)
    driver.live(*map(unnumbered, (0.0, 1.0)))
    driver.disconnected()
    driver.connected()
    assert expected_share(driver.stats) == 0.0
    driver.live(unnumbered(2.0), unnumbered(3.0))
    assert driver.applied == [2.0, 3.0]
    assert (driver.forgets, driver.stats.restarts) == (1, 1)
    assert driver.state == (FeedState.DEGRADED, "unnumbered")


def test_answers_to_requests_that_are_void_are_ignored() -> None:
    driver = ready()
    void = driver.requests[-1].request_id
    driver.live(frame(5))
    assert driver.machine.replayed(driver.now, void, frame(3)) == []
    assert driver.machine.replay_ended(driver.now, void) == []
    assert driver.machine.replay_failed(driver.now, void) == []
    assert driver.applied == [0.0, 1.0, 2.0]


def test_request_ids_are_never_used_twice() -> None:
    driver = ready()
    for seq in range(5, 50, 5):
        driver.live(frame(seq))
        driver.fail()
        driver.replay(*frames(seq - 5 if seq > 5 else 2, seq + 1))
    ids = [request.request_id for request in driver.requests]
    assert ids == sorted(set(ids))
