"""Where a prompt would have gone, by what a capture says of the engines; their load is not in it, so all are
idle."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from publisher.block_hash import HashScheme
from router.index.model import HashedPrompt
from router.placement.candidate import Ask, Candidate, Confidence, Hit, PolicySettings, ask
from router.placement.policies import ArmState, policy
from router.tools.explain.state import EngineExplanation

_CONFIDENCE: dict[str, Confidence] = {"native": "exact", "learned": "learned", "assumed": "assumed"}


class ChoiceMade(msgspec.Struct, frozen=True):
    """The engine chosen among idle ones."""

    engine: str
    reason: str
    hit_tokens: int
    uncached_tokens: int


def choice(
    engines: Sequence[EngineExplanation],
    prompt: HashedPrompt,
    scheme: HashScheme | None,
    settings: PolicySettings,
) -> ChoiceMade:
    """What the policy says. ``scheme`` gives the keys that settle ties."""
    candidates = [
        Candidate(
            e.engine,
            Hit(
                e.hit_tokens,
                e.offloaded_tokens - e.hit_tokens - e.storage_tokens,
                e.storage_tokens,
                max(e.trunk_tokens, e.offloaded_tokens),
                confidence=_CONFIDENCE.get(e.mode, "none"),
            ),
        )
        for e in engines
    ]
    hashes = prompt.hashes(scheme) if scheme is not None else ()
    question: Ask = ask(prompt.num_tokens, hashes, prefix_blocks=settings.prefix_blocks)
    made = policy(settings.policy)(candidates, question, settings, ArmState())
    return ChoiceMade(made.engine_id, made.reason, engines[made.index].hit_tokens, made.uncached_tokens)
