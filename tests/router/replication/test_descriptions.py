"""Knowledge of other replicas about an engine: only what they can already read in the index."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from msgspec.structs import replace

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.router.feeds.base import FeedState, FeedStats
from kvatlas.router.feeds.manager import FeedManager
from kvatlas.router.index.base import Slot
from kvatlas.router.index.engine import EngineResidency
from kvatlas.router.index.learn.layout import CacheLayout, ModelFacts
from kvatlas.router.index.learn.learned_keys import LearnedKeys
from kvatlas.router.index.model_indexes import ModelIndexes
from kvatlas.router.index.query_plan import EngineHit, EngineQuery
from kvatlas.router.replication.descriptions import Descriptions, engine_facts
from kvatlas.router.replication.mirror import MirroredIndex
from kvatlas.router.replication.registry import EngineFacts
from tests.support.event_writer import Writer, batch, tokens


class Mirror:
    """Notes descriptions; ``is_written``: all that was replayed is in the index."""

    def __init__(self) -> None:
        self.is_written = False
        self.described: list[str] = []

    def written(self, engine_id: str) -> bool:
        return self.is_written

    def describe(self, engine_id: str, facts: EngineFacts, learned: LearnedKeys | None) -> None:
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


LAYOUT = CacheLayout((), (), 16, 16)
QUERY, UNKNOWN = EngineQuery("e", HashScheme(), LAYOUT, Slot(0, 0)), EngineHit("unknown", why_unknown="why")
NATIVE, NOTHING = EngineFacts(LAYOUT, HashScheme(), "native"), EngineFacts(why_unknown="why")
ASSUMED = EngineFacts(LAYOUT, why_unknown="hash scheme not proven yet, only assumed")
READY = FeedState.READY


@pytest.mark.parametrize(
    ("query", "layout", "state", "chunks", "told"),
    [
        (QUERY, LAYOUT, READY, False, NATIVE),
        (QUERY._replace(stores=frozenset("ab")), LAYOUT, READY, False, replace(NATIVE, stores=("a", "b"))),
        (QUERY._replace(mode="assumed"), LAYOUT, READY, False, ASSUMED),
        (QUERY._replace(learned=LearnedKeys()), LAYOUT, READY, False, replace(NATIVE, mode="learned")),
        (UNKNOWN, None, READY, False, replace(NOTHING, mode="empty")),
        (UNKNOWN, None, READY, True, NOTHING),
        (UNKNOWN, None, FeedState.REPLAYING, False, NOTHING),
        (UNKNOWN, LAYOUT, READY, False, replace(NOTHING, layout=LAYOUT)),
    ],
)
def test_others_learn_what_they_can_predict(
    query: EngineQuery | EngineHit,
    layout: CacheLayout | None,
    state: FeedState,
    chunks: bool,  # a parameter of a case
    told: EngineFacts,
) -> None:
    engine = SimpleNamespace(layout=layout, facts=SimpleNamespace(has_chunks=chunks))
    facts = engine_facts(cast("EngineResidency", engine), query, state, 3)
    assert facts == replace(told, feed_state=str(state), missing_batches=3)
