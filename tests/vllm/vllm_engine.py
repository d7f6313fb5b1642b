"""Starts a real vLLM server on the CPU, with KV events on, and always stops it.

One context manager per engine. Ports are free loopback ports; the server runs in a process group of its
own, which is killed whole at the end, whatever happened. Its output goes to a file whose tail is in the
error when the server does not come up.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.ports import free_ports
from tests.support.processes import standing_still
from tests.vllm.forked import Forked, popen

START_DEADLINE_S = 600.0
"""A server needs about 40 s of CPU, a forked one 5 s; several start side by side on slow, busy machines."""
# vLLM narrows float32 to bfloat16 by itself. There the last place of a logit is 1.2e-4, and some kernels need
# instructions that virtual machines may lack: short prompts end the engine (SIGILL).
_DTYPE = "float32"
_STOP_DEADLINE_S = 20.0
_POLL_INTERVAL_S = 0.5
_LOG_TAIL_BYTES = 6000


class VllmServer:
    """``python -m WORDS...`` in vLLM's environment, which serves ``base_url``. Entering waits until it is
    healthy; call ``start`` first on several to let them come up side by side."""

    def __init__(
        self,
        python: str,
        words: list[str],
        *,
        base_url: str,
        log: Path,
        environment: dict[str, str] | None = None,
        forked: bool = True,
    ) -> None:
        self.base_url = base_url
        self.log = log
        self._python = python
        self._words = words
        self._environment = environment or {}
        self._forked = forked
        self._process: subprocess.Popen[bytes] | Forked | None = None

    @property
    def started(self) -> bool:
        """It was launched, and not stopped or killed since."""
        return self._process is not None

    def start(self) -> None:
        """Launch the server without waiting for it; a second call does nothing."""
        if self._process is not None:
            return
        environment = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
        }
        environment.pop("PYTHONPATH", None)
        environment |= self._environment
        with self.log.open("wb") as output:
            if self._forked:
                folder = self.log.parent
                self._process = popen(
                    self._python, self._words, cwd=folder, env=environment, stdout=output, stderr=output
                )
            else:
                self._process = subprocess.Popen(
                    [self._python, "-m", *self._words],
                    cwd=self.log.parent,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def wait_until_healthy(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Block until ``GET /health`` is 200. Raises ``RuntimeError`` with the end of the server's log."""
        assert self._process is not None, "start() comes first"
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"vLLM ended with status {self._process.returncode}:\n{self.log_tail()}")
            if answers(f"{self.base_url}/health"):
                return
            time.sleep(_POLL_INTERVAL_S)
        raise RuntimeError(f"vLLM was not healthy after {deadline_s:.0f} s:\n{self.log_tail()}")

    def stop(self) -> None:
        """End the server and all its children, politely first."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(timeout=_STOP_DEADLINE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def standing_still(self) -> contextlib.AbstractContextManager[None]:
        """The server and all its children are stopped meanwhile, and go on afterwards."""
        assert self._process is not None, "start() comes first"
        return standing_still(partial(os.killpg, self._process.pid))

    def processes(self) -> tuple[int, int]:
        """Ids of the API server and of the core behind it, of a forked engine."""
        assert isinstance(self._process, Forked), "start() comes first"
        children: dict[int, list[tuple[int, int]]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                told = stat.read_text().rpartition(")")[2].split()
                parent, group, started = int(told[1]), int(told[2]), int(told[19])
                program = (stat.parent / "cmdline").read_bytes()
                if group == self._process.pid and b"resource_tracker" not in program:
                    children.setdefault(parent, []).append((started, int(stat.parent.name)))
        # The first ones: both may have others, for a moment.
        server = min(children[self._process.pid])[1]
        return server, min(children[server])[1]

    def kill(self) -> None:
        """``kill -9`` of the server and all its children, as when the system runs out of memory."""
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def log_tail(self) -> str:
        """The last lines the server wrote."""
        return self.log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


class VllmEngine(VllmServer):
    """``with VllmEngine(...) as engine``: ``engine.base_url`` answers, ``engine.events`` publishes.

    ``num_gpu_blocks`` is the size of the whole KV pool in blocks. ``forked=False`` starts
    the server as users do, for tests of what happens while a process imports vLLM.
    """

    def __init__(
        self,
        python: str,
        model: Path,
        *,
        num_gpu_blocks: int,
        log: Path,
        served_name: str = "tiny",
        extra_args: tuple[str, ...] = (),
        buffer_steps: int = 10_000,
        environment: dict[str, str] | None = None,
        forked: bool = True,
    ) -> None:
        self._buffer_steps = buffer_steps
        http, events, replay = free_ports(3)
        self.events = f"tcp://127.0.0.1:{events}"
        self.replay = f"tcp://127.0.0.1:{replay}"
        words = [
            "vllm.entrypoints.openai.api_server",
            "--model", str(model), "--served-model-name", served_name,
            "--host", "127.0.0.1", "--port", str(http),
            "--load-format", "dummy", "--enforce-eager", "--max-num-seqs", "8", "--dtype", _DTYPE,
            "--no-disable-hybrid-kv-cache-manager", "--enable-prompt-tokens-details",
            "--num-gpu-blocks-override", str(num_gpu_blocks),
            "--kv-events-config", json.dumps(self._kv_events_config()),
            *extra_args,
        ]  # fmt: skip
        base_url = f"http://127.0.0.1:{http}"
        super().__init__(python, words, base_url=base_url, log=log, environment=environment, forked=forked)

    def _kv_events_config(self) -> dict[str, object]:
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.events.replace("127.0.0.1", "*"),
            "replay_endpoint": self.replay.replace("127.0.0.1", "*"),
            "topic": "kv",
            "buffer_steps": self._buffer_steps,
        }

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Prompts wait in the scheduler meanwhile. What resumes it goes the same way as they did, so all that
        ``added`` counts are there when it chooses the first one, however slow the machine is."""
        self._post("/pause?mode=keep")
        try:
            yield
        finally:
            self._post("/resume")

    @property
    def added(self) -> int:
        """Prompts that the API server has sent to its scheduler, by its log (``AsyncLLM._add_request``, vLLM
        0.32 and 0.33). Needs ``--enable-log-requests``."""
        return self.log.read_bytes().count(b"Added request ")

    def _post(self, path: str) -> None:
        with urllib.request.urlopen(urllib.request.Request(self.base_url + path, b"", method="POST")):
            pass


def answers(url: str) -> bool:
    """Whether it says 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextlib.contextmanager
def side_by_side(engines: Sequence[VllmEngine]) -> Iterator[list[VllmEngine]]:
    """Start them at the same time, yield them healthy, and stop them all."""
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.callback(engine.stop)
            engine.start()
        for engine in engines:
            engine.wait_until_healthy()
        yield list(engines)


def two_engines(python: str, model: Path, logs: Path, **options: Any) -> list[VllmEngine]:
    """Engines of the same options, with logs of their own."""
    return [VllmEngine(python, model, log=logs / f"engine{index}.log", **options) for index in range(2)]
