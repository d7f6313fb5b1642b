from __future__ import annotations

from collections.abc import Callable

import pytest

from connectors.store.base import StoreUnavailable
from connectors.store.open import Circuit, GuardedStore
from tests.connectors.store.store_kit import MemoryStore


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except StoreUnavailable:
        return True
    return False


def test_an_absent_store_is_asked_now_and_then_only(clock: Clock) -> None:
    store = MemoryStore()
    store.gone = True
    guarded = GuardedStore(store, Circuit("memory", clock=clock))
    for _ in range(1000):
        assert refused(lambda: guarded.exists([b"k"], 1.0))
        clock.now += 0.01
    # Ten seconds: three failures, then pauses of 0.1 s to 10 s that double.
    assert 5 <= len(store.calls) <= 15
    assert guarded.counters()["left_alone"] == 1000 - len(store.calls)
    store.gone = False
    clock.now += 20
    assert guarded.exists([b"k"], 1.0) == [False]
    store.gone = True
    # Whole again: it takes three new failures to leave it alone.
    before = len(store.calls)
    assert all(refused(lambda: guarded.exists([b"k"], 1.0)) for _ in range(9))
    assert len(store.calls) == before + 3


def test_one_caller_at_a_time_tries_a_store_that_was_away(clock: Clock) -> None:
    circuit = Circuit("memory", clock=clock)
    for _ in range(3):
        circuit.failed(StoreUnavailable("gone"))
    assert refused(circuit.enter)
    clock.now += 10
    circuit.enter()
    assert refused(circuit.enter)
    circuit.succeeded()
    circuit.enter()
    circuit.enter()


def test_failures_between_successes_do_not_add_up(clock: Clock) -> None:
    circuit = Circuit("memory", clock=clock)
    for _ in range(20):
        circuit.enter()
        circuit.failed(StoreUnavailable("gone"))
        circuit.enter()
        circuit.succeeded()


def test_pauses_stay_bounded_however_long_the_store_is_away(clock: Clock) -> None:
    circuit = Circuit("memory", clock=clock, longest_pause_s=5.0)
    for _ in range(5000):
        circuit.failed(StoreUnavailable("gone"))
    clock.now += 5.0
    circuit.enter()


def test_whatever_a_store_raises_is_that_it_cannot_be_asked() -> None:
    class Broken(MemoryStore):
        def exists(self, keys: object, deadline_s: float) -> list[bool]:
            raise KeyError("a bug")

    with pytest.raises(StoreUnavailable, match="KeyError"):
        GuardedStore(Broken()).exists([b"k"], 1.0)
