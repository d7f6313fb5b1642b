"""A run of tests ends by itself, whatever hangs or dies, names the test, and runs every other one once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import waiting
from tests.support.waiting import run, until, wait_until
from tests.support.workers import Ranges

_HANGS = """
import pytest

from tests.support import hangs

hangs.GRACE_S = 1.0

def test_before(): pass

@pytest.mark.timeout(0.5)
@pytest.mark.parametrize("how", ["lock-free"])
def test_hangs(how):
    import signal, time
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(600)
"""


def test_a_server_left_open_fails_the_test_and_the_loop_closes() -> None:
    async def main() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        left.append(server)

    left: list[asyncio.Server] = []
    with pytest.raises(ResourceWarning, match="TCPServer"):
        run(main())


def test_deadlines_grow_with_the_load_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "WAIT_S", 0.02)
    looks = 0

    def third() -> bool:
        nonlocal looks
        looks += 1
        return looks > 20  # at the earliest after 0.1 s

    monkeypatch.setattr(waiting, "patience", lambda: 1.0)
    with pytest.raises(AssertionError, match="never happened: third"):
        run(until(third, "third"))
    looks = 0
    monkeypatch.setattr(waiting, "patience", lambda: 10_000.0)
    run(until(third, "third"))


def test_the_limit_of_a_whole_test_grows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "patience", lambda: 10_000.0)
    run(asyncio.sleep(0.2), wait_s=0.1)
    monkeypatch.setattr(waiting, "patience", lambda: 1.0)
    with pytest.raises(TimeoutError):
        run(asyncio.sleep(60.0), wait_s=0.1)


@contextlib.contextmanager
def run_of(tests: str, folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """pytest in a process of its own, with this repository's conftest."""
    root = Path(__file__).parents[1]
    path = root / "tests" / "support" / f"run_of_{os.getpid()}_{folder.name}.py"
    path.write_text(tests)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", *options, str(path)]
    environ = {**os.environ, "FOLDER": str(folder)}
    try:
        with subprocess.Popen(
            words, cwd=root, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            yield process
    finally:
        path.unlink()


@pytest.mark.process
@pytest.mark.parametrize("options", [(), ("--workers", "1")])
def test_what_no_signal_interrupts_ends_by_itself_with_its_name(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    with run_of(_HANGS, tmp_path, *options) as process:
        output = process.communicate(timeout=200)[0]
    assert process.returncode != 0
    assert "test_hangs[lock-free] hangs; the process ends" in output
    assert "in test_hangs" in output
    if options:
        assert "crashed with status 1 while running" in output
        assert "1 failed, 1 passed" in output


_MIXED = """
import os, sys, threading, time, warnings
import pytest

FOLDER = os.environ["FOLDER"]

@pytest.fixture(scope="module", autouse=True)
def marked():
    open(f"{FOLDER}/set-up-{os.getpid()}", "w").close()
    yield
    open(f"{FOLDER}/torn-down-{os.getpid()}", "w").close()

@pytest.mark.parametrize("number", range(12))
def test_passes(number, tmp_path):
    print("said by", number)
    threading.Thread(target=time.sleep, args=(600,)).start()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "one").touch()
    with open(f"{FOLDER}/ran-{number}", "x"): pass

def test_dies(): os._exit(7)

def test_fails():
    print("said before")
    assert 1 == 2

@pytest.mark.filterwarnings("default")
def test_warns(): warnings.warn("a careful word")

def test_skips(): pytest.skip("for a reason")
"""


@pytest.mark.process
def test_workers_run_every_test_once_and_tell_all_that_pytest_tells(tmp_path: Path) -> None:
    with run_of(_MIXED, tmp_path, "--workers", "3") as process:
        output = process.communicate(timeout=200)[0]
    assert process.returncode == 1
    assert "2 failed, 13 passed, 1 skipped, 1 warning" in output
    assert "crashed with status 7 while running" in output
    assert "said before" in output
    assert "said by" not in output
    assert "UserWarning: a careful word" in output
    assert "for a reason" in output
    assert len(list(tmp_path.glob("ran-*"))) == 12
    set_up, torn_down = (len(list(tmp_path.glob(f"{kind}-*"))) for kind in ("set-up", "torn-down"))
    assert set_up - torn_down == 1  # the worker that died


_WAITS = """
import os, time
import pytest

@pytest.fixture
def torn_down():
    yield
    open(f"{os.environ['FOLDER']}/torn-down-{os.getpid()}", "w").close()

@pytest.mark.parametrize("number", range(2))
def test_waits(number, torn_down):
    open(f"{os.environ['FOLDER']}/waits-{os.getpid()}", "w").close()
    time.sleep(600)
"""


@pytest.mark.process
def test_an_interrupted_run_tears_down_and_leaves_no_worker(tmp_path: Path) -> None:
    with run_of(_WAITS, tmp_path, "--workers", "2") as process:
        wait_until(lambda: len(list(tmp_path.glob("waits-*"))) == 2, "both wait")
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=200)[0]  # ends when no process holds the pipe
    assert "no tests ran" in output
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    waited, torn = (
        {path.name.split("-")[-1] for path in tmp_path.glob(f"{kind}-*")} for kind in ("waits", "torn")
    )
    assert waited == torn


@given(st.integers(0, 40), st.integers(1, 5), st.randoms(use_true_random=False))
def test_every_test_is_taken_once_whoever_asks(tests: int, workers: int, random: Random) -> None:
    taken: list[int] = []
    busy = set(range(workers))
    with contextlib.closing(Ranges(tests, workers)) as ranges:
        while busy:
            worker, others = random.choice(sorted(busy)), random.random() < 0.5
            test = ranges.take(worker, others=others)
            if test is not None:
                taken.append(test)
                ranges.hold(worker, test, None)
                assert ranges.held(worker) == (test, None)
            elif others:
                busy.remove(worker)
    assert sorted(taken) == list(range(tests))


def test_a_cleared_list_has_no_test_for_anybody() -> None:
    with contextlib.closing(Ranges(9, 2)) as ranges:
        ranges.clear()
        assert [ranges.take(worker) for worker in (0, 1)] == [None, None]
