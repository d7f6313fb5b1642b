"""An asyncio loop on virtual time: it never waits, its clock jumps to the next timer.

Callbacks run in asyncio's order (first in, first out; timers of the same time in the order they were set).
What the seed decides is when bytes and threads' results arrive, so that two runs of a seed are the same byte
for byte (``digest``). Code takes no virtual time but for ``turn_s`` a turn and ``LOOK_S`` a look at a clock,
so that busy waiting ends.

All machines and processes of a world run in this one loop. The code of a process runs in a context in which
``MACHINE`` is its machine's address and ``PROCESS`` its number; its tasks and callbacks inherit both.
``kill`` ends a process as SIGKILL does: nothing of it runs again, no ``finally`` either.
"""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import heapq
import itertools
import logging
import random
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextvars import Context, copy_context
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from tests.world.machines import MACHINE, PROCESS
from tests.world.net import Listener, Network
from tests.world.zmq_net import ZmqNetwork

THREAD_S = (1e-4, 1e-3, 8e-3)
"""Times that a thread's work may take."""
LOOK_S = 1e-6
"""Virtual time that each look at a clock takes, so that nothing takes none."""
_BEGIN_S = 1000.0


class DeadlockError(RuntimeError):
    """Nothing is ready and no timer is set: what is waited for never comes."""


