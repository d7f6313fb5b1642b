"""Hit rules, one by one, with numbers worked out by hand."""

from __future__ import annotations

import pytest

from kvatlas.publisher.events import BlockHash
from kvatlas.publisher.groups import GroupSpec
from kvatlas.router.index.base import Plane
from kvatlas.router.index.hit_rules import FleetRule, evaluate
from kvatlas.router.index.learn.layout import CacheLayout, ModelFacts
from kvatlas.router.index.memory import MemoryIndex
from kvatlas.router.index.offloaded import tier_extents
from tests.router.index.rules.layouts import (
    chunked,
    evaluate_one,
    full,
    hashes_of,
    hit,
    layout_of,
    mamba,
    rows_of,
    window,
)


@pytest.mark.parametrize(
    ("num_tokens", "held", "expected"),
    [
        (100, [], 0),
        (100, [0, 1, 2], 48),
        (100, [0, 1, 3, 4], 32),
        (100, [1, 2, 3], 0),
        (100, range(6), 96),
        (97, range(6), 96),
        (96, range(6), 80),
        (95, range(6), 80),
        (17, [0], 16),
        (16, [0], 0),
        (1, [0], 0),
        (0, [], 0),
    ],
)
def test_full_attention(num_tokens: int, held: list[int], expected: int) -> None:
    assert hit(layout_of(full()), num_tokens, {0: held}) == expected


@pytest.mark.parametrize(
    ("tokens", "needed"), [(2, 1), (16, 1), (17, 1), (18, 2), (33, 2), (49, 3), (50, 4), (64, 4), (65, 4)]
)
def test_a_window_needs_the_blocks_of_all_but_its_newest_token(tokens: int, needed: int) -> None:
    layout = layout_of(window(0, tokens))
    assert hit(layout, 200, {0: range(10 - needed, 10)}) == 160
    assert hit(layout, 200, {0: range(10 - needed + 1, 10)}) == 0


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ([3, 4, 5, 6], 112),
        ([3, 4, 5, 6, 8, 9, 10], 112),
        ([2, 3, 4, 5, 7, 8, 9, 10], 176),
        ([0, 1, 2], 48),
        ([0], 16),
        ([0, 1, 3, 4, 5], 32),
        ([1, 2, 3], 0),
    ],
)
def test_a_window_resumes_after_its_last_whole_window_or_a_run_from_the_start(
    held: list[int], expected: int
) -> None:
    assert hit(layout_of(window(0, 64)), 200, {0: held}) == expected


def test_a_window_longer_than_any_prompt_is_full_attention() -> None:
    assert hit(layout_of(window(0, 1 << 31)), 200, {0: [0, 1, 2, 4, 5]}) == 48


@pytest.mark.parametrize(
    ("num_tokens", "held", "expected"),
    [
        (150, [], 128),  # chunk starts need nothing: 64, 128
        (150, [8], 144),
        (129, [7, 8], 128),
        (128, [4, 5, 6], 112),
        (128, [4, 6], 80),
        (128, [5, 6], 64),
        (128, range(7), 112),
        (60, [], 0),
        (60, [0, 1], 32),
    ],
)
def test_chunked_local(num_tokens: int, held: list[int], expected: int) -> None:
    assert hit(layout_of(chunked(0, 64)), num_tokens, {0: held}) == expected


def test_full_attention_bounds_chunked_local() -> None:
    layout = layout_of(full(0), chunked(1, 64))
    assert hit(layout, 200, {0: range(9)}) == 128
    assert hit(layout, 200, {0: range(9), 1: [8]}) == 144
    assert hit(layout, 200, {1: range(12)}) == 0


@pytest.mark.parametrize(("held", "expected"), [([5], 96), ([2, 8], 144), ([12], 0), ([11], 192)])
def test_mamba_needs_the_state_at_the_boundary_alone(held: list[int], expected: int) -> None:
    assert hit(layout_of(mamba(0)), 200, {0: held}) == expected


def test_a_hit_must_be_valid_in_every_class() -> None:
    layout = layout_of(full(0), window(1, 32), mamba(2))
    held = {0: range(12), 1: [1, 2, 4, 5, 8, 9], 2: [2, 5, 7]}
    assert hit(layout, 200, held) == 96, "not min(192, 160, 128): 96 is the last that all three serve"


def test_groups_of_one_class_must_hold_the_same_block() -> None:
    layout = layout_of(full(0), window(1, 32), window(2, 32))
    assert hit(layout, 200, {0: range(12), 1: [4, 5], 2: [6, 7]}) == 0
    assert hit(layout, 200, {0: range(12), 1: [4, 5, 6, 7], 2: [6, 7, 9]}) == 128


def test_unequal_blocks_resume_at_common_boundaries_only() -> None:
    layout = layout_of(full(0, 32), window(1, 33, 16))
    assert layout.alignment == 32
    assert layout.hash_block_size == 16
    held = {0: range(5), 1: [1, 2, 5, 6]}
    assert hit(layout, 200, held) == 0, "48 and 112 are no multiples of 32"
    held = {0: range(5), 1: [2, 3, 5, 6]}
    assert hit(layout, 200, held) == 64


