"""The load account: queue seconds follow what was sent, time, and evidence."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.router.placement.load import EngineLoad, LoadAccount, LoadSettings, Ticket
from kvatlas.router.placement.others import NO_OTHERS, OthersLoad
from kvatlas.router.placement.rates import FleetRates, PrefillSample, RateSettings
from kvatlas.router.proxy.breaker import Breaker
from tests.support.examples import examples

RATE = 0.001


def account(**knobs: float) -> LoadAccount:
    return LoadAccount(FleetRates(RateSettings(prefill_s_per_token=RATE)).engine(), LoadSettings(**knobs))


def test_queue_is_the_prefill_still_to_do() -> None:
    load = account()
    assert load.queue_ahead_s(0.0) == 0
    load.admit(uncached_tokens=2000, now=0.0)
    load.admit(uncached_tokens=500, now=0.5)
    assert load.queue_ahead_s(0.5) == pytest.approx(1.5 + 0.5)
    assert account().queue_ahead_s(0.5) == 0
    state = load.current(0.5)
    assert (state.waiting, state.running, state.awaited_tokens) == (2, 0, 2500)
    assert state.idle_s == 0
    load.admit(uncached_tokens=0, now=0.5)
    assert load.current(0.5).awaited_tokens == 2501, "the last token is always computed"


def test_time_works_off_the_head_only() -> None:
    load = account()
    load.admit(uncached_tokens=1000, now=0.0)
    load.admit(uncached_tokens=300, now=0.0)
    assert load.queue_ahead_s(0.6) == pytest.approx(0.7)
    assert load.queue_ahead_s(1.5) == pytest.approx(0.3)  # the head is late, so the next has not begun


def test_a_first_token_corrects_the_account() -> None:
    load = account()
    first = load.admit(uncached_tokens=5000, now=0.0)
    load.admit(uncached_tokens=1000, now=0.0)
    sample = load.first_token(first, 2.0)  # 3 s sooner than believed
    assert load.queue_ahead_s(2.0) == pytest.approx(1.0)
    assert load.queue_ahead_s(2.4) == pytest.approx(0.6)
    assert sample is not None
    assert (sample.tokens, sample.service_s, sample.running) == (5000, 2.0, 0)
    assert load.current(2.0).running == 1
    load.finish(first, 9.0)
    assert load.current(9.0).running + load.current(9.0).waiting == 1


def test_work_until_a_first_token_is_its_own_and_that_of_prompts_ahead() -> None:
    load, found = account(), []
    tickets = [load.admit(uncached_tokens=tokens, now=0.0) for tokens in (1000, 500)]
    for ticket, now in zip(tickets, (1.0, 1.5), strict=True):
        load.first_token(ticket, now)
        found.append(load.timed(ticket))
    assert [one and (one.tokens, one.ahead_tokens) for one in found] == [(1000, 0), (500, 1000)]


def test_samples_leave_out_the_queue() -> None:
    load = account()
    first = load.admit(uncached_tokens=1000, now=0.0)
    second = load.admit(uncached_tokens=2000, now=0.1)
    load.first_token(first, 1.0)
    sample = load.first_token(second, 3.0)
    assert sample is not None
    assert sample.service_s == pytest.approx(2.0)
    assert sample.running == 1


def test_loads_count_in_the_queue_until_the_first_token() -> None:
    load = account()
    loading = load.admit(uncached_tokens=100, now=0.0, load_s=0.4)
    load.admit(uncached_tokens=1000, now=0.1, load_s=0.2)
    assert load.queue_ahead_s(0.2) == pytest.approx(0.1 + 0.4 - 0.2 + 1.0 + 0.2)
    assert load.queue_ahead_s(1.0) == pytest.approx(1.0 + 0.2), "the head is late, not negative"
    load.first_token(loading, 1.0)
    assert load.queue_ahead_s(1.3) == pytest.approx(1.0 + 0.2 - 0.3)
    others = load.own(1.3)
    assert others is not None
    assert others.tokens == 900, "loads are reported to other replicas as tokens"


def test_a_first_token_after_a_load_says_nothing_of_the_prefill() -> None:
    load = account()
    ticket = load.admit(uncached_tokens=1000, now=0.0, load_s=5.0)
    assert load.current(4.0).waiting == 1, "not overdue while it loads"
    assert load.first_token(ticket, 5.1) is None
    after = load.admit(uncached_tokens=1000, now=5.1)
    assert load.first_token(after, 5.3) is not None
    assert load.check_integrity() == []


def test_a_prompt_that_overtakes_is_part_of_the_heads_sample() -> None:
    load = account()
    head = load.admit(uncached_tokens=1000, now=0.0)
    quick = load.admit(uncached_tokens=200, now=0.0)
    assert load.first_token(quick, 0.5) is None
    sample = load.first_token(head, 1.2)
    assert sample is not None
    assert (sample.tokens, sample.service_s) == (1200, 1.2)


def late_s(load: LoadAccount, now: float) -> float:
    """Mean lateness as a decision sees it."""
    return load.ahead(now, None, 0.0)[4]


def test_first_tokens_later_than_expected_are_noticed_and_forgotten() -> None:
    load = account()
    assert late_s(load, 0.0) == 0
    for at in range(60):
        load.first_token(load.admit(uncached_tokens=1000, now=float(at), expected_s=1.0), at + 5.0)
    assert late_s(load, 64.0) == pytest.approx(4.0, rel=0.01)
    soon = load.admit(uncached_tokens=1000, now=70.0, expected_s=9.0)
    load.first_token(soon, 70.5)  # sooner than expected takes nothing off others
    assert late_s(load, 70.5) == pytest.approx(3.6, rel=0.01)
    load.first_token(load.admit(uncached_tokens=1000, now=71.0), 99.0)  # nothing was expected of this one
    assert late_s(load, 100.5) == pytest.approx(3.6, rel=0.01)
    assert late_s(load, 100.6) == 0


def test_answers_that_do_not_stream_drain_by_time_and_teach_nothing() -> None:
    load = account()
    whole = load.admit(uncached_tokens=1000, now=0.0, streams=False)
    streamed = load.admit(uncached_tokens=1000, now=0.0)
    assert load.queue_ahead_s(1.5) == pytest.approx(0.5)
    assert load.first_token(whole, 1.6) is None
    assert load.first_token(streamed, 2.1) is None  # it began at a guessed time
    assert load.current(2.1).running == 2
    load.finish(whole, 2.2)
    assert load.current(2.2).running == 1


def test_an_overdue_head_does_not_block_the_account_for_ever() -> None:
    load = account(overdue_factor=2.0, overdue_s=1.0)
    late = load.admit(uncached_tokens=1000, now=0.0)
    load.admit(uncached_tokens=1000, now=0.0)
    assert load.queue_ahead_s(2.9) == pytest.approx(1.0)
    assert load.queue_ahead_s(3.5) == pytest.approx(0.5)
    assert load.stats.overdue == 1
    assert load.first_token(late, 3.6) is None
    assert load.queue_ahead_s(3.6) == pytest.approx(1.0)  # only now can the next have begun


def test_a_failed_request_leaves_immediately() -> None:
    load = account()
    dead = load.admit(uncached_tokens=9000, now=0.0)
    load.fail(dead, 0.1)
    load.fail(dead, 0.1)
    load.finish(dead, 0.2)
    assert load.current(0.2).queue_s == 0
    assert load.current(0.2).running == 0
    assert (load.stats.failed, load.stats.finished) == (1, 0)


def test_the_next_begins_when_the_head_fails() -> None:
    load = account()
    head = load.admit(uncached_tokens=1000, now=0.0)
    after = load.admit(uncached_tokens=1000, now=0.0)
    load.fail(head, 0.5)
    assert load.queue_ahead_s(0.7) == pytest.approx(0.8)
    assert load.first_token(after, 1.5) is None  # the failed one may have taken some of that time


def test_gauges_show_the_load_of_others_while_fresh() -> None:
    load = account(gauge_fresh_s=10.0, foreign_tokens=700)
    own = load.admit(uncached_tokens=700, now=0.0)
    load.report(running=5, waiting=3, now=0.0)  # ours is one of the eight
    state = load.current(0.0)
    assert (state.foreign, state.waiting, state.running) == (7, 3, 5)
    assert state.queue_s == pytest.approx((1 + 2) * 0.7)
    assert load.first_token(own, 0.5) is None  # others were prefilled in between: no sample
    assert load.current(10.1).foreign == 0


def test_a_prompt_of_others_counts_as_one_of_those_sent_there() -> None:
    load = account(foreign_tokens=1000)
    for at in range(100):
        load.finish(load.admit(uncached_tokens=50, now=float(at)), at + 0.5)
    load.report(running=0, waiting=1, now=100.0)
    assert load.queue_ahead_s(100.0) == pytest.approx(50 * RATE, rel=0.01)


def decide(load: LoadAccount, now: float, others: OthersLoad | None) -> tuple[int, int, float]:
    """Running, waiting and the queue as a decision finds them."""
    queue_s, running, waiting, *_ = load.ahead(now, others, load.rates.prefill_s_per_token(now))
    return running, waiting, round(queue_s, 9)


def test_gauges_beyond_the_replicas_state_are_other_clients() -> None:
    load = account(gauge_fresh_s=10.0, foreign_tokens=700)
    others = OthersLoad(running=3, waiting=2, tokens=500)
    load.report(running=3, waiting=2, now=0.0)
    assert decide(load, 0.0, others) == (3, 2, 0.5)
    assert decide(load, 9.0, NO_OTHERS) == (0, 0, 0.0)  # theirs have ended since
    load.report(running=4, waiting=4, now=9.0)
    assert decide(load, 9.0, others) == (4, 4, 0.5 + 2 * 0.7)
    assert decide(load, 9.0, NO_OTHERS) == (1, 2, 2 * 0.7)


def waiting_for_pages(streams: bool = True) -> tuple[LoadAccount, list[Ticket]]:
    """12 answers of ours run, 3 prompts of 1 s each wait."""
    load = account()
    for _ in range(12):
        load.first_token(load.admit(uncached_tokens=1, now=0.0), 0.0)
    return load, [load.admit(uncached_tokens=1000, now=0.0, streams=streams) for _ in range(3)]


@pytest.mark.parametrize("streams", [True, False])
def test_prompts_that_the_engine_says_wait_neither_begin_nor_end(streams: bool) -> None:
    load, tickets = waiting_for_pages(streams)
    for tenth in range(400):
        now = 0.1 + tenth / 10
        if tenth % 20 == 0:  # gauges are 2 s old at most
            load.report(running=12, waiting=3, now=now)
        assert load.current(now).queue_s >= 2.0, now
        assert load.current(now).waiting == 3
        assert not load.check_integrity()
    load.report(running=13, waiting=2, now=40.0)  # one has begun
    assert 1.5 <= load.current(40.5).queue_s <= 3.0  # two have not begun before 40.0
    load.report(running=15, waiting=0, now=41.0)
    load.first_token(tickets[0], 41.0)
    load.first_token(tickets[1], 41.0)
    load.first_token(tickets[2], 41.0)
    for ticket in tickets:
        load.finish(ticket, 42.0)
    assert load.current(42.0).queue_s == 0
    assert not load.check_integrity()


def test_prompts_assumed_begun_wait_again_where_the_gauges_say_so() -> None:
    load, tickets = waiting_for_pages()
    assert load.current(30.0).waiting == 0  # overdue, all three, as far as the account can tell
    load.report(running=12, waiting=3, now=30.0)
    assert (load.current(30.0).waiting, load.current(30.0).queue_s) == (3, pytest.approx(3.0))
    load.report(running=13, waiting=2, now=31.0)
    assert load.first_token(tickets[0], 32.0) is None  # when it began is a guess: no sample
    assert load.current(32.0).waiting == 2
    assert not load.check_integrity()


def test_loads_of_prompts_that_wait_again_count_again() -> None:
    load = account()
    for _ in range(3):
        load.admit(uncached_tokens=1000, now=0.0, load_s=0.5)
    assert load.current(60.0).queue_s == 0
    load.report(running=0, waiting=3, now=60.0)
    assert load.current(60.0).queue_s == pytest.approx(3 * 1.5)
    assert not load.check_integrity()


def test_old_gauges_let_no_request_wait() -> None:
    load, _ = waiting_for_pages()
    load.report(running=12, waiting=3, now=0.0)
    assert load.current(9.9).queue_s == pytest.approx(3.0)
    assert load.current(30.0).queue_s == 0


def test_prompts_of_other_routers_that_wait_are_not_taken_for_ours() -> None:
    load = account()
    load.admit(uncached_tokens=4000, now=0.0)
    theirs = OthersLoad(running=2, waiting=3, tokens=3000)
    load.current(0.5, theirs)
    load.report(running=3, waiting=3, now=1.0)  # theirs wait, ours is being computed
    assert load.current(2.0, theirs).queue_s == pytest.approx(2.0 + 3.0)


def test_recent_work_fades() -> None:
    load = account(recent_s=30.0)
    load.finish(load.admit(uncached_tokens=4000, now=0.0), 4.0)
    assert load.current(0.0).recent_s == pytest.approx(4.0)
    assert load.current(30.0).recent_s == pytest.approx(4.0 / math.e)
    load.report(running=0, waiting=0, now=60.0)
    assert load.current(60.0).recent_s == pytest.approx(4.0 / math.e**2)
    refused = load.admit(uncached_tokens=1000, now=60.0)
    assert load.current(60.0).recent_s == pytest.approx(1.0 + 4.0 / math.e**2)
    load.fail(refused, 63.0)
    assert load.recent_s(63.0) == pytest.approx(4.0 / math.e**2.1)


def test_without_the_others_state_the_whole_excess_is_foreign() -> None:
    load = account(gauge_fresh_s=10.0, foreign_tokens=700)
    others = OthersLoad(running=3, waiting=2, tokens=500)
    load.report(running=3, waiting=4, now=0.0)
    for now in (1.0, 2.0):  # as often as it becomes known and unknown again
        assert decide(load, now, None) == (3, 4, 4 * 0.7)
        assert decide(load, now, others) == (3, 4, 0.5 + 2 * 0.7)
    assert decide(load, 3.0, NO_OTHERS) == (
        0,
        2,
        2 * 0.7,
    )  # settled when first known


def test_old_state_of_others_settles_nothing() -> None:
    load = account()
    load.report(running=3, waiting=0, now=0.0)
    assert load.current(0.0, OthersLoad(running=1)) == EngineLoad(0.0, 3, 0, 0, 3, math.inf)
    assert decide(load, 0.1, OthersLoad(running=3)) == (3, 0, 0.0)


def test_a_prompt_behind_those_of_others_is_no_sample() -> None:
    load = account()
    behind = load.admit(uncached_tokens=1000, now=0.0, waiting=1)
    after = load.admit(uncached_tokens=1000, now=0.1, waiting=1, running=2)  # ours alone waits
    third = load.admit(uncached_tokens=1000, now=0.2, waiting=3)  # one of them is not ours
    assert load.first_token(behind, 2.0) is None
    assert load.first_token(after, 3.0) == PrefillSample(1000, 1.0, 1 + 2)
    assert load.first_token(third, 5.0) is None


def test_gauges_that_show_less_than_the_account_change_nothing() -> None:
    load = account()
    load.admit(uncached_tokens=1000, now=0.0)
    load.report(running=0, waiting=0, now=0.0)  # polled before the engine saw it
    assert load.queue_ahead_s(0.0) == pytest.approx(1.0)
    assert load.current(0.0).foreign == 0


def test_old_tickets_do_not_touch_an_engine_that_came_back() -> None:
    before = account()
    waiting, running = (before.admit(uncached_tokens=1000, now=0.0) for _ in range(2))
    load = account()  # it left, and came back as another object
    fresh = load.admit(uncached_tokens=2000, now=1.0)
    before.first_token(waiting, 1.0)
    before.finish(waiting, 1.0)
    before.fail(running, 1.0)
    assert load.queue_ahead_s(1.0) == pytest.approx(2.0)
    load.finish(fresh, 1.0)
    assert load.current(1.0).running == 0
    assert load.check_integrity() == before.check_integrity() == []


def test_awaited_prompts_are_bounded() -> None:
    load = account(awaited_max=2)
    for _ in range(5):
        load.admit(uncached_tokens=100, now=0.0)
    assert load.current(0.0).waiting == 2
    assert load.stats.overflow == 3


def test_an_engine_never_used_is_idle_for_ever() -> None:
    assert account().current(5.0).idle_s == math.inf


steps = st.lists(
    st.tuples(
        st.sampled_from(("admit", "quiet", "first_token", "finish", "fail", "report", "forget")),
        st.sampled_from("AB"),
        st.integers(0, 5000),
        st.floats(0, 3),
    ),
    max_size=60,
)


@settings(max_examples=examples(150))
@given(steps=steps)
def test_whatever_happens_the_books_add_up(steps: list[tuple[str, str, int, float]]) -> None:
    loads, now = {name: account() for name in "AB"}, 0.0
    tickets: list[tuple[LoadAccount, Ticket]] = []
    for what, engine, number, wait_s in steps:
        now += wait_s
        load = loads[engine]
        if what in ("admit", "quiet"):
            load_s = number % 7 / 7
            ticket = load.admit(uncached_tokens=number, now=now, streams=what == "admit", load_s=load_s)
            tickets.append((load, ticket))
        elif what == "report":
            load.report(running=number % 5, waiting=number % 3, now=now)
        elif what == "forget":
            loads[engine] = account()
        elif tickets:
            of, ticket = tickets[number % len(tickets)]
            getattr(of, what)(ticket, now)
        for one in loads.values():
            state = one.current(now)
            assert state.queue_s >= 0
            assert state.running >= 0
            most_s = (state.awaited_tokens + state.foreign * 5000) * RATE + state.waiting  # loads: 1 s each
            assert state.queue_s <= most_s + 1e-9
            assert one.check_integrity() == []
    for of, ticket in tickets:
        of.finish(ticket, now)
    for one in loads.values():
        state = one.current(now)
        assert state.running + state.waiting == state.foreign
        assert state.awaited_tokens == 0


def test_a_place_that_is_held_counts_as_running_and_teaches_nothing() -> None:
    account = LoadAccount(FleetRates().engine())
    held = account.reserve(1.0)
    now = account.current(2.0)
    assert (now.running, now.waiting, now.awaited_tokens, now.queue_s) == (1, 0, 0, 0.0)
    assert account.first_token(held, 9.0) is None
    account.finish(held, 10.0)
    assert account.current(10.0).running == 0
    assert account.check_integrity() == []


def test_an_unseen_answer_should_be_over_after_queue_and_the_mean_of_answers() -> None:
    load = account(answer_s=4.0)
    seen = load.admit(uncached_tokens=1000, now=0.0)
    load.first_token(seen, 1.0)
    load.finish(seen, 15.0)  # 14 s, a tenth of which counts
    load.admit(uncached_tokens=2000, now=20.0)
    unseen = load.admit(uncached_tokens=500, now=20.0)
    assert load.unseen(unseen, 20.0, lambda: None) == pytest.approx(2.5 + 5.0)
    load.finish(unseen, 27.5)
    assert load.unseen(unseen, 28.0, lambda: None) == 0.0
    assert load.check_integrity() == []


def test_gauges_end_the_oldest_unseen_answers_that_may_have_ended() -> None:
    load, ended = account(), list[str]()
    watched = load.admit(uncached_tokens=10, now=0.0)
    load.first_token(watched, 0.1)
    tickets = [load.admit(uncached_tokens=10, now=number / 10) for number in (2, 3, 40)]
    for name, ticket in zip("abc", tickets, strict=True):
        load.unseen(ticket, 4.0, lambda name=name: ended.append(name))  # type: ignore[misc]
    load.report(running=4, waiting=0, now=4.5)
    assert ended == []
    load.report(running=3, waiting=0, now=4.6)
    assert ended == ["a"]
    load.report(running=0, waiting=0, now=4.7)  # the last one may not have arrived yet
    assert ended == ["a", "b"]
    assert (load.current(4.7).running, load.current(4.7).foreign) == (2, 0)
    load.report(running=1, waiting=0, now=5.1)
    assert ended == ["a", "b", "c"]
    for ticket in (*tickets, watched):
        load.finish(ticket, 6.0)  # who sent them says so, too
    assert (load.stats.finished, load.stats.ended_by_gauges) == (4, 3)
    assert load.current(6.0).running == 0
    assert load.check_integrity() == []


def test_an_unseen_stream_is_never_overdue() -> None:
    load = account()
    first = load.admit(uncached_tokens=1000, now=0.0)
    load.unseen(first, 0.0, lambda: None)
    load.admit(uncached_tokens=1000, now=0.0)
    assert load.queue_ahead_s(1.5) == pytest.approx(0.5)  # by time, as nothing will be heard
    assert load.stats.overdue == 0


@pytest.mark.parametrize("unseen", [True, False])
def test_an_unseen_request_is_no_evidence_that_its_engine_is_silent(unseen: bool) -> None:
    breaker = Breaker()
    for now in (1.0, 20.0):
        breaker.begin(now, streams=True)
        if unseen:
            breaker.unseen(now)
    assert breaker.allows(21.0) is unseen


@pytest.mark.parametrize("sequences", [1, 3, 256])
def test_a_request_counts_as_the_requests_that_the_engine_makes_of_it(sequences: int) -> None:
    """Its engine's gauges show each: none of them is another client's, and no slot is counted as free."""
    load = LoadAccount(FleetRates(RateSettings(prefill_s_per_token=RATE)).engine())
    ticket = load.admit(uncached_tokens=1000, now=0.0, streams=False, sequences=sequences)
    assert (load.current(0.0).waiting, load.current(0.0).running) == (sequences, 0)
    load.report(running=0, waiting=sequences, now=0.1)
    found = load.current(0.1)
    assert (found.waiting, found.foreign) == (sequences, 0)
    load.report(running=sequences, waiting=0, now=0.2)
    assert load.current(0.2).foreign == 0
    found = load.current(1000 * RATE + 0.3)
    assert (found.waiting, found.running) == (0, sequences)
    # By the gauges some of them wait again: so does the request.
    load.report(running=sequences - 1, waiting=1, now=1000 * RATE + 0.4)
    assert load.check_integrity() == []
    own = load.own(1000 * RATE + 0.4)
    assert own is not None
    assert own.running + own.waiting == sequences
    load.finish(ticket, 1000 * RATE + 0.5)
    assert (load.current(2000 * RATE).waiting, load.current(2000 * RATE).running) == (0, 0)
    assert load.check_integrity() == []


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("admit"), st.integers(1, 5), st.integers(0, 900)),
            st.tuples(st.just("first"), st.integers(0, 9), st.just(0)),
            st.tuples(st.just("gauges"), st.integers(0, 3), st.integers(0, 9)),
        ),
        max_size=25,
    ),
    st.integers(0, 6),
)
def test_the_work_passed_by_priority_is_the_sum_recentlyr_prompts(
    steps: list[tuple[str, int, int]], rank: int
) -> None:
    account, tickets, now = LoadAccount(FleetRates().engine()), [], 0.0
    for name, number, tokens in steps:
        now += 0.001
        if name == "admit":
            tickets.append(
                account.admit(uncached_tokens=tokens, now=now, rank_s=float(number), load_s=tokens / 1000)
            )
        elif name == "first" and tickets:
            account.first_token(tickets.pop(number % len(tickets)), now)
        elif name == "gauges":
            account.report(running=number, waiting=tokens, now=now)
        passed = []
        order = list(account._awaited)[0 if account._stuck else 1 :]
        for ticket in reversed(order):
            if ticket.rank_s <= rank:
                break
            passed.append(ticket)
        work_s, pages = account.behind(float(rank), 0.5)
        assert work_s == pytest.approx(sum(one.uncached_tokens * 0.5 + one.load_s for one in passed))
        assert pages == sum(one.pages for one in passed)
