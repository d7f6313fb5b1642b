"""Plans of loads and stores: the blocks of a request that a load fills or a store reads.

Invariants: a plan never contains the null block (0). A load fills every block that the engine allocated for
it. A store names only blocks that are full, hashed and in the request's current table.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvatlas.connectors.transfer.base import Direction, GroupMoves, TransferJob
from kvatlas.publisher.pool.retention_order import TTL_S_MAX, RetentionHint

if TYPE_CHECKING:
    from kvatlas.connectors.hits import HitResolver


# Routers send digests.
_OWNER_CHARS_MAX = 64


class EngineRequest(Protocol):
    """The attributes of vLLM's ``Request`` that are read here; none is written."""

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    """Includes tokens of steps in flight; 0 again after a preemption or a failed load."""
    shared_prefix_boundary: int
    skip_reading_prefix_cache: bool
    kv_transfer_params: dict[str, Any] | None

    @property
    def num_tokens(self) -> int: ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One full hash per hash block of known tokens."""

    @property
    def all_token_ids(self) -> Sequence[int]: ...


# Member of ``kv_transfer_params`` in which a router sends a retention hint.
HINT = "retention_hint"


def retention_hint(request: EngineRequest) -> RetentionHint | None:
    """The hint of a request; None if it has none, or an invalid one."""
    fields = _hint_fields(request)
    if not isinstance(fields, dict):
        return None
    ttl_s, value, owner = fields.get("ttl_s", 0), fields.get("value", 1), fields.get("owner", "")
    tokens = fields.get("tokens")
    if any(type(number) not in {int, float} for number in (ttl_s, value)) or not isinstance(owner, str):
        return None
    if not ttl_s > 0 or not 0 <= value <= 1 or len(owner) > _OWNER_CHARS_MAX:
        return None
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        return None
    return RetentionHint(float(min(ttl_s, TTL_S_MAX)), float(value), owner, tokens)


def has_invalid_hint(request: EngineRequest) -> bool:
    """Whether a request has a hint that is ignored."""
    return _hint_fields(request) is not None and retention_hint(request) is None


def _hint_fields(request: EngineRequest) -> Any:
    params = request.kv_transfer_params
    return params.get(HINT) if isinstance(params, dict) else None


@dataclass(slots=True)
class RequestState:
    """One live request. Token positions count from its first token."""

    request: EngineRequest
    next_token: int = 0
    """Blocks that end here or before were stored or refused."""
    refused_blocks: int = 0
    """Blocks not stored because of the pin limit; they are tried again in the request's next step."""
    num_local_tokens: int = 0
    """The local hit of the last lookup: the following load begins there."""
    offered_token: int = 0
    """Blocks that end here or before were counted by ``StoreThreshold``."""
    must_compute: bool = False
    """A load failed since the request was last admitted: it gets no other load before it has run."""


BlockTable = Sequence[Sequence[int]]
"""Per group of the model, the block ids of a request in prompt order; 0 for a block that was not needed."""


@dataclass(frozen=True, slots=True, order=True)
class PlannedBlock:
    """One block with the tokens [start, end) of its request. Sorts in prompt order."""

    end_token: int
    group_idx: int
    start_token: int
    block_id: int
    key: bytes


def plan_load(
    resolver: HitResolver, request: EngineRequest, table: BlockTable, num_local_tokens: int, hit_tokens: int
) -> list[PlannedBlock] | None:
    """Blocks that a hit of ``hit_tokens`` fills; None if the table does not fit such a hit."""
    blocks: list[PlannedBlock] = []
    for group_idx, indices in resolver.load_mask(num_local_tokens, hit_tokens).items():
        size = block_tokens(resolver, group_idx)
        row = table[group_idx]
        last = -(-hit_tokens // size)
        if len(row) < last:
            return None
        wanted = set(indices)
        for index in range(num_local_tokens // size, last):
            # An allocated block that is not filled would be cached under a hash that does not match its
            # content: wrong answers.
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
    """Blocks to store since ``state.next_token``, in prompt order.

    ``num_computed_tokens``: tokens computed and hashed after this step.
    """
    request = state.request
    hashes = request.block_hashes
    blocks: list[PlannedBlock] = []

    def add(group_idx: int, index: int, size: int, end: int) -> None:
        row = table[group_idx]
        # Null blocks (outside the window, or skipped states) have no content.
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
    """States that the engine offers for storing: ``offers`` are (group, block id, boundary in tokens)."""
    # Groups whose tables are rewritten in place are stored only through these offers. Offers beyond
    # ``end_max`` or without a hash are skipped.
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
    """Make one job over all groups; ``slots[i]`` is the host row of ``blocks[i]``."""
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
    return next(shape.block_tokens for shape in resolver.group_shapes if shape.group_idx == group_idx)


# Most keys remembered below the threshold: some megabytes.
_REMEMBERED_MAX = 1 << 17


class StoreThreshold:
    """Admits a block after ``threshold`` requests have offered it; with 1, immediately."""

    def __init__(self, threshold: int, remembered_max: int = _REMEMBERED_MAX) -> None:
        self._threshold = threshold
        self._remembered_max = remembered_max
        self._offers: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._offers)

    def admit(self, state: RequestState, blocks: list[PlannedBlock]) -> list[PlannedBlock]:
        """The blocks of one request to store. Blocks that are tried again count once."""
        if self._threshold <= 1:
            return blocks
        admitted = []
        for block in blocks:
            # Moved to the end: blocks in use are forgotten last. Blocks that are tried again count once.
            offers = self._offers.pop(block.key, 0) + (block.end_token > state.offered_token)
            self._offers[block.key] = offers
            if offers >= self._threshold:
                admitted.append(block)
        if blocks:
            state.offered_token = max(state.offered_token, blocks[-1].end_token)
        while len(self._offers) > self._remembered_max:
            self._offers.popitem(last=False)
        return admitted
