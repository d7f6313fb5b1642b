"""Address arithmetic against loops that spell out what it means."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.connectors.layout import (
    CacheView,
    GroupPages,
    LayoutError,
    Piece,
    Region,
    group_pages,
    round_up_row,
    strided_pieces,
)
from kvatlas.connectors.transfer import base as plan
from kvatlas.connectors.transfer.base import Direction, GroupMoves, Pieces, TransferPlan, merge_adjacent
from tests.connectors.transfer.contract import job, move

Triples = list[tuple[int, int, int]]


class Rows:
    """A pool that is only an address."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.address = address
        self.size_bytes = size_bytes


def triples(pieces: Pieces) -> Triples:
    assert all(array.dtype == np.int64 for array in pieces)
    return list(zip(*(array.tolist() for array in pieces), strict=True))


def arrays(entries: Triples) -> Pieces:
    sources, destinations, sizes = np.array(entries, np.int64).reshape(-1, 3).T
    return sources, destinations, sizes


regions = st.builds(
    Region,
    base_address=st.integers(0, 1 << 47),
    block_stride_bytes=st.integers(1, 1 << 24),
    piece_offsets=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=4).map(tuple),
    piece_bytes=st.integers(1, 1 << 20),
)


@st.composite
def views(draw: st.DrawFn) -> CacheView:
    groups = tuple(
        GroupPages(index, tuple(found), sum(r.row_bytes for r in found))
        for index, found in enumerate(
            draw(st.lists(st.lists(regions, min_size=1, max_size=3), min_size=1, max_size=3))
        )
    )
    return CacheView(groups, 50, round_up_row(max(group.row_bytes for group in groups)))


@st.composite
def some_moves(draw: st.DrawFn, groups: int) -> tuple[GroupMoves, ...]:
    blocks = draw(st.lists(st.integers(1, 49), unique=True, max_size=12))
    slots = draw(st.permutations(range(12)))[: len(blocks)]
    cut = draw(st.integers(0, len(blocks)))
    last = draw(st.integers(0, groups - 1))
    return move(0, blocks[:cut], slots[:cut]), move(last, blocks[cut:], slots[cut:])


@given(st.data(), views(), st.integers(0, 1 << 47), st.sampled_from(Direction))
def test_pieces_are_those_of_the_loop(
    data: st.DataObject, view: CacheView, base: int, direction: Direction
) -> None:
    plan = TransferPlan(view, Rows(base, view.row_bytes * 12))
    work = job(1, direction, *data.draw(some_moves(len(view.groups))))
    wanted: Triples = []
    moved: dict[int, int] = {}
    for moves in work.groups:
        for block, slot in zip(moves.block_ids.tolist(), moves.slots.tolist(), strict=True):
            at = base + slot * view.row_bytes
            for region in view.groups[moves.group_idx].regions:
                for offset in region.piece_offsets:
                    device = region.base_address + block * region.block_stride_bytes + offset
                    pair = (device, at) if direction is Direction.STORE else (at, device)
                    wanted.append((*pair, region.piece_bytes))
                    at += region.piece_bytes
                    moved[moves.group_idx] = moved.get(moves.group_idx, 0) + region.piece_bytes
    assert plan.refusal(work) == ""
    assert triples(plan.pieces(work)) == wanted
    assert plan.bytes_by_group(work) == moved


def merged_by_loop(entries: Triples, max_bytes: int) -> Triples:
    joined: Triples = []
    for source, destination, size in entries:
        if joined:
            last = joined[-1]
            if (last[0] + last[2], last[1] + last[2]) == (source, destination):
                joined[-1] = (last[0], last[1], last[2] + size)
                continue
        joined.append((source, destination, size))
    return [
        (source + done, destination + done, min(max_bytes, size - done))
        for source, destination, size in joined
        for done in range(0, size, max_bytes)
    ]


@st.composite
def runs_with_gaps(draw: st.DrawFn) -> Triples:
    entries: Triples = []
    source, destination = draw(st.integers(0, 1000)), draw(st.integers(0, 1000))
    for _ in range(draw(st.integers(0, 20))):
        size = draw(st.integers(1, 40))
        entries.append((source, destination, size))
        source += size + draw(st.sampled_from([0, 0, 0, 1]))
        destination += size + draw(st.sampled_from([0, 0, 0, 5]))
    return entries


@given(runs_with_gaps(), st.sampled_from([1, 7, 40, 1 << 20]))
def test_merging_is_that_of_the_loop(entries: Triples, max_bytes: int) -> None:
    merged = merge_adjacent(arrays(entries), max_bytes)
    assert triples(merged) == merged_by_loop(entries, max_bytes)
    assert all(size <= max_bytes for _, _, size in triples(merged))


