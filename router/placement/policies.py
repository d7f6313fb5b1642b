"""The policies by name: the default, and the ones it is compared with, over the same candidates.

Each is one small function; what a policy must remember between requests lies in the ``ArmState`` the
caller passes (a turn counter and a seeded generator), so a simulator on a virtual clock runs them unchanged.
Whatever the policy, ``Choice.costs`` are the default model's, so that explanations stay comparable.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec

from router.placement.candidate import Candidate, Hit, PlacementRequest, PolicySettings
from router.placement.cost import Choice, choose, chosen, favourite, weigh, weight


@dataclass(slots=True)
class ArmState:
    """State that some policies keep between requests. ``rng`` must be seeded by whoever needs repeatable
    runs."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    turn: int = 0


Policy = Callable[[Sequence[Candidate], PlacementRequest, PolicySettings, ArmState], Choice]
"""Raises ``ValueError`` when there are no candidates."""


def kvatlas(
    candidates: Sequence[Candidate], prompt: PlacementRequest, settings: PolicySettings, state: ArmState
) -> Choice:
    """The default: lowest cost in seconds, with credit for the trunk and load counted by the exact hit."""
    return choose(candidates, prompt.prompt_tokens, settings, prompt_key=prompt.prompt_key)


def exact(
    candidates: Sequence[Candidate], prompt: PlacementRequest, settings: PolicySettings, state: ArmState
) -> Choice:
    """Lowest cost by what engines hold now: no trunk, no credit, no prompts in flight."""
    blind = [
        msgspec.structs.replace(c, hit=_only(c.hit, trunk_tokens=0, coming_tokens=0)) for c in candidates
    ]
    return choose(blind, prompt.prompt_tokens, _for_itself(settings), prompt_key=prompt.prompt_key)


def full_attention(
    candidates: Sequence[Candidate], prompt: PlacementRequest, settings: PolicySettings, state: ArmState
) -> Choice:
    """Counts the full-attention prefix as the hit, as an index that ignores groups does."""
    trusting = [
        msgspec.structs.replace(c, hit=_only(c.hit, gpu_tokens=max(c.hit.gpu_tokens, _all_trunk(c.hit))))
        for c in candidates
    ]
    return choose(trusting, prompt.prompt_tokens, _for_itself(settings), prompt_key=prompt.prompt_key)


def least_load(
    candidates: Sequence[Candidate], prompt: PlacementRequest, settings: PolicySettings, state: ArmState
) -> Choice:
    """Shortest queue in seconds, then fewest requests; ignores caches."""
    _need(candidates)
    index = min(range(len(candidates)), key=lambda i: _load_order(candidates[i], prompt.prompt_key))
    return _choice(candidates, index, prompt, settings)


def round_robin(
    candidates: Sequence[Candidate], prompt: PlacementRequest, settings: PolicySettings, state: ArmState
) -> Choice:
    """The engines in turn, by their order in the list."""
    _need(candidates)
    index = state.turn % len(candidates)
    state.turn += 1
    return _choice(candidates, index, prompt, settings)


def power_of_two(
    candidates: Sequence[Candidate], prompt: PlacementRequest, settings: PolicySettings, state: ArmState
) -> Choice:
    """The less loaded of two engines drawn at random (Mitzenmacher, 2001)."""
    _need(candidates)
    drawn = state.rng.sample(range(len(candidates)), min(2, len(candidates)))
    index = min(drawn, key=lambda i: _load_order(candidates[i], prompt.prompt_key))
    return _choice(candidates, index, prompt, settings)


def hash_prefix(
    candidates: Sequence[Candidate], prompt: PlacementRequest, settings: PolicySettings, state: ArmState
) -> Choice:
    """Rendezvous hashing of the first blocks, skipping engines above ``bounded_load_factor`` times the mean
    load.

    Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2018), with requests as load.
    """
    _need(candidates)
    total = sum(c.running + c.waiting for c in candidates)
    most = math.ceil(settings.bounded_load_factor * (total + 1) / len(candidates))
    free = [i for i, c in enumerate(candidates) if c.running + c.waiting < most]
    index = free[favourite([candidates[i].engine_id for i in free], prompt.prefix_key)]
    return _choice(candidates, index, prompt, settings)


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "kvatlas": kvatlas,
        "full-attention": full_attention,
        "exact": exact,
        "least-load": least_load,
        "round-robin": round_robin,
        "hash": hash_prefix,
        "power-of-two": power_of_two,
    }
)


def policy(name: str) -> Policy:
    """The policy called ``name``. Raises ``ValueError`` that lists the known names."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}") from None


def _only(hit: Hit, **changes: int) -> Hit:
    """The hit as another index would give it."""
    return msgspec.structs.replace(hit, **changes)


def _all_trunk(hit: Hit) -> int:
    return hit.trunk_tokens - hit.cpu_tokens - hit.storage_tokens


def _for_itself(settings: PolicySettings) -> PolicySettings:
    """The cost of the prompt alone, as routers without a premium for pages have it."""
    return msgspec.structs.replace(settings, eviction_premium=0.0, scarcity_premium=0.0)


def _need(candidates: Sequence[Candidate]) -> None:
    if not candidates:
        raise ValueError("no engine to choose from")


def _load_order(candidate: Candidate, key: int) -> tuple[float, int, int]:
    requests = candidate.running + candidate.waiting
    return candidate.queue_s, requests, -weight(candidate.engine_id, key)


def _choice(
    candidates: Sequence[Candidate], index: int, prompt: PlacementRequest, settings: PolicySettings
) -> Choice:
    weighed = weigh(candidates, prompt.prompt_tokens, settings)
    return chosen(weighed, index, "only" if len(candidates) == 1 else "policy")
