"""A run of tests ends by itself, whatever hangs, and names the test."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import waiting
from tests.support.paths import ROOT
from tests.support.waiting import run_real, until

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
        run_real(main())


def test_deadlines_grow_with_the_load_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "WAIT_S", 0.02)
    looks = 0

    def third() -> bool:
        nonlocal looks
        looks += 1
        return looks > 20  # at the earliest after 0.1 s

    monkeypatch.setattr(waiting, "patience", lambda: 1.0)
    with pytest.raises(AssertionError, match="never happened: third"):
        run_real(until(third, "third"))
    looks = 0
    monkeypatch.setattr(waiting, "patience", lambda: 10_000.0)
    run_real(until(third, "third"))


def test_the_limit_of_a_whole_test_grows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "patience", lambda: 10_000.0)
    run_real(asyncio.sleep(0.2), wait_s=0.1)
    monkeypatch.setattr(waiting, "patience", lambda: 1.0)
    with pytest.raises(TimeoutError):
        run_real(asyncio.sleep(60.0), wait_s=0.1)


@pytest.mark.process
@pytest.mark.parametrize("options", [(), ("-n", "1")])
def test_a_hang_that_no_signal_interrupts_is_ended_and_named(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    path = tmp_path / "test_hanging.py"
    path.write_text(_HANGS)
    words = ["-q", "-p", "no:randomly", "-p", "tests.conftest", "-c", "pyproject.toml", "--rootdir", "."]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *options, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert "test_hangs[lock-free] hangs; the process ends" in output
    assert "in test_hangs" in output
    if options:
        assert "crashed while running" in output
