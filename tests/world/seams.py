"""Puts a ``VirtualLoop`` in the place of what a process gets from its machine, and runs a coroutine on it.

``install`` before the product is imported, which keeps ``time.monotonic`` as default of arguments. What it
replaces asks whether a virtual loop runs, and else does what it did: real and virtual tests are in one
process.

Replaced: the clocks of ``time``, and its ``sleep``, with which code takes virtual time; ``os.urandom`` (with
it ``secrets`` and ``uuid``) and the seed of ``random``; work of thread pools; sockets of ``zmq.Context``;
sets of tasks and connections, whose order is that of addresses in memory; signal handlers of servers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from tests.world.loop import DeadlockError, VirtualLoop, freed_in_silence, is_thread, run_in_thread

T = TypeVar("T")
LIMIT_S = 3600.0
"""Virtual time after which a run is a failure."""
_ENDS_MAX = 10
"""How often what is left is cancelled: what ends may start other tasks."""


class _State:
    """The virtual loop that runs, if one does."""

    loop: VirtualLoop | None = None
    entropy = random.Random(0)
    installed = False


BEGINS: list[Callable[[VirtualLoop], None]] = []
"""Called with each virtual loop when it begins: what a test finds there, as a server."""


def virtual_loop() -> VirtualLoop | None:
    """The virtual loop that runs now."""
    return _State.loop


def run(main: Coroutine[Any, Any, T], seed: int = 0, *, limit_s: float = LIMIT_S) -> T:
    """Run to the end on a virtual loop; tasks that are left are cancelled."""
    return run_with(lambda _: main, seed, limit_s=limit_s)


def run_with(
    main: Callable[[VirtualLoop], Coroutine[Any, Any, T]],
    seed: int = 0,
    *,
    limit_s: float = LIMIT_S,
    **options: Any,
) -> T:
    """The same for what wants its loop; ``options`` are ``VirtualLoop``'s."""
    killed: set[int] = set()
    try:
        return _run_with(main, VirtualLoop(seed, **options), limit_s, killed)
    finally:
        if killed:  # what their loop, which is gone now, has held
            with freed_in_silence():
                gc.collect()


def _run_with(
    main: Callable[[VirtualLoop], Coroutine[Any, Any, T]],
    loop: VirtualLoop,
    limit_s: float,
    killed: set[int],
) -> T:
    async def limited() -> T:
        async with asyncio.timeout(limit_s):
            return await main(loop)

    with _running(loop):
        try:
            return loop.run_until_complete(limited())
        finally:
            killed |= loop.killed
            _end(loop)


def cancel_all(loop: asyncio.AbstractEventLoop, left: Callable[[], list[asyncio.Task[Any]]]) -> None:
    """Cancel tasks until none is left. ``asyncio.run`` does so once: a task that another one starts while it
    ends would find its context managers closed when it is freed in a later test, which then fails of
    "generator didn't stop after athrow()"."""
    for _ in range(_ENDS_MAX):
        if not (tasks := left()):
            return
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=60.0))
    raise RuntimeError(f"do not end when they are cancelled: {left()}")


@contextlib.contextmanager
def _running(loop: VirtualLoop) -> Iterator[None]:
    if not _State.installed:
        raise RuntimeError("tests.world.seams.install() comes before the product is imported")
    if _State.loop is not None:
        raise RuntimeError("a virtual loop runs already")
    state = random.getstate()
    random.seed(loop.seed)
    _State.entropy.seed(loop.seed)
    _State.loop = loop
    asyncio.set_event_loop(loop)
    try:
        for begin in BEGINS:
            begin(loop)
        yield
    finally:
        loop.close()
        _State.loop = None
        asyncio.set_event_loop(None)
        random.setstate(state)


def _end(loop: VirtualLoop) -> None:
    """Cancel what still runs, and what that starts in its ``finally``."""
    with contextlib.suppress(DeadlockError):
        cancel_all(loop, lambda: [task for task in asyncio.all_tasks(loop) if not loop.is_killed(task)])
        loop.run_until_complete(loop.shutdown_asyncgens())
    for transport in list(loop.net.transports):
        transport.vanish(silent=True)


def install() -> None:
    """Replace everything, once."""
    if _State.installed:
        return
    _State.installed = True
    _replace_clocks()
    _replace_threads()
    _replace_zmq()
    order(asyncio.TaskGroup, "_tasks")
    _replace_servers()


