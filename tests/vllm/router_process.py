"""Runs ``kvatlas serve`` in front of given engines as a process of its own, and always stops it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.paths import ROOT
from tests.support.ports import free_ports
from tests.support.processes import standing_still

_START_DEADLINE_S = 240.0
_STOP_DEADLINE_S = 120.0
_POLL_INTERVAL_S = 0.01


class RouterProcess:
    """``with RouterProcess(...) as router``: ``router.base_url`` serves once every feed is READY."""

    def __init__(
        self,
        engines: Sequence[str],
        tokenizer: Path | None,
        *,
        log: Path,
        options: Sequence[str] = (),
    ) -> None:
        """``engines`` as ``--engine`` takes them; ``options``: further words of the command line."""
        port, ops_port = free_ports(2)
        self.base_url = f"http://127.0.0.1:{port}"
        self.ops_url = f"http://127.0.0.1:{ops_port}"
        self.log = log
        self._command = [
            sys.executable,
            "-m",
            "kvatlas",
            "serve",
            "--expose-decision",
            "--ops-port",
            str(ops_port),
        ]
        self._command += ["--port", str(port)]
        if tokenizer is not None:
            self._command += ["--tokenizer", str(tokenizer)]
        for engine in engines:
            self._command += ["--engine", engine]
        self._command += options
        self._process: subprocess.Popen[bytes] | None = None

    def engines(self) -> list[dict[str, Any]]:
        """Answer of ``GET /kvatlas/engines``."""
        with urllib.request.urlopen(f"{self.ops_url}/kvatlas/engines") as response:
            answer: list[dict[str, Any]] = json.load(response)
        return answer

    def receipts(self) -> list[dict[str, Any]]:
        """Answer of ``GET /kvatlas/receipts``: the latest ones."""
        with urllib.request.urlopen(f"{self.ops_url}/kvatlas/receipts") as response:
            answer: list[dict[str, Any]] = json.load(response)
        return answer

    def explain(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer of ``POST /kvatlas/explain`` for this request."""
        headers = {"content-type": "application/json"}
        data = json.dumps(body).encode()
        asked = urllib.request.Request(f"{self.ops_url}/kvatlas/explain", data, headers)
        with urllib.request.urlopen(asked) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def metric(self, name: str) -> float:
        """A metric without labels."""
        with urllib.request.urlopen(f"{self.ops_url}/metrics") as response:
            lines = response.read().decode().splitlines()
        return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])

    def standing_still(self) -> AbstractContextManager[None]:
        """The process gets no time meanwhile."""
        return standing_still(self._process.send_signal)

    def wait_until_seen(self, engine_id: str, seq: int, *, deadline_s: float = 120.0) -> None:
        """Block until the router has applied batch ``seq`` of this engine."""

        def seen() -> bool:
            states = {engine["engine"]: engine["feed"] for engine in self.engines()}
            last_seq = states[engine_id]["last_seq"]
            return last_seq is not None and last_seq >= seq

        try:
            self._wait(seen, f"batch {seq} of {engine_id} to be applied", deadline_s)
        except RuntimeError as error:
            error.add_note(str(self.engines()))
            raise

    def wait_until_up(self, engine_id: str, *, deadline_s: float = 240.0) -> None:
        """Block until the router knows that this engine answers, and gives it requests."""

        def up() -> bool:
            known = {engine["engine"]: engine for engine in self.engines()}
            return bool(known[engine_id]["up"] and known[engine_id]["available"])

        self._wait(up, f"{engine_id} to be up", deadline_s)

    def _wait(self, condition: Callable[[], bool], what: str, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        while not condition():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{what}: not in time; the router's log ends:\n{self.log_tail()}")
            time.sleep(_POLL_INTERVAL_S)

    def _ready(self) -> bool:
        try:
            return all(engine["feed_state"] == "ready" for engine in self.engines())
        except OSError:
            return False  # not listening yet

    def log_tail(self) -> str:
        """The last lines the router wrote."""
        return self.log.read_bytes()[-6000:].decode(errors="replace")

    def __enter__(self) -> Self:
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait(self._ready, "all feeds to be READY", _START_DEADLINE_S)
        except BaseException:
            self._stop()
            raise
        return self

    def _stop(self) -> int:
        process, self._process = self._process, None
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(timeout=_STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        status = self._stop()
        if value is None:
            assert status == 0, f"the router ended with status {status}:\n{self.log_tail()}"
