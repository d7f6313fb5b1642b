"""The eviction policies by name: which key gives way when a tier is full.

``lru`` and ``arc``: by recency (``recency.py``). ``boundary``: what can no longer serve a hit first
(``boundary.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from connectors.hits.group_shapes import GroupShape
from connectors.tier.eviction.base import EvictionPolicy
from connectors.tier.eviction.boundary import BoundaryPolicy
from connectors.tier.eviction.recency import ArcPolicy, LruPolicy

POLICY_NAMES = ("lru", "arc", "boundary")


def make_policy(
    name: str,
    *,
    slots: int,
    shapes: Sequence[GroupShape],
    hash_block_tokens: int,
    boundary_tokens: int,
) -> EvictionPolicy:
    """The policy of this name for a tier of ``slots`` rows.

    ``shapes``, ``hash_block_tokens``, ``boundary_tokens`` (the engine's scheduler block): as ``HitResolver``
    knows them; only ``boundary`` reads them. ValueError for another name.
    """
    if name == "lru":
        return LruPolicy()
    if name == "arc":
        return ArcPolicy(slots)
    if name == "boundary":
        return BoundaryPolicy(shapes, hash_block_tokens, boundary_tokens, nodes_max=4 * slots + 1024)
    raise ValueError(f"no eviction policy {name!r}; there are {', '.join(POLICY_NAMES)}")
