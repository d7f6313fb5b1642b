"""What the planner asks of an index that several replicas share; with an index of its own it asks nothing.

The planner first ``look``s (the only wait: one round trip, bounded by a deadline), then decides without
waiting. Always true: a look never raises and never waits longer than the deadline; whatever it could not
learn is answered as ``unknown`` with the reason, never with a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from publisher.block_hash import HashScheme
from router.index.base import Rows
from router.index.learn.layout import CacheLayout
from router.index.model import EngineHit, HashedPrompt
from router.placement.load import OthersLoad


class Look(msgspec.Struct, frozen=True):
    """What one look told for one prompt."""

    hits: Mapping[str, EngineHit] = {}
    """Engines that another replica follows; those followed here are for the caller to predict."""
    load: Mapping[str, OthersLoad] = {}
    """What the other replicas have in flight, by engine."""
    stores: Mapping[str, Mapping[HashScheme, Rows]] = {}
    """What other replicas were told of stores that engines share, by model and hash scheme: for predicting
    the engines followed here (``router.index.rules.offload.shared_part``)."""
    problem: str = ""
    """Why the shared index could not be asked; "" where it answered."""


NO_LOOK = Look()


class SharedView(Protocol):
    """One index of many replicas, as a planner sees it."""

    def scheme(self, engine_id: str) -> HashScheme | None:
        """The hash scheme of an engine that another replica follows, as last heard."""

    def layout(self, engine_id: str) -> CacheLayout | None:
        """The cache layout of an engine that another replica follows, as last heard."""

    def feed_state(self, engine_id: str) -> str | None:
        """State of the feed at the replica that follows the engine; None where nobody is known to."""

    async def look(
        self, prompt: HashedPrompt | None, engines: Mapping[str, str], *, detail: bool = False
    ) -> Look:
        """Ask the shared index about ``engines`` (id -> model); ``prompt`` None: about their load only.

        ``detail``: hits by spec class too.
        """
