"""The cache layouts on which our pool is held against vLLM: group mixes, retention, pool and chunk sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.groups import Family, GroupSpec, hash_unit, scheduler_block_size
from kvatlas.publisher.pool.layout import pool_layout


@dataclass(frozen=True)
class Layout:
    """One engine's cache; sizes in tokens, ``groups`` as ``GroupSpec`` fields without ``group_idx``, blocks
    as one rank of ``dcp`` has them."""

    groups: tuple[dict[str, Any], ...]
    num_blocks: int
    prefix_match_unit: int | None = None
    retention_interval: int | None = 0
    hash_algo: str = "sha256"
    seed: str | None = None
    int_hashes: bool = True
    max_num_batched_tokens: int = 96
    max_num_seqs: int = 8
    dcp: int = 1

    @property
    def specs(self) -> tuple[GroupSpec, ...]:
        """The groups as events show them: blocks of full attention reach over all ranks."""
        specs = [GroupSpec(index, **group) for index, group in enumerate(self.groups)]
        return tuple(
            replace(spec, block_size=spec.block_size * self.dcp) if spec.family is Family.FULL else spec
            for spec in specs
        )

    @property
    def hash_block_size(self) -> int:
        """As vLLM resolves it: a mode-"all" Mamba group rules out hashing finer than all blocks."""
        specs = self.specs
        if len(specs) == 1 or any(group.mamba_cache_mode == "all" for group in specs):
            return scheduler_block_size(specs)
        return self.prefix_match_unit or hash_unit(specs)

    @property
    def engine_block_size(self) -> int:
        """vLLM's ``cache_config.block_size`` once the engine has started."""
        return pool_layout(
            self.specs, HashScheme(hash_block_size=self.hash_block_size), self.retention_interval, self.dcp
        ).chunk_align


def full(size: int = 16, **extra: Any) -> dict[str, Any]:
    return {"kind": "full_attention", "block_size": size, **extra}


def window(tokens: int, size: int = 16, **extra: Any) -> dict[str, Any]:
    return {"kind": "sliding_window", "block_size": size, "sliding_window": tokens, **extra}


def chunked(chunk: int, size: int = 16) -> dict[str, Any]:
    return {"kind": "chunked_local_attention", "block_size": size, "attention_chunk_size": chunk}


def mamba(mode: str, size: int = 16, **extra: Any) -> dict[str, Any]:
    return {"kind": "mamba", "block_size": size, "mamba_cache_mode": mode, **extra}


def replayed(tokens: int, size: int = 16) -> dict[str, Any]:
    """A window that is rebuilt by replay."""
    return {"kind": "sliding_window_mla", "block_size": size, "sliding_window": tokens, "cacheable": False}


def ring(size: int = 16) -> dict[str, Any]:
    return {"kind": "circular_buffer", "block_size": size, "cacheable": False}


MIXES: dict[str, tuple[dict[str, Any], ...]] = {
    "full": (full(),),
    "window": (window(64),),
    "window_odd": (window(49),),
    "chunked": (chunked(64),),
    "mamba_all_alone": (mamba("all"),),
    "mamba_align_alone": (mamba("align"),),
    "gemma": (*[window(64)] * 5, full()),
    "gpt_oss": (full(), window(128)),
    "two_windows_apart": (window(64), window(96)),
    "full_two_windows": (full(), window(32), window(96)),
    "full_two_windows_mamba": (full(), window(32), window(80), mamba("align")),
    "full_chunked": (full(), chunked(48)),
    "chunked_first": (chunked(64), chunked(64), full()),
    "full_chunked_window": (full(), chunked(64), window(40)),
    "mamba_align_equal": (full(), mamba("align"), mamba("align")),
    "mamba_align_coarse": (full(), mamba("align", 64)),
    "mamba_align_same_coarse": (full(64), mamba("align", 64)),
    "mamba_align_fine": (full(32), mamba("align", 16)),
    "mamba_align_window": (full(32), window(48), mamba("align", 32)),
    "mamba_all": (full(), mamba("all")),
    "mamba_all_window": (full(), mamba("all"), window(64)),
    "coarse_full": (full(32), window(64, 16)),
    "coarse_window": (full(16), window(64, 32)),
    "odd_sizes": (full(48), window(64, 32)),
    "three_sizes": (full(64), window(40, 16), window(100, 32)),
    "two_fulls": (full(16), full(32)),
    "eagle_full": (full(is_eagle=True),),
    "eagle_window": (window(64, is_eagle=True),),
    "eagle_hybrid": (full(is_eagle=True), window(64), window(64)),
    "eagle_window_group": (full(), window(64), window(64, is_eagle=True)),
    "eagle_sizes": (full(32, is_eagle=True), window(64, 16, is_eagle=True)),
    "eagle_mamba": (full(is_eagle=True), mamba("align")),
    "eagle_mamba_coarse": (full(16, is_eagle=True), mamba("align", 64)),
    "eagle_mamba_all": (full(is_eagle=True), mamba("all", is_eagle=True)),
    "eagle_apart": (full(), window(64), window(64, is_eagle=True, apart=True)),
    "replayed": (replayed(64), full(), ring()),
    "replayed_windows": (full(32), replayed(48), window(96, 16), replayed(48)),
    "replayed_mamba": (full(32), mamba("align", 32), replayed(48)),
    "eagle_ring": (full(is_eagle=True), ring(4)),
    "window_ring": (ring(), window(64)),
    "mamba_ring": (full(32), mamba("align", 32), ring(8)),
    "dcp2_mamba": (full(), mamba("align")),
    "dcp2_mamba_eagle": (full(is_eagle=True), mamba("align"), mamba("align")),
    "dcp4_mamba": (mamba("align", 32), full()),
    "dcp2_two_fulls": (full(), full(32)),
}
UNITS: dict[str, int] = {"mamba_align_same_coarse": 16, "mamba_align_window": 16, "coarse_window": 8}
"""``prefix_match_unit`` where the hash block is finer than the greatest common divisor."""


def families() -> Iterator[tuple[str, Layout]]:
    """Every mix with retention 0, dense and, where it has an effect, an interval of 128 or more."""
    for name, groups in MIXES.items():
        sizes = max(group["block_size"] for group in groups)
        blocks = sum(400 // group["block_size"] + 3 for group in groups) + 12
        dcp = int(name[3]) if name.startswith("dcp") else 1
        common = {"groups": groups, "prefix_match_unit": UNITS.get(name), "dcp": dcp}
        sparse = any(group["kind"] in {"sliding_window", "mamba", "sliding_window_mla"} for group in groups)
        interval = 128 if 128 % (math.lcm(*(group["block_size"] for group in groups)) * dcp) == 0 else 384
        for retention in (0, None, interval) if sparse else (0,):
            label = "dense" if retention is None else f"r{retention}"
            yield f"{name}.{label}", Layout(**common, num_blocks=blocks, retention_interval=retention)
        if sparse:
            yield f"{name}.tight", Layout(**common, num_blocks=blocks * 2 // 3, max_num_seqs=4)
        yield (
            f"{name}.big_chunks",
            Layout(**common | {"max_num_batched_tokens": max(256, 2 * sizes)}, num_blocks=blocks * 2),
        )
    hybrid = (full(), window(64))
    yield "bytes", Layout(groups=hybrid, num_blocks=60, int_hashes=False, max_num_batched_tokens=64)
    yield "cbor", Layout(groups=hybrid, num_blocks=60, hash_algo="sha256_cbor", seed="7")


FAMILIES = dict(families())