@st.composite
def strided_blocks(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    """Dimensions of a block that do not overlap, in any order, with gaps here and there."""
    element = draw(st.sampled_from([1, 2, 4]))
    dims: list[tuple[int, int]] = []
    reach = element
    for _ in range(draw(st.integers(0, 4))):
        size, gap = draw(st.integers(1, 4)), draw(st.sampled_from([0, 0, 4, 12]))
        dims.append((size, reach + gap))
        reach = size * (reach + gap)
    return draw(st.permutations(dims)), element


@given(strided_blocks(), st.integers(0, 100))
def test_pieces_cover_exactly_the_blocks_bytes(block: tuple[list[tuple[int, int]], int], base: int) -> None:
    dims, element = block
    starts = [base]
    for size, stride in dims:
        starts = [start + i * stride for start in starts for i in range(size)]
    wanted = sorted(start + i for start in starts for i in range(element))
    pieces = strided_pieces(base, 1 << 20, dims, element)
    assert [p.address + i for p in pieces for i in range(p.size_bytes)] == wanted
    group = group_pages(0, pieces, 9)
    covered = [
        region.base_address + offset + i
        for region in group.regions
        for offset in region.piece_offsets
        for i in range(region.piece_bytes)
    ]
    assert covered == wanted
    assert group.row_bytes == len(wanted)


@given(
    st.lists(
        st.builds(Piece, st.integers(0, 120), st.sampled_from([16, 24]), st.integers(1, 20)),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 5),
)
def test_overlaps_are_refused_and_only_they(pieces: list[Piece], num_blocks: int) -> None:
    """Refusals may be too careful only for pieces of unequal strides that lie across each other."""
    touched = [
        piece.address + block * piece.block_stride_bytes + i
        for piece in pieces
        for block in range(num_blocks)
        for i in range(piece.size_bytes)
    ]
    disjoint = len(set(touched)) == len(touched)
    try:
        group_pages(0, pieces, num_blocks)
    except LayoutError:
        careful = len({p.block_stride_bytes for p in pieces}) > 1 or num_blocks < 5
        assert not disjoint or careful
    else:
        assert disjoint


def test_a_block_that_overlaps_itself_is_refused() -> None:
    with pytest.raises(LayoutError, match="overlaps"):
        strided_pieces(0, 64, [(4, 0)], 2)
    with pytest.raises(LayoutError, match="overlaps"):
        strided_pieces(0, 64, [(4, 4), (2, 8)], 4)


def test_a_shattered_block_is_refused() -> None:
    with pytest.raises(LayoutError, match="scattered"):
        strided_pieces(0, 1 << 30, [(65_537, 2)], 1)


def test_neighbours_become_one_piece_and_equal_pieces_one_region() -> None:
    touching = [Piece(1000 + 32 * i, 128, 32) for i in range(4)]
    assert group_pages(3, touching, 5) == GroupPages(3, (Region(1000, 128, (0,), 128),), 128)
    apart = [Piece(1000, 128, 32), Piece(1064, 128, 32), Piece(5000, 16, 16)]
    assert group_pages(0, apart, 5).regions == (Region(1000, 128, (0, 64), 32), Region(5000, 16, (0,), 16))


def test_blocks_next_to_each_other_do_not_merge_into_one() -> None:
    """With two layers outermost and one block each, the second layer starts where the first one ends."""
    view = group_pages(0, [Piece(0, 64, 64), Piece(64, 64, 64)], 1)
    assert view.regions == (Region(0, 64, (0, 64), 64),)


def test_rows_that_are_too_small_are_refused() -> None:
    group = group_pages(0, [Piece(0, 128, 100)], 4)
    with pytest.raises(LayoutError, match="too small"):
        TransferPlan(CacheView((group,), 4, 64), Rows(0, 6400))
    with pytest.raises(LayoutError, match="too small"):
        TransferPlan(CacheView((group,), 4, 128), Rows(0, 6400), row_bytes=99)


def test_a_group_that_contradicts_its_regions_is_refused() -> None:
    wrong = GroupPages(0, (Region(0, 128, (0,), 100),), 101)
    with pytest.raises(LayoutError, match="100 bytes"):
        TransferPlan(CacheView((wrong,), 4, 128), Rows(0, 6400))


def test_indices_of_another_kind_are_refused() -> None:
    group = group_pages(0, [Piece(0, 128, 100)], 4)
    plan = TransferPlan(CacheView((group,), 4, 128), Rows(0, 6400))
    small = GroupMoves(0, np.array([1], np.int32), np.array([1], np.int64))  # type: ignore[arg-type]
    assert "int64" in plan.refusal(job(1, Direction.LOAD, small))


class CountingNumpy:
    """numpy, with a note of how large a table counting was asked to make."""

    def __init__(self) -> None:
        self.table = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def bincount(self, numbers: Any) -> Any:
        self.table = max(self.table, int(numbers.max()) + 1)
        return np.bincount(numbers)


@pytest.mark.parametrize("count", [1, 2, 16, 5000])
@pytest.mark.parametrize("low", [0, 480_000])
@pytest.mark.parametrize("spread", [1, 90])
def test_a_destination_named_twice_is_found_at_the_jobs_cost_and_not_the_pools(
    monkeypatch: pytest.MonkeyPatch, count: int, low: int, spread: int
) -> None:
    numpy = CountingNumpy()
    monkeypatch.setattr(plan, "np", numpy)
    named = low + spread * np.random.default_rng(1).permutation(count).astype(np.int64)
    assert not plan._repeats(named)
    if count > 1:
        named[-1] = named[0]
        assert plan._repeats(named)
    assert numpy.table <= 16 * count
