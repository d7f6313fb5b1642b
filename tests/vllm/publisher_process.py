"""vLLM's own ``ZmqEventPublisher`` in a process of vLLM's environment (``vllm_event_publisher.py``)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tests.support.paths import ROOT
from tests.support.ports import free_port


class VllmPublisher:
    """The process; one publisher at a time in it. Calls block until they are carried out."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.endpoint = ""
        self.replay_endpoint = ""

    def call(self, command: str, argument: Any = None) -> Any:
        self._process.stdin.write(json.dumps([command, argument]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def open(self, **arguments: Any) -> None:
        ports = [free_port(), free_port()]
        defaults = {"endpoint": f"tcp://*:{ports[0]}", "replay_endpoint": f"tcp://*:{ports[1]}"}
        self.call("open", {"data_parallel_rank": 0, **defaults, **arguments})
        self.endpoint, self.replay_endpoint = (f"tcp://127.0.0.1:{port}" for port in ports)

    def restart(self) -> None:
        """A new publisher, from seq 0, on the same addresses."""
        self.call("restart")

    def close(self) -> None:
        self.call("close")


P = TypeVar("P", bound=VllmPublisher)


@contextmanager
def publisher_process(python: str, kind: type[P]) -> Iterator[P]:
    """``python``: an interpreter that has vLLM; ``kind``: what to make of the process."""
    with subprocess.Popen(
        [python, "-m", "tests.vllm.vllm_event_publisher"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr"},
    ) as process:
        yield kind(process)
        process.stdin.close()
