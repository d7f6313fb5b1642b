"""Knowledge of other replicas about an engine: only what they can already read in the index."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.router.feeds.base import FeedState, FeedStats
from kvatlas.router.feeds.manager import FeedManager
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.model import ModelIndexes
from kvatlas.router.replication.mirror import Descriptions, MirroredIndex
from kvatlas.router.replication.registry import EngineFacts
from tests.support.event_writer import Writer, batch, tokens


class Mirror:
    """Notes descriptions; ``is_written``: all that was replayed is in the index."""

    def __init__(self) -> None:
        self.is_written = False
        self.described: list[str] = []

    def written(self, engine_id: str) -> bool:
        return self.is_written

    def describe(self, engine_id: str, facts: EngineFacts) -> None:
        self.described.append(facts.feed_state)


def test_an_engine_is_ready_for_others_when_its_history_is_written() -> None:
    scopes, mirror, found = ModelIndexes(lambda model: ModelFacts()), Mirror(), Descriptions()
    scopes.assign("e", "m").apply(batch(Writer(HashScheme()).stored(tokens(160))))
    stats = FeedStats(state=FeedState.REPLAYING)
    feeds = cast("FeedManager", SimpleNamespace(stats={"e": stats}))

    def renew() -> list[str]:
        found.renew("e", "m", cast("MirroredIndex", mirror), scopes, feeds)
        said, mirror.described = mirror.described, []
        return said

    assert renew() == ["replaying"]
    stats.state = FeedState.READY
    assert renew() == [], "blocks that are not written yet would count as missing"
    mirror.is_written = True
    assert renew() == ["ready"]
    assert renew() == []
    # Small changes of an engine that is ready wait for nothing.
    mirror.is_written, stats.missing_batches = False, 1
    assert renew() == ["ready"]
    stats.unconfirmed = True
    assert renew() == ["stale"], "its process may have ended"
    found.forget("e")
    assert renew() == ["stale"]
