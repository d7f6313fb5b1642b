"""Real processes for fault tests: Redis or Valkey servers, router replicas, simulated engines."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec

from publisher.engine import DEMO_TOKENIZER_DIR
from tests.support.redis_servers import any_program

START_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """One server process on a port of its own, which it keeps over restarts."""

    def __init__(self, *options: str, keep_data: bool = False) -> None:
        self.binary = any_program()
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="kvatlas-redis-"))
        self.options = [*options, *(["--appendonly", "yes", "--appendfsync", "always"] if keep_data else [])]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start, and wait until it answers."""
        command = [self.binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--dir", str(self.folder), "--loglevel", "warning", *self.options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + START_S
        while not self._answers():
            assert self.process.poll() is None, "the server ended at once"
            assert time.monotonic() < end, "the server does not answer"
            time.sleep(0.01)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as link:
                link.sendall(b"PING\r\n")
                return link.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def command(self, *args: str) -> bytes:
        """One command, over a connection of its own."""
        request = b"*%d\r\n" % len(args) + b"".join(b"$%d\r\n%s\r\n" % (len(a), a.encode()) for a in args)
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as link:
            link.sendall(request)
            answer = link.recv(1 << 16)
        assert not answer.startswith(b"-"), answer
        return answer

    def freeze(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self.process is not None and self.process.poll() is None:
            self.thaw()
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class Replica:
    """One ``kvatlas serve`` process. ``lines`` are its log records so far."""

    def __init__(self, name: str, engines: list[str], index: str, *settings: str) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        ops_port = free_port()
        self.ops_url = f"http://127.0.0.1:{ops_port}"
        self.lines: list[dict[str, Any]] = []
        self._command = [sys.executable, "-m", "router", "serve", "--port", str(self.port)]
        self._command += ["--ops-port", str(ops_port)]
        self._command += ["--tokenizer", str(DEMO_TOKENIZER_DIR), "--expose-decision"]
        for engine in engines:
            self._command += ["--engine", engine]
        options = [
            "server.log_format=json",
            f"index.replica={name}",
            "fleet.poll_interval_s=0.2",
            "fleet.poll_down_interval_s=0.1",
            "fleet.gauge_interval_s=0.2",
            *settings,
        ]
        for option in options:
            self._command += ["--set", option]
        self._environ = {**os.environ, "KVATLAS_INDEX_URL": index}
        self.process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None

    def use_index(self, url: str) -> None:
        """Another way to the index, for a replica not started yet."""
        self._environ["KVATLAS_INDEX_URL"] = url

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
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()
        self._ended()

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        return self._ended()

    def _ended(self) -> int:
        assert self.process is not None
        assert self.process.stderr is not None
        try:
            status = self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        if self._reader is not None:
            self._reader.join(10)
        self.process.stderr.close()
        return status


@contextlib.contextmanager
def replicas(
    count: int, engines: list[str], index: str, *settings: str, first_index: str | None = None
) -> Iterator[list[Replica]]:
    """``count`` replicas ``r0``, ``r1``, ... of one fleet; stopped at the end, whatever state they are in."""
    made = [Replica(f"r{number}", engines, index, *settings) for number in range(count)]
    if first_index is not None:
        made[0].use_index(first_index)
    try:
        for replica in made:
            replica.start()
        yield made
    finally:
        for replica in made:
            if replica.process is not None and replica.process.returncode is None:
                replica.stop()
