"""The parent of workers on a machine that a script plays: whom it starts, when, and what it passes on."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvatlas.router.workers import supervisor
from kvatlas.router.workers.context import WorkerSockets
from kvatlas.router.workers.supervisor import Supervisor

Step = Callable[[], None] | float
WOKEN = 3
"""The descriptor of signals: the parent's second pipe."""


class Exited(BaseException):
    """The end of the process in which the worker would run."""


class Signals:
    """In place of the module ``signal``: what a process does with its signals."""

    def __init__(self) -> None:
        self.handlers, self.blocked, self.wakes = dict[int, Any](), set[int](), -1

    def __getattr__(self, name: str) -> Any:
        return getattr(signal, name)

    def signal(self, number: int, handler: Any) -> Any:
        was, self.handlers[number] = self.handlers.get(number, signal.SIG_DFL), handler
        return was

    def set_wakeup_fd(self, descriptor: int, *, warn_on_full_buffer: bool = True) -> int:
        assert descriptor == -1 or not warn_on_full_buffer, "a burst of signals is no fault"
        was, self.wakes = self.wakes, descriptor
        return was

    def pthread_sigmask(self, how: int, numbers: tuple[int, ...]) -> None:
        self.blocked = self.blocked | {*numbers} if how == signal.SIG_BLOCK else self.blocked - {*numbers}

    @property
    def untouched(self) -> bool:
        return {*self.handlers.values()} <= {signal.SIG_DFL} and self.wakes == -1


class Machine:
    """In place of the modules ``os``, ``signal``, ``selectors`` and ``time``. Processes are numbered from 1
    in the order of their start; numbers in a script are seconds that pass."""

    WNOHANG, EVENT_READ = 1, 1

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, stop_s_max: float = 30.0) -> None:
        self.now, self.script = 100.0, list[Step]()
        self.open: set[int] = set()
        self.descriptors = 0
        self.readable: dict[int, bytes] = {}
        self.watched: dict[int, Any] = {}
        self.pipe_of: dict[int, int] = {}
        self.status: dict[int, int] = {}
        self.started_s, self.died_s = list[float](), list[float]()
        self.sent: list[tuple[int, int]] = []
        self.said: list[str] = []
        self.signals = Signals()
        self.child = 0
        """Number of the process that the script follows; 0: the parent."""
        for name in ("os", "selectors", "time"):
            monkeypatch.setattr(supervisor, name, self)
        monkeypatch.setattr(supervisor, "signal", self.signals)
        sockets = SimpleNamespace(
            count=2,
            close=self.says("closed"),
            stop_listening=self.says("deaf"),
            open_worker=lambda slot, life, listens, _: listens() or (slot, life),
        )
        self.supervisor = Supervisor(
            cast("WorkerSockets", sockets),
            self.works,
            on_up=self.says("up"),
            on_hup=self.says("hup"),
            stop_s_max=stop_s_max,
        )

    def says(self, what: str) -> Callable[[], None]:
        return lambda: self.said.append(what)

    def plays(self, *script: Step) -> int:
        """The parent's exit status."""
        self.script = list(script)
        status = self.supervisor.run()
        assert not self.script, "it ended before"
        assert self.said[-1] == "closed"
        assert self.signals.untouched
        return status

    def works(self, worker: Any) -> int:
        assert worker == (1, 0)
        assert self.signals.untouched
        assert self.signals.blocked == {signal.SIGHUP}, "until it can handle it"
        return 7

    # What happens.

    def up(self, *pids: int) -> Callable[[], None]:
        return lambda: self.readable.update({self.pipe_of[pid]: b"1" for pid in pids})

    def ends(self, *pids: int, status: int = 0) -> Callable[[], None]:
        def end() -> None:
            self.died_s.append(self.now)
            self.status.update(dict.fromkeys(pids, status))
            self.readable.update(
                {self.pipe_of[pid]: b"" for pid in pids if self.pipe_of[pid] in self.watched}
            )

        return end

    def hears(self, *numbers: int) -> Callable[[], None]:
        return lambda: self.readable.update({WOKEN: bytes(numbers)})

    # What the parent calls.

    def pipe(self) -> tuple[int, int]:
        self.descriptors += 2
        self.open |= {self.descriptors - 1, self.descriptors}
        return self.descriptors - 1, self.descriptors

    def close(self, descriptor: int | None = None) -> None:
        if descriptor is not None:
            self.open.remove(descriptor)

    def set_blocking(self, *_: object) -> None: ...

    def setpgrp(self) -> None:
        self.said.append("a group of its own")

    def write(self, descriptor: int, text: bytes) -> None:
        assert text
        self.said.append(f"listens on {descriptor}")

    def _exit(self, status: int) -> None:
        raise Exited(status, self.open.copy())

    def read(self, descriptor: int, _: int) -> bytes:
        assert descriptor in self.open
        return self.readable.pop(descriptor)

    def fork(self) -> int:
        assert self.signals.blocked == {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        self.started_s.append(self.now)
        pid = len(self.started_s)
        if pid == self.child:
            return 0
        self.pipe_of[pid] = self.descriptors - 1
        return pid

    def kill(self, pid: int, number: int) -> None:
        if pid in self.status:
            raise ProcessLookupError
        self.sent.append((pid, number))
        if number == signal.SIGKILL:
            self.status[pid] = -9

    def waitpid(self, pid: int, _: int) -> tuple[int, int]:
        return (pid, self.status[pid]) if pid in self.status else (0, 0)

    def waitstatus_to_exitcode(self, status: int) -> int:
        return status

    def DefaultSelector(self) -> Machine:  # noqa: N802 - its name in ``selectors``
        return self

    def register(self, descriptor: int, _: int, data: object = None) -> None:
        self.watched[descriptor] = data

    def unregister(self, descriptor: int) -> None:
        del self.watched[descriptor]

    def monotonic(self) -> float:
        return self.now

    def select(self, timeout: float) -> list[tuple[SimpleNamespace, int]]:
        assert self.script, "nothing more happens, and it goes on"
        assert not self.signals.blocked
        step = self.script.pop(0)
        if callable(step):
            step()
        else:
            self.now += timeout
            if step > timeout:
                self.script.insert(0, step - timeout)
        return [
            (SimpleNamespace(fd=fd, data=self.watched[fd]), 1) for fd in self.readable if fd in self.watched
        ]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_parent_ends_after_the_last_worker(machine: Machine, number: int) -> None:
    ends = machine.hears(number), machine.ends(1), machine.hears(signal.SIGCHLD), machine.ends(2)
    assert machine.plays(machine.up(1), machine.up(2), *ends) == 0
    assert machine.said == ["up", "deaf", "closed"]
    assert machine.sent == [(1, signal.SIGTERM), (2, signal.SIGTERM)]
    assert machine.open == {1, 2}, "the pipe that its workers watch is open until its end"


def test_a_worker_that_fails_while_it_drains_is_the_parents_status(machine: Machine) -> None:
    drain = machine.hears(signal.SIGTERM), machine.ends(1, status=3), machine.ends(2)
    assert machine.plays(machine.up(1, 2), *drain) == 1


def test_workers_that_do_not_drain_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, stop_s_max=2.0)
    assert machine.plays(machine.up(1, 2), machine.hears(signal.SIGTERM), machine.ends(1), 2.0, 0.5, 0.5) == 1
    assert machine.sent[2:] == [(2, signal.SIGKILL)]
    assert machine.now == pytest.approx(103.0)