def test_three_block_sizes() -> None:
    layout = layout_of(full(0, 32), window(1, 17, 16), window(2, 17, 48))
    assert layout.alignment == 96
    assert hit(layout, 400, {0: range(12), 1: range(24), 2: range(8)}) == 384
    assert hit(layout, 400, {0: range(12), 1: range(24), 2: [0, 1, 2, 5]}) == 288


def test_eagle_full_attention_must_hold_one_more_block() -> None:
    layout = layout_of(full(0, is_eagle=True))
    assert hit(layout, 200, {0: range(6)}) == 80
    assert hit(layout, 200, {0: [0]}) == 0
    assert hit(layout, 97, {0: range(6)}) == 80, "the block after may not hold the last token"
    assert hit(layout, 96, {0: range(6)}) == 64
    assert hit(layout, 113, {0: range(7)}) == 96


def test_eagle_full_attention_beside_a_window() -> None:
    layout = layout_of(full(0, is_eagle=True), window(1, 33))
    assert hit(layout, 200, {0: range(7), 1: range(12)}) == 96
    assert hit(layout, 112, {0: range(7), 1: range(12)}) == 96, (
        "with several groups the block may end the prompt"
    )
    assert hit(layout, 97, {0: range(6), 1: range(12)}) == 80


def test_eagle_window_needs_the_block_behind_too() -> None:
    layout = layout_of(full(0), window(1, 64, is_eagle=True))
    assert hit(layout, 200, {0: range(12), 1: [3, 4, 5, 6, 7]}) == 112
    assert hit(layout, 200, {0: range(12), 1: [3, 4, 5, 6]}) == 0
    assert hit(layout, 200, {0: range(12), 1: [0, 1, 2]}) == 32
    assert hit(layout, 200, {0: range(12), 1: [0]}) == 0


def test_eagle_window_of_small_blocks_loses_an_alignment_unit_of_a_short_run() -> None:
    layout = layout_of(full(0, 32), window(1, 128, 16, is_eagle=True))
    assert hit(layout, 400, {0: range(12), 1: range(9)}) == 128, "a whole window, and the block behind"
    assert hit(layout, 400, {0: range(12), 1: range(8)}) == 64, "seven blocks in use: 112 -> 96, less 32"
    assert hit(layout, 400, {0: range(12), 1: range(7)}) == 64
    assert hit(layout, 400, {0: range(12), 1: range(3)}) == 0


def test_a_prefix_shortened_by_another_class_needs_a_block_behind_again() -> None:
    layout = layout_of(full(0), window(1, 33, is_eagle=True), window(2, 17))
    held = {0: range(12), 1: [2, 3, 6, 7, 8], 2: [1, 3]}
    assert hit(layout, 200, held) == 0, "64 would do but for block 4"
    assert hit(layout, 200, held | {1: [2, 3, 4, 6, 7, 8]}) == 64


def test_a_prefix_shortened_by_another_eagle_window_does_not() -> None:
    layout = layout_of(full(0), window(1, 33, is_eagle=True), window(2, 17, is_eagle=True))
    held = {0: range(12), 1: [2, 3, 6, 7, 8], 2: [3, 4]}
    assert hit(layout, 200, held) == 64


def test_one_eagle_group_makes_its_class_drop() -> None:
    layout = layout_of(full(0), window(1, 33), window(2, 33, is_eagle=True))
    assert len(layout.classes) == 2
    assert hit(layout, 200, {0: range(12), 1: [3, 4, 5], 2: [3, 4, 5]}) == 80


def test_hits_inside_a_block() -> None:
    """Full attention and Mamba in blocks of 64, hashes every 16: a checkpoint at 16-token steps counts."""
    layout = layout_of(full(0, 64), mamba(1, "align", 64), unit=16)
    assert layout.alignment == 16
    units = {0: [3, 5], 1: [5]}  # block 0 of full attention, a partial block up to token 96, a state there
    assert evaluate_one(layout, 200, units).hit[0] == 96
    assert evaluate_one(layout, 96, units).hit[0] == 0, "token 96 itself must be computed"
    assert evaluate_one(layout, 200, {0: [3, 6], 1: [5]}).hit[0] == 96, "a longer part of the block serves"
    assert evaluate_one(layout, 200, {0: [3, 4], 1: [5]}).hit[0] == 0, "a shorter one does not"
    assert evaluate_one(layout, 200, {0: [5], 1: [5]}).hit[0] == 0, "the block before is missing"
    assert evaluate_one(layout, 200, {0: [3, 7], 1: [1, 6]}).hit[0] == 112


def test_eagle_hits_inside_a_block_need_one_more_hash_block() -> None:
    layout = layout_of(full(0, 64, is_eagle=True), mamba(1, "align", 64), unit=16)
    assert evaluate_one(layout, 112, {0: [3, 6], 1: [5]}).hit[0] == 96, "it may hold the prompt's last token"
    assert evaluate_one(layout, 112, {0: [3, 5], 1: [5]}).hit[0] == 0
    assert evaluate_one(layout, 112, {0: [3, 5], 1: [4, 5]}).hit[0] == 80


