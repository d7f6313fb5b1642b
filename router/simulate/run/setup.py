"""Inputs and outcomes of one run of a simulated fleet."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from publisher.block_hash import HashScheme
from publisher.block_pool import PoolRequest
from publisher.events import GroupSpec, hash_unit
from publisher.pool.host_tier import HeldKey, RetentionHint
from router.pd.settings import PdSettings
from router.placement.candidate import PolicySettings
from router.simulate.run.tiers import EngineTiers, Medium, TierSetup

# Timing model of an engine, in seconds.
#
# A chunk of ``n`` prompt tokens beside ``r`` generating sequences takes::
#
#     chunk_s + prefill_s_per_token * n + interference_s * r
#
# Prompts are computed one after the other in the order of their arrival, in chunks of at most
# ``chunk_tokens``; every generating sequence makes one token per ``decode_s``. ``request_s`` is the transfer
# to the engine and back: it is added to every time to first token and keeps no engine busy. At most
# ``seqs_max`` requests run on an engine. ``stall_share``: share of a chunk's time that generating sequences
# lose, less the one token that each step gives them: 1 as in vLLM, where all of a step's tokens come at its
# end; 0, the default, where only times to first token matter. The model omits the quadratic part of attention
# and effects of the batch; ``fit`` finds the values closest to a real engine.


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Timing. The defaults: an engine that prefills 8,000 tokens per second and decodes 50 per sequence."""

    prefill_s_per_token: float = 1 / 8000
    request_s: float = 0.0
    chunk_s: float = 0.0
    interference_s: float = 0.0
    decode_s: float = 0.02
    stall_share: float = 0.0
    chunk_tokens: int = 8192
    seqs_max: int = 64

    def __post_init__(self) -> None:
        for name in ("prefill_s_per_token", "decode_s"):
            if not 0 < getattr(self, name) < 1e6:
                raise ValueError(f"{name} must be seconds above 0, got {getattr(self, name)}")
        for name in ("request_s", "chunk_s", "interference_s"):
            if not 0 <= getattr(self, name) < 1e6:
                raise ValueError(f"{name} must be seconds, not negative, got {getattr(self, name)}")
        if not 0 <= self.stall_share <= 1:
            raise ValueError(f"stall_share must be 0 to 1, got {self.stall_share}")
        for name in ("chunk_tokens", "seqs_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def chunk_seconds(self, tokens: int, generating: int) -> float:
        return self.chunk_s + self.prefill_s_per_token * tokens + self.interference_s * generating

    def stall_s(self, chunk_seconds: float) -> float:
        """Return the delay of the tokens of an answer by a chunk beside them."""
        return self.stall_share * max(0.0, chunk_seconds - self.decode_s)


def simulated_scheme(groups: tuple[GroupSpec, ...]) -> HashScheme:
    """Return the hash scheme of simulated engines, the fastest one: hits do not depend on the algorithm."""
    return HashScheme(algo="xxhash_cbor", hash_block_size=hash_unit(groups))


class FleetSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Setup of a simulation. ``num_blocks``: pages of each engine's pool; ``retention`` None: dense."""

    groups: tuple[GroupSpec, ...]
    num_blocks: int
    engines: int = 8
    retention: int | None = 0
    timing: Timing = Timing()
    speed: float = 1.0
    """Multiple of the workload's arrival rate."""
    closed: bool = False
    """Whether a turn waits for the answer before it; otherwise every request arrives at its recorded time."""
    seed: int = 0
    gauge_s: float = 2.0
    """Seconds between two polls of every engine's gauges, like ``fleet.poll_interval_s`` of a router."""
    learn_rates: bool = False
    """Whether to learn each engine's prefill rate as the router does; otherwise variants get the true one.
    Learning from wrong predictions misleads a variant about load as well, so that variants differ in two
    things."""
    policy: PolicySettings = PolicySettings()
    tiers: TierSetup | None = None
    """Memory outside the GPUs. Variants that see it get the load times."""
    pd: PdSettings = PdSettings()
    """Transfer times, for variants with disaggregated prefill."""


# Result of one run of a simulated fleet: outcomes of the requests, and numbers of the engines.


class Row(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Outcome of one request. Tokens and seconds; ``ttft_s`` is -1 for one that no engine could hold."""

    index: int
    arrived_s: float
    engine: int
    prompt_tokens: int
    predicted: int
    """The variant's prediction at the decision."""
    hit: int
    ttft_s: float
    queue_s: float
    preempted: int
    cpu: int = 0
    """Part of the hit that was loaded from host memory; ``storage``: from the store."""
    storage: int = 0
    answer_s: float = -1.0
    """Time to the last token; ``per_token_s``: between two of them, -1 for an answer of one."""
    per_token_s: float = -1.0
    fetched: int = 0
    """Tokens transferred from the engine that computed the prompt."""
    promised: int = 0
    """Tokens that the decision expected to be pulled from another engine's host memory; ``pulled``:
    actual."""
    pulled: int = 0


class FleetRun(msgspec.Struct):
    """Rows in the workload's order, and numbers of the engines."""

    rows: list[Row]
    busy_s: list[float]
    computed_tokens: list[int]
    preemptions: int
    ended_s: float
    moved_bytes: int = 0
    """Tokens loaded from outside the GPUs."""
    left_out_blocks: int = 0
    """Blocks not written to the store because the queue was full."""


# One request on its simulated engine: its times and tokens, and its blocks elsewhere.
#
# Written by the engine (``engine``), read by the fleet (``fleet``). Times are seconds of the run's clock.


class Fetch(NamedTuple):
    """A prompt held by another engine: up to token ``end``, at a cost in seconds per token missing here, and
    ``fixed_s`` per request."""

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
        "hint",
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
        "pulled",
        "rank_s",
        "source",
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
        source: EngineTiers | None = None,
        hint: RetentionHint | None = None,
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
        # Blocks that the current chunk copies out.
        self.due: list[HeldKey] = []
        self.coming = 0
        self.generated = 0
        self.preempted = 0
        # The engine's total when this request's next event was scheduled.
        self.stalled_s = 0.0
        self.keeps = keeps
        self.kept: list[int] = []
        self.fetch = fetch
        self.source = source  # engine to pull from
        self.hint = hint  # sent with the request, for its engine's host memory
        self.pulled = 0  # tokens that only that engine had
        # Its key in the engine's order; 0 for all: order of arrival.
        self.rank_s = rank_s