class CallCounter:
    """Counts calls of Python functions: a profiler whose clock is a counter, so that each event is one step
    of C."""

    def __init__(self) -> None:
        self._events = itertools.count().__next__
        self._profile = cProfile.Profile(self._events, 1.0, subcalls=False, builtins=False)
        self._seen = 0

    def start(self) -> None:
        self._profile.enable()

    def stop(self) -> None:
        self._profile.disable()

    def lap(self) -> int:
        """Calls since the last lap."""
        seen = self._events()
        calls, self._seen = (seen - self._seen) // 2, seen
        return calls

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Leave out what is called inside."""
        begin = self._events()
        try:
            yield
        finally:
            self._seen += self._events() - begin


_Base: Any = asyncio.BaseEventLoop  # its parts are not typed


class VirtualLoop(_Base):
    """``turn_s``: virtual time of one turn of the loop. ``look_s``: virtual time that a look at a clock may
    take, for races between slow pieces of code; 0: none."""

    def __init__(self, seed: int, *, turn_s: float = 2e-6, look_s: float = 0.0) -> None:
        super().__init__()
        self._selector: Any = self
        self.seed = seed
        self.rng = random.Random(seed)
        self.now, self._turn_s, self.look_s = _BEGIN_S, turn_s, look_s
        self.net = Network(self)
        self.zmq = ZmqNetwork(self)
        self.turns = 0
        self.digest = 0
        self.log: list[tuple[Any, ...]] | None = None
        """If a list: every arrival, to compare two runs."""
        self.calls: CallCounter | None = None
        self.calls_max = 0
        """Most Python calls of one turn so far, if ``count_calls``."""
        self.calls_max_at_s = 0.0
        self.errors: list[str] = []
        """Exceptions that nothing handled."""
        self.skew_s: dict[str, float] = {}
        """Seconds by which a machine's wall clock is ahead."""
        self.killed: set[int] = set()
        self._kept: list[Any] = []
        self._kept_generators: list[Any] = []
        self._tasks_of: dict[int, dict[asyncio.Task[Any], None]] = {}
        self._process_of: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Of asynchronous generators that have begun."""
        self._processes = itertools.count(1)
        self._readers: dict[int, tuple[Callable[..., Any], tuple[Any, ...], Context]] = {}
        self._connecting: dict[int, tuple[str, int]] = {}
        self.set_exception_handler(self._note_error)

    # Time.

    def time(self) -> float:
        return self.now

    def look(self) -> float:
        """The monotonic clock, for code that looks at it."""
        self.now += LOOK_S
        if self.look_s:
            self.now += self.rng.random() ** 4 * self.look_s
        return self.now

    def wall(self) -> float:
        """The wall clock of the machine that the running code is on."""
        return 1.8e9 + self.look() + self.skew_s.get(MACHINE.get(), 0.0)

    def select(self, timeout: float | None) -> tuple[()]:
        """End of a turn: time passes. Called by ``BaseEventLoop`` in place of its selector's."""
        self.turns += 1
        if self.calls is not None and (calls := self.calls.lap()) > self.calls_max:
            self.calls_max, self.calls_max_at_s = calls, self.now
        if timeout is None:
            raise DeadlockError("nothing is ready and no timer is set")
        self.now += self._turn_s
        if timeout > 0 and self._scheduled:
            self.now = max(self.now, self._scheduled[0]._when)
        return ()

    @contextlib.contextmanager
    def count_calls(self) -> Iterator[None]:
        """Keep the most calls of Python functions that a turn makes in ``calls_max``. Costs a quarter more
        CPU."""
        self.calls = CallCounter()
        self.calls.start()
        try:
            yield
        finally:
            self.calls.stop()
            self.calls = None

    def not_counted(self) -> contextlib.AbstractContextManager[None]:
        """Around calls that stand for the work of a program in C on another machine."""
        return contextlib.nullcontext() if self.calls is None else self.calls.left_out()

    def mark(self, what: bytes, *facts: Any) -> None:
        """Add an arrival to the digest of this run."""
        self.digest = zlib.crc32(what, zlib.crc32(struct.pack("d", self.now), self.digest))
        if self.log is not None:
            self.log.append((round(self.now, 9), *facts, what[:80]))

    # Processes.

    @contextlib.contextmanager
    def machine(self, address: str, *, process: bool = False) -> Iterator[int]:
        """Tasks that begin inside run on this machine; with ``process``, in a new process of it. Gives its
        number."""
        number = next(self._processes) if process else PROCESS.get()
        tokens = MACHINE.set(address), PROCESS.set(number)
        try:
            yield number
        finally:
            MACHINE.reset(tokens[0])
            PROCESS.reset(tokens[1])

    def kill(self, process: int, *, silent: bool = False) -> None:
        """End a process here and now. Its machine resets its connections; with ``silent``, as when power
        fails, nothing is sent: the other ends are half open."""
        self.killed.add(process)
        # Kept: a coroutine that is freed runs its ``finally``.
        self._kept += self._tasks_of.pop(process, {})
        generators = [one for one, owner in self._process_of.items() if owner == process]
        self._kept_generators += generators
        self._asyncgens.difference_update(generators)
        self.net.killed(process, silent=silent)
        self.zmq.killed(process, silent=silent)
        for handle in (*self._ready, *self._scheduled):
            if handle._context.get(PROCESS) in self.killed:
                handle.cancel()

    def is_killed(self, task: asyncio.Task[Any]) -> bool:
        """Whether the task belonged to a killed process, or was cancelled and will not hear of it: the router
        makes tasks of requests without the loop, and calls of a killed process are dropped."""
        waits_for: Any = task._fut_waiter  # type: ignore[attr-defined]
        return task in self._kept or bool(self.killed and waits_for is not None and waits_for.cancelled())

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = super().create_task(coro, **options)
        context = options.get("context")
        if process := PROCESS.get() if context is None else context.get(PROCESS, 0):
            tasks = self._tasks_of.setdefault(process, {})
            if process in self.killed:
                self._kept.append(task)
            else:
                tasks[task] = None
                task.add_done_callback(lambda done: tasks.pop(done, None))
        return task

    def _asyncgen_firstiter_hook(self, generator: Any) -> None:
        super()._asyncgen_firstiter_hook(generator)
        self._process_of[generator] = PROCESS.get()

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        handle: Any = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        if self.killed and handle._context.get(PROCESS) in self.killed:
            handle.cancel()
        return handle

    call_soon_threadsafe = call_soon

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        timer: Any = _Timer(when, callback, args, self, context)
        timer._scheduled = True
        heapq.heappush(self._scheduled, timer)
        if self.killed and timer._context.get(PROCESS) in self.killed:
            timer.cancel()
        return timer

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def _note_error(self, _loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (self.killed and "destroyed" in str(context.get("message"))):
            self.errors.append(f"{context.get('message')}: {type(error).__name__}: {error}")

    # Threads: their work is done in the loop after a while.

    def thread(self, future: Any, work: Callable[[], Any]) -> None:
        """Do a thread's work after a while; ``future``, of asyncio or ``concurrent.futures``, gets the
        result."""
        thread = _Thread(self, future, work)
        self.call_later(self.rng.choice(THREAD_S), thread.begin)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = self.create_future()
        self.thread(future, lambda: func(*args))
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None: ...

    # Descriptors and sockets.

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        number = fd if isinstance(fd, int) else fd.fileno()
        if not self.zmq.knows(number):
            raise NotImplementedError(
                "a descriptor of the operating system on virtual time: mark the test real"
            )
        self._readers[number] = callback, args, copy_context()
        self.zmq.watched(number)

    def remove_reader(self, fd: Any) -> bool:
        return self._readers.pop(fd if isinstance(fd, int) else fd.fileno(), None) is not None

    def readable(self, number: int) -> None:
        """A virtual descriptor has become readable."""
        if (found := self._readers.get(number)) is not None:
            self.call_soon(found[0], *found[1], context=found[2])

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None: ...

    def remove_signal_handler(self, sig: int) -> bool:
        return True

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> list[Any]:
        """Names are not looked up: a name is the address of a machine of that name."""
        name = host.decode() if isinstance(host, bytes) else host
        return [(2, 1, 6, "", (self.net.host(name), int(port or 0)))]

    async def getnameinfo(self, sockaddr: Any, flags: int = 0) -> tuple[str, str]:
        return str(sockaddr[0]), str(sockaddr[1])

    async def sock_connect(self, sock: Any, address: Any) -> None:
        """Only noted: ``create_connection`` with this socket connects."""
        self._connecting[sock.fileno()] = address[0], address[1]

    async def create_connection(
        self,
        protocol_factory: Any,
        host: Any = None,
        port: Any = None,
        *,
        ssl: Any = None,
        sock: Any = None,
        **_: Any,
    ) -> tuple[Any, Any]:
        if ssl:
            if sock is not None:
                sock.close()
            raise NotImplementedError("TLS on virtual time: mark the test real")
        if sock is not None:
            host, port = self._connecting.pop(sock.fileno())
            sock.close()
        return await self.net.connect(protocol_factory, (self.net.host(host), int(port)))

    async def create_unix_connection(
        self, protocol_factory: Any, path: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        return await self.net.connect(protocol_factory, (f"unix:{path}", 0))

    async def create_server(
        self,
        protocol_factory: Any,
        host: Any = None,
        port: Any = None,
        *,
        ssl: Any = None,
        sock: Any = None,
        **_: Any,
    ) -> Any:
        if ssl:
            raise NotImplementedError("TLS on virtual time: mark the test real")
        if isinstance(sock, Listener):
            sock.factory, sock.context = protocol_factory, copy_context()
            return sock
        if sock is not None:
            host, port = sock.getsockname()[:2]
        hosts = host if isinstance(host, list | tuple) else [host]
        return self.net.listen(protocol_factory, hosts[0], int(port or 0))

    async def create_unix_server(self, protocol_factory: Any, path: Any = None, **_: Any) -> Any:
        return self.net.listen(protocol_factory, f"unix:{path}", 0)

    # Parts of ``BaseEventLoop``.

    def _process_events(self, event_list: Any) -> None: ...

    def _write_to_self(self) -> None: ...

    def close(self) -> None:
        """End. What killed processes have left is closed, whatever it says; ``seams.run_with`` frees it."""
        self._selector = None
        self._closed = True
        self._ready.clear()
        self._scheduled.clear()
        if not self._kept:
            return
        with freed_in_silence():
            for task in self._kept:
                task._log_destroy_pending = False
                coro = task.get_coro()
                if isinstance(coro, Generator) or hasattr(coro, "close"):
                    with contextlib.suppress(BaseException):
                        coro.close()
            del task, coro
            self._kept.clear()
            self._kept_generators.clear()


@contextlib.contextmanager
def freed_in_silence() -> Iterator[None]:
    """For what killed processes have left: it says when it is freed that it was not ended. A record of the
    log would keep all that its frames hold for a later test."""
    said, sys.unraisablehook = sys.unraisablehook, lambda _: None
    disabled = logging.root.manager.disable
    logging.disable()
    try:
        yield
    finally:
        sys.unraisablehook = said
        logging.disable(disabled)


class _Thread:
    """A thread that runs while the loop stands still, so that it is repeatable; ``asyncio.run`` in it is a
    task of the loop, and other things happen meanwhile."""

    running: ClassVar[dict[int, _Thread]] = {}
    """By the identity of the thread."""

    def __init__(self, loop: VirtualLoop, future: Any, work: Callable[[], Any]) -> None:
        self._loop, self._future, self._work = loop, future, work
        self._turn, self._loops_turn = threading.Semaphore(0), threading.Semaphore(0)
        self._wanted: tuple[Coroutine[Any, Any, Any], Context] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._result: tuple[Any, BaseException | None] = None, None

    def begin(self) -> None:
        if self._future.done() or not getattr(self._future, "set_running_or_notify_cancel", lambda: True)():
            return
        threading.Thread(target=self._run, daemon=True).start()
        self._go_on()

    def _go_on(self, _done: Any = None) -> None:
        self._turn.release()
        self._loops_turn.acquire()
        if self._wanted is not None:
            (main, context), self._wanted = self._wanted, None
            self._task = self._loop.create_task(main, context=context)
            self._task.add_done_callback(self._go_on)
        elif not self._future.done():
            result, error = self._result
            if error is None:
                self._future.set_result(result)
            else:
                self._future.set_exception(
                    RuntimeError(repr(error)) if isinstance(error, StopIteration) else error
                )

    def _run(self) -> None:
        self.running[threading.get_ident()] = self
        self._turn.acquire()
        try:
            self._result = self._work(), None
        except BaseException as error:  # noqa: BLE001 - as an executor does
            self._result = None, error
        finally:
            del self.running[threading.get_ident()]
            self._loops_turn.release()

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """``asyncio.run``, in the thread."""
        self._wanted = main, copy_context()
        self._loops_turn.release()
        self._turn.acquire()
        assert self._task is not None
        return self._task.result()


def run_in_thread(main: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
    """``asyncio.run`` where a thread of a virtual loop calls it: whether one does, and the result."""
    thread = _Thread.running.get(threading.get_ident())
    return (False, None) if thread is None else (True, thread.run(main))


def is_thread() -> bool:
    """Whether a thread of a virtual loop asks."""
    return threading.get_ident() in _Thread.running


_TimerBase: Any = asyncio.TimerHandle


class _Timer(_TimerBase):
    """Timers of the same time run in the order they were set; a heap alone keeps no order among equals."""

    _count = itertools.count()
    __slots__ = ("_turn",)

    def __init__(self, when: float, callback: Any, args: Any, loop: Any, context: Any) -> None:
        super().__init__(when, callback, args, loop, context)
        self._turn = next(self._count)

    def __lt__(self, other: Any) -> bool:
        return (self._when, self._turn) < (other._when, other._turn)
