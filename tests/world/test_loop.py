"""The loop: order, time, threads, and processes that end without a word."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import secrets
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.waiting import run_real
from tests.world.loop import DeadlockError, VirtualLoop
from tests.world.seams import run, run_with


def test_callbacks_run_in_the_order_that_asyncio_promises() -> None:
    async def main(loop: VirtualLoop) -> list[int]:
        seen: list[int] = []
        for number in range(100):
            loop.call_soon(seen.append, number)
        for number in range(100, 200):  # all at the same time
            loop.call_at(loop.time() + 5, seen.append, number)
        await asyncio.sleep(6)
        return seen

    assert run_with(main) == list(range(200))


def test_a_day_passes_immediately_on_every_clock() -> None:
    async def main() -> list[float]:
        before = [time.monotonic(), time.time(), time.time_ns() / 1e9, time.perf_counter()]
        await asyncio.sleep(86_400)
        after = [time.monotonic(), time.time(), time.time_ns() / 1e9, time.perf_counter()]
        return [later - earlier for earlier, later in zip(before, after, strict=True)]

    assert run(main(), limit_s=1e6) == pytest.approx([86_400.0] * 4, abs=1e-3)


def test_clocks_differ_by_machine_and_jump() -> None:
    async def main(loop: VirtualLoop) -> float:
        loop.skew_s["10.0.0.2"] = 3600.0
        here = time.time()
        with loop.machine("10.0.0.2"):
            return await asyncio.create_task(asyncio.sleep(1, time.time())) - here

    assert run_with(main) == pytest.approx(3600, abs=1e-3)


def test_code_that_takes_time_delays_what_is_due() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        due, ran = loop.time() + 1, loop.create_future()
        loop.call_at(due, lambda: ran.set_result(loop.time()))
        time.sleep(5)
        return await ran - due

    assert run(main()) == pytest.approx(4, abs=1e-3)


def test_a_wait_for_nothing_fails_immediately() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(TimeoutError):
        run(main(), limit_s=10)
    loop = VirtualLoop(0)
    with pytest.raises(DeadlockError):
        loop.run_until_complete(main())
    loop.close()


def test_randomness_and_ids_are_the_seeds() -> None:
    async def main() -> tuple[object, ...]:
        return random.random(), uuid.uuid4(), secrets.token_hex(8), os.urandom(4)

    assert run(main(), 7) == run(main(), 7)
    assert len({*run(main(), 7), *run(main(), 8)}) == 8
    assert run(main(), 7)[3] != os.urandom(4)


def test_threads_finish_in_the_loop_after_a_while() -> None:
    async def main() -> tuple[tuple[object, ...], float]:
        begun = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            first = asyncio.wrap_future(pool.submit(divmod, 7, 2))
            found = await asyncio.gather(
                first, asyncio.to_thread(divmod, 1, 0), asyncio.to_thread(len, "abc"), return_exceptions=True
            )
        return found, time.monotonic() - begun

    (first, error, length), took_s = run(main())
    assert (first, length) == ((3, 1), 3)
    assert isinstance(error, ZeroDivisionError)
    assert 0 < took_s < 0.1


def test_a_thread_may_run_a_loop_of_its_own_meanwhile() -> None:
    async def later(text: str) -> str:
        await asyncio.sleep(1)
        return text

    def command() -> list[str]:
        time.sleep(1)
        return [asyncio.run(later("first")), asyncio.run(later("second"))]

    async def main() -> None:
        begun = time.monotonic()
        thread = asyncio.ensure_future(asyncio.to_thread(command))
        await asyncio.sleep(2.5)
        assert not thread.done()
        assert await thread == ["first", "second"]
        assert time.monotonic() - begun == pytest.approx(3, abs=0.1)

    run(main())


def test_a_killed_process_never_runs_again() -> None:
    seen: list[str] = []

    async def serve() -> None:
        try:
            while True:
                seen.append("serves")
                await asyncio.sleep(1)
        finally:
            seen.append("cleaned up")

    async def main(loop: VirtualLoop) -> bool:
        with loop.machine("10.0.0.1", process=True) as process:
            task = asyncio.create_task(serve())
            loop.call_later(5, seen.append, "timer")
        await asyncio.sleep(2.5)
        loop.kill(process)
        count = len(seen)
        await asyncio.sleep(10)
        assert len(seen) == count == 3
        return loop.is_killed(task)

    assert run_with(main)


def test_files_of_a_killed_process_are_not_closed_when_the_world_ends() -> None:
    """Of asynchronous generators too: the router would give back its leases after its death, and those that
    wait meanwhile would complain in whichever test is the next."""
    released: list[str] = []

    @contextlib.asynccontextmanager
    async def opened(name: str) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.sleep(1)
            released.append(name)

    async def serve(name: str) -> None:
        async with opened(name):
            await asyncio.Event().wait()

    async def main(loop: VirtualLoop) -> None:
        with loop.machine("10.0.0.1", process=True) as process:
            tasks.append(asyncio.create_task(serve("killed")))
        with loop.machine("10.0.0.2", process=True):
            tasks.append(asyncio.create_task(serve("lives")))
        await asyncio.sleep(1)
        loop.kill(process)

    tasks: list[asyncio.Task[None]] = []
    run_with(main)
    assert released == ["lives"]


@pytest.mark.parametrize("end", [run, run_real])
def test_tasks_that_begin_at_the_end_end_too(
    end: Callable[[Coroutine[Any, Any, None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else their context managers say at some later collection that their generators do not stop."""
    ended: list[str] = []
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)

    @contextlib.asynccontextmanager
    async def opened(name: str) -> AsyncIterator[None]:
        try:
            yield
        finally:
            ended.append(name)

    async def held(name: str) -> None:
        async with opened(name):
            try:
                await asyncio.Event().wait()
            finally:
                if name == "first":
                    tasks.append(asyncio.ensure_future(held("second")))

    tasks: list[asyncio.Future[None]] = []

    async def main() -> None:
        tasks.append(asyncio.ensure_future(held("first")))
        await asyncio.sleep(0)

    end(main())
    assert all(task.cancelled() for task in tasks)
    tasks.clear()
    gc.collect()
    assert (ended, unraisable) == (["first", "second"], [])


def test_calls_of_the_busiest_turn_are_counted() -> None:
    def step() -> None: ...

    async def main(loop: VirtualLoop) -> int:
        with loop.count_calls():
            await asyncio.sleep(1)
            for _ in range(1000):
                step()
            with loop.not_counted():
                for _ in range(5000):
                    step()
            await asyncio.sleep(1)
        return loop.calls_max

    calls = run_with(main)
    assert 1000 <= calls < 1050
    assert run_with(main) == calls


_PRINTS_A_DIGEST = """
from tests.world import seams
seams.install()
from tests.world.test_net import busy_world
print(seams.run_with(busy_world, 3))
"""


def test_a_seed_is_the_same_run_byte_for_byte_in_every_process() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", _PRINTS_A_DIGEST],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1
