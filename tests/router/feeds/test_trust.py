"""The stated rule: how much of a predicted hit is expected while a feed does not know everything."""

from __future__ import annotations

import pytest

from kvatlas.router.feeds.base import FeedState, FeedStats
from kvatlas.router.feeds.position import expected_hit, expected_share


def feed(state: FeedState = FeedState.DEGRADED, **numbers: object) -> FeedStats:
    return FeedStats(state=state, **numbers)  # type: ignore[arg-type]


def test_a_ready_feed_is_believed() -> None:
    assert expected_hit(160, 16, feed(FeedState.READY, known_batches=1)) == 160
    assert expected_hit(160, 16, None) == 160


@pytest.mark.parametrize(
    ("known", "missing", "waiting", "expected"),
    [
        (3, 1, 0, 112),  # three quarters of 160 is 120, down to a multiple of 16
        (3, 0, 1, 112),
        (1, 3, 0, 32),
        (10_000, 1, 0, 144),
        (0, 5, 0, 0),
        (0, 0, 0, 0),
        (5, 0, 0, 160),
    ],
)
def test_the_hit_shrinks_with_what_is_missing(known: int, missing: int, waiting: int, expected: int) -> None:
    stats = feed(known_batches=known, missing_batches=missing, waiting_batches=waiting)
    assert expected_hit(160, 16, stats) == expected


@pytest.mark.parametrize("reason", ["phantom", "unverified"])
def test_a_doubt_without_a_number_halves(reason: str) -> None:
    assert expected_hit(160, 16, feed(known_batches=7, reason=reason)) == 80


def test_silence_alone_takes_nothing_away() -> None:
    assert expected_share(feed(FeedState.STALE, known_batches=7, reason="silent")) == 1.0


def test_an_aligned_hit_stays_aligned() -> None:
    for missing in range(50):
        hit = expected_hit(960, 96, feed(known_batches=17, missing_batches=missing))
        assert hit % 96 == 0
        assert hit <= 960 * 17 / (17 + missing)
