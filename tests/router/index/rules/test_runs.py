"""Rules over runs of equal rows give what the rules over arrays give, for every engine and class."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.events import BlockHash
from kvatlas.publisher.groups import GroupSpec
from kvatlas.router.index.base import Plane, Rows
from kvatlas.router.index.hit_rules import WordHits, evaluate
from kvatlas.router.index.learn.layout import CacheLayout
from kvatlas.router.index.memory import MemoryIndex
from kvatlas.router.index.query_plan import NOWHERE, EngineQuery, query_hits
from tests.router.index.rules.layouts import chunked, full, hashes_of, layout_of, window


@st.composite
def _layouts(draw: st.DrawFn) -> CacheLayout:
    groups: list[GroupSpec] = []
    for idx in range(draw(st.integers(1, 4))):
        wide = draw(st.integers(2, 100))
        groups.append(full(idx) if draw(st.booleans()) else window(idx, wide))
    return layout_of(*groups)


@st.composite
def _held(draw: st.DrawFn, layout: CacheLayout, num_tokens: int) -> Rows:
    """Contents of up to seventy engines for a prompt: beginnings, with holes and strays in some groups."""
    index = MemoryIndex()
    count = num_tokens // 16 + 1
    for number in range(draw(st.sampled_from([1, 1, 2, 70]))):
        limit = draw(st.integers(max(0, count - 3), count))
        holes = draw(st.sets(st.integers(0, count), max_size=3))
        for group in layout.groups:
            cut = draw(st.integers(0, limit)) if draw(st.integers(0, 3)) == 0 else limit
            blocks = [n for n in range(cut) if n not in holes]
            index.store(f"e{number}", Plane("GPU", group.group_idx), [BlockHash(1000 + n) for n in blocks])
    return index.lookup(hashes_of(num_tokens, layout))


def _by_bit(hits: WordHits) -> tuple[list[int], list[int]]:
    return hits.hit, hits.shared_prefix


@given(st.data())
def test_runs_say_what_arrays_say(data: st.DataObject) -> None:
    layout = data.draw(_layouts())
    num_tokens = data.draw(st.integers(1, 250))
    rows = data.draw(_held(layout, num_tokens))
    for word in (0, 1, 2):
        by_arrays = evaluate(Rows(rows.num_hashes, rows.columns), layout, num_tokens, word=word)
        assert _by_bit(evaluate(rows, layout, num_tokens, word=word)) == _by_bit(by_arrays)


def test_a_prompt_in_few_pieces_is_described_in_runs_and_a_shredded_one_is_not() -> None:
    index = MemoryIndex()
    index.store("a", Plane("GPU", 0), [BlockHash(1000 + n) for n in range(10)])
    hashes = [BlockHash(1000 + n) for n in range(200)]
    runs = index.lookup(hashes).runs
    assert runs is not None
    assert (runs.starts, runs.rows) == ([0, 10], [[1], [0]])
    index.store("b", Plane("GPU", 0), hashes[::2])
    assert index.lookup(hashes).runs is None


def test_engines_that_stored_nothing_each_have_what_needs_no_blocks() -> None:
    """A chunk's start needs nothing, so everybody has it."""
    layout = layout_of(chunked(0, 64))
    seats = [EngineQuery(name, HashScheme(), layout, NOWHERE) for name in ("a", "b")]
    hits = query_hits(MemoryIndex().lookup(hashes_of(200, layout)), 200, seats, detail=False)
    assert [hit.hit_tokens for hit in hits.values()] == [192, 192]
