"""A decision: what was known of each engine when a prompt was placed, and which one was chosen."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from publisher.events import MEDIA
from router.fleet.status import EngineStatus
from router.index.model import EngineHit
from router.placement.candidate import Candidate, Choice
from router.placement.shadow import ShadowHit
from router.prompts.affinity import TextAffinity
from router.prompts.prompt import Prompt


class Shared(NamedTuple):
    """What a prompt shares with prompts in flight at one engine, in tokens."""

    common_tokens: int = 0
    coming_tokens: int = 0
    """Of those, what will be a hit once the prompt in flight is computed."""


class View(NamedTuple):
    """One engine as this decision saw it."""

    status: EngineStatus
    candidate: Candidate
    hit: EngineHit | None
    shadow: ShadowHit | None
    shared: Shared

    @property
    def mode(self) -> str:
        """Where the hit comes from: ``native``, ``learned``, ``assumed`` or ``shadow``; ``none`` where there
        is none."""
        if self.candidate.confidence == "none":
            return "none"
        if self.candidate.confidence == "degraded" and self.hit is not None:
            return self.hit.mode
        return "native" if self.candidate.confidence == "exact" else self.candidate.confidence

    @property
    def expected_tokens(self) -> int:
        """The hit when the engine gets to this prompt, as it will report it: what it holds, or what a prompt
        ahead leaves there, and what it loads beyond that."""
        return sum(self.expected_by_medium.values())

    @property
    def expected_by_medium(self) -> dict[str, int]:
        """``expected_tokens`` by where they come from: all of GPU, CPU and STORAGE."""
        candidate = self.candidate
        gpu = max(candidate.hit_tokens, self.shared.coming_tokens)
        near = max(gpu, candidate.hit_tokens + candidate.cpu_tokens)
        whole = max(near, candidate.hit_tokens + candidate.offloaded_tokens)
        return dict(zip(MEDIA, (gpu, near - gpu, whole - near), strict=True))


class Decision(msgspec.Struct, frozen=True):
    """A choice and all it rested on."""

    read: Prompt | TextAffinity | None
    prompt_tokens: int
    views: tuple[View, ...]
    choice: Choice
    index_problem: str = ""
    """Why the index shared with other replicas could not be asked; "" where it answered, or there is none."""

    @property
    def view(self) -> View:
        return self.views[self.choice.index]
