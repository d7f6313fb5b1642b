"""Our connector under vLLM's real scheduler, on random load with small pools: nobody reads wrong KV.

Preemption, chunked prefill, failed allocation, aborts during loads, resets, slow and failing transfers, and
two ranks that answer in different steps all happen; the sim asserts after each step, these tests at the end.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch; make test-connectors runs it")
pytest.importorskip("vllm", reason="needs vLLM; make test-connectors runs it")

from sim_engine import Prompt, RequestStatus, Setup, SimConnector, SimEngineCore

sys.path.insert(0, str(Path(__file__).parents[2] / "vllm"))
sys.path.insert(0, str(Path(__file__).parents[2] / "pool"))

from layouts import MIXES
from tiny_model import write_tiny_model

LAYOUTS = {
    name: MIXES[name]
    for name in (
        "full",
        "window",
        "gemma",
        "gpt_oss",
        "full_two_windows",
        "full_chunked_window",
        "coarse_full",
        "coarse_window",
        "odd_sizes",
        "three_sizes",
        "two_fulls",
        "mamba_align_equal",
        "mamba_align_same_coarse",
        "full_two_windows_mamba",
        "mamba_align_window",
    )
}

LONGEST_PROMPT = 330
LONGEST_ANSWER = 40


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny-model")))


def run_load(core: SimEngineCore, seed: int, *, requests: int = 40) -> None:
    """Random prompts that share beginnings, aborts (also of requests that wait for a load) and resets."""
    rng = random.Random(seed)
    trunks = [[rng.randrange(3, 900) for _ in range(rng.randint(80, 260))] for _ in range(5)]
    asked: list[list[int]] = []
    live: list[Any] = []
    added = 0
    while added < requests or core.busy:
        if added < requests and rng.random() < 0.3:
            trunk = rng.choice(trunks)
            kept = len(trunk) if rng.random() < 0.6 else rng.randint(20, len(trunk))
            own = [rng.randrange(3, 900) for _ in range(rng.randint(1, 70))]
            tokens = trunk[:kept] + own
            if asked and rng.random() < 0.4:  # the same again, or the next turn
                tokens = [*rng.choice(asked), *own[: rng.choice((0, 0, 30))]][:LONGEST_PROMPT]
            asked.append(tokens)
            live.append(core.add(Prompt(tokens), rng.randint(1, LONGEST_ANSWER)))
            added += 1
        live = [request for request in live if not request.is_finished()]
        loading = [request for request in live if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS]
        if live and rng.random() < 0.02:
            core.abort(rng.choice(live))
        elif loading and rng.random() < 0.1:
            core.abort(rng.choice(loading))
        if rng.random() < 0.3:
            core.reset(connector=rng.random() < 0.05)
        core.step()
    core.check_idle()


def small_setup(layout: str) -> Setup:
    """A pool in which the longest request of ``run_load`` fits, and hardly a second one."""
    chunk = 96
    need = 0
    for group in LAYOUTS[layout]:
        kept = group.get("sliding_window") or group.get("attention_chunk_size") or LONGEST_PROMPT
        blocks = min(LONGEST_PROMPT + LONGEST_ANSWER, kept + chunk) // group["block_size"] + 3
        need += 6 if group["kind"] == "mamba" else blocks
    return Setup(
        groups=LAYOUTS[layout], num_blocks=need * 3 // 2 + 4, max_num_batched_tokens=chunk, max_num_seqs=6
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reads_right_kv(layout: str, model: str) -> None:
    core = SimEngineCore(small_setup(layout), SimConnector(), model, seed=1)
    run_load(core, seed=1)
    assert core.counts["loads"] > 0, core.counts
    print(layout, core.counts, core.setup.num_blocks)
