"""Descriptions of the engines followed here for other replicas: layout, hash scheme, and feed state.
An engine is described as READY only once everything replayed for it has been written.
"""

from __future__ import annotations

from kvatlas.router.feeds.base import FeedState
from kvatlas.router.feeds.manager import FeedManager
from kvatlas.router.index.engine import EngineResidency
from kvatlas.router.index.learn.learned_keys import LearnedKeys
from kvatlas.router.index.model_indexes import ModelIndexes
from kvatlas.router.index.query_plan import EngineHit, EngineQuery
from kvatlas.router.replication.mirror import MirroredIndex
from kvatlas.router.replication.registry import EngineFacts


class Descriptions:
    """Last published description of each engine, so that only changes are written."""

    def __init__(self) -> None:
        self._published: dict[str, tuple[EngineFacts, LearnedKeys | None]] = {}

    def renew(
        self, engine_id: str, model: str, mirror: MirroredIndex, residency: ModelIndexes, feeds: FeedManager
    ) -> None:
        """Publish the current description of this engine if it differs from the last one."""
        engine, feed = residency.engine(engine_id), feeds.stats.get(engine_id)
        if engine is None or feed is None:
            return
        query = residency.scope(model).residency(engine_id).query()
        # Other replicas use a degraded feed's blocks as they are; those of a process that may have ended must
        # not count.
        state = FeedState.STALE if feed.unconfirmed else feed.state
        facts = engine_facts(engine, query, state, feed.missing_batches)
        learned = query.learned if isinstance(query, EngineQuery) else None
        published = self._published.get(engine_id)
        if published is not None and facts == published[0] and learned is published[1]:
            return
        caught_up = published is not None and published[0].feed_state == facts.feed_state
        if facts.feed_state == FeedState.READY and not caught_up and not mirror.written(engine_id):
            return
        self._published[engine_id] = facts, learned
        mirror.describe(engine_id, facts, learned)

    def forget(self, engine_id: str) -> None:
        """Forget the published description: it has to be published again, or the engine is no longer
        followed here.
        """
        self._published.pop(engine_id, None)


def engine_facts(
    engine: EngineResidency, query: EngineQuery | EngineHit, feed_state: FeedState, missing: int
) -> EngineFacts:
    """Return what other replicas need to predict this engine's hits, or why they cannot."""
    state = str(feed_state)
    if isinstance(query, EngineQuery) and query.mode == "assumed":
        why = "hash scheme not proven yet, only assumed"
        return EngineFacts(engine.layout, None, "unknown", why, state, missing)
    if isinstance(query, EngineQuery):
        stores = tuple(sorted(query.stores))
        mode = "native" if query.learned is None else "learned"
        return EngineFacts(query.layout, query.scheme, mode, "", state, missing, stores)
    empty = engine.layout is None and feed_state is FeedState.READY and not engine.facts.has_chunks
    mode = "empty" if empty else "unknown"
    return EngineFacts(engine.layout, None, mode, query.why_unknown, state, missing)
