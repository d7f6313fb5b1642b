"""Policies by name: the default, and those that need no knowledge of caches, over the same candidates.

Each is one small function; state between requests is in the ``ArmState`` of the caller, so a simulator on a
virtual clock runs them unchanged. ``Choice.costs`` always come from the default model, so that explanations
stay comparable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvatlas.router.placement.candidate import POLICIES as NAMES
from kvatlas.router.placement.candidate import Candidate, PlacementRequest, PolicySettings
from kvatlas.router.placement.cost import Choice, choose, favourite, make_choice, score, weight


@dataclass(slots=True)
class ArmState:
    """State between requests."""

    turn: int = 0


Policy = Callable[[Sequence[Candidate], PlacementRequest, PolicySettings, ArmState], Choice]
"""Chooses an engine. Raises ``ValueError`` without candidates."""


def kvatlas(
    candidates: Sequence[Candidate], prompt: PlacementRequest, settings: PolicySettings, state: ArmState
) -> Choice:
    """The default: lowest cost in seconds, with credit for the shared prefix and load counted by the exact
    hit."""
    return choose(candidates, prompt.prompt_tokens, settings, prompt_key=prompt.prompt_key)


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


def hash_prefix(
    candidates: Sequence[Candidate], prompt: PlacementRequest, settings: PolicySettings, state: ArmState
) -> Choice:
    """Rendezvous hashing of the first blocks, skipping engines above 1.25 times the mean load.

    Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2018), with requests as load.
    """
    _need(candidates)
    total = sum(c.running + c.waiting for c in candidates)
    most = math.ceil(settings.bounded_load_factor * (total + 1) / len(candidates))
    free = [i for i, c in enumerate(candidates) if c.running + c.waiting < most]
    index = free[favourite([candidates[i].engine_id for i in free], prompt.prefix_key)]
    return _choice(candidates, index, prompt, settings)


POLICIES: Mapping[str, Policy] = MappingProxyType(
    dict(zip(NAMES, (kvatlas, least_load, round_robin, hash_prefix), strict=True))
)


def policy(name: str) -> Policy:
    """Return the policy of this name. Raises ``ValueError`` that lists the known names."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}") from None


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
