"""A request on two engines, whatever fails: parameters never twice, never late, and an end."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.pd.course import Course
from router.pd.handoff import Handoff, HandoffRefusedError
from router.pd.settings import PdSettings

SETTINGS = PdSettings(lease_s=30.0, lease_margin_s=10.0, prefills_max=3)


def handoff(held_since_s: float, *, answered_s: float | None = None) -> Handoff:
    return Handoff.of(
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


def test_a_decode_engine_that_was_not_told_leaves_the_parameters_to_another() -> None:
    course = Course(SETTINGS)
    course.asked()
    course.handed_over(handoff(0.0))
    assert not course.told
    assert course.handoff(1.0) is not None


@pytest.mark.parametrize(("status", "splits"), [(500, False), (503, True), (0, True)])
def test_after_a_decode_engine_failed_its_parameters_are_gone(status: int, splits: bool) -> None:
    """500 is how vLLM says that it could not fetch: nobody fetches for this request any more."""
    course = Course(SETTINGS)
    course.asked()
    held = handoff(0.0)
    course.handed_over(held)
    held.take(1.0)
    assert course.told
    course.decode_failed(status)
    assert course.handoff(1.0) is None
    assert course.splits is splits


class AnyCourse(RuleBasedStateMachine):
    """The proxy's loop over one course, with whatever may happen at each step, and time that passes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.course = Course(SETTINGS)
        self.asked = 0
        self.given: list[Handoff] = []
        self.sent: list[tuple[Handoff, float]] = []
        self.over = False

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: not self.over and self.course.splits and not self.course.handoff(self.now))
    @rule(outcome=st.sampled_from(["held", "failed", "nothing"]), took_s=st.floats(0, 40))
    def prefill(self, outcome: str, took_s: float) -> None:
        self.course.asked()
        self.asked += 1
        began = self.now
        self.now += took_s
        if outcome == "held":
            self.given.append(handoff(began, answered_s=self.now))
            self.course.handed_over(self.given[-1])
        elif outcome == "failed":
            self.course.prefill_failed(f"p{self.asked}")
        else:
            self.course.nothing_held()

    @precondition(lambda self: not self.over and self.course.handoff(self.now) is not None)
    @rule(outcome=st.sampled_from(["answer", "unreached", 0, 500, 503]), connecting_s=st.floats(0, 40))
    def decode(self, outcome: str | int, connecting_s: float) -> None:
        held = self.course.handoff(self.now)
        assert held is not None
        self.now += connecting_s
        if outcome == "unreached":
            return
        try:
            held.take(self.now)
        except HandoffRefusedError:
            return
        self.sent.append((held, self.now))
        if outcome == "answer":
            self.over = True
        else:
            self.course.decode_failed(int(outcome))

    @invariant()
    def never_twice(self) -> None:
        assert len({id(held) for held, _ in self.sent}) == len(self.sent)

    @invariant()
    def never_late(self) -> None:
        assert all(at - (held.until_s - 20.0) < 20.0 for held, at in self.sent)

    @invariant()
    def only_the_newest(self) -> None:
        held = self.course.handoff(self.now)
        assert held is None or held is self.given[-1]

    @invariant()
    def it_ends(self) -> None:
        assert self.asked <= SETTINGS.prefills_max


AnyCourse.TestCase.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)
TestAnyCourse = AnyCourse.TestCase
