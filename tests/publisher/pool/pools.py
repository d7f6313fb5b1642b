"""Shared by the pool's tests: group mixes, prompts, and a plain reading of events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.block_pool import HybridBlockPool, PoolRequest
from kvatlas.publisher.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvatlas.publisher.groups import GroupSpec


def full(idx: int, size: int = 16, **extra: Any) -> GroupSpec:
    return GroupSpec(idx, "full_attention", size, **extra)


def window(idx: int, tokens: int, size: int = 16, **extra: Any) -> GroupSpec:
    return GroupSpec(idx, "sliding_window", size, sliding_window=tokens, **extra)


def chunked(idx: int, chunk: int, size: int = 16) -> GroupSpec:
    return GroupSpec(idx, "chunked_local_attention", size, attention_chunk_size=chunk)


def mamba(idx: int, mode: str, size: int = 16) -> GroupSpec:
    return GroupSpec(idx, "mamba", size, mamba_cache_mode=mode)


def make_pool(*groups: GroupSpec, hash_block: int = 16, blocks: int = 200, **options: Any) -> HybridBlockPool:
    scheme = HashScheme(hash_block_size=hash_block)
    return HybridBlockPool(groups, num_blocks=blocks, scheme=scheme, **options)


def prefill(pool: HybridBlockPool, request: PoolRequest) -> int:
    """Start a request and compute its prompt in as many steps as it takes; returns its hit."""
    hit = pool.start(request)
    assert hit is not None, "the request does not fit"
    while chunk := pool.next_chunk(request):
        assert pool.compute(request, chunk)
        pool.end_step()
    return hit


def generate(pool: HybridBlockPool, request: PoolRequest, token_ids: Iterable[int]) -> None:
    """Append tokens as a decode does: each is computed in the step after the one that made it."""
    for token_id in token_ids:
        if request.num_computed < request.num_tokens:
            assert pool.compute(request, 1)
        request.append(token_id)
        pool.end_step()


def run(pool: HybridBlockPool, prompt: list[int], answer: Iterable[int] = ()) -> int:
    """A whole request, alone; returns its hit."""
    request = pool.request(prompt)
    hit = prefill(pool, request)
    generate(pool, request, answer)
    pool.finish(request)
    return hit


class CopyCounter:
    """Copies per group and hash, by events alone: one up, one down, all gone."""

    def __init__(self, num_groups: int) -> None:
        self.copies: list[Counter[int | bytes]] = [Counter() for _ in range(num_groups)]

    def apply(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                for counter in self.copies:
                    counter.clear()
            elif isinstance(event, BlockStored):
                self.copies[self._group(event)].update(event.block_hashes)
            else:
                counter = self.copies[self._group(event)]
                for block_hash in event.block_hashes:
                    assert counter[block_hash] > 0, "removed, but never stored"
                    counter[block_hash] -= 1

    def resident(self, group_idx: int) -> dict[int | bytes, int]:
        return {block_hash: count for block_hash, count in self.copies[group_idx].items() if count}

    @staticmethod
    def _group(event: BlockStored | BlockRemoved) -> int:
        assert event.group_idx is not None
        return event.group_idx
