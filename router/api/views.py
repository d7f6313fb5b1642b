"""What the ops port shows: of this process alone, or of several that are one router."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from router.api.answers import EngineView, LiveRequest, PrefixView, ReceiptView, view_receipt
from router.api.insight import blocks_held, hot_prefixes, live_requests
from router.api.metrics.page import Sources, families, page_steps
from router.openai.members import at_leisure
from router.placement.engine import Engine
from router.placement.load.others import OthersLoad, others_at


class OpsView(Protocol):
    """Pages of the ops port."""

    async def metrics(self) -> bytes:
        """Prometheus text format."""

    async def engines(self) -> list[EngineView]:
        """Every engine as the router sees it."""

    async def receipts(self) -> Sequence[ReceiptView | msgspec.Raw]:
        """The latest receipts, oldest first."""

    async def requests(self) -> Sequence[LiveRequest]:
        """Requests that have not ended, oldest first."""

    async def prefixes(self) -> Sequence[PrefixView]:
        """What most prompts begin with, shorter ones first."""


class OwnView:
    """Of this process, out of its live objects."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    async def metrics(self) -> bytes:
        """See ``OpsView``."""
        return await at_leisure(page_steps(families(self._sources)))

    async def engines(self) -> list[EngineView]:
        """See ``OpsView``; the load is with what siblings and replicas have in flight."""
        others = self._sources.others()
        return [_viewed(self._sources, status, others) for status in self._sources.fleet]

    async def receipts(self) -> list[ReceiptView]:
        """See ``OpsView``."""
        return [view_receipt(receipt) for receipt in self._sources.accounts.receipts.latest]

    async def requests(self) -> list[LiveRequest]:
        """See ``OpsView``."""
        book = self._sources.requests
        return [] if book is None else live_requests(book)

    async def prefixes(self) -> list[PrefixView]:
        """See ``OpsView``."""
        return hot_prefixes(self._sources)


def _viewed(s: Sources, status: Engine, others: Mapping[str, OthersLoad] | None) -> EngineView:
    now = s.accounts.now()
    engine = None if status.residency is None else status.residency.writer
    return EngineView(
        engine=status.engine_id,
        up=status.up,
        problem=status.problem,
        held=status.held,
        asleep=status.asleep,
        models=[card.id for card in status.models],
        available=status.breaker.allows(now),
        publishes_events=status.publishes_events,
        kv_usage=status.kv_usage,
        kv_cached=None if engine is None else engine.cached_share(status.pool_blocks),
        blocks_held=blocks_held(s, status),
        feed=status.feed,
        feed_state=status.feed_state,
        followed_by=None if s.shared is None else s.shared.follower(status.engine_id),
        mode="shadow" if status.shadow is not None else None if engine is None else engine.mode,
        scheme=None if engine is None else engine.scheme,
        assumed_scheme=None if engine is None else engine.assumed,
        layout=None if engine is None else engine.layout,
        shared_stores=[] if engine is None else sorted(engine.stores),
        rejected_events={} if engine is None else dict(engine.rejected),
        unknown_events={} if engine is None else dict(engine.unknown_types),
        unusable_events=status.unusable_events,
        load=status.load.at(now, others_at(status.engine_id, others)),
        receipts=status.receipts.outcomes,
        drifting=status.receipts.drifting,
    )
