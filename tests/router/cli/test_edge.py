"""Every end of a command is a sentence: status, one line on stderr, no traceback. In process."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.publisher.simulator.settings import EngineSettings
from kvatlas.router import cli
from kvatlas.router.__main__ import run
from tests.support.paths import ROOT
from tests.support.ports import free_port


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of this machine on which somebody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = run(words)
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out
    return status, said.err


def ends_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Every command raises ``error``."""

    def call(words: object) -> int:
        raise error

    monkeypatch.setattr(cli, "call", call)


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("num_blocks=0", "num_blocks = 0: expected 1 to 16777216"),
        ("num_blocks=-5", "num_blocks = -5: expected 1 to"),
        ("block_size=0", "block_size = 0: expected 1 to"),
        ("block_size=big", "--set 'block_size=big': expected a whole number"),
        ("max_num_seqs=0", "max_num_seqs = 0: expected 1 to"),
        ("retention_interval=-1", "retention_interval = -1: expected 0 to"),
        ("retention_interval=7", "retention interval 7 has no effect without a window or Mamba group"),
        ("prefill_s_per_token=-1", "prefill_s_per_token = -1.0: expected 0 to 3600"),
        ("decode_s_per_token=nan", "decode_s_per_token = nan: expected 0 to 3600"),
        ("events_port=70000", "events_port = 70000: expected 0 to 65535"),
        ("groups=gpt-9", "unknown group preset 'gpt-9'; known: gemma3-like"),
        ("hash_algo=md5", "hash_algo = 'md5': expected one of sha256"),
        ("tokenizer_dir=/nowhere", "tokenizer_dir: no file /nowhere/tokenizer.json"),
    ],
)
def test_invalid_engine_settings(setting: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = told(capsys, "engine", "--set", setting)
    assert (status, said.count("\n")) == (2, 1)
    assert complaint in said


@pytest.mark.parametrize("port", ["-1", "70000"])
def test_an_invalid_port(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = told(capsys, "engine", "--port", port)
    assert (status, said) == (2, f"kvatlas: engine: port = {port}: expected 0 to 65535\n")


def test_an_invalid_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    status, said = told(capsys, "engine", "--set", f"tokenizer_dir={tmp_path}")
    assert status == 2
    assert f"tokenizer_dir: {tmp_path}/tokenizer.json: " in said


def test_a_taken_port_of_an_engine_is_named(taken: int, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = told(capsys, "engine", "--port", str(taken))
    assert (status, said) == (1, f"kvatlas: cannot listen on 127.0.0.1:{taken}: Address already in use\n")
    status, said = told(capsys, "engine", "--set", f"events_port={taken}")
    assert status == 1
    assert f"Address already in use (addr='tcp://127.0.0.1:{taken}')" in said


@pytest.mark.real  # ports of the kernel
async def test_an_engine_that_could_not_start_leaves_no_port_taken(taken: int) -> None:
    port = free_port()
    with pytest.raises(OSError, match="event subscribers"):
        await SimulatedEngine(EngineSettings(port=port, events_port=taken)).start()
    engine = SimulatedEngine(EngineSettings(port=port))
    await engine.start()
    await engine.stop()


@pytest.mark.parametrize("path", ["/proc/log.jsonl", "/dev/null/log.jsonl", "x" * 300])
def test_a_usage_record_that_cannot_be_written(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where permissions would allow it: /proc takes no files from anybody."""
    words = ["serve", "--engine", "http://h", "--check-config", "--set", f"usage.path={path}"]
    status, said = told(capsys, *words)
    assert status == 2
    assert f"usage.path = {path!r}: " in said


def test_checking_the_usage_record_leaves_nothing_behind(tmp_path: Path) -> None:
    words = ["serve", "--engine", "http://h", "--check-config", "--set"]
    assert run([*words, f"usage.path={tmp_path}/log.jsonl"]) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["cyclopts", "rich", "uvicorn", "tokenizers"])
def test_a_wheel_without_dependencies_says_what_to_install(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in {"kvatlas", module}]:
        if name != "kvatlas.router.__main__":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    status, said = told(capsys, "demo", "--seconds", "-1")
    assert (status, said) == (
        1,
        (
            f"kvatlas: this command needs the Python module {module!r}, which is not installed; "
            "in a checkout of kvatlas: python -m pip install .\n"
        ),
    )


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/root/x"), 1, "/root/x: Permission denied"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "No space left on device"),
        (ExceptionGroup("two", [ExceptionGroup("one", [OSError("no route")])]), 1, "no route"),
        (ConnectionResetError(errno.ECONNRESET, "reset by peer"), 1, "reset by peer"),
        (BrokenPipeError(errno.EPIPE, "of some socket"), 1, "of some socket"),
        (ZeroDivisionError("oops"), 1, "unexpected ZeroDivisionError: oops (a bug; KVATLAS_TRACEBACK=1"),
        (ModuleNotFoundError("none", name="kvatlas.router.nonsense"), 1, "unexpected ModuleNotFound"),
        (MemoryError(), 1, "not enough memory"),
    ],
)
def test_unexpected_errors_are_one_line(
    error: BaseException,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ends_with(monkeypatch, error)
    got, line = told(capsys, "top")
    assert (got, line.count("\n")) == (status, 1)
    assert line.startswith(f"kvatlas: {said}")


def test_the_traceback_is_there_for_those_who_ask(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVATLAS_TRACEBACK", "1")
    ends_with(monkeypatch, ZeroDivisionError("oops"))
    assert run(["top"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_is_silent_and_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends_with(monkeypatch, KeyboardInterrupt())
    assert told(capsys, "demo") == (130, "")


def into(opened: Callable[[], int], *words: str) -> subprocess.CompletedProcess[str]:
    """A command whose standard output is what ``opened`` gives."""
    command = [sys.executable, "-m", "kvatlas", *words]
    out = opened()
    try:
        return subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(out)


@pytest.mark.process
def test_an_output_that_is_gone_or_full() -> None:
    """As real processes: what is left in Python's buffer is written at its very end."""

    def without_reader() -> int:
        reading, writing = os.pipe()
        os.close(reading)
        return writing

    gone = into(without_reader, "serve", "--print-config")
    assert (gone.returncode, gone.stderr) == (1, "")
    full = into(lambda: os.open("/dev/full", os.O_WRONLY), "serve", "--print-config")
    assert (full.returncode, full.stderr) == (1, "kvatlas: No space left on device\n")


def test_help_of_serve_shows_defaults_and_choices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert run(["serve", "--help"]) == 0
    said = capsys.readouterr().out
    for words in (
        "(default 127.0.0.1)",
        "(default 8000)",
        "kvatlas, least-load, round-robin, hash (default kvatlas)",
        "debug, info, warning, error (default info)",
    ):
        assert words in said


def test_completion_is_installed_for_the_shell_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "kvatlas.fish"
    assert run(["--install-completion", "--shell", "fish", "--output", str(path)]) == 0
    capsys.readouterr()
    script = path.read_text()
    for word in ("simulate", "check-config", "complete -c kvatlas"):
        assert word in script
