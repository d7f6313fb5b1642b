"""Value types shared by placement: candidates, costs, choices, settings.

Times are seconds, lengths are prompt tokens. Nothing here reads a clock or holds state; a caller builds one
``Candidate`` per engine it may use (healthy, not excluded), or ``Candidates`` of all
(``kvatlas.router.placement.fleet_values``), for a policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from kvatlas.publisher.events import MEDIA

# It imports numpy, which the command line's help does not need.
if TYPE_CHECKING:
    from kvatlas.router.index.query_plan import EngineHit

Confidence = Literal["exact", "pending", "degraded", "learned", "assumed", "partial", "shadow", "none"]
"""Source of a hit; a discount for the feed's state is already applied by the caller. ``pending``: exact if
the engine computes a prompt ahead first, which it may not. ``partial``: exact for the caches of which the
engine's events tell, and it has others."""

Reason = Literal["only", "cheapest", "tie", "probe", "pull", "policy"]
"""Why an engine was chosen: alone; lowest cost; equal cost, settled by shared prefix and rendezvous; it
had been without work for ``probe_interval_s`` and the prompt was
cold; the prefix is pulled from another engine (``placement.pull``); or by the rule of an arm that does not
look at costs."""

# Queues differ by (1 + premium) times the longest prompt's prefill where nothing waits: a bound to it.
EVICTION_PREMIUM_MAX = 4.0


class Hit(msgspec.Struct, gc=False):
    """Hit of one prompt on one engine, in tokens; computed once per decision and engine.

    ``gpu_tokens``: taken from its GPU cache now; ``cpu_tokens`` and ``storage_tokens``: loaded beyond that,
    in this order; ``coming_tokens``: in its GPU cache when this prompt is served, because of a prompt ahead
    of it; ``shared_prefix_tokens``: the longest of the full-attention prefix and the common prefix with a
    prompt in flight there (``common_tokens``).

    From these follows the hit at the prompt's turn: ``soon_tokens`` from its GPU, up to ``near_tokens`` with
    its CPU, ``whole_tokens`` in all.
    """

    gpu_tokens: int = 0
    cpu_tokens: int = 0
    storage_tokens: int = 0
    shared_prefix_tokens: int = 0
    coming_tokens: int = 0
    confidence: Confidence = "none"
    common_tokens: int = 0
    held: EngineHit | None = None
    """The index's or a shadow's answer before any discount; for explanations."""
    soon_tokens: int = 0
    near_tokens: int = 0
    whole_tokens: int = 0
    replay_tokens: int = 0
    """Tokens of the hit that the engine computes again (bounded replay)."""
    share: float = 1.0
    """Share of these tokens that costs count: less where the engine's probe has not seen them come."""
    evicted_tokens: int = 0
    """Tokens present or coming that the engine will have evicted at the prompt's turn: already subtracted."""
    storage_s_per_token: float = 0.0
    """Seconds to load one of ``storage_tokens``; 0: as ``storage_load_s_per_token`` of the policy."""

    def __post_init__(self) -> None:
        # Plain comparisons: this runs once per engine and request, and max() costs four times as much.
        gpu, coming = self.gpu_tokens, self.coming_tokens
        near = gpu + self.cpu_tokens
        whole = near + self.storage_tokens
        self.soon_tokens = soon = coming if coming > gpu else gpu  # noqa: FURB136
        self.near_tokens = near = soon if near < soon else near  # noqa: FURB136
        self.whole_tokens = near if whole < near else whole  # noqa: FURB136

    @property
    def by_medium(self) -> dict[str, int]:
        """``whole_tokens`` by where they come from: all of GPU, CPU and STORAGE."""
        soon, near = self.soon_tokens, self.near_tokens
        return dict(zip(MEDIA, (soon, near - soon, self.whole_tokens - near), strict=True))

    @property
    def mode(self) -> str:
        """Source of the hit: ``native``, ``learned``, ``partial`` or ``shadow``; ``none`` without a hit."""
        if self.confidence == "degraded" and self.held is not None:
            return self.held.mode
        return "native" if self.confidence == "exact" else self.confidence


class Candidate(msgspec.Struct, gc=False):
    """One engine for one prompt. Hits outside ``0 <= whole <= shared_prefix < prompt`` are clamped by the
    cost model. ``idle_s`` is the time since the router last sent it a request, ``late_s`` the delay of its
    first tokens beyond computing and loading, ``recent_s`` the work that it was recently sent.

    ``room_s`` is the wait until the pool has pages for the prompt: 0 if there is room at once.
    """

    engine_id: str
    hit: Hit = msgspec.field(default_factory=Hit)
    queue_s: float = 0.0
    running: int = 0
    waiting: int = 0
    idle_s: float = 0.0
    prefill_s_per_token: float = 1 / 8000
    decode_interference_s: float = 0.0
    late_s: float = 0.0
    recent_s: float = 0.0
    room_s: float = 0.0

    @property
    def interference_s(self) -> float:
        """Seconds that the engine's running requests add to a prompt's first token."""
        return self.decode_interference_s * self.running


