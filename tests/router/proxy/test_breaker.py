"""The breaker by itself: pure, on a made-up clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.proxy.breaker import Breaker, BreakerSettings

S = BreakerSettings()


def _opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(S)
    for _ in range(S.failures_max):
        breaker.record(False, now)
    assert not breaker.allows(now)
    return breaker


def _succeeds(breaker: Breaker, now: float) -> None:
    breaker.taken(now)
    breaker.record(True, now)


def test_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(S)
    for _ in range(10):
        for _ in range(S.failures_max - 1):
            breaker.record(False, 0.0)
            assert breaker.allows(0.0)
        for _ in range(3):
            breaker.record(True, 0.0)


def test_half_opens_after_half_a_second_for_one_probe() -> None:
    breaker = _opened()
    assert not breaker.allows(0.49)
    assert breaker.allows(0.5)
    breaker.begin(0.5)
    assert not breaker.allows(0.6)
    assert breaker.allows(0.5 + S.probe_s)


def test_requests_sent_before_it_opened_are_lost_and_probes_only_after_their_time() -> None:
    breaker = _opened(now=1.0)
    assert breaker.lost(0.9, 1.0, expected_s=9.0)
    probe_s = S.silent_s_max + 2 * 2.0
    assert not breaker.lost(1.5, 1.4 + probe_s, expected_s=2.0)
    breaker.begin(1.5)
    breaker.record(False, 1.6)  # another probe fails
    assert not breaker.lost(1.5, 1.4 + probe_s, expected_s=2.0)
    assert breaker.lost(1.5, 1.5 + probe_s, expected_s=2.0)
    breaker.record(True, 30.0)
    assert not breaker.lost(0.9, 30.0, expected_s=0.0)


def test_requests_at_a_silent_engine_are_lost_and_probes_only_after_their_time() -> None:
    breaker = Breaker(S)
    breaker.begin(0.0, streams=True)
    silent_at = S.silent_s_max
    assert not breaker.lost(0.0, silent_at - 0.1, expected_s=0.0)
    assert breaker.lost(0.0, silent_at, expected_s=0.0)
    assert breaker.lost(silent_at - 1, silent_at, expected_s=9.0)
    breaker.unseen(0.0)
    assert not breaker.lost(0.0, silent_at, expected_s=0.0)
    breaker.begin(0.0, streams=True)
    probe_at = silent_at + 1
    assert not breaker.lost(probe_at, probe_at + S.silent_s_max - 0.1, expected_s=0.0)
    assert breaker.lost(probe_at, probe_at + S.silent_s_max, expected_s=0.0)
    breaker.answered_at(probe_at + 1)
    assert not breaker.lost(probe_at, probe_at + 100, expected_s=0.0)
    assert breaker.left_unanswered(probe_at + 2, probe_at + 9, expected_s=0.0, streams=True)
    assert breaker.lost(probe_at + 3, probe_at + 10, expected_s=0.0)
    assert not breaker.lost(probe_at + 10, probe_at + 11, expected_s=0.0)


def test_first_success_closes_and_forgets() -> None:
    breaker = _opened()
    breaker.begin(0.5)
    breaker.record(True, 0.55)
    assert breaker.allows(0.55)
    assert breaker.closed
    breaker.record(False, 0.6)
    assert breaker.allows(0.6)


def test_failed_probes_back_off_to_the_limit() -> None:
    breaker = _opened()
    now = 0.0
    waits = []
    for _ in range(8):
        start = now
        while not breaker.allows(now):
            now += 0.01
        waits.append(round(now - start, 1))
        breaker.begin(now)
        breaker.record(False, now)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0]


def test_requests_that_fail_together_open_once() -> None:
    breaker = _opened()
    for _ in range(100):
        breaker.record(False, 0.1)
    assert breaker.allows(0.5)


def test_error_statuses_open_by_share_only() -> None:
    breaker = Breaker(S)
    for _ in range(S.window_min - 1):
        breaker.record(False, 0.0, connection=False)
    assert breaker.allows(0.0)
    breaker.record(False, 0.0, connection=False)
    assert not breaker.allows(0.0)


def test_old_failures_leave_the_window() -> None:
    breaker = Breaker(S)
    for _ in range(S.window_min - 1):
        breaker.record(False, 0.0, connection=False)
    breaker.record(False, 2 * S.window_s, connection=False)
    assert breaker.allows(2 * S.window_s)


def test_a_retry_after_needs_refusals_of_different_requests() -> None:
    breaker = Breaker(S)
    for _ in range(50):
        breaker.refused(1, 30.0, 0.0)
    assert breaker.allows(0.0)
    assert breaker.waits_s(0.0) == 0.0
    breaker.refused(2, 30.0, 0.0)
    assert not breaker.allows(0.0)
    assert breaker.waits_s(0.0) == 30.0


def test_a_retry_after_is_independent_of_health_and_the_later_of_two_counts() -> None:
    breaker = _pausing(5.0)
    breaker.refused(3, 3.0, 0.0)
    breaker.record(True, 0.5)  # an answer, but of an error
    assert not breaker.allows(0.9)
    assert breaker.allows(5.0)


def test_a_retry_after_ends_with_the_first_success() -> None:
    breaker = _pausing(30.0)
    _succeeds(breaker, 0.1)
    assert breaker.allows(0.1)


def test_requests_that_succeed_say_more_than_those_that_are_refused() -> None:
    """One client's requests are refused, all others' are served."""
    breaker, now = Breaker(S), 0.0
    for number in range(100):
        _succeeds(breaker, now)
        breaker.refused(2 * number, 60.0, now)
        breaker.refused(2 * number + 1, 60.0, now)
        assert breaker.allows(now)
        now += S.pause_success_s / 2


def test_a_retry_after_lets_a_probe_through_now_and_then() -> None:
    breaker, now, probes = _pausing(60.0), 0.0, []
    while now < 55.0:
        if breaker.allows(now):
            breaker.begin(now)
            probes.append(now)
            assert not breaker.allows(now)
            breaker.refused(len(probes), 60.0, now)
        now += 0.25
    assert probes == [1.0, 2.0, 4.0, 8.0, 16.0, 26.0, 36.0, 46.0]


def test_refusals_of_one_client_keep_other_clients_in() -> None:
    breaker, now, attacker = Breaker(S), 0.0, 7
    for number in range(1000):
        breaker.refused(number, 30.0, now, attacker)
        assert breaker.allows(now, 8)
        if breaker.allows(now, attacker):
            breaker.begin(now, client=attacker)
        now += 0.05
    assert not breaker.allows(now - 0.01, attacker)
    breaker.refused(-1, 30.0, now, 8)  # a second client: it is the engine
    assert not breaker.allows(now, 9)
    _succeeds(breaker, now)
    assert breaker.allows(now, attacker)


def test_clients_that_were_not_refused_have_the_probes_first() -> None:
    breaker, now, served = Breaker(S), 0.0, []
    for step in range(20 * 60):
        now = step * 0.05
        for attacker in (1, 2):
            if breaker.allows(now, attacker):
                breaker.begin(now, client=attacker)
                breaker.refused(2 * step + attacker, 30.0, now, attacker)
        if step % 10 == 0:
            allowed = breaker.allows(now, 3)
            served.append(allowed)
            if allowed:
                breaker.begin(now, client=3)
                _succeeds(breaker, now)
    assert sum(served) > 0.7 * len(served)


def test_the_clients_that_are_remembered_are_bounded() -> None:
    breaker = Breaker(S)
    for number in range(10 * S.pause_clients_max):
        breaker.refused(number, 30.0, 0.0, number)
    assert len(breaker._pause._clients) == S.pause_clients_max
    for probes, allowed in ((0.0, False), (1.5, False), (2.0, True)):
        assert breaker.allows(S.pause_probe_s * probes, -1) is allowed, "as one of those that were refused"


def test_a_client_that_gives_up_on_a_stream_shows_a_silent_engine() -> None:
    breaker = Breaker(S)
    breaker.begin(0.0, streams=True)
    assert breaker.left_unanswered(0.0, 2.0, expected_s=0.1, streams=True)
    assert not breaker.allows(2.0)
    assert not breaker.allows(2.0 + S.silent_probe_s - 0.1)
    now = 2.0 + S.silent_probe_s
    assert breaker.allows(now)
    breaker.begin(now, streams=True)
    assert not breaker.allows(now + 1.0)
    breaker.answered_at(now + 1.0)
    assert breaker.allows(now + 1.0)


def test_whole_answers_take_their_time_so_one_that_is_given_up_says_little() -> None:
    breaker = Breaker(S)
    assert breaker.left_unanswered(0.0, 2.0, expected_s=0.0, streams=False)
    assert breaker.allows(2.0)
    assert breaker.left_unanswered(2.0, 4.0, expected_s=0.0, streams=False)
    assert not breaker.allows(4.0)


def test_clients_that_leave_early_or_while_others_are_answered_are_no_evidence() -> None:
    breaker = Breaker(S)
    for _ in range(10):
        assert not breaker.left_unanswered(0.0, S.give_up_s / 2, expected_s=0.0, streams=True)
        assert not breaker.left_unanswered(0.0, 9.0, expected_s=5.0, streams=True)
    breaker.answered_at(9.5)
    assert not breaker.left_unanswered(0.0, 30.0, expected_s=0.0, streams=True)
    assert breaker.allows(30.0)


def test_a_stream_that_waits_too_long_shows_a_silent_engine_too() -> None:
    breaker = Breaker(S)
    breaker.begin(0.0, streams=False)
    assert breaker.allows(100.0)  # a long generation
    breaker.begin(100.0, streams=True)
    assert breaker.allows(100.0 + S.silent_s_max - 1)
    assert not_probed(breaker, 100.0 + S.silent_s_max)
    breaker.answered_at(150.0)
    assert breaker.allows(150.0)


def test_silence_is_measured_against_the_expected_time() -> None:
    """A long prompt is no silence; of several requests, the one that is due first tells."""
    breaker = Breaker(S)
    breaker.begin(0.0, streams=True, expected_s=60.0)
    assert breaker.allows(S.silent_s_max + 119)
    assert breaker.free_until == S.silent_s_max + 120
    breaker.begin(10.0, streams=True, expected_s=1.0)
    assert breaker.allows(10.0 + S.silent_s_max + 1.9)
    assert not_probed(breaker, 10.0 + S.silent_s_max + 2)
    breaker.answered_at(100.0)
    assert breaker.free_until == float("inf")


def not_probed(breaker: Breaker, now: float) -> bool:
    """Silent: one request may go there, and no second one."""
    first = breaker.allows(now)
    breaker.begin(now)
    return first and not breaker.allows(now)


def _pausing(seconds: float) -> Breaker:
    breaker = Breaker(S)
    breaker.refused(1, seconds, 0.0)
    breaker.refused(2, seconds, 0.0)
    return breaker


step = st.tuples(st.floats(0, 3), st.sampled_from(["ok", "fail", "status", "begin"]))


@given(st.lists(step, max_size=200))
def test_never_shut_for_long_and_success_always_opens(steps: list[tuple[float, str]]) -> None:
    breaker = Breaker(S)
    now = 0.0
    for wait, what in steps:
        now += wait
        if what == "begin":
            breaker.begin(now)
        else:
            breaker.record(what == "ok", now, connection=what == "fail")
        if what == "ok":
            assert breaker.allows(now)
        assert breaker.allows(now + max(S.open_s_max, S.probe_s))
        before = breaker.allows(now)
        assert breaker.allows(now) is before  # asking changes nothing


@given(st.lists(st.booleans(), max_size=300))
def test_closed_means_few_failures(outcomes: list[bool]) -> None:
    """While it has never opened, no run of failures reached the limit."""
    breaker = Breaker(S)
    run = 0
    for ok in outcomes:
        breaker.record(ok, 0.0)
        run = 0 if ok else run + 1
        if not breaker.closed:
            return
        assert run < S.failures_max


def test_says_for_how_long_the_engine_asked_to_be_left_alone() -> None:
    breaker = _pausing(7.0)
    assert breaker.waits_s(0.0) == 7.0
    breaker.begin(0.0)
    breaker.begin(1.0)
    assert breaker.waits_s(2.5) == 4.5
    assert breaker.waits_s(10.0) == 0.0
    broken = _opened()
    assert not broken.allows(0.0)
    assert broken.waits_s(0.0) == 0.0  # broken, but it did not ask


_told = st.tuples(
    st.floats(0, 20), st.sampled_from(["ok", "fail", "begin", "stream", "heard", "gave up", "refused"])
)


@given(st.lists(_told, max_size=60))
def test_free_until_then_means_allowed_until_then(steps: list[tuple[float, str]]) -> None:
    breaker, now = Breaker(S), 0.0
    for number, (wait_s, what) in enumerate(steps):
        now += wait_s
        match what:
            case "ok":
                _succeeds(breaker, now)
            case "fail":
                breaker.record(False, now)
            case "begin" | "stream":
                breaker.begin(now, streams=what == "stream", expected_s=number % 7)
            case "heard":
                breaker.answered_at(now)
            case "gave up":
                breaker.left_unanswered(now - 5, now, expected_s=0.1, streams=True)
            case _:
                breaker.refused(number, 3.0, now)
        for later in (now, now + 1, now + S.silent_s_max - 0.001, now + 27.0, now + 100):
            assert breaker.allows(later) or later >= breaker.free_until
