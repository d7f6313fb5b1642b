"""Inputs and outcomes of one run of a simulated fleet, and the variants to compare.

The policies are the production ones (``kvatlas.router.placement.policies``), unchanged; a variant only
defines their input: the view, and whether prompts in flight count. ``VARIANTS`` are what a router can run;
benchmarks add other routers (``OtherRouter``)."""

from __future__ import annotations

import msgspec

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.groups import GroupSpec, hash_unit
from kvatlas.router.index.learn.layout import CacheLayout, ModelFacts, make_layout
from kvatlas.router.pd.settings import PdSettings
from kvatlas.router.placement.candidate import PolicySettings
from kvatlas.router.simulation.tiers import TierSetup


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Timing. The defaults: an engine that prefills 8,000 tokens per second and decodes 50 per sequence.

    Timing model of an engine, in seconds.

    A step of at most ``chunk_tokens`` tokens (``max_num_batched_tokens``), of which ``n`` are of prompts,
    beside ``r`` generating sequences, takes::

        chunk_s + prefill_s_per_token * n + interference_s * r

    and at least ``decode_s`` if any sequence generates; each of them makes one token per step. All of a
    step's tokens come at its end. ``request_s`` is the transfer to the engine and back: it is added to every
    time to first token and keeps no engine busy. At most ``seqs_max`` requests run on an engine. The model
    omits the quadratic part of attention and effects of the batch; ``fit`` finds the values closest to a
    real engine.
    """

    prefill_s_per_token: float = 1 / 8000
    request_s: float = 0.0
    chunk_s: float = 0.0
    interference_s: float = 0.0
    decode_s: float = 0.02
    chunk_tokens: int = 8192
    seqs_max: int = 64

    def __post_init__(self) -> None:
        for name in ("prefill_s_per_token", "decode_s"):
            if not 0 < getattr(self, name) < 1e6:
                raise ValueError(f"{name} must be seconds above 0, got {getattr(self, name)}")
        for name in ("request_s", "chunk_s", "interference_s"):
            if not 0 <= getattr(self, name) < 1e6:
                raise ValueError(f"{name} must be seconds, not negative, got {getattr(self, name)}")
        for name in ("chunk_tokens", "seqs_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def chunk_seconds(self, tokens: int, generating: int) -> float:
        return self.chunk_s + self.prefill_s_per_token * tokens + self.interference_s * generating

    def step_s(self, tokens: int, generating: int) -> float:
        """Return the seconds of a step with this many tokens of prompts and generating sequences."""
        prompts_s = self.chunk_seconds(tokens, generating) if tokens else 0.0
        return max(prompts_s, self.decode_s) if generating else prompts_s


def simulated_scheme(groups: tuple[GroupSpec, ...]) -> HashScheme:
    """Return the hash scheme of simulated engines, the fastest one: hits do not depend on the algorithm."""
    return HashScheme(algo="xxhash_cbor", hash_block_size=hash_unit(groups))


def simulated_layout(groups: tuple[GroupSpec, ...]) -> CacheLayout:
    """Return the layout of simulated engines as a router learns it from their events: without the groups that
    publish nothing."""
    seen = tuple(group for group in groups if not group.is_hidden)
    replayed = max((group.sliding_window or 0 for group in groups if not group.cacheable), default=0)
    facts = ModelFacts(hidden_groups=len(seen) < len(groups), replay_tokens=replayed)
    return make_layout(seen, facts, hash_unit(groups))


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
    """Seconds between two polls of every engine's gauges: 0.4 of a router's ``fleet.poll_interval_s``. Other
    routers have their own interval."""
    learn_rates: bool = False
    """Whether to learn each engine's prefill rate as the router does; otherwise variants get the true one.
    Learning from wrong predictions misleads a variant about load as well, so that variants differ in two
    things."""
    policy: PolicySettings = PolicySettings()
    tiers: TierSetup | None = None
    """Memory outside the GPUs. Variants that see it get the load times."""
    pd: PdSettings = PdSettings()
    """Transfer times, for variants with disaggregated prefill."""