def test_signals_are_passed_on(machine: Machine) -> None:
    """While workers drain, nothing is loaded again, and only a further SIGINT cuts requests."""
    serving = machine.up(1, 2), machine.hears(signal.SIGHUP)
    draining = machine.hears(signal.SIGINT), machine.hears(signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
    assert machine.plays(*serving, *draining, machine.ends(1, 2)) == 0
    numbers = [number for pid, number in machine.sent if pid == 1]
    assert numbers == [signal.SIGHUP, signal.SIGTERM, signal.SIGINT]
    assert machine.said == ["up", "hup", "deaf", "closed"]


def test_a_dead_worker_is_replaced_and_one_that_dies_young_after_pauses_that_double(machine: Machine) -> None:
    old = [step for pid in range(2, 5) for step in (machine.ends(pid, status=-9), 6.0)]
    young = [step for pid in range(5, 13) for step in (machine.ends(pid), min(6.0, 0.13 * 2 ** (pid - 5)))]
    last = machine.ends(13), 6.0, machine.hears(signal.SIGTERM), machine.ends(1, 14)
    assert machine.plays(machine.up(1, 2), 6.0, *old, *young, *last) == 0
    assert machine.said.count("up") == 1
    pauses = [begun - died for begun, died in zip(machine.started_s[2:], machine.died_s, strict=False)]
    assert pauses == pytest.approx([0, 0, 0, 0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0], abs=0.021)


def test_a_worker_that_fails_before_all_are_up_ends_all(machine: Machine) -> None:
    assert machine.plays(machine.up(1), machine.ends(2, status=1), machine.ends(1)) == 1
    assert machine.said == ["deaf", "closed"]
    assert machine.sent == [(1, signal.SIGTERM)]


def test_a_worker_that_is_reaped_before_its_pipe_is_read_leaves_no_descriptor(machine: Machine) -> None:
    dies = [lambda: machine.status.update({2: 1}), machine.ends(1)]
    assert machine.plays(machine.up(1), *dies) == 1
    assert machine.open == {1, 2}


def test_with_every_worker_dead_it_starts_others_or_ends_when_told(machine: Machine) -> None:
    dead = machine.up(1, 2), machine.ends(1, 2), machine.ends(3, 4), 0.12
    assert machine.plays(*dead, machine.ends(5, 6), 0.04, machine.hears(signal.SIGTERM)) == 0
    assert len(machine.started_s) == 6
    assert machine.sent == []


def test_a_worker_leaves_what_is_the_parents(machine: Machine) -> None:
    """It must not hold what tells it that the parent has ended, nor what others tell the parent on."""
    machine.child = 2
    with pytest.raises(Exited) as ended:
        machine.plays()
    assert ended.value.args == (7, {1, 3, 4, 7}), "not the parent's end (2), nor the other worker's (5)"
    assert machine.said == ["a group of its own", "listens on 8"]
