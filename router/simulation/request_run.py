"""One request on its simulated engine: its times and tokens, and its blocks elsewhere.

Written by the engine (``engine``), read by the fleet (``fleet``). Times are seconds of the run's clock.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvatlas.publisher.block_pool import PoolRequest
from kvatlas.publisher.pool.host_tier import HeldKey
from kvatlas.publisher.pool.retention_order import RetentionHint
from kvatlas.router.simulation.tiers import EngineTiers, Medium


class Fetch(NamedTuple):
    """A prompt held by another engine: up to token ``end``, at a cost in seconds per token missing here, and
    ``fixed_s`` per request."""

    end: int
    s_per_token: float
    fixed_s: float


class RequestRun(msgspec.Struct, eq=False):
    """One request on its engine. Times in seconds, ``-1`` before they are known; ``hit`` in tokens, of which
    ``loaded`` came from ``medium``, outside the GPU, or were fetched. ``keeps``: its blocks are for another
    engine."""

    index: int
    pool_request: PoolRequest
    input_tokens: int
    output_tokens: int
    arrived_s: float
    keeps: bool = False
    fetch: Fetch | None = None
    rank_s: float = 0.0
    """Its key in the engine's order; 0 for all: order of arrival."""
    source: EngineTiers | None = None
    """Engine to pull from; ``pulled``: tokens that only that engine had."""
    hint: RetentionHint | None = None
    """Sent with the request, for its engine's host memory."""
    started_s: float = -1.0
    first_token_s: float = -1.0
    ended_s: float = -1.0
    hit: int = 0
    loaded: int = 0
    medium: Medium | None = None
    due: list[HeldKey] = []
    """Blocks that the current step copies out."""
    order: int = 0
    """Its place among those that run."""
    from_step: int = 0
    """The last step whose token its pool request has."""
    preempted: int = 0
    kept: list[int] = []
    pulled: int = 0
