"""Imports vLLM once and forks a process for every request to run a module; ``forked.py`` starts it and asks.

    python tests/vllm/fork_server.py FD

Runs under vLLM's own interpreter only. Every vLLM process spends 12 s of CPU in imports, and a server is
three processes; one forked here starts in seconds. It is otherwise what ``python -m`` runs: in a session and
process group of its own, with the environment, folder and files it was given. Engine core and worker are
forked too, which vLLM does by itself where there is no CPU backend.

FD is a socket. A request is one message, answered with one. ``{"run": [module, word...], "cwd": ..., "env":
{...}}`` brings three files, stdin, stdout and stderr of the process, and gives ``{"pid": ...}``.
``{"poll": pid}`` gives ``{"status": ...}``, null while it runs, negative for a signal. Where the socket
ends all processes are killed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import sys
from typing import Any

MESSAGE_BYTES_MAX = 1 << 18
NIXL_PAUSE_US = 2000
PRELOADED = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.gemma3",
)


def preload() -> None:
    envs = importlib.import_module("vllm.envs")
    # The CPU backend asks for "spawn", which would import everything again in engine core and worker.
    envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
    for module in PRELOADED:
        importlib.import_module(module)
    calm_nixl()
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"{threads} threads after importing vLLM: a process with threads cannot be forked")
    gc.freeze()


def calm_nixl() -> None:
    """Every NIXL agent has a thread that looks for news all the time (its Python sets the pause between two
    looks to 0), which a few engines on two cores have no time for. It sleeps between two looks here."""
    nixl_utils: Any = importlib.import_module("vllm.distributed.nixl_utils")
    load = nixl_utils._load_nixl_attr

    def patient(name: str) -> Any:
        value = load(name)
        bindings = getattr(sys.modules.get(getattr(value, "__module__", "")), "nixlBind", None)
        if name == "NixlWrapper" and bindings is not None:
            bindings.nixlAgentConfig = _with_pause(bindings.nixlAgentConfig)
        return value

    nixl_utils._load_nixl_attr = patient


def _with_pause(config: type[Any]) -> type[Any]:
    inherited: Any = config.__setattr__

    def set_attribute(self: Any, name: str, value: Any) -> None:
        inherited(self, name, NIXL_PAUSE_US if name == "pthrDelay" else value)

    return type("PatientConfig", (config,), {"__setattr__": set_attribute})


def serve(channel: socket.socket) -> list[str]:
    """Until the socket ends. Returns only in a forked process: the words to run."""
    running: set[int] = set()
    status: dict[int, int] = {}
    while True:
        message, files, _, _ = socket.recv_fds(channel, MESSAGE_BYTES_MAX, 3)
        if not message:
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            sys.exit()
        asked = json.loads(message)
        if "run" in asked:
            pid = os.fork()
            if pid == 0:
                os.setsid()
                channel.send(json.dumps({"pid": os.getpid()}).encode())
                channel.close()
                become(asked["cwd"], asked["env"], files)
                return list(asked["run"])
            for file in files:
                os.close(file)
            running.add(pid)
        else:
            pid = asked["poll"]
            if pid in running and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                running.discard(pid)
                status[pid] = os.waitstatus_to_exitcode(ended[1])
            channel.send(json.dumps({"status": status.get(pid)}).encode())


def become(cwd: str, environment: dict[str, str], files: list[int]) -> None:
    """Import path at the start of ``python -m``."""
    os.chdir(cwd)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [cwd, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    importlib.invalidate_caches()
    random.seed()


if __name__ == "__main__":
    sys.path.pop(0)  # this script's folder
    preload()
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        listening.send(b'{"ready": true}')
        words = serve(listening)
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
