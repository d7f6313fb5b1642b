"""Highest-random-weight (rendezvous) hashing: every prompt has its own order of the engines.

Thaler and Ravishankar, 1998. Different keys spread evenly, the same key meets the same engine, and an engine
that comes or goes moves only the keys it wins or held. No state.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

_U64 = (1 << 64) - 1


def weight(engine_id: str, key: int) -> int:
    """How much ``key`` prefers this engine: uniform over 64 bits, equal in every router process."""
    return xxhash.xxh64_intdigest(engine_id.encode(), key & _U64)


def favourite(engine_ids: Sequence[str], key: int) -> int:
    """Position of the engine that ``key`` prefers. The order of the list does not matter."""
    digest, seed = xxhash.xxh64_intdigest, key & _U64
    weights = [digest(engine_id.encode(), seed) for engine_id in engine_ids]
    return weights.index(max(weights))
