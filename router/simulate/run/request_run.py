"""One request on its simulated engine: its times and tokens, and what of it lies elsewhere.

The engine (``engine``) writes it, the fleet (``fleet``) reads it. Times are seconds of the run's clock.
"""

from __future__ import annotations

from typing import NamedTuple

from publisher.block_pool import PoolRequest
from publisher.pool.host_tier import HeldKey
from router.simulate.run.tier_setup import Medium


class Fetch(NamedTuple):
    """A prompt that another engine has: up to token ``end``, at so many seconds per token that is missing
    here, and ``fixed_s`` for asking."""

    end: int
    s_per_token: float
    fixed_s: float


class RequestRun:
    """One request on its engine. Times in seconds, ``-1`` before they are known; ``hit`` in tokens, of which
    ``loaded`` came from ``medium``, outside the GPU, or were fetched. ``keeps``: its blocks are for another
    engine."""

    __slots__ = (
        "arrived_s",
        "coming",
        "due",
        "ended_s",
        "fetch",
        "first_token_s",
        "generated",
        "hit",
        "index",
        "input_tokens",
        "keeps",
        "kept",
        "loaded",
        "medium",
        "output_tokens",
        "pool_request",
        "preempted",
        "rank_s",
        "stalled_s",
        "started_s",
    )

    def __init__(
        self,
        index: int,
        pool_request: PoolRequest,
        input_tokens: int,
        output_tokens: int,
        now: float,
        *,
        keeps: bool = False,
        fetch: Fetch | None = None,
        rank_s: float = 0.0,
    ) -> None:
        self.index = index
        self.pool_request = pool_request
        self.input_tokens = input_tokens
        self.output_tokens = output_tokens
        self.arrived_s = now
        self.started_s = -1.0
        self.first_token_s = -1.0
        self.ended_s = -1.0
        self.hit = 0
        self.loaded = 0
        self.medium: Medium | None = None
        self.due: list[HeldKey] = []  # what the chunk under way copies out
        self.coming = 0
        self.generated = 0
        self.preempted = 0
        self.stalled_s = 0.0  # the engine's, as far as this request's next event counts it
        self.keeps = keeps
        self.kept: list[int] = []
        self.fetch = fetch
        self.rank_s = rank_s  # its key in the engine's order; 0 for all: that of arrival
