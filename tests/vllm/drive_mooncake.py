"""Hits and keys of vLLM's MooncakeStoreConnector for random stores. Runs under vLLM's interpreter.

Usage: ``-m tests.vllm.drive_mooncake SEED COUNT``. One JSON line per store: its groups (kind, block size,
window), the prompt's tokens, hash block, the store's chunks by group (numbers of hash blocks), the hit in
tokens, and a key of each group. The look-up is that of ``MooncakeStoreWorker.lookup``, whose class needs
GPUs.
"""

from __future__ import annotations

import json
import math
import random
import sys
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    ExternalCachedBlockPool,
    MooncakeStoreCoordinator,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import KeyMetadata, PoolKey
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

Group = tuple[str, int, int]
LAYOUTS: list[list[Group]] = [
    [("full", 16, 0)],
    [("full", 16, 0), ("window", 16, 33)],
    [("full", 16, 0), ("window", 16, 65), ("window", 16, 33)],
    [("full", 32, 0), ("window", 16, 40)],
    [("window", 16, 50)],
    [("full", 16, 0), ("window", 32, 100)],
]


def spec(kind: str, size: int, window: int) -> Any:
    """The spec of a group."""
    shape: dict[str, Any] = {
        "block_size": size,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": torch.float16,
    }
    return FullAttentionSpec(**shape) if kind == "full" else SlidingWindowSpec(sliding_window=window, **shape)


def looked_up(made: Any, groups: list[Group], tokens: int, unit: int, held: dict[int, list[int]]) -> int:
    """The hit in a store that holds these chunks."""
    hashes = [number.to_bytes(32, "big") for number in range(tokens // unit)]
    aligned = made.align_lookup_length(tokens)
    if aligned <= 0:
        return 0
    masks, there = made.lookup_mask(aligned), set()
    for number, (_, size, _) in enumerate(groups):
        mask = masks[number]
        for chunk in range(aligned // size):
            end = (chunk + 1) * size // unit - 1
            if end in held[number] and (mask is None or mask[chunk]):
                there.add((number, hashes[end]))
    pool = ExternalCachedBlockPool(unit, there)
    hit = made.find_longest_cache_hit(hashes, aligned, pool)[1]
    if hit >= tokens:
        aligned = made.align_lookup_length(tokens - 1)
        hit = made.find_longest_cache_hit(hashes, aligned, pool)[1] if aligned > 0 else 0
    return int(hit)


def main() -> None:
    rng = random.Random(int(sys.argv[1]))
    for _ in range(int(sys.argv[2])):
        groups, tokens = rng.choice(LAYOUTS), rng.randint(1, 330)
        sizes = [size for _, size, _ in groups]
        unit, whole = math.gcd(*sizes), math.lcm(*sizes)
        share = rng.choice((0.5, 0.9, 0.97))
        held = {
            number: [
                end for end in range(size // unit - 1, tokens // unit, size // unit) if rng.random() < share
            ]
            for number, size in enumerate(sizes)
        }
        made = MooncakeStoreCoordinator(
            [KVCacheGroupSpec([f"layer{number}"], spec(*group)) for number, group in enumerate(groups)],
            whole,
            unit,
        )
        hit = looked_up(made, groups, tokens, unit, held)
        keys = [
            PoolKey(KeyMetadata("model", 1, 0, 1, 0, number), bytes([number] * 32).hex()).to_string()
            for number in range(len(groups))
        ]
        print(json.dumps([groups, tokens, unit, held, hit, keys]))


if __name__ == "__main__":
    main()
