"""Parent of the workers: forks them, replaces dead ones and forwards signals. It serves no requests.

It has no event loop and no threads, so it can fork at any time, and workers share the memory of what it
loaded (code, tokenizers). SIGTERM or SIGINT: every worker drains, and the parent exits after the last one; a
second SIGINT cuts requests. A dead worker is replaced immediately, but one that died young only after a pause
that doubles each time. If a worker fails before all were up, all of them end. SIGHUP is forwarded to all.
Invariant: no worker outlives its parent, even a killed one: a worker drains when it reads the end of the pipe
that the parent holds.

Control port of a worker: a Unix socket on which siblings request its part of a page and send the
administrator's decisions. The lead's port also accepts forwarded client requests. Only the owner can enter
the socket's folder, so no authentication is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl

import msgspec
import structlog

from kvatlas.router.api.asgi import OwnAnswer, read_body
from kvatlas.router.api.metrics_page import Sources
from kvatlas.router.fleet.engines import AdminDecisions, DesiredState
from kvatlas.router.http.server import listen_config
from kvatlas.router.http.side_ports import SIDE_LISTEN, SideServer
from kvatlas.router.workers.context import LEAD, WorkerContext, WorkerSockets
from kvatlas.router.workers.gossip import SiblingGossip
from kvatlas.router.workers.merged_view import PEER_HEADER, AggregateView, SiblingCalls

# The administrator's decisions, replicated to every worker.
#
# Only the lead makes decisions, so all workers see one order of changes. It sends them to its siblings before
# it answers the change, and again every ``_REPEAT_S``, for workers that missed them or did not know the
# server yet. A new lead restores them from a sibling, and applies them until its own sources have reported.


DECISIONS_PATH = "/worker/decisions"
_REPEAT_S = 1.0


class SharedDecisions:
    """Replicated decisions. ``applied`` updates the fleet; ``unsynced``: sources without a report yet."""

    def __init__(
        self,
        worker: WorkerContext,
        desired: DesiredState,
        calls: SiblingCalls,
        *,
        applied: Callable[[], None],
        unsynced: Callable[[], list[str]],
    ) -> None:
        self._worker = worker
        self._desired = desired
        self._calls = calls
        self._applied = applied
        self._unsynced = unsynced
        self._restored = AdminDecisions()
        self._last_sent = AdminDecisions()

    def state(self) -> bytes:
        return msgspec.json.encode(self._desired.decisions())

    def adopt(self, state: bytes) -> None:
        """Adopt the lead's decisions. Raises ``msgspec.MsgspecError``."""
        self._adopt(msgspec.json.decode(state, type=AdminDecisions))

    async def restore(self) -> None:
        """Restore the decisions from a sibling if this worker replaces a dead one."""
        if self._worker.life == 0:
            return
        for state in (await self._calls.call_all(DECISIONS_PATH)).values():
            self._restored = msgspec.json.decode(state, type=AdminDecisions)
            self._adopt(self._restored)
            return

    async def changed(self) -> None:
        """Send the lead's changed decisions; return when the siblings answered or their time is over."""
        self._restored = AdminDecisions()
        await self._send()

    async def run(self) -> None:
        """Send the decisions periodically, until cancelled."""
        while self._worker.slot == LEAD:
            await asyncio.sleep(_REPEAT_S)
            if self._restored.any:
                self._adopt(self._restored)
                if not self._unsynced():
                    self._restored = AdminDecisions()
            if self._last_sent.any or self._desired.decisions().any:
                await self._send()

    async def _send(self) -> None:
        self._last_sent = self._desired.decisions()
        await self._calls.call_all(DECISIONS_PATH, method="PUT", body=self.state())

    def _adopt(self, decisions: AdminDecisions) -> None:
        if decisions != self._desired.decisions():
            self._desired.adopt(decisions)
            self._applied()


PREFIX = "/worker/"
# Of what an administrator decided about all engines.
_DECISIONS_BYTES_MAX = 64 << 20


class ControlPort:
    """Control port. ``whole``: ASGI application that the lead serves for all workers."""

    def __init__(
        self,
        worker: WorkerContext,
        view: AggregateView,
        decisions: SharedDecisions,
        whole: Any,
    ) -> None:
        self._view = view
        self._decisions = decisions
        self._whole = whole
        self._server = SideServer(
            listen_config(self, listen=SIDE_LISTEN, lifespan="off"),
            name="control port",
            setting="workers",
            sock=worker.control,
        )

    def listening(self) -> AbstractAsyncContextManager[None]:
        """Keep the port open for the duration of the context."""
        return self._server.listening()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["path"].startswith(PREFIX):
            await (await self._answer(scope, receive))(scope, receive, send)
            return
        peer = dict(scope["headers"]).get(PEER_HEADER.encode(), b"").decode("latin-1")
        await self._whole({**scope, "client": (peer, 0) if peer else None}, receive, send)

    async def _answer(self, scope: dict[str, Any], receive: Any) -> OwnAnswer:
        method, path = scope["method"], scope["path"]
        if method == "PUT" and path == DECISIONS_PATH:
            try:
                self._decisions.adopt(await read_body(receive, _DECISIONS_BYTES_MAX))
            except msgspec.MsgspecError:
                return OwnAnswer(status=400)
            return OwnAnswer(status=204)
        if method != "GET":
            return OwnAnswer(status=404)
        if path == "/worker/metrics":
            return OwnAnswer(await self._view.own_page())
        if path == DECISIONS_PATH:
            return OwnAnswer(self._decisions.state())
        wanted = dict(parse_qsl(scope["query_string"].decode("latin-1"))).get("wanted", "")
        part = await self._view.own_part(path.removeprefix(PREFIX), wanted)
        return OwnAnswer(status=404) if part is None else OwnAnswer(part)


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


# One worker's connections to its siblings: ``gossip`` (requests), ``calls`` and ``control`` (pages),
# ``decisions`` (of the administrator). A router without workers has no group.


class WorkerGroup:
    """A worker and its siblings. The lead serves ``whole``, the ASGI application for all workers."""

    def __init__(
        self,
        worker: WorkerContext,
        gossip: SiblingGossip,
        desired: DesiredState,
        *,
        applied: Callable[[], None],
        unsynced: Callable[[], list[str]],
        body_bytes_max: int,
    ) -> None:
        self.worker = worker
        self.gossip = gossip
        self.calls = SiblingCalls(worker, body_bytes_max=body_bytes_max)
        self.decisions = SharedDecisions(worker, desired, self.calls, applied=applied, unsynced=unsynced)

    @property
    def leads(self) -> bool:
        """Whether this worker serves the ops port for all."""
        return self.worker.slot == LEAD

    def view(self, sources: Sources) -> AggregateView:
        """Return the workers' state for the ops port."""
        return AggregateView(self.worker, sources, self.calls)

    @asynccontextmanager
    async def working(self, view: AggregateView, whole: Any) -> AsyncIterator[None]:
        """Exchange state with the siblings for the duration of the context."""
        async with self.calls, asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self.gossip.run())]
            await self.decisions.restore()
            background.append(tasks.create_task(self.decisions.run()))
            try:
                async with ControlPort(self.worker, view, self.decisions, whole).listening():
                    yield
            finally:
                for task in background:
                    task.cancel()