def test_no_hits_inside_a_block_where_a_group_cannot_follow() -> None:
    layout = layout_of(full(0, 64), mamba(1, "align", 64), window(2, 64, 32), unit=16)
    assert layout.alignment == 64


def test_partial_hits_that_no_group_mix_allows_are_not_switched_on() -> None:
    wanted = ModelFacts(partial_hash_hits=True)
    layout = layout_of(full(0, 64), window(1, 64, 32), unit=16, facts=wanted)
    assert layout.alignment == 64
    assert hit(layout, 200, {0: range(3), 1: range(6)}) == 192
    # vLLM 0.33 with decode context parallelism and no states (random mix 20261305_0123).
    dense = layout_of(full(0, 32), full(1, 64), lookahead=3, facts=wanted, unit=32)
    assert hit(dense, 176, {0: range(5), 1: range(2)}) == 128
    assert hit(dense, 100, {0: range(3), 1: range(1)}) == 64


def test_partial_hits_can_be_switched_off() -> None:
    layout = layout_of(full(0, 64), mamba(1, "align", 64), unit=16, facts=ModelFacts(partial_hash_hits=False))
    assert layout.alignment == 64


def test_look_ahead_hashes_need_no_dropped_block() -> None:
    layout = layout_of(full(0, is_eagle=True), window(1, 33, is_eagle=True), lookahead=1)
    assert hit(layout, 200, {0: range(6), 1: range(6)}) == 96
    assert hit(layout, 97, {0: range(6), 1: range(6)}) == 96
    assert hit(layout, 96, {0: range(6), 1: range(6)}) == 80


def test_unused_groups_are_not_asked() -> None:
    layout = layout_of(full(0), GroupSpec(1, "encoder_only_attention", 16))
    assert hit(layout, 100, {0: range(3)}) == 48


def test_shared_prefix_is_what_full_attention_alone_would_serve() -> None:
    layout = layout_of(full(0), window(1, 64))
    hits = evaluate_one(layout, 200, {0: range(9), 1: range(2, 6)}, detail=True)
    assert (hits.hit[0], hits.shared_prefix[0]) == (96, 144)
    assert [tokens[0] for tokens in hits.by_class] == [144, 96]


def test_without_full_attention_the_shared_prefix_is_the_hit() -> None:
    hits = evaluate_one(layout_of(window(0, 64)), 200, {0: range(2, 6)})
    assert hits.shared_prefix == hits.hit


def test_engines_of_a_word_are_evaluated_apart() -> None:
    layout = layout_of(full(0), window(1, 64))
    index = MemoryIndex()
    hashes = hashes_of(1000, layout)
    for number in range(130):
        index.store(f"e{number}", Plane("GPU", 0), hashes[: number % 60])
        index.store(f"e{number}", Plane("GPU", 1), hashes[: number % 60])
    rows = index.lookup(hashes)
    for number in range(130):
        slot = index.slot(f"e{number}")
        if slot is not None:
            assert evaluate(rows, layout, 1000, word=slot.word).hit[slot.bit] == number % 60 * 16


def test_a_plane_without_stores_is_empty() -> None:
    layout = layout_of(full(0), window(1, 64))
    assert hit(layout, 100, {0: range(6)}) == 0


def test_rows_shorter_than_the_prompt_are_no_trouble() -> None:
    """An engine whose hash blocks do not reach the end (look-ahead, or a prompt cut short)."""
    layout = layout_of(full(0), window(1, 64))
    index = MemoryIndex()
    index.store("a", Plane("GPU", 0), [BlockHash(1000)])
    rows = index.lookup([BlockHash(1000)])
    assert evaluate(rows, layout, 500).hit[0] == 0


@pytest.mark.parametrize(
    "layout",
    [layout_of(window(0, 0)), layout_of(full(0), chunked(1, 40)), layout_of(full(0), chunked(1, 0))],
    ids=["window", "chunk of no whole blocks", "chunk"],
)
def test_layouts_that_lack_a_fact_say_so(layout: CacheLayout) -> None:
    assert layout.missing_facts
    assert rows_of({}, 100, layout).num_hashes == 6


def test_no_hit_ends_behind_the_last_hash() -> None:
    """A chunk's start needs no block, but hashes that look ahead may be fewer than the boundaries."""
    layout = layout_of(chunked(0, chunk=1, size=1), lookahead=2)
    for num_tokens in range(6):
        rows = rows_of({0: []}, num_tokens, layout)
        found = evaluate(rows, layout, num_tokens)
        assert [end for end, _ in found.hit_ends] == ([rows.num_hashes] if rows.num_hashes else [])
        assert FleetRule(layout, (0,)).ends(rows, num_tokens)[0] == found.hit_ends
        assert tier_extents(rows, layout, num_tokens, 0, found) == ()
