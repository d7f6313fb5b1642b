"""vLLM's sleep mode on its real engine core and scheduler, without a model, and engines that cache nothing.
Runs under vLLM's interpreter.

Usage: ``-m tests.vllm.drive_sleep --model DIR``. One JSON line per level: the tokens that a prompt hits
before, during and after the sleep, and the batches published by then. Two more lines: the events of the
host memory of vLLM's OffloadingConnector when it stores a block, is reset, and stores the block again; and
whether an encoder-decoder model has prefix caching, as its metrics say.
"""

from __future__ import annotations

import argparse
import base64
import json
import tempfile
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from tests.vllm.real_scheduler import Prompt, RealEngine, Setup

GROUPS = (
    {"kind": "full_attention", "block_size": 16},
    {"kind": "sliding_window", "block_size": 16, "sliding_window": 64},
)


class Executor:
    """Stands in for the workers, which hold the memory."""

    is_sleeping = False

    def sleep(self, level: int) -> None:
        self.is_sleeping = level > 0

    def wake_up(self, tags: list[str] | None) -> None:
        self.is_sleeping = False

    def collective_rpc(self, method: str) -> None:
        """Nothing to synchronize."""

    def reset_mm_cache(self) -> None:
        """No images."""

    def reset_encoder_cache(self) -> None:
        """No images."""


def core_of(engine: RealEngine) -> Any:
    """vLLM's engine core around this scheduler; its constructor would start workers."""
    core = object.__new__(EngineCore)
    core.scheduler, core.model_executor, core.mm_receiver_cache = engine.scheduler, Executor(), None
    return core


def slept(model: str, level: int) -> dict[str, Any]:
    engine = RealEngine(Setup(GROUPS, num_blocks=200), model)
    core, prompt, other = core_of(engine), Prompt(list(range(10, 210))), Prompt(list(range(500, 600)))
    batches: list[list[str]] = []

    def served(asked: Prompt | None) -> None:
        if asked is not None:
            engine.add(asked, 2)
        payloads: list[bytes] = []
        while engine.busy:
            payloads += engine.step()
        batches.append([base64.b64encode(one).decode() for one in payloads])

    served(prompt)
    hits = [engine.hit(prompt)]
    core.sleep(level)
    hits.append(engine.hit(prompt))
    batches.append([base64.b64encode(one).decode() for one in engine.take_payloads()])
    core.wake_up()
    served(other)
    hits.append(engine.hit(prompt))
    return {"level": level, "header": engine.header(), "hits": hits, "batches": batches}


def host_memory() -> list[list[str]]:
    manager = CPUOffloadingManager(num_chunks=8, enable_events=True)
    key, context = make_offload_key(b"k" * 32, 0), ReqContext(req_id="r")
    told: list[list[str]] = []

    def note() -> None:
        told.append(["removed" if event.removed else "stored" for event in manager.take_events()])

    for _ in range(2):
        manager.prepare_store([key], context)
        manager.complete_store([key], context)
        note()
        manager.reset_cache()
        note()
    return told


def encoder_decoder() -> str:
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    with tempfile.TemporaryDirectory() as folder:
        names = {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"}
        config = {**names, "d_model": 64, "vocab_size": 1024, **sizes}
        Path(folder, "config.json").write_text(json.dumps(config))
        engine = EngineArgs(model=folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True)
        return str(engine.create_engine_config().cache_config.metrics_info()["enable_prefix_caching"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    options = parser.parse_args()
    for level in (0, 1, 2):
        print(json.dumps(slept(options.model, level)), flush=True)
    print(json.dumps({"host_memory": host_memory()}), flush=True)
    print(json.dumps({"enable_prefix_caching": encoder_decoder()}), flush=True)


if __name__ == "__main__":
    main()
