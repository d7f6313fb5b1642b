"""Blocks of each KV cache group that a hit at a boundary needs, without engine types, for the eviction
policies.

``HitResolver`` makes them from the engine's specs. A *boundary* is a prefix length in tokens, a multiple of
the engine's alignment, at which a later request can resume.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class GroupKind(Enum):
    """Blocks needed at a boundary. ``FULL``: all of the prefix. ``WINDOW``: the last ones. ``STATE``: one."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One group: ``block_tokens`` per block; a hit needs ``span_tokens`` before its boundary (0 for FULL)."""

    group_idx: int
    """The model's group index, as in block keys."""
    kind: GroupKind
    block_tokens: int
    span_tokens: int = 0

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.span_tokens < 0:
            raise ValueError(f"group {self.group_idx}: block_tokens must be >= 1 and span_tokens >= 0")
