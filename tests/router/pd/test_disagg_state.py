"""A request on two engines, whatever fails: parameters never twice, never late, and an end."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvatlas.router.pd.handoff import DisaggState, Handoff, HandoffRefusedError
from kvatlas.router.pd.settings import PdSettings, PdStats
from tests.support.examples import examples

SETTINGS = PdSettings(lease_s=30.0, lease_margin_s=10.0, prefills_max=3)


def handoff(held_since_s: float, *, answered_s: float | None = None) -> Handoff:
    return Handoff.from_answer(
        b"{}",
        source="p",
        version="0.32.0",
        held_since_s=held_since_s,
        answered_s=held_since_s if answered_s is None else answered_s,
        settings=SETTINGS,
    )


def test_parameters_are_sent_once() -> None:
    held = handoff(0.0)
    held.take(1.0)
    with pytest.raises(HandoffRefusedError):
        held.take(1.1)


@pytest.mark.parametrize(("now", "alive"), [(19.9, True), (20.0, False), (31.0, False)])
def test_parameters_are_not_sent_when_less_than_the_margin_is_left(now: float, alive: bool) -> None:
    assert handoff(0.0).alive(now) is alive


def test_the_lease_runs_from_when_the_answer_may_have_come() -> None:
    """The loop stood still for 19 s before it read the answer: only a second is left."""
    held = handoff(0.0, answered_s=19.0)
    assert held.alive(19.5)
    assert not held.alive(20.5)


def asked(prefills: int) -> DisaggState:
    """Return the state after this number of prefill requests."""
    disagg = DisaggState(SETTINGS)
    for _ in range(prefills):
        disagg.prefill_sent()
    return disagg


def test_a_request_has_a_bounded_number_of_prefills() -> None:
    assert [asked(prefills).may_split for prefills in range(5)] == [True, True, True, False, False]


def test_reasons_are_counted_apart() -> None:
    stats = PdStats()
    for reason in ("down", "status", "down"):
        stats.count(stats.prefill_failures, reason)
    assert stats.prefill_failures == {"down": 2, "status": 1}


def test_a_decode_engine_that_was_not_told_leaves_the_parameters_to_another() -> None:
    disagg = asked(1)
    disagg.handed_over(handoff(0.0))
    assert not disagg.is_sent
    assert disagg.handoff(1.0) is not None


def test_another_prefill_forgets_what_the_one_before_handed_over() -> None:
    disagg = asked(1)
    disagg.handed_over(handoff(0.0))
    disagg.prefill_sent()
    assert disagg.handoff(0.0) is None


def test_after_an_answer_without_blocks_nothing_is_split() -> None:
    disagg = asked(1)
    disagg.nothing_to_fetch()
    assert not disagg.may_split
    assert disagg.handoff(0.0) is None


@pytest.mark.parametrize(("status", "splits"), [(500, False), (503, True), (0, True)])
def test_after_a_decode_engine_failed_its_parameters_are_gone(status: int, splits: bool) -> None:
    """500 is how vLLM says that it could not fetch: no fetch for this request follows."""
    disagg = asked(1)
    held = handoff(0.0)
    disagg.handed_over(held)
    held.take(1.0)
    assert disagg.is_sent
    disagg.decode_failed(status)
    assert disagg.handoff(1.0) is None
    assert disagg.may_split is splits


class AnyCourse(RuleBasedStateMachine):
    """The proxy's loop over one disagg, with whatever may happen at each step, and time that passes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.disagg = DisaggState(SETTINGS)
        self.began_s: float | None = None
        self.given: list[Handoff] = []
        self.sent: list[Handoff] = []
        self.slack_s: list[float] = []
        self.over = False

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: not self.over and self.disagg.may_split and not self.disagg.handoff(self.now))
    @precondition(lambda self: self.began_s is None)
    @rule()
    def prefill(self) -> None:
        self.disagg.prefill_sent()
        self.began_s = self.now

    @precondition(lambda self: self.began_s is not None)
    @rule(outcome=st.sampled_from(["held", "failed", "nothing"]), took_s=st.floats(0, 40))
    def prefill_ends(self, outcome: str, took_s: float) -> None:
        assert self.began_s is not None
        self.now += took_s
        if outcome == "held":
            self.given.append(handoff(self.began_s, answered_s=self.now))
            self.disagg.handed_over(self.given[-1])
        elif outcome == "failed":
            self.disagg.prefill_failed(f"p{self.disagg.prefills}")
        else:
            self.disagg.nothing_to_fetch()
        self.began_s = None

    @precondition(lambda self: not self.over and self.disagg.handoff(self.now) is not None)
    @rule(outcome=st.sampled_from(["answer", "unreached", 0, 500, 503]), connecting_s=st.floats(0, 40))
    def decode(self, outcome: str | int, connecting_s: float) -> None:
        held = self.disagg.handoff(self.now)
        assert held is not None
        self.now += connecting_s
        if outcome == "unreached":
            return
        try:
            held.take(self.now)
        except HandoffRefusedError:
            return
        self.sent.append(held)
        self.slack_s.append(held.until_s - self.now)
        if outcome == "answer":
            self.over = True
        else:
            self.disagg.decode_failed(int(outcome))

    @invariant()
    def never_twice(self) -> None:
        assert len({id(held) for held in self.sent}) == len(self.sent)

    @invariant()
    def never_late(self) -> None:
        assert all(slack_s > 0 for slack_s in self.slack_s)

    @invariant()
    def only_the_newest(self) -> None:
        held = self.disagg.handoff(self.now)
        assert held is None or (held is self.given[-1] and held.alive(self.now))

    @invariant()
    def it_ends(self) -> None:
        assert self.disagg.prefills <= SETTINGS.prefills_max


AnyCourse.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=20)
TestAnyCourse = AnyCourse.TestCase
