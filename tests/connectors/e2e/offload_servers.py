"""Real vLLM servers with the offload connector, and how tests make them forget."""

from __future__ import annotations

import json
import os
import random
import sys
import urllib.request
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT
from tests.support.waiting import wait_until as until
from tests.vllm.vllm_engine import VllmEngine

GPU_BLOCKS = 260
"""Three long prompts fit, eight do not."""


def prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 1000) for _ in range(tokens)]


def server(model: Path, folder: Path, connector: str, module: str, **extra: Any) -> VllmEngine:
    transfer = {
        "kv_connector": connector,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"host_bytes": "64MiB", "pinned_source_blocks_max": 0.3, **extra},
    }
    arguments = (
        "--enable-log-requests",
        "--max-num-batched-tokens",
        "256",
        "--block-size",
        "32",
        "--max-num-seqs",
        "16",
        "--max-model-len",
        "4096",
    )
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return VllmEngine(
        sys.executable,
        model,
        num_gpu_blocks=GPU_BLOCKS,
        log=folder / f"{connector}.log",
        extra_args=("--kv-transfer-config", json.dumps(transfer), *arguments),
        environment={"PYTHONPATH": path, "PYTHONHASHSEED": "0"},
    )


def forget(base_url: str, *, connector: bool = False) -> None:
    """Drop the GPU's prefix cache, and the host tier on demand, when all stores have ended: vLLM refuses it
    while they read blocks."""
    url = f"{base_url}/reset_prefix_cache" + ("?reset_external=true" if connector else "")

    def done() -> bool:
        request = urllib.request.Request(url, method="POST")
        with urllib.request.urlopen(request) as response:
            return bool(json.load(response)["success"])

    until(done, "the prefix cache is empty")


def preemptions(base_url: str) -> float:
    """How often the engine took a running request's blocks away."""
    with urllib.request.urlopen(f"{base_url}/metrics") as response:
        lines = response.read().decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:num_preemptions_total")
    )
