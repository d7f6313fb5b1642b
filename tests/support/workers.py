"""``pytest --workers N``: tests side by side in N processes forked after one collection.

Importing the product and collecting some 7,500 tests takes 5 to 10 s of CPU, which pytest-xdist spends in
each worker. A fork shares them. Each worker runs a contiguous range of the shuffled tests, so that fixtures
of a module are set up once or twice, and takes the back half of the longest rest when it has none. Reports
come to the parent over a pipe; the parent alone has a terminal.

A worker that dies costs the test that it was running, which fails by name: another one goes on in its place.
Threads that never end keep no worker, and no worker outlives the parent for longer than its test.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import pickle
import selectors
import signal
import struct
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_NONE = 0xFFFFFFFF
_LENGTH = struct.Struct("<I")
LOOK_S = 1.0
"""Between looks whether a silent worker lives: a process that it forked may hold its pipe open."""
END_S = 30.0
"""From the interruption of a worker to its end: the fixtures it has set up are torn down."""


class Ranges:
    """The tests that each worker has still to run, and those it has, in memory that all of them share."""

    def __init__(self, tests: int, workers: int) -> None:
        self._workers = range(workers)
        cut = [tests * worker // workers for worker in range(workers + 1)]
        # First and end of the rest of each, then the test that runs and the one after it.
        self._rest = memoryview(mmap.mmap(-1, 16 * workers)).cast("I", (4 * workers,))
        for worker in self._workers:
            self._set(worker, cut[worker], cut[worker + 1])
            self.hold(worker, None, None)
        self._lock_file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`

    def take(self, worker: int, *, others: bool = True) -> int | None:
        """The next test of ``worker``, or of another one if it has none and ``others``; else None."""
        with self._locked():
            first, end = self._get(worker)
            if first == end and others:
                longest = max(self._workers, key=self._length)
                begin, end = self._get(longest)
                first = (begin + end) // 2
                self._set(longest, begin, first)
            if first == end:
                return None
            self._set(worker, first + 1, end)
            return first

    def clear(self) -> None:
        """No worker finds another test."""
        with self._locked():
            for worker in self._workers:
                self._set(worker, 0, 0)

    def hold(self, worker: int, running: int | None, following: int | None) -> None:
        """``worker`` begins ``running`` and has taken ``following``."""
        for place, test in enumerate((running, following), 4 * worker + 2):
            self._rest[place] = _NONE if test is None else test

    def held(self, worker: int) -> tuple[int | None, int | None]:
        """The two of ``hold``."""
        running, following = self._rest[4 * worker + 2 : 4 * worker + 4]
        return None if running == _NONE else running, None if following == _NONE else following

    def close(self) -> None:
        """In the parent, when no worker is left."""
        self._lock_file.close()

    def _get(self, worker: int) -> tuple[int, int]:
        return self._rest[4 * worker], self._rest[4 * worker + 1]

    def _set(self, worker: int, first: int, end: int) -> None:
        self._rest[4 * worker], self._rest[4 * worker + 1] = first, end

    def _length(self, worker: int) -> int:
        first, end = self._get(worker)
        return end - first

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # A lock of the process, which ends with it, unlike one in shared memory or of flock.
        fcntl.lockf(self._lock_file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._lock_file, fcntl.LOCK_UN)


class Teller:
    """In a worker: sends to the parent what pytest would show."""

    def __init__(self, config: pytest.Config, pipe: int) -> None:
        self._config, self._pipe = config, pipe
        self._told = bytearray()
        self._ready = False
        config.pluginmanager.register(self)  # warnings of the collection are told again here
        self._ready = True

    def tell(self, kind: str, content: object = None) -> None:
        message = pickle.dumps((kind, content), pickle.HIGHEST_PROTOCOL)
        self._told += _LENGTH.pack(len(message)) + message

    def flush(self) -> None:
        while self._told:
            del self._told[: os.write(self._pipe, self._told)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of setup, call and teardown."""
        self.tell(
            "report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        )

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        """As text: the warning itself may not survive the pipe."""
        if self._ready:
            text = f"{warning_message.category.__name__}: {warning_message.message}"
            place = (warning_message.filename, warning_message.lineno)
            self.tell("warning", (text, place, {"when": when, "nodeid": nodeid, "location": location}))


class Worker:
    """The parent's side of one."""

    def __init__(self, number: int, pid: int, pipe: int) -> None:
        self.number, self.pid, self.pipe = number, pid, pipe
        self._received = bytearray()

    def receive(self) -> list[tuple[str, Any]] | None:
        """The messages that have arrived; None at the end."""
        data = os.read(self.pipe, 1 << 20)
        self._received += data
        messages, at = [], 0
        while len(self._received) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, at)
            if len(self._received) - at < _LENGTH.size + length:
                break
            at += _LENGTH.size
            messages.append(pickle.loads(self._received[at : at + length]))
            at += length
        del self._received[:at]
        return messages if data else None


