"""A request on two engines, whatever fails: parameters never twice, never late, and an end."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.pd.handoff import DisaggState, Handoff, HandoffRefusedError
from router.pd.settings import PdSettings
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


def asked(*transfer_ids: str) -> DisaggState:
    """After so many prefills were asked for, with these names."""
    disagg = DisaggState(SETTINGS)
    for transfer_id in transfer_ids:
        disagg.prefill_sent(transfer_id)
    return disagg


def test_a_decode_engine_that_was_not_told_leaves_the_parameters_to_another() -> None:
    disagg = asked("a")
    assert disagg.handed_over("a", handoff(0.0))
    assert not disagg.is_sent
    assert disagg.handoff(1.0) is not None


def test_what_was_handed_over_early_is_not_handed_over_again_by_the_answer() -> None:
    disagg = asked("a")
    early = handoff(0.0)
    assert disagg.handed_over("a", early)
    early.take(0.0)
    disagg.decode_failed(503)
    assert not disagg.handed_over("a", handoff(5.0))
    assert disagg.handoff(5.0) is None


def test_nobody_is_told_of_what_was_handed_over_early_once_the_prefill_has_failed() -> None:
    disagg = asked("a")
    early = handoff(0.0)
    disagg.handed_over("a", early)
    disagg.prefill_failed("a", "p")
    assert disagg.handoff(0.0) is None
    with pytest.raises(HandoffRefusedError):
        early.take(0.0)


def test_what_is_found_out_after_the_prefill_has_failed_is_told_to_nobody() -> None:
    disagg = asked("a")
    disagg.nothing_to_fetch("a")
    assert not disagg.handed_over("a", handoff(0.0))
    assert disagg.handoff(0.0) is None


def test_a_prefill_that_ends_after_another_was_asked_for_changes_nothing_of_that() -> None:
    disagg = asked("a", "b")
    held = handoff(0.0)
    assert disagg.handed_over("b", held)
    assert not disagg.handed_over("a", handoff(1.0))
    disagg.prefill_failed("a", "p")
    assert disagg.handoff(1.0) is held
    assert disagg.failed == {"p"}


@pytest.mark.parametrize(("status", "splits"), [(500, False), (503, True), (0, True)])
def test_after_a_decode_engine_failed_its_parameters_are_gone(status: int, splits: bool) -> None:
    """500 is how vLLM says that it could not fetch: nobody fetches for this request any more."""
    disagg = asked("a")
    held = handoff(0.0)
    disagg.handed_over("a", held)
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
        self.running: dict[str, float] = {}
        self.names: dict[int, str] = {}
        self.ended_badly: set[str] = set()
        self.given: list[Handoff] = []
        self.sent: list[Handoff] = []
        self.slack_s: list[float] = []
        self.over = False

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: not self.over and self.disagg.may_split and not self.disagg.handoff(self.now))
    @rule(early=st.booleans())
    def prefill(self, early: bool) -> None:
        """``early``: what a decode engine may be told is known at once."""
        transfer_id = f"t{self.disagg.prefills}"
        self.disagg.prefill_sent(transfer_id)
        self.running[transfer_id] = self.now
        if early:
            self.hand_over(transfer_id, handoff(self.now))

    @precondition(lambda self: self.running)
    @rule(
        which=st.integers(0, 9),
        outcome=st.sampled_from(["held", "failed", "nothing"]),
        took_s=st.floats(0, 40),
    )
    def prefill_ends(self, which: int, outcome: str, took_s: float) -> None:
        """Perhaps long after another one was asked for."""
        transfer_id = sorted(self.running)[which % len(self.running)]
        self.now += took_s
        began = self.running.pop(transfer_id)
        if outcome == "held":
            self.hand_over(transfer_id, handoff(began, answered_s=self.now))
        elif outcome == "failed":
            self.disagg.prefill_failed(transfer_id, f"p{transfer_id}")
            self.ended_badly.add(transfer_id)
        else:
            self.disagg.nothing_to_fetch(transfer_id)
            self.ended_badly.add(transfer_id)

    def hand_over(self, transfer_id: str, held: Handoff) -> None:
        if self.disagg.handed_over(transfer_id, held):
            self.names[id(held)] = transfer_id
            self.given.append(held)

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
        assert self.names[id(held)] not in self.ended_badly
        self.sent.append(held)
        self.slack_s.append(held.until_s - self.now)
        if outcome == "answer":
            self.over = True
        else:
            self.disagg.decode_failed(int(outcome))

    @invariant()
    def never_twice(self) -> None:
        assert len({self.names[id(held)] for held in self.sent}) == len(self.sent)

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


AnyCourse.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=20, deadline=None)
TestAnyCourse = AnyCourse.TestCase
