"""Parent of the workers: forks them, replaces dead ones and forwards signals. It serves no requests.

It has no event loop and no threads, so it can fork at any time, and workers share the memory of what it
loaded (code, tokenizers). SIGTERM or SIGINT: every worker drains, and the parent exits after the last one; a
second SIGINT cuts requests. A dead worker is replaced immediately, but one that died young only after a pause
that doubles each time. If a worker fails before all were up, all of them end. SIGHUP is forwarded to all.
Invariant: no worker outlives its parent, even a killed one: a worker drains when it reads the end of the pipe
that the parent holds.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import msgspec
import structlog

from kvatlas.router.workers.context import WorkerContext, WorkerSockets

_log = structlog.get_logger()
_YOUNG_S = 5.0
_PAUSE_S_MIN = 0.1
_PAUSE_S_MAX = 5.0
_LOOK_S, _LOOK_SOON_S = 0.5, 0.02
_ENDING = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
_SIGNALS = (*_ENDING, signal.SIGHUP)


class _Process(msgspec.Struct, eq=False):
    pid: int
    slot: int
    life: int
    began_s: float
    ready_fd: int
    """Reading end of the pipe on which the worker reports that it listens."""
    up: bool = False


class Supervisor:
    """Supervises the workers of one port; ``run`` may be called once.

    ``work`` runs in each worker process and returns its exit status. ``on_up`` is called once, when all
    workers listen; ``on_hup`` at SIGHUP, before the signal is forwarded. ``stop_s_max``: longest wait for
    draining workers.
    """

    def __init__(
        self,
        sockets: WorkerSockets,
        work: Callable[[WorkerContext], int],
        *,
        on_up: Callable[[], None],
        on_hup: Callable[[], None],
        stop_s_max: float,
    ) -> None:
        self._sockets = sockets
        self._work = work
        self._on_up = on_up
        self._on_hup = on_hup
        self._stop_s_max = stop_s_max
        self._processes: dict[int, _Process] = {}
        self._lives = [0] * sockets.count
        self._pauses_s = [0.0] * sockets.count
        # Time at which to restart the worker of a slot.
        self._due: dict[int, float] = {}
        self._all_were_up = False
        self._stop_by: float | None = None
        self._status = 0
        self._selector = selectors.DefaultSelector()
        self._parent_reads, self._parent_holds = os.pipe()

    def run(self) -> int:
        """Run until every worker has ended; returns the exit status. Call it in the main thread."""
        with self._signals() as woken:
            self._selector.register(woken, selectors.EVENT_READ)
            for slot in range(self._sockets.count):
                self._start(slot)
            while self._processes or (self._due and self._stop_by is None):
                self._turn(woken)
        self._sockets.close()
        return self._status

    def _turn(self, woken: int) -> None:
        for key, _ in self._selector.select(_LOOK_SOON_S if self._due else _LOOK_S):
            if key.fd == woken:
                for number in os.read(woken, 4096):
                    self._signalled(number)
            else:
                self._listens(key.data)
        self._reap()
        now = time.monotonic()
        if self._stop_by is None:
            for slot in [slot for slot, due_s in self._due.items() if due_s <= now]:
                del self._due[slot]
                self._start(slot)
        elif now > self._stop_by:
            _log.error("workers do not end, killing them", workers=len(self._processes))
            self._status = 1
            self._pass_on(signal.SIGKILL)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[int]:
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        old = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        try:
            yield reads
        finally:
            signal.set_wakeup_fd(old)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(reads)
            os.close(writes)

    def _signalled(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return
        if number == signal.SIGHUP:
            if self._stop_by is None:
                self._on_hup()
                self._pass_on(signal.SIGHUP)
        elif self._stop_by is None:
            self._stop()
        elif number == signal.SIGINT:
            self._pass_on(signal.SIGINT)

    def _stop(self) -> None:
        self._stop_by = time.monotonic() + self._stop_s_max
        self._sockets.stop_listening()
        self._pass_on(signal.SIGTERM)

    def _pass_on(self, number: int) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _start(self, slot: int) -> None:
        reads, writes = os.pipe()
        life, self._lives[slot] = self._lives[slot], self._lives[slot] + 1
        # The child must not run the parent's handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        pid = os.fork()
        if pid == 0:
            self._become_worker(slot, life, writes)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.close(writes)
        process = self._processes[pid] = _Process(pid, slot, life, time.monotonic(), reads)
        self._selector.register(reads, selectors.EVENT_READ, process)

    def _become_worker(self, slot: int, life: int, ready_fd: int) -> None:
        """Run the worker in the child process; never returns."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            # SIGHUP stays blocked until the worker handles it
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
            # The terminal sends Ctrl-C to the parent only, which forwards it.
            os.setpgrp()
            os.close(self._parent_holds)
            self._selector.close()
            for other in self._processes.values():
                if other.ready_fd >= 0:
                    os.close(other.ready_fd)
            worker = self._sockets.open_worker(
                slot, life, lambda: _signal_ready(ready_fd), self._parent_reads
            )
            status = self._work(worker)
        except BaseException:  # noqa: BLE001  # no code of the parent may run in a child
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(status)

    def _listens(self, process: _Process) -> None:
        """Handle a worker that reported that it listens, or whose pipe was closed."""
        self._selector.unregister(process.ready_fd)
        process.up = bool(os.read(process.ready_fd, 1))
        os.close(process.ready_fd)
        process.ready_fd = -1
        if not self._all_were_up and len(self._processes) == self._sockets.count:
            self._all_were_up = all(one.up for one in self._processes.values())
            if self._all_were_up:
                self._on_up()

    def _reap(self) -> None:
        for pid in list(self._processes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._ended(self._processes.pop(pid), os.waitstatus_to_exitcode(status))

    def _ended(self, process: _Process, status: int) -> None:
        if process.ready_fd >= 0:
            self._selector.unregister(process.ready_fd)
            os.close(process.ready_fd)
        if self._stop_by is not None:
            self._status = self._status or int(status != 0)
            return
        if not self._all_were_up and process.life == 0:
            self._status = 1
            self._stop()
            return
        now = time.monotonic()
        young = now - process.began_s < _YOUNG_S
        pause_s = self._pauses_s[process.slot] if young else 0.0
        self._pauses_s[process.slot] = min(_PAUSE_S_MAX, max(_PAUSE_S_MIN, 2 * pause_s))
        self._due[process.slot] = now + pause_s
        _log.error(
            "worker died, replacing it", slot=process.slot, pid=process.pid, status=status, pause_s=pause_s
        )


def _signal_ready(pipe: int) -> None:
    os.write(pipe, b"1")
    os.close(pipe)
