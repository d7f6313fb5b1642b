"""Another router in place of kvatlas in a simulated fleet: its choices, and its knowledge.

None is part of kvatlas; ``benchmarks/peers.py`` has those that results compare with.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvatlas.publisher.events import BlockHash
from kvatlas.router.placement.candidate import Candidate
from kvatlas.router.simulation.setup import FleetSetup


class PrefixHit(NamedTuple):
    """Hits of one prompt at one engine, in tokens: on its GPU, the shared prefix, and beyond the GPU in host
    memory or the store; ``alone``: what its host memory holds by itself."""

    hit: int
    shared_prefix: int
    cpu: int = 0
    storage: int = 0
    alone: int = 0


class OtherRouter(ABC):
    """Requests are identified by ``index``, engines by their place; times are seconds."""

    gauge_s: float = math.inf
    """Seconds between two polls of every engine's gauges; infinite: it reads none."""

    @abstractmethod
    def place(
        self,
        index: int,
        prompt_tokens: int,
        hashes: Sequence[BlockHash],
        seen: Sequence[PrefixHit],
        now: float,
    ) -> tuple[int, int]:
        """Return the engine that gets the request, and the number of prompt tokens believed cached there.
        ``seen``: state of each engine from events."""

    @abstractmethod
    def misses(
        self, prompt_tokens: int, hashes: Sequence[BlockHash], seen: Sequence[PrefixHit], left_s: float
    ) -> bool:
        """Whether every engine is predicted to give the first token later than in ``left_s``."""

    @abstractmethod
    def first_token(self, index: int, now: float | None = None) -> None:
        """The request's prompt is computed."""

    @abstractmethod
    def ended(self, index: int) -> None:
        """The request was answered, or has failed."""

    @abstractmethod
    def polled(self, engine: int, waiting: int, usage: float) -> None:
        """Gauges of an engine were read."""

    def full(self) -> bool:
        """Whether requests wait in the router now, first come, first served."""
        return False


MakeRouter = Callable[[FleetSetup, int, random.Random], OtherRouter]
"""Makes one for a fleet, tokens per block, and a generator that draws between equals."""


def seen_of(candidates: Sequence[Candidate]) -> list[PrefixHit]:
    """Return what events show of each engine, for other routers."""
    return [PrefixHit(one.hit.gpu_tokens, one.hit.shared_prefix_tokens) for one in candidates]
