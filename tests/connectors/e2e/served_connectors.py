"""Real vLLM servers with any connector, and all KV events they have published."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import zmq

from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import BlockStored
from tests.support.paths import ROOT
from tests.vllm.vllm_engine import VllmEngine

_REPLAY_MS = 30_000


def serve(model: Path, folder: Path, transfer: dict[str, Any], **environment: str) -> VllmEngine:
    """A server with this ``--kv-transfer-config``; not started."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    both = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    arguments = ("--max-num-batched-tokens", "256", "--block-size", "32", "--max-model-len", "2048")
    return VllmEngine(
        sys.executable,
        model,
        num_gpu_blocks=400,
        log=folder / "server.log",
        extra_args=("--kv-transfer-config", json.dumps(both | transfer), *arguments),
        environment={"PYTHONPATH": path, "PYTHONHASHSEED": "0"} | environment,
        forked="PYTHONOPTIMIZE" not in environment,
    )


def stored_blocks(engine: VllmEngine) -> dict[tuple[str, str | None], set[tuple[int | None, Any]]]:
    """(Medium, ownership) -> (group, hash) of every block that the server has announced outside the GPU."""
    found: dict[tuple[str, str | None], set[tuple[int | None, Any]]] = {}
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(engine.replay)
        dealer.send_multipart([b"", (0).to_bytes(8, "big")])
        while dealer.poll(_REPLAY_MS):
            *_, seq, payload = dealer.recv_multipart()
            if int.from_bytes(seq, "big", signed=True) < 0:
                return found
            for event in decode_batch(payload).events:
                if isinstance(event, BlockStored) and event.medium not in {None, "GPU"}:
                    place = found.setdefault((str(event.medium), event.ownership), set())
                    place |= {(event.group_idx, block_hash) for block_hash in event.block_hashes}
    raise AssertionError("the server did not answer to the end")
