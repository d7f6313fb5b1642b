"""Processes of a vLLM environment that start in seconds, forked from one that has imported vLLM already.

``popen`` and ``run`` do what ``subprocess`` does for ``python -m MODULE WORD...``. There is one fork server
(``fork_server.py``) for each interpreter; it ends, and kills what still runs, when this process ends.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.support.paths import ROOT

IMPORT_DEADLINE_S = 300.0
_ANSWER_BYTES_MAX = 1 << 12
_POLL_INTERVAL_S = 0.05


class Forked:
    """As ``subprocess.Popen``; the process leads a group of its own, for ``os.killpg(process.pid, ...)``."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask({"poll": self.pid})["status"]
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_POLL_INTERVAL_S)
        return status


class ForkServer:
    """The process that forks, and the socket to it; threads may share it."""

    def __init__(self, python: str) -> None:
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(IMPORT_DEADLINE_S)
        # Strings hash alike in all processes; a request's environment says what vLLM hashes blocks from.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        environment |= {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_TARGET_DEVICE": "cpu"}
        environment.pop("PYTHONPATH", None)
        program = Path(__file__).with_name("fork_server.py")
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as this process
        with theirs:
            self._process = subprocess.Popen(
                [python, str(program), str(theirs.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C leaves it the time to kill what it forked
            )
        self._receive()

    def ask(self, request: Mapping[str, Any], files: Sequence[int] = ()) -> dict[str, Any]:
        with self._lock:
            socket.send_fds(self._channel, [json.dumps(request).encode()], files)
            return self._receive()

    def _receive(self) -> dict[str, Any]:
        with contextlib.suppress(ConnectionError):
            if answer := self._channel.recv(_ANSWER_BYTES_MAX):
                return dict(json.loads(answer))
        self._log.seek(0)
        raise RuntimeError(f"vLLM cannot be imported:\n{self._log.read()[-6000:].decode(errors='replace')}")


@functools.cache
def fork_server(python: str) -> ForkServer:
    return ForkServer(python)


def popen(
    python: str,
    words: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    stdout: IO[bytes],
    stderr: IO[bytes],
) -> Forked:
    """Start ``python -m WORDS...``, with no standard input."""
    server = fork_server(python)
    request = {"run": list(words), "cwd": str(cwd), "env": dict(env)}
    with open(os.devnull, "rb") as nothing:
        answer = server.ask(request, [nothing.fileno(), stdout.fileno(), stderr.fileno()])
    return Forked(server, answer["pid"])


def driven(python: str, *words: str, timeout: float, **environment: str) -> list[str]:
    """Lines that ``python -m WORDS...`` prints, offline; its own error is in the assertion if it fails."""
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    quiet |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", **environment}
    done = run(python, words, cwd=ROOT, env=os.environ | quiet, timeout=timeout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout.splitlines()


def run(
    python: str, words: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """``python -m WORDS...`` to its end: status and output. Raises ``TimeoutExpired``, the process killed."""
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complained:
        process = popen(python, words, cwd=cwd, env=env, stdout=said, stderr=complained)
        try:
            process.wait(timeout)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
        for file in (said, complained):
            file.seek(0)
        return subprocess.CompletedProcess(
            [python, "-m", *words],
            process.returncode or 0,
            said.read().decode(errors="replace"),
            complained.read().decode(errors="replace"),
        )
