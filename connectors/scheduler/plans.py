"""Which blocks of a request a load fills and a store reads; nothing is held yet.

What always holds: the null block (0) is in no plan, a load fills every block that the engine allocated for
it, and a store names only blocks that are full, hashed and in the request's table now.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from connectors.scheduler.requests import EngineRequest, RequestState
from connectors.transfer.base import Direction, GroupMoves, TransferJob

if TYPE_CHECKING:
    from connectors.hits.resolver import HitResolver

BlockTable = Sequence[Sequence[int]]
"""Per group of the model, the block ids of a request in prompt order; 0 where a block was never needed."""


@dataclass(frozen=True, slots=True, order=True)
class PlannedBlock:
    """One block: the tokens [start, end) of its request lie in it. Sorts in prompt order."""

    end_token: int
    group_idx: int
    start_token: int
    block_id: int
    key: bytes


def plan_load(
    resolver: HitResolver, request: EngineRequest, table: BlockTable, num_local_tokens: int, hit_tokens: int
) -> list[PlannedBlock] | None:
    """The blocks that a hit of ``hit_tokens`` fills, or None where the table does not fit such a hit.

    Every block beyond the local ones must be either null or filled: one that was allocated and is not filled
    would be cached by the engine under a hash whose bytes it does not hold.
    """
    blocks: list[PlannedBlock] = []
    for group_idx, indices in resolver.load_mask(num_local_tokens, hit_tokens).items():
        size = block_tokens(resolver, group_idx)
        row = table[group_idx]
        last = -(-hit_tokens // size)
        if len(row) < last:
            return None
        wanted = set(indices)
        for index in range(num_local_tokens // size, last):
            if (row[index] != 0) != (index in wanted):
                return None
        blocks += [
            PlannedBlock(
                end_token=min((index + 1) * size, hit_tokens),
                group_idx=group_idx,
                start_token=index * size,
                block_id=row[index],
                key=resolver.key_at(request.block_hashes, group_idx, index, hit_tokens),
            )
            for index in indices
        ]
    return sorted(blocks)


def plan_store(
    resolver: HitResolver, state: RequestState, table: BlockTable, num_computed_tokens: int
) -> list[PlannedBlock]:
    """The blocks that became worth storing since ``state.next_token``, in prompt order.

    ``num_computed_tokens``: tokens that are computed and hashed once this step has run.
    """
    request = state.request
    hashes = request.block_hashes
    blocks: list[PlannedBlock] = []

    def add(group_idx: int, index: int, size: int, end: int) -> None:
        row = table[group_idx]
        if index < len(row) and row[index] != 0:
            key = resolver.state_key(hashes, group_idx, end)
            blocks.append(PlannedBlock(end, group_idx, index * size, row[index], key))

    mask = resolver.store_mask(
        num_computed_tokens,
        request.num_prompt_tokens,
        first_token=state.next_token,
        shared_prefix_tokens=request.shared_prefix_boundary,
    )
    for group_idx, indices in mask.items():
        size = block_tokens(resolver, group_idx)
        for index in indices:
            add(group_idx, index, size, (index + 1) * size)
    tails = resolver.partial_tail(num_computed_tokens, request.num_prompt_tokens)
    for group_idx, (index, end) in tails.items():
        if end > state.next_token:
            add(group_idx, index, block_tokens(resolver, group_idx), end)
    return sorted(blocks)


def plan_states(
    resolver: HitResolver, request: EngineRequest, offers: Iterable[tuple[int, int, int]], end_max: int
) -> list[PlannedBlock]:
    """The states the engine hands over: ``offers`` are (group, block id, boundary in tokens).

    Only these are read of groups whose tables are rewritten in place; those beyond ``end_max`` or without a
    hash are left out.
    """
    hash_tokens = resolver.hash_block_tokens
    limit = min(end_max, len(request.block_hashes) * hash_tokens)
    return sorted(
        PlannedBlock(
            end_token=boundary,
            group_idx=group_idx,
            start_token=max(0, boundary - block_tokens(resolver, group_idx)),
            block_id=block_id,
            key=resolver.state_key(request.block_hashes, group_idx, boundary),
        )
        for group_idx, block_id, boundary in offers
        if group_idx in resolver.group_ids
        and block_id != 0
        and 0 < boundary <= limit
        and boundary % hash_tokens == 0
    )


def make_job(
    job_id: int, direction: Direction, blocks: Sequence[PlannedBlock], slots: Sequence[int]
) -> TransferJob:
    """One job over all groups; ``slots[i]`` is the host row of ``blocks[i]``."""
    by_group: dict[int, list[int]] = {}
    for at, block in enumerate(blocks):
        by_group.setdefault(block.group_idx, []).append(at)
    groups = tuple(
        GroupMoves(
            group_idx=group_idx,
            block_ids=np.array([blocks[at].block_id for at in members], dtype=np.int64),
            slots=np.array([slots[at] for at in members], dtype=np.int64),
            keys=tuple(blocks[at].key for at in members),
        )
        for group_idx, members in sorted(by_group.items())
    )
    return TransferJob(job_id, direction, groups)


def block_tokens(resolver: HitResolver, group_idx: int) -> int:
    """Tokens per block of a group."""
    return next(shape.block_tokens for shape in resolver.group_shapes if shape.group_idx == group_idx)
