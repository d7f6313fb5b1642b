"""Pairs of prompts through vLLM's real scheduler, the second sent with the first or while it is computed.

Usage, under vLLM's interpreter: ``-m tests.vllm.drive_in_flight --model DIR --seed N --pairs N``. One line
per family of ``record_traces.FAMILIES`` whose prompts have no adapter, salt or image: its trace header, the
events before each pair, both prompts, the priority of the first (1: sent with the second one, which is
computed before it), and the tokens of the second that the engine took from its cache. The pool is so large
that nothing is evicted.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import json
import random
from typing import Any

import vllm
from vllm.v1.request import Request

from tests.vllm.real_scheduler import Prompt, RealEngine
from tests.vllm.record_traces import FAMILIES, Family

VOCAB_TOKENS = 2000
FIRST_REQUESTS = 12
"""Requests before the first pair: they show every group, also by prompts longer than any block."""


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCAB_TOKENS) for _ in range(count)]


def step(engine: RealEngine) -> list[str]:
    """One step; returns the payloads of its batches in base64."""
    return [base64.b64encode(payload).decode() for payload in engine.step()]


def serve(engine: RealEngine) -> list[str]:
    """Step until the engine is idle."""
    payloads: list[str] = []
    while engine.busy:
        payloads += step(engine)
    return payloads


def pair(rng: random.Random, earlier: list[list[int]], unit: int) -> tuple[list[int], list[int]]:
    """A prompt, and one that begins like it: mostly exactly a number of hash blocks of it."""
    root = rng.choice(earlier)
    ahead = root[: rng.choice((0, 0, rng.randint(0, len(root))))] + tokens(rng, rng.randint(100, 300))
    match rng.randrange(4):
        case 0:
            return ahead, ahead[: rng.randint(1, len(ahead))] + tokens(rng, rng.randint(1, 60))
        case 1:
            return ahead, ahead + tokens(rng, rng.randint(1, 60))
        case _:
            return ahead, ahead[: rng.randint(1, len(ahead) // unit) * unit]


def drive(name: str, family: Family, model: str, seed: int, pairs: int) -> dict[str, Any]:
    rng = random.Random(f"{name}/{seed}")
    states = any(group["kind"] == "mamba" for group in family.setup.groups)
    budget = 512 if states else 64
    setup = dataclasses.replace(
        family.setup, num_blocks=20_000, max_num_batched_tokens=budget, policy="priority"
    )
    engine = RealEngine(setup, model)
    engine.scheduler.cache_config.block_size = engine.scheduler_block_size
    cached, look_up = dict[str, int](), engine.manager.get_computed_blocks

    def noted(request: Request, *limit: int) -> Any:
        found = look_up(request, *limit)
        cached[request.request_id] = engine.used(int(found[1]))
        return found

    engine.manager.get_computed_blocks = noted  # type: ignore[method-assign]
    earlier: list[list[int]] = []
    for _ in range(FIRST_REQUESTS):
        earlier.append(tokens(rng, rng.randint(150, 400)))
        engine.add(Prompt(earlier[-1]), 2)
    events, found = serve(engine), list[dict[str, Any]]()
    for number in range(pairs):
        ahead, behind = pair(rng, earlier, engine.hash_block_size)
        together, priority = number % 3 == 2, number % 6 // 5
        first = engine.add(Prompt(ahead), 3, priority)
        during = [] if together else step(engine)
        # With states the second prompt may enter the engine between two chunks of the first one, which end
        # where vLLM keeps a state; otherwise it waits until the first one is computed.
        while states and not together and not first.num_output_tokens:
            during += step(engine)
        request = engine.add(Prompt(behind), 1)
        during += serve(engine)
        hit = cached[request.request_id]
        prompts = {"ahead": ahead, "behind": behind, "priority": priority}
        found.append({"events": events, "cached_tokens": hit, **prompts})
        events = during
        earlier.append(ahead)
    return {"family": name, "header": engine.header(), "pairs": found}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=12)
    options = parser.parse_args()
    for name, family in FAMILIES.items():
        modes = {group.get("mamba_cache_mode") for group in family.setup.groups}
        unable = "all" in modes and not vllm.__version__.startswith("0.32")
        if not (family.extras or family.setup.max_model_len > 4096 or unable):
            print(json.dumps(drive(name, family, options.model, options.seed, options.pairs)), flush=True)


if __name__ == "__main__":
    main()
