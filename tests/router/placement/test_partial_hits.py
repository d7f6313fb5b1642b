"""Hits that events tell a part of: what receipts confirm of them, by class of prompt."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.placement.partial_hits import PartialHits

PAGE = 16
# (hit by events, prompt, what the engine takes of it): the next turn of a conversation finds its state,
# another prompt with the same beginning half of it or nothing; short prompts lose their window.
CLASSES = [(3008, 3200, 3008), (1024, 4000, 512), (2048, 20_000, 0), (96, 130, 32)]


def test_without_receipts_all_of_a_hit_counts() -> None:
    assert PartialHits().expected(1024, 2000, PAGE) == 1024
    assert PartialHits().expected(0, 2000, PAGE) == 0


def test_twenty_receipts_tell_four_classes_apart() -> None:
    rng, known = random.Random(1), PartialHits()
    for hit, prompt, actual in (order := CLASSES * 5):
        known.add(hit, prompt + rng.randrange(30), actual)
    assert len(order) == 20
    for hit, prompt, actual in CLASSES:
        assert abs(known.expected(hit, prompt, PAGE) - actual) <= hit // 5
    assert known.expected(3008, 3200, PAGE) >= 2700


def test_a_class_without_receipts_takes_the_share_of_all() -> None:
    known = PartialHits()
    for _ in range(10):
        known.add(1024, 4000, 256)
    assert 256 <= known.expected(8192, 9000, PAGE) // 8 <= 400


def test_rules_count_until_receipts_contradict_them_and_again_after_that() -> None:
    known = PartialHits()
    assert known.expected(1024, 4000, PAGE, 512) == 512
    assert known.expected(256, 4000, PAGE, 512) == 256, "never above what events tell"
    for _ in range(4):  # another client's requests, of which the rules know nothing
        known.add(1024, 4000, 0, 512)
    assert not known.by_rules
    assert known.expected(1024, 4000, PAGE, 512) == known.expected(1024, 4000, PAGE) <= 256
    for actual in [64, 960] * 12:
        known.add(1024, 4000, actual, actual)
    assert known.expected(1024, 4000, PAGE, 960) == 960


def test_changes_are_followed() -> None:
    known = PartialHits()
    for actual in [0] * 50 + [1024] * 20:
        known.add(1024, 4000, actual)
    assert known.expected(1024, 4000, PAGE) > 800


@given(
    st.lists(
        st.tuples(st.integers(0, 1 << 26), st.integers(0, 1 << 26), st.integers(0, 1 << 26)), max_size=40
    ),
    st.integers(0, 1 << 22),
    st.integers(1, 1 << 22),
    st.sampled_from([1, 16, 64, 528]),
)
def test_any_receipts_give_a_part_of_the_hit(
    receipts: list[tuple[int, int, int]], pages: int, prompt: int, page: int
) -> None:
    known, hit = PartialHits(), pages * page
    for told in receipts:
        known.add(*told)
    expected = known.expected(hit, prompt, page)
    assert 0 <= expected <= hit
    assert expected % page == 0
    if all(actual >= held for held, _, actual in receipts):
        assert expected == hit, "nothing was denied"
