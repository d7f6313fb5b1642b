"""Real vLLM servers that share a store, and a client that sees tokens and the top five log-probabilities."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT
from tests.vllm.vllm_engine import VllmEngine

REQUEST_S = 180.0
SETTLE_S = 120.0
_ROUNDING = 5e-6


def engine(model: Path, folder: Path, name: str, store: dict[str, Any], **environment: str) -> VllmEngine:
    """A server with ``SharedStoreConnector`` on this store; not started."""
    transfer = {
        "kv_connector": "SharedStoreConnector",
        "kv_connector_module_path": "kvatlas.connectors.shared_store",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        # Deadlines fit a busy machine: these tests are about what is loaded, not when. Nothing is kept on the
        # way: what a test does to the store must show.
        "kv_connector_extra_config": {
            "host_bytes": "64MiB",
            "keep_in_host": False,
            "lookup_deadline_s": 20,
            "store": store,
        },
    }
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return VllmEngine(
        sys.executable,
        model,
        num_gpu_blocks=700,
        log=folder / f"{name}.log",
        extra_args=(
            "--kv-transfer-config",
            json.dumps(transfer),
            "--max-num-batched-tokens",
            "256",
            "--block-size",
            "32",
        ),
        environment={"PYTHONPATH": path, "PYTHONHASHSEED": "0"} | environment,
    )


def complete(base_url: str, prompt: list[int], max_tokens: int = 6) -> dict[str, Any]:
    """Greedy completion of token ids: ``text``, ``logprobs`` and how much of the prompt was ``cached``."""
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 5,
        "ignore_eos": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=REQUEST_S) as response:
        answer = json.load(response)
    choice, usage = answer["choices"][0], answer["usage"]
    details = usage.get("prompt_tokens_details") or {}
    logprobs = choice["logprobs"]
    return {
        "tokens": logprobs["tokens"],
        "logprobs": logprobs["token_logprobs"],
        "top": logprobs["top_logprobs"],
        "cached": details.get("cached_tokens") or 0,
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Bit-identical in everything that was computed."""
    return all(one[what] == other[what] for what in ("tokens", "logprobs", "top"))


def same_but_for_rounding(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """The same tokens, as likely: for answers of a float32 model in batches of other shapes, whose sums some
    processors round otherwise, by one unit in the last place (5e-7). One zeroed block of one group among 448
    tokens changed one of twelve by 5e-6 and more in 22 of 24, by 1.4e-6 in the others."""
    pairs = zip(one["logprobs"], other["logprobs"], strict=True)
    return one["tokens"] == other["tokens"] and all(abs(a - b) < _ROUNDING for a, b in pairs)


def metric(base_url: str, name: str, **labels: str) -> float:
    """Sum of a Prometheus counter over everything but these labels."""
    with urllib.request.urlopen(f"{base_url}/metrics") as response:
        text = response.read().decode()
    total = 0.0
    for line in text.splitlines():
        if line.startswith(f"kvatlas_offload_{name}_total{{") and all(
            f'{key}="{value}"' in line for key, value in labels.items()
        ):
            total += float(line.rpartition(" ")[2])
    return total


def forget_gpu(base_url: str) -> None:
    """Drop the engine's own prefix cache; its connector is not told."""
    request = urllib.request.Request(f"{base_url}/reset_prefix_cache", method="POST")
    with urllib.request.urlopen(request):
        pass
