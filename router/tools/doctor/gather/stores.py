"""Comparison of the blocks that an engine stored for one prompt with that prompt: hashes, tokens, first
block.

An engine stores what it computed. The first stored block of a full-attention group therefore shows how much
of the prompt came from its cache: independently of ``cached_tokens`` and of earlier events.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import msgspec

from publisher.block_hash import HashScheme
from publisher.events import BlockHash, BlockStored, EventDecodeError, Family, GroupSpec, to_block_hash
from router.prompts.prompt import Prompt


class StoreComparison(msgspec.Struct):
    """Result of a comparison, in tokens; ``computed_from`` None: no block of a full-attention group was
    stored.
    """

    computed_from: int | None = None
    block_size: int = 1
    """Block size of the groups that ``computed_from`` refers to."""
    hashes: int = 0
    """Number of hashes compared."""
    hash_differs_at: int | None = None
    """End in tokens of the first block whose hash differs."""
    token_differs_at: int | None = None
    """Index of the first token that differs."""

    def begins(self, hit_tokens: int) -> bool:
        """Return whether the engine computed from the end of a hit of ``hit_tokens`` tokens."""
        return (
            self.computed_from is None
            or hit_tokens // self.block_size * self.block_size == self.computed_from
        )


def compare_stores(
    prompt: Prompt,
    scheme: HashScheme,
    groups: Sequence[GroupSpec],
    events: Sequence[BlockStored],
    late: Set[BlockHash] = frozenset(),
) -> StoreComparison:
    """Compare the events that followed a prompt with it.

    Events that begin at no block of the prompt, and those of ``late`` blocks (of other prompts), are ignored.
    """
    seen = StoreComparison()
    hashes, unit = prompt.hashes(scheme), scheme.hash_block_size
    ends = {block: (at + 1) * unit for at, block in enumerate(hashes)}
    full = {group.group_idx: group.block_size for group in groups if group.family is Family.FULL}
    for event in events:
        parent = event.parent_block_hash
        start = 0 if parent is None else ends.get(to_block_hash(parent))
        if start is None or any(to_block_hash(block) in late for block in event.block_hashes):
            continue
        try:
            tokens = event.tokens()
        except EventDecodeError:
            continue
        _compare_tokens(seen, prompt, start, tokens)
        if seen.token_differs_at is not None:
            continue
        if event.block_size and len(event.block_hashes) * event.block_size == len(tokens):
            _compare_hashes(seen, hashes, unit, start, event)
        if full.get(event.group_idx or 0) == event.block_size:
            first = start if seen.computed_from is None else min(seen.computed_from, start)
            seen.computed_from, seen.block_size = first, event.block_size
    return seen


def _compare_tokens(seen: StoreComparison, prompt: Prompt, start: int, tokens: list[int]) -> None:
    ours = list(prompt.token_ids[start : start + len(tokens)])
    if seen.token_differs_at is None and ours != tokens[: len(ours)]:
        pairs = zip(ours, tokens, strict=False)
        seen.token_differs_at = start + next((i for i, (a, b) in enumerate(pairs) if a != b), len(tokens))


def _compare_hashes(
    seen: StoreComparison, hashes: Sequence[int], unit: int, start: int, event: BlockStored
) -> None:
    for number, wire in enumerate(event.block_hashes, 1):
        end = start + number * event.block_size
        at = end // unit - 1
        if end % unit or at >= len(hashes):
            return
        seen.hashes += 1
        if hashes[at] != to_block_hash(wire) and seen.hash_differs_at is None:
            seen.hash_differs_at = end
