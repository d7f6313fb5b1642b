"""Group mixes of the engine's own specs, and a coordinator of the engine filled with chosen blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvatlas.connectors.hits import HitResolver
from kvatlas.connectors.tier.base import block_key

BASE = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}


def full(block: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, **BASE)


def mla(block: int) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=block, **BASE)


def window(block: int, tokens: int, **more: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block, sliding_window=tokens, **BASE, **more)


def chunk(block: int, tokens: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(block_size=block, attention_chunk_size=tokens, **BASE)


def mamba(block: int) -> MambaSpec:
    return MambaSpec(shapes=((4,),), dtypes=(torch.float16,), block_size=block, mamba_cache_mode="align")


@dataclass(frozen=True)
class Mix:
    """``specs`` of the groups; ``eagle_groups``: those with draft layers."""

    name: str
    specs: tuple[Any, ...]
    scheduler_block: int
    hash_block: int
    eagle: bool = False
    eagle_groups: tuple[int, ...] = ()
    retention: int | None = None

    @property
    def config(self) -> KVCacheConfig:
        groups = [
            KVCacheGroupSpec([f"layer{i}"], spec, is_eagle_group=i in self.eagle_groups)
            for i, spec in enumerate(self.specs)
        ]
        return KVCacheConfig(
            num_blocks=384,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=self.retention,
        )

    def coordinator(self) -> Any:
        return get_kv_cache_coordinator(
            self.config,
            max_model_len=4096,
            max_in_flight_tokens=4096,
            use_eagle=self.eagle,
            enable_caching=True,
            enable_kv_cache_events=False,
            dcp_world_size=1,
            pcp_world_size=1,
            scheduler_block_size=self.scheduler_block,
            hash_block_size=self.hash_block,
        )

    def resolver(self, coordinator: Any = None, *, hash_block: int | None = None) -> HitResolver:
        return HitResolver(
            self.config,
            scheduler_block_size=self.scheduler_block,
            hash_block_size=hash_block or self.hash_block,
            use_eagle=self.eagle,
            partial_hits=coordinator is not None and coordinator.enable_partial_hash_hits,
        )


MIXES = [
    Mix("full", (full(4),), 4, 4),
    Mix("full with EAGLE", (full(4),), 4, 4, eagle=True),
    Mix("window alone", (window(4, 10),), 4, 4),
    Mix("window and full", (window(4, 9), full(4)), 4, 4),
    Mix("window of one block and full", (window(4, 2), full(4)), 4, 4),
    Mix("two same windows and full", (window(4, 12), full(4), window(4, 12)), 4, 4),
    Mix("different windows and full", (window(4, 6), window(4, 16), full(4), window(4, 31)), 4, 4),
    Mix("different block sizes", (window(4, 9), full(8), window(8, 20)), 8, 4),
    Mix("short window under a large alignment", (window(4, 5), full(16)), 16, 4),
    Mix("windows only", (window(4, 6), window(8, 20)), 8, 4),
    Mix("chunked local and full", (chunk(4, 16), full(4)), 4, 4),
    Mix("Mamba and full", (mamba(8), full(8)), 8, 8),
    Mix("Mamba, window and full", (mamba(8), window(8, 20), full(8)), 8, 8),
    Mix("Mamba with finer hashes", (mamba(16), full(8)), 16, 4),
    Mix("Mamba with finer hashes and EAGLE", (mamba(16), full(16)), 16, 4, eagle=True, eagle_groups=(1,)),
    Mix("MLA and full", (mla(4), full(4)), 4, 4),
    Mix("EAGLE everywhere", (window(4, 9), full(4)), 4, 4, eagle=True),
    Mix("EAGLE in the full group", (window(4, 9), full(4)), 4, 4, eagle=True, eagle_groups=(1,)),
    Mix("EAGLE in two windows", (window(4, 9), full(4), window(4, 6)), 4, 4, eagle=True, eagle_groups=(0, 2)),
    Mix("EAGLE in one window", (window(4, 9), full(4), window(4, 14)), 4, 4, eagle=True, eagle_groups=(0,)),
    Mix("EAGLE with block sizes", (window(4, 9), full(8), window(8, 20)), 8, 4, eagle=True),
    Mix("EAGLE in a window of one token", (window(4, 1), full(4)), 4, 4, eagle=True),
    Mix("EAGLE and chunks of two sizes", (full(4), chunk(4, 16), chunk(4, 32)), 4, 4, True, (0,)),
    Mix("chunks of two sizes", (chunk(4, 16), chunk(4, 32), full(4), window(4, 9)), 4, 4),
    Mix("EAGLE with Mamba", (mamba(8), full(8)), 8, 8, eagle=True, eagle_groups=(1,)),
    Mix(
        "a ring that is never shared", (CircularBufferSpec(block_size=4, **BASE), window(4, 9), full(4)), 4, 4
    ),
]


def hashes(count: int) -> list[bytes]:
    return [i.to_bytes(4, "big") * 8 for i in range(1, count + 1)]


def fill(coordinator: Any, keys: set[tuple[int, bytes]]) -> None:
    """Let the engine's pool hold exactly these (group, hash)."""
    pool = coordinator.block_pool
    for group_idx, block_hash in sorted(keys):
        block = pool.get_new_blocks(1)[0]
        name = make_block_hash_with_group_id(block_hash, group_idx)
        block.set_block_hash(name, coordinator.group_block_sizes[group_idx])
        pool.cached_block_hash_to_block.insert(name, block)
        pool.free_blocks([block])


def keys_of(held: set[tuple[int, bytes]]) -> frozenset[bytes]:
    return frozenset(block_key(block_hash, group_idx) for group_idx, block_hash in held)


def with_retained(mix: Mix, tokens: int) -> Mix:
    """The same mix with ``extra_retained_tokens`` in its windows."""
    specs = tuple(
        replace(spec, extra_retained_tokens=tokens) if isinstance(spec, SlidingWindowSpec) else spec
        for spec in mix.specs
    )
    return replace(mix, specs=specs)
