"""Policies by name: the default, and those it is compared with, over the same candidates.

Each is one small function; state between requests is in the ``ArmState`` of the caller (a turn counter and a
seeded generator), so a simulator on a virtual clock runs them unchanged. ``Choice.costs`` always come from
the default model, so that explanations stay comparable.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec

from kvatlas.router.placement.candidate import Candidate, Hit, PlacementRequest, PolicySettings
from kvatlas.router.placement.cost import Choice, choose, favourite, make_choice, score, weight


@dataclass(slots=True)
class ArmState:
    """State between requests. ``rng`` must be seeded for repeatable runs."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    turn: int = 0


Policy = Callable[[Sequence[Candidate], PlacementRequest, PolicySettings, ArmState], Choice]
"""Chooses an engine. Raises ``ValueError`` without candidates."""


def kvatlas(
    candidates: Sequence[Candidate], prompt: PlacementRequest, settings: PolicySettings, state: ArmState
) -> Choice:
    """The default: lowest cost in seconds, with credit for the shared prefix and load counted by the exact
    hit."""
    return choose(candidates, prompt.prompt_tokens, settings, prompt_key=prompt.prompt_key)


def exact(
    candidates: Sequence[Candidate], prompt: PlacementRequest, settings: PolicySettings, state: ArmState
) -> Choice:
    """Lowest cost by current contents only: no shared prefix, no credit, no prompts in flight."""
    blind = [
        msgspec.structs.replace(c, hit=_only(c.hit, shared_prefix_tokens=0, coming_tokens=0))
        for c in candidates
    ]
    return choose(blind, prompt.prompt_tokens, _for_itself(settings), prompt_key=prompt.prompt_key)


def full_attention(
    candidates: Sequence[Candidate], prompt: PlacementRequest, settings: PolicySettings, state: ArmState
) -> Choice:
    """Count the full-attention prefix as the hit, like an index that ignores groups."""
    held = [c.hit.shared_prefix_tokens - c.hit.cpu_tokens - c.hit.storage_tokens for c in candidates]
    trusting = [
        msgspec.structs.replace(c, hit=_only(c.hit, gpu_tokens=max(c.hit.gpu_tokens, tokens)))
        for c, tokens in zip(candidates, held, strict=True)
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
    """Round robin, by the order in the list."""
    _need(candidates)
    index = state.turn % len(candidates)
    state.turn += 1
    return _choice(candidates, index, prompt, settings)


def power_of_two(
    candidates: Sequence[Candidate], prompt: PlacementRequest, settings: PolicySettings, state: ArmState
) -> Choice:
    """The less loaded of two random engines (Mitzenmacher, 2001)."""
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
    """Return the policy of this name. Raises ``ValueError`` that lists the known names."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}") from None


def _only(hit: Hit, **changes: int) -> Hit:
    """Return the hit as another index would report it."""
    return msgspec.structs.replace(hit, **changes)


def _for_itself(settings: PolicySettings) -> PolicySettings:
    """Return settings for the cost of the prompt alone, as in routers without a premium for pages."""
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
    scored = score(candidates, prompt.prompt_tokens, settings)
    return make_choice(scored, index, "only" if len(candidates) == 1 else "policy")
