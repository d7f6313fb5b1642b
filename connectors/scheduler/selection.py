"""Which of the blocks that a step fills are stored, and when.

By default all of them, at once. ``StoreThreshold`` leaves out what few requests have asked for so far;
``LazyStores`` waits until the GPU is about to give a block to somebody else, so that what stays there is
never copied. What always holds: both keep a bounded number of keys, and forget the oldest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from connectors.hits.group_shapes import GroupKind, GroupShape
from connectors.scheduler.plans import PlannedBlock
from connectors.scheduler.requests import EngineRequest, RequestState
from connectors.settings import OffloadSettings

_REMEMBERED_MAX = 1 << 17
"""Keys that were offered less often than the threshold: some megabytes."""


class StoreThreshold:
    """Lets a block pass when ``threshold`` requests have offered it; 1: at once."""

    def __init__(self, threshold: int, remembered_max: int = _REMEMBERED_MAX) -> None:
        self._threshold = threshold
        self._remembered_max = remembered_max
        self._offers: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._offers)

    def admit(self, state: RequestState, blocks: list[PlannedBlock]) -> list[PlannedBlock]:
        """Those of these blocks of one request to be stored. Blocks that are tried again count once."""
        if self._threshold <= 1:
            return blocks
        admitted = []
        for block in blocks:
            offers = self._offers.pop(block.key, 0) + (block.end_token > state.offered_token)
            self._offers[block.key] = offers
            if offers >= self._threshold:
                admitted.append(block)
        if blocks:
            state.offered_token = max(state.offered_token, blocks[-1].end_token)
        while len(self._offers) > self._remembered_max:
            self._offers.popitem(last=False)
        return admitted


class LazyStores:
    """Blocks that are stored only when they come within ``blocks_ahead`` of being reused by the engine."""

    def __init__(self, blocks_ahead: int) -> None:
        self._blocks_ahead = blocks_ahead
        self._pool: Any = None
        self._planned: OrderedDict[bytes, tuple[EngineRequest, PlannedBlock]] = OrderedDict()
        self._head: Any = None

    def __len__(self) -> int:
        return len(self._planned)

    def bind(self, pool: Any) -> None:
        """Use vLLM's ``BlockPool``, whose free blocks lie in the order in which they are reused."""
        self._pool = pool

    def keep(self, request: EngineRequest, blocks: list[PlannedBlock]) -> None:
        """These can be stored from now on."""
        for block in blocks:
            self._planned.pop(block.key, None)
            self._planned[block.key] = request, block
        while len(self._planned) > self._pool.num_gpu_blocks:
            self._planned.popitem(last=False)

    def due(self, room: int) -> list[tuple[EngineRequest, list[PlannedBlock]]]:
        """Up to ``room`` blocks that must be stored now or never, by request, in prompt order."""
        queue = self._pool.free_block_queue
        head = queue.fake_free_list_head.next_free_block
        if not self._planned or head is self._head:
            return []  # nothing was given away since the last look
        found: dict[str, tuple[EngineRequest, list[PlannedBlock]]] = {}
        for _, block in zip(range(self._blocks_ahead), queue.iter_blocks_after(None), strict=False):
            if room <= 0:
                break
            planned = self._planned.pop(block.block_hash, None) if block.block_hash is not None else None
            if planned is not None:
                request, described = planned
                # The same content may lie in another block than the one it was planned in.
                described = replace(described, block_id=block.block_id)
                found.setdefault(request.request_id, (request, []))[1].append(described)
                room -= 1
        else:
            self._head = head
        return [(request, sorted(blocks)) for request, blocks in found.values()]

    def clear(self) -> None:
        self._planned.clear()


class StoreSelection:
    """What an engine's settings say of both. ``step_tokens_max``: of one step of the engine."""

    def __init__(self, settings: OffloadSettings, shapes: Sequence[GroupShape], step_tokens_max: int) -> None:
        self._threshold = StoreThreshold(settings.store_threshold)
        self._lazy = LazyStores(blocks_of_a_step(shapes, step_tokens_max)) if settings.store_lazy else None

    def bind(self, pool: Any) -> None:
        if self._lazy is not None:
            self._lazy.bind(pool)

    def at_once(self, state: RequestState, blocks: list[PlannedBlock]) -> list[PlannedBlock]:
        """Those of the blocks that this step fills which are stored with it."""
        blocks = self._threshold.admit(state, blocks)
        if self._lazy is None:
            return blocks
        self._lazy.keep(state.request, blocks)
        return []

    def before_reuse(self, room: int) -> list[tuple[EngineRequest, list[PlannedBlock]]]:
        """Up to ``room`` blocks of earlier steps, by request."""
        return [] if self._lazy is None else self._lazy.due(room)

    def clear(self) -> None:
        if self._lazy is not None:
            self._lazy.clear()


def blocks_of_a_step(shapes: Sequence[GroupShape], max_tokens: int) -> int:
    """How many blocks an engine may take in one step of so many tokens, and as many again: what it takes in
    the step after is only known when it has taken them."""
    total = 0
    for shape in shapes:
        if shape.kind is GroupKind.STATE:
            total += 2
            continue
        total += -(-max_tokens // shape.block_tokens) + 1
    return 2 * total
