from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvatlas.connectors.store.base import Deadline, Namespace
from kvatlas.connectors.tier.base import StoreTierSettings
from kvatlas.connectors.tier.store import LookupQuery, StoreTier
from tests.connectors.store.store_kit import MemoryStore
from tests.support.examples import examples
from tests.support.waiting import HANG_S

ONE_RANK = Namespace({"model": "m"}, ((0, 0, 0),), "engine-1")
TWO_RANKS = Namespace({"model": "m"}, ((0, 0, 0), (1, 0, 0)), "engine-1")
SETTINGS = StoreTierSettings(lookup_deadline_s=10.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def key(number: int) -> bytes:
    return number.to_bytes(32, "big") + bytes(4)


class Rig:
    """A tier over a store that a test looks into; time passes when the test says so."""

    def __init__(self, namespace: Namespace = ONE_RANK, settings: StoreTierSettings = SETTINGS) -> None:
        self.store, self.clock, self.namespace = MemoryStore(), Clock(), namespace
        self.tier = StoreTier(self.store, namespace, settings, clock=self.clock)

    def write(self, *keys: bytes, ranks: tuple[int, ...] | None = None, epoch: int = 0) -> None:
        """Another engine of the same namespace stored these."""
        for rank in ranks or range(len(self.namespace.ranks)):
            for at in keys:
                self.store.values[self.namespace.digest(rank, epoch) + at] = b"value"

    def ask(self, *keys: bytes, request: str = "r") -> frozenset[bytes]:
        """Until there is an answer, as the scheduler does in later steps."""
        while (held := self.tier.held(request, keys)) is None:
            self.tier._open[request].query.done.wait(HANG_S)
        return held

    def store_done(self, *keys: bytes) -> None:
        for at, _ in self.tier.begin_store(keys):
            self.write(at, epoch=self.tier._epoch)
            self.tier.end_store(at, ok=True)


@pytest.fixture
def rigs() -> Iterator[Any]:
    made: list[Rig] = []

    def make(*args: Any, **others: Any) -> Rig:
        made.append(Rig(*args, **others))
        return made[-1]

    yield make
    for rig in made:
        if rig.store.gate is not None:
            rig.store.gate.set()
        rig.tier.close()


def test_the_first_answer_is_not_known_yet_and_the_next_is_right(rigs: Any) -> None:
    rig = rigs()
    rig.store.gate = threading.Event()
    rig.write(key(1), key(3))
    keys = [key(i) for i in range(5)]
    assert rig.tier.held("r", keys) is None
    assert rig.tier.held("r", keys) is None
    rig.store.gate.set()
    assert rig.ask(*keys) == {key(1), key(3)}
    assert rig.store.calls == [("exists", 5)]


def test_answers_are_cached_for_a_while_and_no_longer(rigs: Any) -> None:
    rig = rigs()
    rig.write(key(1))
    assert rig.ask(key(1), key(2)) == {key(1)}
    rig.store.values.clear()
    rig.write(key(2))
    assert rig.tier.held("other", [key(1), key(2)]) == {key(1)}
    rig.clock.now += SETTINGS.absent_for_s
    assert rig.ask(key(1), key(2)) == {key(1), key(2)}
    assert rig.store.calls == [("exists", 2), ("exists", 1)]
    rig.clock.now += SETTINGS.held_for_s
    assert rig.ask(key(1), key(2)) == {key(2)}


def test_a_key_is_held_only_if_every_rank_has_it(rigs: Any) -> None:
    rig = rigs(TWO_RANKS)
    rig.write(key(1))
    rig.write(key(2), ranks=(0,))
    rig.write(key(3), ranks=(1,))
    assert rig.ask(key(1), key(2), key(3)) == {key(1)}
    assert rig.store.calls == [("exists", 6)]


def test_after_the_deadline_what_was_not_answered_is_absent(rigs: Any) -> None:
    rig = rigs()
    rig.store.gate = threading.Event()
    rig.write(key(1))
    assert rig.tier.held("r", [key(1)]) is None
    rig.clock.now += SETTINGS.lookup_deadline_s
    assert rig.tier.held("r", [key(1)]) == frozenset()
    assert rig.tier.counters["questions_late"] == 1
    # The result stays for this request; the late answer serves later lookups.
    assert rig.tier.held("r", [key(1)]) == frozenset()
    late = rig.tier._late[0].query
    rig.store.gate.set()
    assert late.done.wait(HANG_S)
    assert rig.tier.held("next", [key(1)]) == {key(1)}


def test_a_late_answer_counts_as_far_as_it_goes(rigs: Any) -> None:
    rig = rigs()
    keys = [key(i) for i in range(3000)]
    rig.write(*keys)
    question = None
    asked = rig.store.exists

    def slow(some: Any, deadline_s: float) -> list[bool]:
        if len(rig.store.calls) == 2:
            rig.store.gate = threading.Event()
        return asked(some, deadline_s)

    rig.store.exists = slow
    assert rig.tier.held("r", keys) is None
    question = rig.tier._open["r"].query
    for _ in range(3):
        assert rig.store.entered.acquire(timeout=HANG_S)
    assert len(question.answers()) == 2048
    rig.clock.now += SETTINGS.lookup_deadline_s
    assert rig.tier.held("r", keys) == set(keys[:2048])


def test_a_store_may_take_longer_to_connect_than_a_question_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a store that is far away would never be connected to, as every attempt is cut short."""
    given: list[float] = []

    def exists(keys: list[bytes], deadline_s: float) -> list[bool]:
        given.append(deadline_s)
        return [True] * len(keys)

    store = MemoryStore()
    monkeypatch.setattr(store, "exists", exists)
    monkeypatch.setattr(Deadline, "passed", lambda _: False)
    LookupQuery([key(1)], (b"",), 0.02).run(store)
    assert given == [1.0]


def test_a_store_that_is_away_is_not_asked_for_every_request(rigs: Any) -> None:
    rig = rigs()
    rig.store.gone = True
    assert rig.ask(key(1)) == frozenset()
    for i in range(100):
        assert rig.tier.held(f"r{i}", [key(i + 2)]) == frozenset()
        assert rig.tier.begin_store([key(i + 2)]) == []
    assert len(rig.store.calls) == 1
    assert rig.tier.counters["stores_left_out_store_away"] == 100
    rig.store.gone = False
    rig.clock.now += SETTINGS.away_for_s
    assert rig.ask(key(200)) == frozenset()
    assert len(rig.store.calls) == 2
    assert len(rig.tier.begin_store([key(200)])) == 1
    rig.write(key(1))
    rig.clock.now += SETTINGS.absent_for_s
    assert rig.ask(key(1)) == {key(1)}
    assert len(rig.tier.begin_store([key(7)])) == 1


def test_too_many_questions_are_answered_by_absent(rigs: Any) -> None:
    rig = rigs(settings=dataclasses.replace(SETTINGS, questions_max=2))
    rig.store.gate = threading.Event()
    rig.write(*[key(i) for i in range(9)])
    assert rig.tier.held("r0", [key(0)]) is None
    assert rig.store.entered.acquire(timeout=HANG_S)
    assert [rig.tier.held(f"r{i}", [key(i)]) for i in range(1, 5)] == [None, None, frozenset(), frozenset()]
    assert rig.tier.counters["questions_left_out"] == 2


def test_a_request_that_is_gone_leaves_nothing_behind(rigs: Any) -> None:
    rig = rigs()
    rig.store.gate = threading.Event()
    assert rig.tier.held("r", [key(1)]) is None
    rig.tier.forget_request("r")
    rig.tier.forget_request("never seen")
    assert not rig.tier._open
    assert not rig.tier.busy()


def test_only_what_is_not_there_is_stored_and_only_once(rigs: Any) -> None:
    rig = rigs()
    rig.write(key(1))
    rig.ask(key(1), key(2))
    begun = rig.tier.begin_store([key(1), key(2), key(3)])
    assert [at for at, _ in begun] == [key(2), key(3)]
    assert {ONE_RANK.read_ticket(ticket) for _, ticket in begun} == {0}
    assert rig.tier.begin_store([key(2), key(3)]) == []
    assert rig.tier.busy()
    rig.tier.end_store(key(2), ok=True)
    rig.tier.end_store(key(3), ok=False)
    assert not rig.tier.busy()
    assert rig.tier.take_changes().changes == ((True, key(2)),)
    assert rig.tier.take_changes().changes == ()
    assert [at for at, _ in rig.tier.begin_store([key(2), key(3)])] == [key(3)]


def test_found_blocks_are_not_copied_again_for_every_request(rigs: Any) -> None:
    rig = rigs()
    rig.write(key(1))
    rig.ask(key(1))
    rig.store_done(key(2))
    rig.clock.now += SETTINGS.held_for_s
    assert rig.tier.begin_store([key(1), key(2)]) == []
    rig.store.values.clear()
    assert rig.ask(key(1)) == frozenset()
    assert [at for at, _ in rig.tier.begin_store([key(1), key(2)])] == [key(1)]
    rig.clock.now += SETTINGS.stored_for_s
    assert [at for at, _ in rig.tier.begin_store([key(1), key(2)])] == [key(2)]


def test_stores_under_way_are_bounded(rigs: Any) -> None:
    rig = rigs(settings=dataclasses.replace(SETTINGS, stores_max=3))
    assert len(rig.tier.begin_store([key(i) for i in range(5)])) == 3
    assert rig.tier.counters["stores_left_out_too_many"] == 2
    rig.tier.end_store(key(0), ok=True)
    assert len(rig.tier.begin_store([key(3), key(4)])) == 1
    rig.tier.end_store(key(1), ok=False)
    assert rig.tier.counters["failed_stores"] == 1
    assert len(rig.tier.begin_store([key(1)])) == 1


def test_answers_kept_are_bounded(rigs: Any) -> None:
    rig = rigs(settings=dataclasses.replace(SETTINGS, answers_max=100))
    for start in range(0, 1000, 50):
        rig.ask(*[key(i) for i in range(start, start + 50)])
    assert list(rig.tier._answers) == [key(i) for i in range(900, 1000)]
    rig.store_done(key(900))
    rig.ask(key(1000))
    assert list(rig.tier._answers) == [*(key(i) for i in range(902, 1000)), key(900), key(1000)]


def test_a_key_whose_load_failed_is_not_held_until_stored_again(rigs: Any) -> None:
    rig = rigs()
    rig.write(key(1), key(2))
    rig.ask(key(1), key(2))
    tickets = rig.tier.begin_load([key(1), key(2)])
    assert tickets == [ONE_RANK.ticket(0)] * 2
    assert rig.tier.begin_store([key(1)]) == []
    rig.tier.end_load(key(1), ok=False)
    rig.tier.end_load(key(2), ok=True)
    assert rig.tier.counters["failed_loads"] == 1
    assert rig.ask(key(1), key(2)) == {key(2)}
    assert rig.tier.begin_load([key(1), key(2)]) is None
    assert not rig.tier.busy()
    rig.store_done(key(1))
    assert rig.ask(key(1), key(2)) == {key(1), key(2)}


def test_quarantine_ends_without_a_new_store(rigs: Any) -> None:
    rig = rigs()
    rig.write(key(1))
    rig.ask(key(1))
    rig.tier.begin_load([key(1)])
    rig.tier.end_load(key(1), ok=False)
    rig.clock.now += SETTINGS.quarantine_s - 0.1
    assert rig.ask(key(1)) == frozenset()
    rig.clock.now += 0.1
    assert rig.ask(key(1)) == {key(1)}


def test_keys_in_quarantine_are_bounded(rigs: Any) -> None:
    rig = rigs(settings=dataclasses.replace(SETTINGS, answers_max=3))
    keys = [key(i) for i in range(4)]
    rig.write(*keys)
    for one in (keys[0], *keys):
        assert rig.ask(one) == {one}
        rig.tier.begin_load([one])
    for at in (0, 1, 2, 0, 3):
        rig.tier.end_load(keys[at], ok=False)
    assert list(rig.tier._quarantine) == [keys[2], keys[0], keys[3]], "those that failed last"


def test_blocks_not_known_to_be_held_cannot_be_loaded(rigs: Any) -> None:
    rig = rigs()
    rig.write(key(1))
    rig.ask(key(1), key(2))
    assert rig.tier.begin_load([key(1), key(2)]) is None
    assert rig.tier.begin_load([key(9)]) is None
    assert not rig.tier.busy()


def test_events_tell_of_this_engines_stores_only(rigs: Any) -> None:
    rig = rigs()
    rig.write(key(1))
    rig.ask(key(1))
    rig.store_done(key(2), key(3))
    assert rig.tier.take_changes().changes == ((True, key(2)), (True, key(3)))
    rig.clock.now += SETTINGS.held_for_s
    rig.store.values.clear()
    assert rig.ask(key(1), key(2)) == frozenset()
    assert rig.tier.take_changes().changes == ((False, key(2)),)
    rig.tier.begin_load([key(3)])
    rig.tier.end_load(key(3), ok=False)
    assert rig.tier.take_changes().changes == ((False, key(3)),)


def test_an_answer_from_before_a_store_does_not_undo_it(rigs: Any) -> None:
    rig = rigs()
    assert rig.tier.held("r", [key(1)]) is None
    assert rig.tier._open["r"].query.done.wait(HANG_S)
    rig.clock.now += 0.1
    rig.store_done(key(1))
    assert rig.tier.held("r", [key(1)]) == {key(1)}
    assert rig.tier.take_changes().changes == ((True, key(1)),)


def test_after_a_reset_nothing_from_before_is_ever_held(rigs: Any) -> None:
    rig = rigs()
    rig.write(key(1))
    rig.ask(key(1))
    rig.store_done(key(2))
    [(under_way, _)] = rig.tier.begin_store([key(3)])
    assert rig.tier.held("open", [key(4)]) is None
    rig.tier.take_changes()
    assert rig.tier.reset()
    assert rig.tier.take_changes().changes == ((False, key(2)),)
    rig.tier.end_store(under_way, ok=True)
    assert rig.tier.take_changes().changes == ()
    assert rig.ask(key(1), key(2), key(3)) == frozenset()
    [(again, ticket)] = rig.tier.begin_store([key(2)])
    assert ONE_RANK.read_ticket(ticket) == 1
    rig.write(again, epoch=1)
    rig.tier.end_store(again, ok=True)
    assert rig.ask(key(2)) == {key(2)}


def test_a_late_answer_from_before_a_reset_is_none_after_it(rigs: Any) -> None:
    rig = rigs()
    rig.store.gate = threading.Event()
    rig.write(key(1))
    assert rig.tier.held("r", [key(1)]) is None
    query = rig.tier._open["r"].query
    rig.clock.now += SETTINGS.lookup_deadline_s
    assert rig.tier.held("r", [key(1)]) == frozenset()
    assert rig.tier.reset()
    rig.store.gate.set()
    assert query.done.wait(HANG_S)
    assert rig.ask(key(1)) == frozenset()


def test_ending_what_was_not_begun_is_an_error(rigs: Any) -> None:
    rig = rigs()
    with pytest.raises(RuntimeError, match="not begun"):
        rig.tier.end_store(key(1), ok=True)
    with pytest.raises(RuntimeError, match="not begun"):
        rig.tier.end_load(key(1), ok=True)


KEYS = st.integers(0, 5).map(key)


class TierMachine(RuleBasedStateMachine):
    """Events replayed are what this engine may say; nothing bad is held; begun and ended stay balanced."""

    @initialize()
    def begin(self) -> None:
        self.rig = Rig()
        self.said: set[bytes] = set()
        self.bad: dict[bytes, float] = {}
        self.storing: set[bytes] = set()
        self.loading: list[bytes] = []

    @rule(at=KEYS)
    def another_engine_stores(self, at: bytes) -> None:
        self.rig.write(at)

    @rule(at=KEYS)
    def the_store_evicts(self, at: bytes) -> None:
        self.rig.store.values.pop(ONE_RANK.digest(0, self.rig.tier._epoch) + at, None)

    @rule(keys=st.lists(KEYS, max_size=6))
    def ask(self, keys: list[bytes]) -> None:
        held = self.rig.ask(*keys)
        assert held <= set(keys)
        assert not any(self.bad.get(at, 0) > self.rig.clock.now for at in held)

    @rule(keys=st.lists(KEYS, max_size=4))
    def begin_store(self, keys: list[bytes]) -> None:
        begun = {at for at, _ in self.rig.tier.begin_store(keys)}
        assert not begun & (self.storing | set(self.loading))
        self.storing |= begun

    @rule(ok=st.booleans())
    def end_store(self, ok: bool) -> None:
        if self.storing:
            at = self.storing.pop()
            if ok:
                self.rig.write(at)
                self.bad.pop(at, None)
            self.rig.tier.end_store(at, ok=ok)

    @rule(keys=st.lists(KEYS, min_size=1, max_size=3, unique=True))
    def begin_load(self, keys: list[bytes]) -> None:
        if self.rig.tier.begin_load(keys) is not None:
            assert not any(self.bad.get(at, 0) > self.rig.clock.now for at in keys)
            self.loading += keys

    @rule(ok=st.booleans())
    def end_load(self, ok: bool) -> None:
        if self.loading:
            at = self.loading.pop()
            self.rig.tier.end_load(at, ok=ok)
            if not ok:
                self.bad[at] = self.rig.clock.now + SETTINGS.quarantine_s

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.clock.now += seconds

    @invariant()
    def events_alternate_and_busy_is_true(self) -> None:
        if not hasattr(self, "rig"):
            return
        for stored, at in self.rig.tier.take_changes().changes:
            assert stored is (at not in self.said)
            self.said ^= {at}
        assert self.rig.tier.busy() is bool(self.storing or self.loading)

    def teardown(self) -> None:
        self.rig.tier.close()


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = hypothesis_settings(max_examples=examples(40), stateful_step_count=30)
