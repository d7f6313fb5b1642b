"""Inputs and outcomes of one run of a simulated fleet, and the variants to compare.

The policies are the production ones (``kvatlas.router.placement.policies``), unchanged; a variant only
defines their input: the view, and whether prompts in flight count. ``VARIANTS`` are what a router can run;
benchmarks add other routers (``OtherRouter``)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.block_pool import PoolRequest
from kvatlas.publisher.groups import GroupSpec, hash_unit
from kvatlas.publisher.pool.host_tier import HeldKey, RetentionHint
from kvatlas.router.index.learn.layout import CacheLayout, ModelFacts, make_layout
from kvatlas.router.pd.settings import PdSettings
from kvatlas.router.placement.candidate import EVICTION_PREMIUM_MAX, PolicySettings
from kvatlas.router.placement.policies import Policy
from kvatlas.router.simulation.other_router import MakeRouter
from kvatlas.router.simulation.tiers import EngineTiers, Medium, TierSetup

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
    """Blocks that the current chunk copies out."""
    coming: int = 0
    generated: int = 0
    preempted: int = 0
    stalled_s: float = 0.0
    """The engine's total when this request's next event was scheduled."""
    kept: list[int] = []
    pulled: int = 0


# Variants: a policy of the router, the view it has, and whether prompts in flight count.


ViewName = Literal["truth", "rules", "blind"]


class HoldSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The router holds requests while every engine has more than ``hold_s`` seconds of prompts queued."""

    hold_s: float
    ageing: float = 0.0
    """Order: arrival time plus this multiple of the request's own work."""
    siblings: float | None = None
    """Share of its prompt that a request must share with one in flight not to be held."""
    credit: float = 0.0
    """Most work that a tenant may save up, in seconds of the fleet's computation."""


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """``policy``: a name of ``kvatlas.router.placement.policies``, or a policy of its own; ``settings``:
    overrides of the policy's own, by name; ``hold`` None: every request goes to an engine immediately."""

    policy: str | Policy
    view: ViewName
    in_flight: bool = True
    by_session: bool = False
    tiers: bool = True
    """With view ``truth``: whether it includes the memory outside the GPUs."""
    settings: tuple[tuple[str, float], ...] = ()
    hold: HoldSetup | None = None
    prefill: int = 0
    """Number of engines that compute prompts for the others, which decode; 0: all engines do both."""
    pulls: bool = False
    """Whether prefixes are pulled from other engines' host memory, if the fleet has links for that."""
    other: MakeRouter | None = None
    """Another router, which chooses instead of ``policy``."""
    predicts: bool = False
    """Whether that router predicts first tokens, so that ``slo_s`` and ``refuses`` mean something to it."""
    admit_s: float = math.inf
    """Requests whose predicted wait is longer at every engine are refused."""
    slo_s: float = math.inf
    """Target for the first token: engines predicted to miss it are skipped while others are not."""
    refuses: int = 0
    """1: requests predicted to miss ``slo_s`` by their wait are refused, 2: and those that miss it with their
    own prefill (``policy.slo_refuse``)."""
    what: str


# Name of each parameter among the policy's settings, and its maximum.
_KNOBS = {
    "beta": ("beta", 1.0),
    "premium": ("eviction_premium", EVICTION_PREMIUM_MAX),
    "sequence": ("sequence_s", 10.0),
    "scarcity": ("scarcity_premium", EVICTION_PREMIUM_MAX),
    "spread": ("spread", 10.0),
    "room": ("room_share", 1.0),
    "crowding": ("crowding", 100.0),
    "priority": ("engine_priority", 100.0),
}
_COUNTS = {"prefill": 1023.0, "pull": 1.0}
_ADMIT = {"admit": 600.0, "slo": 600.0, "refuse": 2.0}
_HOLD_KNOBS = {"hold": 60.0, "ageing": 100.0, "siblings": 1.0, "credit": 60.0}


