"""The circuit before the shared index: opens after failures in a row, tries again one question at a time."""

from __future__ import annotations

from router.replication.circuit import Circuit


def opened() -> Circuit:
    circuit = Circuit(failures_max=3, open_s=0.5, open_s_max=5.0)
    for _ in range(3):
        assert circuit.allows(0.0)
        circuit.failed(0.0)
    return circuit


def test_single_failures_change_nothing() -> None:
    circuit = Circuit(failures_max=3)
    for now in range(10):
        circuit.failed(now)
        circuit.failed(now)
        assert circuit.allows(now)
        circuit.succeeded()
    assert circuit.opened == 0


def test_while_open_nobody_asks_and_then_one_tries() -> None:
    circuit = opened()
    assert circuit.is_open
    assert not circuit.allows(0.49)
    assert circuit.allows(0.5)
    assert not circuit.allows(0.5)
    circuit.succeeded()
    assert not circuit.is_open
    assert circuit.allows(0.5)


def test_each_vain_try_keeps_it_open_twice_as_long_up_to_the_most() -> None:
    circuit, now = opened(), 0.0
    for pause in (0.5, 1.0, 2.0, 4.0, 5.0, 5.0):
        assert not circuit.allows(now + pause - 0.01)
        now += pause
        assert circuit.allows(now)
        circuit.failed(now)


def test_questions_that_were_under_way_do_not_keep_it_open_longer() -> None:
    circuit = opened()
    for _ in range(100):
        circuit.failed(0.1)
    assert circuit.opened == 1
    assert circuit.allows(0.5)
