"""A look-up with the memory of the last one equals a full look-up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.publisher.block_hash import HashChain, HashScheme, PromptHashes
from kvatlas.publisher.events import BlockHash
from kvatlas.router.index import lookup_cache as recall
from kvatlas.router.index import memory
from kvatlas.router.index.base import Plane, Rows
from kvatlas.router.index.memory import MemoryIndex
from tests.support.examples import examples

ENGINES = ("a", "b")
PLANES = (Plane("GPU", 0), Plane("CPU", 0))
BLOCKS = [BlockHash(n * 0x9E3779B97F4A7C15 & (1 << 64) - 1) for n in range(1, 17)]

some_blocks = st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=12)
engine, plane = st.sampled_from(ENGINES), st.sampled_from(PLANES)
change = st.one_of(
    st.tuples(st.just("store"), engine, plane, some_blocks),
    st.tuples(st.just("remove"), engine, plane, some_blocks),
    st.tuples(st.just("set_copies"), engine, plane, st.sampled_from(BLOCKS), st.integers(0, 2)),
    st.tuples(st.just("clear"), engine, st.sampled_from(("GPU", "CPU"))),
    st.tuples(st.just("forget"), engine),
    st.tuples(st.just("adopt"), st.just("staged"), engine),
    st.tuples(st.just("store"), st.just("staged"), plane, some_blocks),
    st.tuples(st.just("look"), st.integers(0, 1)),
    st.tuples(st.just("branch"), st.integers(0, 1), st.integers(0, 16), some_blocks),
)


def same(left: Rows, right: Rows) -> bool:
    """Every plane's bits of every block; and a summary, where there is one, says what they say. Summaries may
    differ: two rows may be equal."""
    columns = left.columns.keys() == right.columns.keys() and all(
        (left.columns[key] == right.columns[key]).all() for key in left.columns
    )
    return columns and left.num_hashes == right.num_hashes and summed_up(left) and summed_up(right)


def summed_up(rows: Rows) -> bool:
    if rows.runs is None or not rows.num_hashes:
        return True
    ends = [*rows.runs.starts[1:], rows.num_hashes]
    runs = list(zip(rows.runs.starts, ends, rows.runs.rows, strict=True))
    return all(
        (rows.columns[key][start:end] == row[column]).all()
        for key, column in rows.runs.columns.items()
        for start, end, row in runs
    )


@pytest.fixture(autouse=True, scope="module")
def crowded() -> object:
    """Few places for stamps, few look-ups before they are reset, few rows before they are renumbered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recall, "_PLACES", 16)
        patch.setattr(recall, "_LOOKUPS_MAX", 5)
        patch.setattr(memory, "HASHES_MIN", 1)
        patch.setattr(memory, "_ROWS_MAX", 4)
        yield


@settings(max_examples=examples(300))
@given(
    st.lists(change, max_size=60),
    st.lists(st.lists(st.sampled_from(BLOCKS), max_size=16), min_size=2, max_size=2),
)
def test_a_look_up_with_memory_is_one_without(changes: list[tuple], prompts: list[list[BlockHash]]) -> None:
    index = MemoryIndex()
    held = [PromptHashes(prompt) for prompt in prompts]
    for name, *arguments in changes:
        if name == "branch":  # another turn: the first blocks are those of an earlier one
            number, length, new = arguments
            before = held[number]
            known = min(length, len(before))
            found = None if before.found is None else before.found.first(known)
            held[number] = PromptHashes([*before[:known], *new], found)
        elif name == "look":
            asked = held[arguments[0]]
            assert same(index.lookup(asked), index.lookup(list(asked)))
        else:
            getattr(index, name)(*arguments)
    for asked in held:
        assert same(index.lookup(asked), index.lookup(list(asked)))
    assert not index.check_integrity()


def test_only_what_changed_is_looked_up_again() -> None:
    looked_up: list[int] = []

    class Watched(MemoryIndex):
        def _numbers(self, hashes):
            looked_up.append(len(hashes))
            return super()._numbers(hashes)

    index, prompt = Watched(), PromptHashes(BLOCKS)
    index.store("a", PLANES[0], BLOCKS[:10])
    index.lookup(prompt)
    index.lookup(prompt)
    assert looked_up == [16]
    index.store("b", PLANES[0], BLOCKS[:1])
    index.lookup(prompt)
    assert looked_up[0] == 16
    assert 1 <= looked_up[1] < 16  # the block, and those that share its place


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.store("b", PLANES[0], BLOCKS[8:]),
        lambda index: index.remove("a", PLANES[0], BLOCKS[3:9]),
        lambda index: index.set_copies("a", PLANES[0], BLOCKS[0], 0),
        lambda index: index.clear("a", "GPU"),
        lambda index: index.forget("a"),
        lambda index: index.adopt("staged", "a"),
        lambda index: [index.store(f"e{n}", PLANES[0], BLOCKS[n : n + 2]) for n in range(15)],  # new rows
    ],
)
def test_a_change_is_seen_at_the_next_look(change: Callable[[MemoryIndex], object]) -> None:
    index, prompt = MemoryIndex(), PromptHashes(BLOCKS)
    index.store("a", PLANES[0], BLOCKS[:10])
    index.store("staged", PLANES[1], BLOCKS[5:])
    before = index.lookup(prompt)
    change(index)
    assert same(index.lookup(prompt), index.lookup(list(BLOCKS)))
    assert not same(index.lookup(prompt), before)


def test_rows_that_are_renumbered_are_looked_up_again() -> None:
    index, prompt = MemoryIndex(), PromptHashes(BLOCKS[8:])
    index.store("gone", PLANES[0], BLOCKS[:1])
    index.store("a", PLANES[0], BLOCKS[8:12])
    index.remove("gone", PLANES[0], BLOCKS[:1])
    index.lookup(prompt)
    for number in range(8):
        index.store(f"e{number}", PLANES[0], BLOCKS[number : number + 1])
    assert same(index.lookup(prompt), index.lookup(BLOCKS[8:]))


def test_cached_lookups_belong_to_one_index() -> None:
    first, second, prompt = MemoryIndex(), MemoryIndex(), PromptHashes(BLOCKS)
    first.store("a", PLANES[0], BLOCKS)
    assert first.lookup(prompt).columns[PLANES[0], 0].all()
    second.store("b", PLANES[0], BLOCKS[:1])
    assert same(second.lookup(prompt), second.lookup(BLOCKS))


def test_a_next_turn_knows_what_was_found_of_its_beginning() -> None:
    scheme, tokens = HashScheme(hash_block_size=4), list(range(400))
    chain = HashChain(scheme)
    index = MemoryIndex()
    index.lookup(chain.extend(tokens[:200]))
    turn = chain.fork(30)
    assert len(turn.hashes.found.numbers) == 30
    assert turn.extend(tokens) == HashChain(scheme).extend(tokens)
    assert same(index.lookup(turn.hashes), index.lookup(list(turn.hashes)))


def test_look_ups_are_counted_beyond_what_a_stamp_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stamps have 32 bits: a router that has looked up 2^32 times begins again, and forgets what it knew."""
    monkeypatch.setattr(recall, "_LOOKUPS_MAX", (1 << 32) - 1)
    index, prompt = MemoryIndex(), PromptHashes(BLOCKS)
    index.lookup(prompt)
    index._lookup_cache.now = (1 << 32) - 3
    for held in range(1, 6):
        index.store("a", PLANES[0], BLOCKS[held - 1 : held])
        assert same(index.lookup(prompt), index.lookup(list(prompt)))
    assert index._lookup_cache.now < 10
