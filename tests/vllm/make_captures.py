"""Records the captures in tests/data/captures, and beside each the prompts sent with the engine's own truth.

    python -m tests.vllm.make_captures simulated [folder]
    KVATLAS_VLLM_PYTHON=... python -m tests.vllm.make_captures vllm [folder]

A small load with shared prefixes on a pool that is too small for it, and a cache reset on the way, so that
blocks are masked, evicted and cleared. ``NAME.prompts.json`` lists ``{"token_ids", "after_seq",
"cached_tokens"}``.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from kvatlas.publisher.groups import GroupSpec
from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.publisher.simulator.settings import EngineSettings
from kvatlas.router.tools.capture_writer import CaptureWriter
from kvatlas.router.tools.recorder import RecordSource, SourceRecorder
from tests.support.paths import DATA

FOLDER = DATA / "captures"
REQUESTS, RESET_AFTER = 36, 30
_SETTLE_S = 0.4
_WINDOW_TOKENS = 64


def prompts(rng: random.Random) -> list[list[int]]:
    """Token ids: four systems, conversations that grow on them, and some prompts sent again."""
    systems = [[rng.randrange(10, 900) for _ in range(rng.randrange(90, 260))] for _ in range(4)]
    sent: list[list[int]] = []
    for number in range(REQUESTS):
        if number % 3 == 2:
            sent.append(rng.choice(sent) + [rng.randrange(10, 900) for _ in range(rng.randrange(5, 60))])
        else:
            tail = [rng.randrange(10, 900) for _ in range(rng.randrange(20, 120))]
            sent.append(systems[rng.randrange(4)] + tail)
    return sent


async def capture(
    name: str, folder: Path, base_url: str, model: str, source: RecordSource, *, resets: bool
) -> None:
    """Drive one engine and record it."""
    path = folder / f"{name}.jsonl.gz"
    path.unlink(missing_ok=True)
    writer = CaptureWriter(path)
    recorder = SourceRecorder(source, writer)
    running = asyncio.create_task(recorder.run())
    truth: list[dict[str, Any]] = []
    async with aiohttp.ClientSession() as session:
        for number, token_ids in enumerate(prompts(random.Random(11))):
            if number == RESET_AFTER and resets:
                async with session.post(f"{base_url}/reset_prefix_cache") as answer:
                    answer.raise_for_status()
                await asyncio.sleep(_SETTLE_S)
            seq = recorder.stats.last_seq
            body = {
                "model": model,
                "prompt": token_ids,
                "max_tokens": 4,
                "temperature": 0,
                "ignore_eos": True,
            }
            async with session.post(f"{base_url}/v1/completions", json=body) as answer:
                said = await answer.json()
            details = said["usage"]["prompt_tokens_details"] or {}
            cached = details.get("cached_tokens") or 0
            truth.append({"token_ids": token_ids, "after_seq": seq, "cached_tokens": cached})
            await asyncio.sleep(_SETTLE_S)
    recorder.finish()
    await running
    writer.close()
    print(recorder.stats, writer.stats)
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in truth)
    (folder / f"{name}.prompts.json").write_text(f"[\n{lines}\n]\n")


async def simulated(folder: Path) -> None:
    """A Gemma-3-like simulated engine with a small pool."""
    groups = (
        *[GroupSpec(i, "sliding_window", 16, sliding_window=_WINDOW_TOKENS) for i in range(2)],
        GroupSpec(2, "full_attention", 16),
    )
    settings = EngineSettings(
        groups=groups,
        num_blocks=150,
        max_model_len=512,
        max_num_batched_tokens=512,
        prefill_s_per_token=1e-6,
        decode_s_per_token=1e-4,
    )
    engine = SimulatedEngine(settings)
    await engine.start()
    try:
        source = RecordSource("http://simulated:8000", engine.events_endpoint or "", engine.replay_endpoint)
        await capture("simulated", folder, engine.base_url, settings.model, source, resets=True)
    finally:
        await engine.stop()


@asynccontextmanager
async def _vllm() -> AsyncIterator[Any]:
    from tests.vllm.tiny_model import write_tiny_model  # noqa: PLC0415
    from tests.vllm.vllm_engine import VllmEngine  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as scratch:
        model = write_tiny_model(Path(scratch) / "model")
        engine = VllmEngine(
            os.environ["KVATLAS_VLLM_PYTHON"],
            model,
            num_gpu_blocks=100,
            log=Path(scratch) / "vllm.log",
            extra_args=("--max-model-len", "512", "--max-num-batched-tokens", "512"),
        )
        try:
            await asyncio.to_thread(engine.__enter__)
            yield engine
        finally:
            engine.stop()


async def vllm(folder: Path) -> None:
    """A real vLLM engine on the CPU, with the tiny Gemma-3-like model of tests/vllm."""
    async with _vllm() as engine:
        source = RecordSource("http://vllm:8000", engine.events, engine.replay, "kv")
        await capture("vllm_0_32", folder, engine.base_url, "tiny", source, resets=True)


if __name__ == "__main__":
    into = Path(sys.argv[2]) if len(sys.argv) > 2 else FOLDER
    asyncio.run({"simulated": simulated, "vllm": vllm}[sys.argv[1]](into))
