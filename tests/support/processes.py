"""Router replicas and simulated engines as real processes, for tests of faults."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import IO, Any

import msgspec

from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR, EngineSettings
from tests.support.ports import free_port
from tests.support.waiting import WAIT_S, patience


@contextlib.contextmanager
def standing_still(send_signal: Callable[[int], object]) -> Iterator[None]:
    """A process, or a group of them, gets no time meanwhile; what is sent to it waits in its sockets."""
    send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        send_signal(signal.SIGCONT)


def ended(process: subprocess.Popen[bytes]) -> int:
    """Its exit status, once it has ended; killed where it does not, so that no failure leaves it running."""
    try:
        return process.wait(WAIT_S * patience())
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


class EngineProcess:
    """One simulated engine in a process of its own, always at the same address."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = msgspec.structs.replace(settings, port=free_port())
        self.base_url = f"http://127.0.0.1:{self.settings.port}"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Until it listens."""
        words = [
            "-m",
            "kvatlas.router.simulation.demo.engines",
            msgspec.json.encode([self.settings]).decode(),
        ]
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(sys.executable, *words, stdin=pipe, stdout=pipe)
        assert await self._process.stdout.readline(), "the engine did not start; its error is above"

    async def terminate(self) -> None:
        """Close its input, and wait: it aborts what runs, as SIGTERM makes vLLM 0.32 do."""
        if self._process is not None and self._process.returncode is None:
            self._process.stdin.close()
            await self._process.wait()

    async def kill(self) -> None:
        """kill -9."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def standing_still(self) -> AbstractContextManager[None]:
        """It gets no time meanwhile."""
        return standing_still(self._process.send_signal)


class Replica:
    """One ``kvatlas serve`` process. ``lines`` are its log records so far."""

    def __init__(self, name: str, engines: list[str], index: str, *settings: str) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        ops_port = free_port()
        self.ops_url = f"http://127.0.0.1:{ops_port}"
        self.lines: list[dict[str, Any]] = []
        self._command = [sys.executable, "-m", "kvatlas", "serve", "--port", str(self.port)]
        self._command += ["--ops-port", str(ops_port)]
        self._command += ["--tokenizer", str(DEMO_TOKENIZER_DIR), "--expose-decision"]
        for engine in engines:
            self._command += ["--engine", engine]
        options = [
            "server.log_format=json",
            f"index.replica={name}",
            "fleet.poll_interval_s=0.2",
            *settings,
        ]
        for option in options:
            self._command += ["--set", option]
        self._environ = {**os.environ, "KVATLAS_INDEX_URL": index}
        self.process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, env=self._environ, stderr=subprocess.PIPE)
        assert self.process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        self._reader.start()

    def _read(self, stream: IO[bytes]) -> None:
        for line in stream:
            try:
                self.lines.append(msgspec.json.decode(line))
            except msgspec.DecodeError:
                self.lines.append({"event": line.decode(errors="replace").rstrip(), "raw": True})

    def said(self, pattern: str) -> bool:
        """Whether a log record of this event came."""
        return any(re.search(pattern, str(line.get("event"))) for line in self.lines)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self._ended()

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        return self._ended()

    def _ended(self) -> int:
        status = ended(self.process)
        if self._reader is not None:
            self._reader.join()
        self.process.stderr.close()
        return status


@contextlib.contextmanager
def replicas(count: int, engines: list[str], index: str, *settings: str) -> Iterator[list[Replica]]:
    """``count`` replicas ``r0``, ``r1``, ... of one fleet; stopped at the end, whatever state they are in."""
    made = [Replica(f"r{number}", engines, index, *settings) for number in range(count)]
    try:
        for replica in made:
            replica.start()
        yield made
    finally:
        for replica in made:
            if replica.process is not None and replica.process.returncode is None:
                replica.stop()
