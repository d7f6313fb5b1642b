"""The share of a predicted hit to expect while a feed is incomplete.

READY: all of it. Otherwise what is known is evidence, and the expected share of a hit is

    applied / (applied + missing + waiting)

where ``applied`` are the batches that what is known rests on (since the engine's start, its last cache clear,
or up to a snapshot's cut), ``missing`` those known to be lost, and ``waiting`` those that exist but have not
been applied yet. Where something is wrong and no number says how much (a phantom alarm, a process that could
not be told from the one before), half of that. A feed that is only silent keeps its share: nothing says that
anything happened since. One that lost its connection has none until the process is confirmed: an engine that
restarts loses its cache, and its next event may be long in coming.
"""

from __future__ import annotations

from router.feeds.base import FeedState, FeedStats

DOUBTS = frozenset({"phantom", "unverified"})
"""Reasons that come without a number."""


def expected_share(stats: FeedStats) -> float:
    """Share of a predicted hit to be expected, 0 to 1."""
    if stats.state is FeedState.READY:
        return 1.0
    if stats.unconfirmed:
        return 0.0
    unknown = stats.missing_batches + stats.waiting_batches
    known = stats.known_batches
    share = known / (known + unknown) if known else 0.0
    return share / 2 if stats.reason in DOUBTS else share


def expected_hit(hit_tokens: int, alignment: int, stats: FeedStats | None) -> int:
    """The hit to count on, in tokens: the share of it, rounded down to where a hit may end."""
    if stats is None or stats.state is FeedState.READY:
        return hit_tokens
    expected = int(hit_tokens * expected_share(stats))
    return expected - expected % max(alignment, 1)