def _blind(policy: str, what: str) -> Variant:
    """Return a variant without knowledge of caches, which does not count prompts in flight."""
    return Variant(policy=policy, view="blind", in_flight=False, what=what)


VARIANTS: dict[str, Variant] = {
    "kvatlas": Variant(
        policy="kvatlas", view="truth", pulls=True, what="place by shared prefix, account by the exact hit"
    ),
    "gpu-only": Variant(
        policy="kvatlas", view="truth", tiers=False, what="kvatlas without the state of memory outside GPUs"
    ),
    "rules": Variant(policy="kvatlas", view="rules", what="no events: shadow pools with the engine's rules"),
    "session-hash": Variant(
        policy="hash", view="blind", in_flight=False, by_session=True, what="sessions hashed, bounded load"
    ),
    "hash": _blind("hash", "first blocks hashed, bounded load"),
    "least-load": _blind("least-load", "shortest queue"),
    "round-robin": _blind("round-robin", "in turn"),
}


def variants_of(names: Iterable[str], known: Mapping[str, Variant] = VARIANTS) -> dict[str, Variant]:
    """Return variants by name, in the given order. ``kvatlas:beta=0.5+premium=0`` sets these parameters,
    ``kvatlas:hold=1+ageing=2+siblings=0.5+credit=2`` those of ``HoldSetup``, ``kvatlas:prefill=2`` the number
    of prefill engines. Raises ``ValueError``."""
    found: dict[str, Variant] = {}
    for name in names:
        base, _, knob = name.partition(":")
        variant = known.get(base)
        if variant is None:
            raise ValueError(f"unknown policy {base!r}; expected one of {', '.join(known)}")
        if knob and variant.other is not None and not (variant.predicts and knob.startswith("slo=")):
            raise ValueError(f"{name}: {base} is another router with its own defaults; it has no parameters")
        if knob:
            variant = _set(variant, name, knob)
        found[name] = variant
    return found


def _set(variant: Variant, name: str, knobs: str) -> Variant:
    """Apply the parameters after the colon: ``beta=0.5+premium=0``."""
    limits = {key: most for key, (_, most) in _KNOBS.items()} | _HOLD_KNOBS | _COUNTS | _ADMIT
    values: dict[str, float] = {}
    for knob in knobs.split("+"):
        key, _, text = knob.partition("=")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= limits.get(key, -1.0):
            allowed = ", ".join(f"{one}=0 to {one}={high:g}" for one, high in limits.items())
            raise ValueError(f"{name}: after the colon, expected {allowed}; separate several with +")
        values[key] = value
    if "prefill" in values:
        variant = msgspec.structs.replace(variant, prefill=int(values.pop("prefill")))
    if "pull" in values:
        if not variant.pulls:
            raise ValueError(f"{name}: only kvatlas pulls prefixes, so only it takes pull=")
        variant = msgspec.structs.replace(variant, pulls=values.pop("pull") > 0)
    if "refuse" in values and "slo" not in values:
        raise ValueError(f"{name}: refuse= needs slo=SECONDS beside")
    variant = msgspec.structs.replace(
        variant,
        admit_s=values.pop("admit", variant.admit_s),
        slo_s=values.pop("slo", variant.slo_s),
        refuses=int(values.pop("refuse", 0.0)),
    )
    held = {key: values.pop(key) for key in _HOLD_KNOBS if key in values}
    if held and "hold" not in held:
        raise ValueError(f"{name}: {' and '.join(held)} need hold=SECONDS as well")
    if held:
        variant = msgspec.structs.replace(variant, hold=HoldSetup(hold_s=held.pop("hold"), **held))
    if variant.hold is not None and variant.prefill:
        raise ValueError(f"{name}: hold= needs engines without roles; leave out prefill=")
    return msgspec.structs.replace(
        variant, settings=tuple((_KNOBS[key][0], value) for key, value in values.items())
    )