class Pool:
    """All workers of a session."""

    def __init__(self, session: pytest.Session, workers: int) -> None:
        self._session, self._config = session, session.config
        self._ranges = Ranges(len(session.items), workers)
        self._selector = selectors.DefaultSelector()
        self._factory = session.config._tmp_path_factory  # type: ignore[attr-defined]
        self._factory.getbasetemp()  # one for all, made before they are forked
        self._forked = 0
        for number in range(workers):
            self._fork(number, None)

    def run(self) -> None:
        """Until no test is left, or pytest wants to end."""
        try:
            while self._selector.get_map():
                self._look()
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
                if self._session.shouldstop:
                    raise self._session.Interrupted(self._session.shouldstop)
        finally:
            self._end()

    def _look(self) -> None:
        ready = [key.data for key, _ in self._selector.select(LOOK_S)]
        for worker in ready or [key.data for key in self._selector.get_map().values()]:
            messages = worker.receive() if ready else []
            for kind, content in messages or ():
                if kind == "end":
                    self._close(worker)
                    return
                self._tell(kind, content)
            if messages is None or (not ready and os.waitid(os.P_PID, worker.pid, _ENDED) is not None):
                self._replace(worker)

    def _tell(self, kind: str, content: Any) -> None:
        hook = self._config.hook
        if kind == "report":
            report = hook.pytest_report_from_serializable(config=self._config, data=content)
            hook.pytest_runtest_logreport(report=report)
        else:
            text, place, where = content
            message = warnings.WarningMessage(Warning(text), Warning, *place)
            hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": message, **where})

    def _close(self, worker: Worker) -> int:
        self._selector.unregister(worker.pipe)
        os.close(worker.pipe)
        return os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])

    def _replace(self, worker: Worker) -> None:
        """It died: its test fails, and another worker runs the one after it and the rest."""
        status = self._close(worker)
        running, following = self._ranges.held(worker.number)
        if running is None:
            raise RuntimeError(f"worker {worker.number} ended before its first test, with status {status}")
        item = self._session.items[running]
        told = f"worker {worker.number} crashed with status {status} while running {item.nodeid!r}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", told, "call")
        self._config.hook.pytest_runtest_logreport(report=report)
        self._fork(worker.number, following)

    def _end(self) -> None:
        """Workers that still run are interrupted, and killed if that does not end them."""
        self._ranges.clear()
        left = [key.data for key in self._selector.get_map().values()]
        for worker in left:
            os.kill(worker.pid, signal.SIGINT)
        until = time.monotonic() + END_S
        try:
            for worker in left:
                while time.monotonic() < until and os.waitid(os.P_PID, worker.pid, _ENDED) is None:
                    for key, _ in self._selector.select(0.05):  # a full pipe would hold up a worker
                        os.read(key.fd, 1 << 20)
        finally:
            for worker in left:
                os.kill(worker.pid, signal.SIGKILL)
                self._close(worker)
            self._selector.close()
            self._ranges.close()

    def _fork(self, number: int, test: int | None) -> None:
        if _threads() > _THREADS_BEFORE:
            raise pytest.UsageError(
                "collecting the tests started threads, which do not survive a fork, so workers might hang: "
                "import what starts them (a library written in Go, say) in the tests, or give --workers 0"
            )
        read, write = os.pipe()
        self._forked += 1
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python 3.12 warns of threads: numpy's, which pytest-randomly imports, end and begin with a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            os.close(write)
            self._selector.register(read, selectors.EVENT_READ, Worker(number, pid, read))
            return
        status = 1
        try:
            self._work(number, test, read, write)
            status = 0
        except KeyboardInterrupt:
            pass
        except BaseException:  # noqa: BLE001 - of pytest itself; nothing else would say it
            os.write(sys.__stderr__.fileno(), traceback.format_exc().encode())
        finally:
            os._exit(status)  # threads that never end do not keep it

    def _work(self, number: int, test: int | None, read: int, write: int) -> None:
        """In the worker: its tests, in a process that shares no file with the others."""
        for pipe in (*[key.fd for key in self._selector.get_map().values()], read):
            os.close(pipe)  # so that a write fails when the parent is gone
        self._selector.close()
        plugins = self._config.pluginmanager
        capture = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
        plugins.unregister(name="terminalreporter")
        self._factory._basetemp = self._factory.getbasetemp() / f"w{self._forked}"
        self._factory._basetemp.mkdir(mode=0o700)
        teller, items, ranges = Teller(self._config, write), self._session.items, self._ranges
        try:
            while test is not None or (test := ranges.take(number)) is not None:
                following = ranges.take(number, others=False)
                ranges.hold(number, test, following)
                after = None if following is None else items[following]
                self._config.hook.pytest_runtest_protocol(item=items[test], nextitem=after)
                teller.flush()
                test = following
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # one from the terminal, then one from the parent
            self._session._setupstate.teardown_exact(None)
        teller.tell("end")
        teller.flush()


def _threads() -> int:
    """Of this process, those of compiled code too, where the system tells."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()


_THREADS_BEFORE = _threads()
"""Before a test was collected."""
_ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--workers``."""
    parser.addoption("--workers", type=int, default=0, help="processes that run tests side by side (0: none)")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """In workers, if there is something to run and they are wanted."""
    workers = min(session.config.getoption("workers"), len(session.items))
    if workers < 1 or session.testsfailed or session.config.option.collectonly:
        return None
    Pool(session, workers).run()
    return True