def _replace_clocks() -> None:
    monotonic, wall, wall_ns, sleep, urandom = time.monotonic, time.time, time.time_ns, time.sleep, os.urandom

    thread = threading.get_ident

    def look() -> float:
        loop = _State.loop
        return monotonic() if loop is None or loop._thread_id != thread() else loop.look()

    def look_wall() -> float:
        loop = _State.loop
        return wall() if loop is None or loop._thread_id != thread() else loop.wall()

    def look_wall_ns() -> int:
        loop = _State.loop
        return wall_ns() if loop is None or loop._thread_id != thread() else int(loop.wall() * 1e9)

    def random_bytes(size: int, /) -> bytes:
        return urandom(size) if _State.loop is None else _State.entropy.randbytes(size)

    def work(seconds: float, /) -> None:
        """Code that takes time."""
        loop = _State.loop
        if loop is None or not (threading.get_ident() == loop._thread_id or is_thread()):
            sleep(seconds)
        else:
            loop.now += seconds

    time.monotonic = time.perf_counter = look
    time.time, time.time_ns, os.urandom = look_wall, look_wall_ns, random_bytes
    time.sleep = work  # type: ignore[assignment]
    random._urandom = random_bytes  # type: ignore[attr-defined]  # ``secrets`` draws from it


def _replace_threads() -> None:
    submit = concurrent.futures.ThreadPoolExecutor.submit

    def submit_to_loop(self: Any, fn: Callable[..., Any], /, *args: Any, **more: Any) -> Any:
        if _State.loop is None:
            return submit(self, fn, *args, **more)
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        _State.loop.thread(future, lambda: fn(*args, **more))
        return future

    run_for_itself = asyncio.run

    def run_in_loop(main: Coroutine[Any, Any, Any], **more: Any) -> Any:
        done, result = run_in_thread(main)
        return result if done else run_for_itself(main, **more)

    concurrent.futures.ThreadPoolExecutor.submit = submit_to_loop  # type: ignore[method-assign]
    asyncio.run = run_in_loop


def _replace_zmq() -> None:
    try:
        import zmq  # noqa: PLC0415
    except ImportError:  # where the connectors' tests run inside an engine's environment
        return
    real = zmq.Context

    def socket(self: Any, socket_type: int, *args: Any, _open: Any = real.socket, **more: Any) -> Any:
        if _State.loop is None:
            return _open(self, socket_type, *args, **more)
        is_async = type(self).__module__ == "zmq.asyncio"
        return _State.loop.zmq.socket(socket_type, owner=self, is_async=is_async)

    def ends(name: str) -> None:
        end = getattr(real, name)

        def closes(self: Any, *args: Any, **more: Any) -> None:
            if _State.loop is not None:
                _State.loop.zmq.close_all(self)
            end(self, *args, **more)

        setattr(real, name, closes)

    real.socket = socket  # type: ignore[method-assign, assignment]
    ends("destroy")
    ends("term")


def _replace_servers() -> None:
    try:
        import uvicorn.server  # noqa: PLC0415
    except ImportError:
        return
    capture = uvicorn.Server.capture_signals

    def capture_none(self: uvicorn.Server) -> Any:
        return capture(self) if _State.loop is None else contextlib.nullcontext()

    uvicorn.Server.capture_signals = capture_none  # type: ignore[method-assign]
    order(uvicorn.server.ServerState, "connections", "tasks")


class OrderedSet(dict[Any, None]):
    """A set in the order of insertion."""

    def __init__(self, items: Any = ()) -> None:
        super().__init__(dict.fromkeys(items))

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)

    def remove(self, item: Any) -> None:
        del self[item]

    def update(self, *others: Any) -> None:  # type: ignore[override]
        for other in others:
            super().update(dict.fromkeys(other))


def order(owner: type, *names: str) -> None:
    """Give instances of this class ordered sets in place of the sets of these names."""
    begin = owner.__init__  # type: ignore[misc]

    def ordered(self: Any, *args: Any, **more: Any) -> None:
        begin(self, *args, **more)
        for name in names:
            setattr(self, name, OrderedSet(getattr(self, name)))

    owner.__init__ = ordered  # type: ignore[misc]