class EngineState(msgspec.Struct, frozen=True, gc=False):
    """Load and rates of one engine, as in ``Candidate``; ``last_admit_s``: when the router last sent it a
    request."""

    running: int = 0
    waiting: int = 0
    last_admit_s: float = 0.0
    prefill_s_per_token: float = 0.0
    decode_interference_s: float = 0.0
    late_s: float = 0.0
    recent_s: float = 0.0


class Cost(msgspec.Struct, gc=False, frozen=True):
    """The parts of one engine's cost, in seconds; ``total_s`` is their sum minus ``credit_s``.

    ``queue_s`` is the wait as it counts in the comparison, ``wait_s`` the predicted one (not part of the
    sum). ``uncached_tokens`` and ``shared_prefix_tokens`` are the clamped values that the parts were computed
    from.
    """

    engine_id: str
    queue_s: float
    prefill_s: float
    load_s: float
    decode_s: float
    credit_s: float
    delay_s: float
    spread_s: float
    total_s: float
    uncached_tokens: int
    shared_prefix_tokens: int
    wait_s: float

    @property
    def first_token_s(self) -> float:
        """Predicted first token: waiting, computing and loading."""
        return self.wait_s + self.prefill_s + self.load_s


class Pull(msgspec.Struct, frozen=True, gc=False):
    """A prefix to pull. ``tokens`` are those that come from the source, up to token ``end`` of the prompt;
    ``link_s`` is the predicted time of the transfer with its wait for the link."""

    source: int
    """Position among the candidates."""
    source_id: str
    tokens: int
    end: int
    link_s: float


class PlacementRequest(msgspec.Struct, frozen=True, gc=False):
    """The prompt to place. ``prompt_key`` identifies the whole prompt, ``prefix_key`` its start."""

    prompt_tokens: int
    prompt_key: int = 0
    prefix_key: int = 0


# Leading blocks that the policy `hash` hashes: 1,024 tokens at vLLM's default block size.
PREFIX_BLOCKS = 64


def placement_request(
    prompt_tokens: int, hashes: Sequence[int], *, fallback_key: int = 0
) -> PlacementRequest:
    """Make the keys of a prompt from its block hashes (each covers the whole prefix before it).

    ``fallback_key`` serves prompts shorter than one block; any stable 64-bit hash of the text will do.
    """
    count = len(hashes)
    if not count:
        return PlacementRequest(prompt_tokens, fallback_key, fallback_key)
    first = PREFIX_BLOCKS if count > PREFIX_BLOCKS else count  # noqa: FURB136
    return PlacementRequest(prompt_tokens, hashes[-1], hashes[first - 1])


