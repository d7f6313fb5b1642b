"""What the ops port shows: of this process alone, or of several that are one router."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from router.api.answers import EndedRequest, EngineView, LiveRequest, PrefixView, ReceiptView, view_receipt
from router.api.insight import (
    blocks_held,
    ended_requests,
    hot_prefixes,
    is_named,
    last,
    live_requests,
    show_history,
)
from router.api.metrics.page import Sources, families, page_steps
from router.observe.history import RecentHistory
from router.openai.members import at_leisure
from router.placement.engine import Engine
from router.placement.load.others import OthersLoad, others_at

LATEST_SHOWN = 256


class OpsView(Protocol):
    """Pages of the ops port."""

    async def metrics(self) -> bytes:
        """Prometheus text format."""

    async def engines(self) -> list[EngineView]:
        """Every engine as the router sees it."""

    async def receipts(self, request_id: str = "") -> Sequence[ReceiptView | msgspec.Raw]:
        """The latest receipts, oldest first; with ``request_id`` all kept ones of this request."""

    async def requests(self) -> Sequence[LiveRequest]:
        """Requests that have not ended, oldest first."""

    async def answers(self, request_id: str = "") -> Sequence[EndedRequest]:
        """The latest requests that ended, oldest first; with ``request_id`` all kept ones that it names."""

    async def history(self) -> RecentHistory:
        """The last five minutes."""

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

    async def receipts(self, request_id: str = "") -> list[ReceiptView]:
        """Of this process."""
        kept = self._sources.accounts.receipts.latest
        if request_id:
            return [view_receipt(receipt) for receipt in kept if is_named(receipt.request_id, request_id)]
        return [view_receipt(receipt) for receipt in last(kept, LATEST_SHOWN)]

    async def answers(self, request_id: str = "") -> list[EndedRequest]:
        """Of this process."""
        return ended_requests(self._sources.requests, LATEST_SHOWN, request_id)

    async def history(self) -> RecentHistory:
        """Of this process."""
        return show_history(self._sources)

    async def requests(self) -> list[LiveRequest]:
        """See ``OpsView``."""
        return live_requests(self._sources.requests)

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
        facts=[] if engine is None else list(engine.found_facts),
        shared_stores=[] if engine is None else sorted(engine.stores),
        rejected_events={} if engine is None else dict(engine.rejected),
        unknown_events={} if engine is None else dict(engine.unknown_types),
        unusable_events=status.unusable_events,
        load=status.load.at(now, others_at(status.engine_id, others)),
        receipts=status.receipts.outcomes,
        drifting=status.receipts.drifting,
        contradicting=status.receipts.contradicting,
        first_tokens=status.receipts.first_tokens.summary(),
    )
