"""What other replicas are told of the engines followed here: layout, hash scheme, and how far the feed is.

Always true: an engine is said to be READY only once everything replayed of it has been written.
"""

from __future__ import annotations

from router.feeds.base import FeedState
from router.feeds.manager import FeedManager
from router.index.engine import EngineResidency
from router.index.models import Scopes
from router.index.seats import EngineHit, Seat
from router.replication.schema.registry import EngineFacts
from router.replication.writer.mirror import MirroredIndex


class Descriptions:
    """What was said last of each engine, so that only what changed is written."""

    def __init__(self) -> None:
        self._published: dict[str, EngineFacts] = {}

    def renew(
        self, engine_id: str, model: str, mirror: MirroredIndex, residency: Scopes, feeds: FeedManager
    ) -> None:
        """Say what holds now of this engine, if it is something else than before."""
        engine, feed = residency.engine(engine_id), feeds.stats.get(engine_id)
        if engine is None or feed is None:
            return
        seat = residency.scope(model).residency(engine_id).seat()
        # Others take a degraded feed's blocks as they are: of a process that may have ended, none counts.
        state = FeedState.STALE if feed.unconfirmed else feed.state
        facts = engine_facts(engine, seat, state, feed.missing_batches)
        published = self._published.get(engine_id)
        if facts == published:
            return
        caught_up = published is not None and published.feed_state == facts.feed_state
        if facts.feed_state == FeedState.READY and not caught_up and not mirror.written(engine_id):
            return
        self._published[engine_id] = facts
        mirror.describe(engine_id, facts)

    def forget(self, engine_id: str) -> None:
        """It is followed anew, or not here any more: all of it is to be said again."""
        self._published.pop(engine_id, None)


def engine_facts(
    engine: EngineResidency, seat: Seat | EngineHit, feed_state: FeedState, missing: int
) -> EngineFacts:
    """What other replicas need to predict this engine's hits, or why they cannot."""
    state = str(feed_state)
    if isinstance(seat, Seat) and seat.mode == "assumed":
        why = "hash scheme not proven yet, only assumed"
        return EngineFacts(engine.layout, None, "unknown", why, state, missing)
    if isinstance(seat, Seat):
        if seat.learned is not None:
            return EngineFacts(mode="learned", feed_state=state, missing_batches=missing)
        stores = tuple(sorted(seat.stores))
        return EngineFacts(seat.layout, seat.scheme, "native", "", state, missing, stores)
    empty = engine.layout is None and feed_state is FeedState.READY and not engine.facts.has_chunks
    mode = "empty" if empty else "unknown"
    return EngineFacts(engine.layout, None, mode, seat.why_unknown, state, missing)