POLICIES: Final = ("kvatlas", "least-load", "round-robin", "hash")
"""Names of policies (``kvatlas.router.placement.policies``)."""


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of placement: costs in seconds, shares from 0 to 1. Raises ``ValueError`` for a value out of
    range."""

    policy: str = "kvatlas"
    """Policy that places requests; one of the table below. Change it only to compare."""
    # Not a key of the configuration: config/removed.py.
    beta: float = 0.25
    """Share of the prefill time of (shared prefix - hit) tokens that is credited to the engine holding the
    shared prefix, 0 to 1. 0 counts exact hits only."""
    # Not a key of the configuration: config/removed.py.
    eviction_premium: float = 0.75
    """Least price of computing, as a share of the prefill time: the prompt takes pages, whose contents must
    be computed again. Also that of pulled tokens, where pages are short. 0 ignores it."""
    # Not a key of the configuration: config/removed.py.
    delay: float = 0.5
    """Price of computing, for what it delays: the prefill time, times this, times the unfinished requests of
    an engine in the mean of the fleet and the prompts that wait at the engine itself (and its answers, where
    prompts wait for their pages). 0 leaves the least price."""
    load_s_per_token: float = 2e-6
    """Seconds to load one token from host memory. Default: 100 KB of KV per token at 50 GB/s (PCIe 5). Set it
    to bytes of KV per token divided by the measured bandwidth, if engines offload to host memory."""
    storage_load_s_per_token: float = 5e-5
    """Seconds to load one token from storage. Default: 100 KB of KV per token at 2 GB/s, between a Redis
    server and a store over TCP that writes straight into host memory. Set it likewise, if engines load from a
    store."""
    # Not a key of the configuration: config/removed.py.
    sequence_s: float = 0.02
    """Seconds charged for each request that an engine already has, if part of the prompt can be loaded from
    memory outside the GPUs: little is computed then, and blocks for generating sequences are scarce."""
    # Not a key of the configuration: config/removed.py.
    scarcity_premium: float = 1.75
    """Further price of the cache pages a prompt takes, computed or loaded, as a share of the time to compute
    their contents. Charged if part of the prompt can be loaded, in full if the fleet's first tokens come 5 s
    later than computing and loading explain: prompts wait for pages then. 0 ignores it."""
    spread: float = 0.1667
    """Seconds charged per second of work that the router recently sent an engine beyond the fleet's mean (the
    last half minute counts most): keeps long sessions apart. 0 ignores it. Set 0 if clients have no
    sessions."""
    # Not a key of the configuration: config/removed.py.
    room_share: float = 0.3
    """Share of the predicted wait for KV cache pages that counts as queue when engines are compared, 0 to 1.
    Counting all of it moves prompts away from the engines that hold their prefixes, and every queue grows."""
    engine_priority: float = 0.0
    """Above 0, for engines that schedule by priority (vLLM's `--scheduling-policy priority`): a prompt's
    priority is its arrival plus this many times its predicted uncached work, in ms, within its client's class
    ([queue.md](queue.md#engine-order)). 2 is the measured value; 0: engines get no priority. Set 2 if the
    engines schedule so."""
    retention_hints: bool = False
    """Send retention hints to engines whose connector obeys them
    ([connectors.md](connectors.md#retention-hints)): how long, and with what probability, a prompt's blocks
    are used again. Switch it on if engines have kvatlas's connector with `"policy": "hinted"`."""
    service_levels: bool = False
    """Requests have targets for the time to first token ([queue.md](queue.md#service-levels)): by
    `x-slo-ttft-ms`, else by their tenant's `slo_ttft_ms` in the key file, else by their class. Engines that
    are predicted to miss it are skipped while others are not. Switch it on if some requests must be faster
    than others."""
    slo_refuse: Literal["off", "wait", "first-token"] = "off"
    """With `service_levels`, requests are refused (429 `predicted_wait`): `wait` those that every engine is
    predicted to let wait beyond their target, `first-token` also those whose own prefill then ends after it,
    which serves more requests in time and refuses long prompts first. Set it if a late answer is worth
    nothing to the client."""
    slo_ttft_ms_high: float | None = None
    """Target of the class `high`; not set: none. Set it from your own service level."""
    slo_ttft_ms_normal: float | None = None
    """Target of the class `normal`; not set: none. Set it from your own service level."""
    slo_ttft_ms_low: float | None = None
    """Target of the class `low`; not set: none. Set it from your own service level."""
    # Not a key of the configuration: config/removed.py.
    probe_interval_s: float = 30.0
    """An engine that got no request for this long is preferred for the next cold prompt, so that its rates
    are learned."""
    # Not a key of the configuration: config/removed.py.
    bounded_load_factor: float = 1.25
    """Policy `hash`: maximum requests of an engine, as a multiple of the mean; above 1."""

    @property
    def targets(self) -> tuple[float | None, float | None, float | None] | None:
        """Targets in ms by class, high first; None without service levels."""
        if not self.service_levels:
            return None
        return self.slo_ttft_ms_high, self.slo_ttft_ms_normal, self.slo_ttft_ms_low

    def __post_init__(self) -> None:
        if self.slo_refuse != "off" and not self.service_levels:
            raise ValueError("slo_refuse needs service_levels = true: without it requests have no targets")
        for name, most in _SHARES.items():
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 0 to {most:g}")
        for name in ("slo_ttft_ms_high", "slo_ttft_ms_normal", "slo_ttft_ms_low"):
            target_ms = getattr(self, name)
            if target_ms is not None and not 0 < target_ms < float("inf"):
                raise ValueError(f"{name} must be finite and above 0, got {target_ms}")
        if self.bounded_load_factor <= 1:
            raise ValueError(f"bounded_load_factor must exceed 1, got {self.bounded_load_factor}")
        for name in _NOT_NEGATIVE:
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")


class PullSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Prefixes that engines fetch from each other's host memory ([pull.md](pull.md)): vLLM 0.32 and later
    with the `p2p` tier of its OffloadingConnector. Raises ``ValueError`` for a value out of range."""

    enabled: bool = False
    """Have an engine pull a prefix if that is cheaper than waiting for the engine that holds it and than
    computing it. Only for `policy.policy = "kvatlas"`, and not in fleets with prefill engines. Switch it on
    if long prefixes are shared by more requests than one engine can take."""
    gbit_s: float = 100.0
    """Rate at which one engine fetches blocks from another, in Gbit/s. Set it to the measured rate between
    two engines."""
    kv_kib_per_token: float = 100.0
    """KV of one token in all layers, in KiB: determines the time of a transfer. Set it to the size of the
    cache that vLLM logs divided by its tokens."""

    @property
    def s_per_token(self) -> float:
        """Seconds of link per token."""
        return self.kv_kib_per_token * 1024 * 8 / (self.gbit_s * 1e9)

    def __post_init__(self) -> None:
        for name in ("gbit_s", "kv_kib_per_token"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be finite and above 0, got {getattr(self, name)}")


_SHARES = {
    "beta": 1.0,
    "eviction_premium": EVICTION_PREMIUM_MAX,
    "scarcity_premium": EVICTION_PREMIUM_MAX,
    "room_share": 1.0,
}
_NOT_NEGATIVE = (
    "load_s_per_token",
    "storage_load_s_per_token",
    "sequence_s",
    "spread",
    "delay",
    "engine_priority",
)
