"""Contract of every ``Index`` backend: one suite, run over each of them.

A backend's test module subclasses ``IndexContract`` and ``IndexMachine`` and says how an empty index is made;
``settle`` gives it a moment to finish work it does in the background.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvatlas.publisher.events import BlockHash
from kvatlas.router.index.base import Index, Plane

FULL = Plane("GPU", 0)
WINDOW = Plane("GPU", 1)
CPU = Plane("CPU", 0)
OWNED = Plane("CPU@host", 0)
SHARED = Plane("STORAGE*0@store", 1)
HUGE = (1 << 64) - 1


def blocks(*numbers: int) -> list[BlockHash]:
    return [BlockHash(number) for number in numbers]


def held(index: Index, engine_id: str, plane: Plane, hashes: Sequence[int]) -> list[bool]:
    """Which of ``hashes`` an engine holds in a plane, by a look-up alone."""
    rows = index.lookup(blocks(*hashes))
    assert rows.num_hashes == len(hashes)
    slot = index.slot(engine_id)
    if slot is None:
        return [False] * len(hashes)
    words = rows.plane(plane, slot.word)
    assert words.dtype == np.uint64
    assert words.shape == (len(hashes),)
    return [bool(int(word) >> slot.bit & 1) for word in words]


def anybody(index: Index, hashes: Sequence[int]) -> bool:
    """Whether any bit is set in any plane of a look-up."""
    return any(words.any() for words in index.lookup(blocks(*hashes)).columns.values())


def held_in(index: Index, engine_id: str, medium: str, hashes: Sequence[int]) -> list[int]:
    """Those of ``hashes`` that an engine holds in any group of a medium."""
    return [number for number in hashes if index.holds(engine_id, medium, BlockHash(number))]


class IndexContract:
    """The examples; ``make`` is the factory of an empty index."""

    @pytest.fixture
    def make(self) -> Callable[[], Index]:
        raise NotImplementedError

    @pytest.fixture
    def index(self, make: Callable[[], Index]) -> Index:
        return make()

    @pytest.fixture(autouse=True)
    def _sound(self, index: Index) -> Any:
        yield
        assert index.check_integrity() == []

    def test_an_empty_index_holds_nothing(self, index: Index) -> None:
        assert index.slot("a") is None
        assert not anybody(index, [0, 1, HUGE])
        assert index.copies("a", FULL) == 0
        assert index.stats()[:4] == (0, 0, 0, 0)

    def test_a_look_up_of_nothing(self, index: Index) -> None:
        index.store("a", FULL, blocks(1))
        assert held(index, "a", FULL, []) == []

    def test_stored_blocks_are_held_in_their_plane_only(self, index: Index) -> None:
        index.store("a", FULL, blocks(1, 2, HUGE))
        index.store("a", CPU, blocks(2))
        assert held(index, "a", FULL, [1, 2, 3, HUGE]) == [True, True, False, True]
        assert held(index, "a", CPU, [1, 2]) == [False, True]
        assert held(index, "a", WINDOW, [1, 2]) == [False, False]

    def test_a_medium_holds_what_any_of_its_groups_holds(self, index: Index) -> None:
        assert held_in(index, "a", "GPU", [1]) == []
        index.store("a", FULL, blocks(1, 2))
        index.store("a", WINDOW, blocks(2, 3))
        index.store("a", CPU, blocks(4))
        index.store("b", FULL, blocks(5))
        assert held_in(index, "a", "GPU", [1, 2, 3, 4, 5, 6]) == [1, 2, 3]
        assert held_in(index, "a", "CPU", [1, 2, 3, 4, 5, 6]) == [4]
        index.remove("a", FULL, blocks(1, 2))
        assert held_in(index, "a", "GPU", [1, 2, 3]) == [2, 3]
        index.clear("a", "GPU")
        assert held_in(index, "a", "GPU", [1, 2, 3]) == []

    def test_engines_are_apart(self, index: Index) -> None:
        index.store("a", FULL, blocks(1))
        index.store("b", FULL, blocks(2))
        assert held(index, "a", FULL, [1, 2]) == [True, False]
        assert held(index, "b", FULL, [1, 2]) == [False, True]
        assert index.slot("a") != index.slot("b")

    def test_hash_zero_is_a_hash(self, index: Index) -> None:
        index.store("a", FULL, blocks(1))
        assert held(index, "a", FULL, [0]) == [False]
        index.store("a", FULL, blocks(0))
        assert held(index, "a", FULL, [0, 2]) == [True, False]

    def test_a_negative_number_is_nowhere(self, index: Index) -> None:
        index.store("a", FULL, blocks(0, 1, HUGE))
        assert held(index, "a", FULL, [-1]) == [False]

    def test_a_hash_asked_twice_is_answered_twice(self, index: Index) -> None:
        index.store("a", FULL, blocks(5))
        assert held(index, "a", FULL, [5, 6, 5]) == [True, False, True]

    def test_removal_takes_one_copy(self, index: Index) -> None:
        index.store("a", FULL, blocks(1, 1, 2))
        index.store("a", FULL, blocks(1))
        assert index.stats().extra_copies == 2
        for left in (True, True, False):
            index.remove("a", FULL, blocks(1))
            assert held(index, "a", FULL, [1, 2]) == [left, True]
        assert index.stats().unknown_removals == 0

    def test_one_call_may_remove_several_copies(self, index: Index) -> None:
        index.store("a", FULL, blocks(1, 1, 1))
        index.remove("a", FULL, blocks(1, 1))
        assert held(index, "a", FULL, [1]) == [True]
        index.remove("a", FULL, blocks(1))
        assert held(index, "a", FULL, [1]) == [False]

    def test_unknown_removals_are_counted_and_change_nothing(self, index: Index) -> None:
        index.store("a", FULL, blocks(1))
        index.remove("a", FULL, blocks(2))
        index.remove("a", WINDOW, blocks(1))
        index.remove("b", FULL, blocks(1, 1))
        assert index.stats().unknown_removals == 4
        assert held(index, "a", FULL, [1, 2]) == [True, False]
        index.store("b", FULL, blocks(1))
        assert held(index, "b", FULL, [1]) == [True]

    def test_an_engine_that_only_removed_has_no_slot(self, index: Index) -> None:
        index.remove("a", FULL, blocks(1))
        assert index.slot("a") is None

    def test_copies_counts_distinct_hashes(self, index: Index) -> None:
        index.store("a", FULL, blocks(1, 2, 2))
        assert index.copies("a", FULL) == 2
        assert index.copies("a", WINDOW) == 0
        assert index.copies("nobody", FULL) == 0

    def test_stats(self, index: Index) -> None:
        index.store("a", FULL, blocks(1, 2, 2))
        index.store("b", FULL, blocks(2))
        index.store("b", CPU, blocks(2))
        stats = index.stats()
        assert (stats.blocks, stats.residencies, stats.extra_copies) == (2, 4, 1)

    @pytest.mark.parametrize("before", [0, 1, 3])
    @pytest.mark.parametrize("told", [0, 1, 4])
    def test_told_copies_replace_counted_ones(self, index: Index, before: int, told: int) -> None:
        index.store("a", FULL, blocks(*[1] * before, 2))
        index.set_copies("a", FULL, BlockHash(1), told)
        assert held(index, "a", FULL, [1, 2]) == [told > 0, True]
        for _ in range(told):
            assert held(index, "a", FULL, [1]) == [True]
            index.remove("a", FULL, blocks(1))
        assert held(index, "a", FULL, [1, 2]) == [False, True]
        assert index.stats().unknown_removals == 0

    def test_clear_empties_one_medium_of_one_engine(self, index: Index) -> None:
        for engine_id in ("a", "b"):
            index.store(engine_id, FULL, blocks(1, 1))
            index.store(engine_id, WINDOW, blocks(1))
            index.store(engine_id, CPU, blocks(1))
        index.clear("a", "GPU")
        assert held(index, "a", FULL, [1]) + held(index, "a", WINDOW, [1]) == [False, False]
        assert held(index, "a", CPU, [1]) == [True]
        assert held(index, "b", FULL, [1]) + held(index, "b", WINDOW, [1]) == [True, True]
        index.remove("a", FULL, blocks(1))
        assert index.stats().unknown_removals == 1, "its copies went with the clear"

    def test_places_of_one_medium_are_cleared_one_by_one(self, index: Index) -> None:
        for plane in (FULL, CPU, OWNED, SHARED):
            index.store("a", plane, blocks(1, 2))
        index.store("b", SHARED, blocks(1))
        index.clear("a", "CPU")
        assert held(index, "a", CPU, [1]) + held(index, "a", OWNED, [1]) == [False, True]
        index.clear("a", "STORAGE*0@store")
        assert held(index, "a", SHARED, [1, 2]) + held(index, "b", SHARED, [1]) == [False, False, True]
        assert held(index, "a", FULL, [1, 2]) + held(index, "a", OWNED, [1]) == [True, True, True]

    def test_clear_of_an_unknown_engine_or_medium(self, index: Index) -> None:
        index.store("a", FULL, blocks(1))
        index.clear("nobody", "GPU")
        index.clear("a", "STORAGE")
        assert held(index, "a", FULL, [1]) == [True]

    def test_store_after_clear(self, index: Index) -> None:
        index.store("a", FULL, blocks(1, 2))
        index.clear("a", "GPU")
        index.store("a", FULL, blocks(2, 3))
        assert held(index, "a", FULL, [1, 2, 3]) == [False, True, True]
        assert index.copies("a", FULL) == 2

    def test_forget_takes_everything_of_one_engine(self, index: Index) -> None:
        for plane in (FULL, WINDOW, CPU):
            index.store("a", plane, blocks(1, 2, 2))
            index.store("b", plane, blocks(2))
        index.forget("a")
        assert index.slot("a") is None
        assert index.copies("a", FULL) == 0
        assert held(index, "b", CPU, [1, 2]) == [False, True]
        assert index.stats().residencies == 3

    def test_forget_of_an_unknown_engine(self, index: Index) -> None:
        index.forget("nobody")
        assert index.slot("nobody") is None

    def test_a_reused_slot_starts_empty(self, index: Index) -> None:
        index.store("a", FULL, blocks(1, 2, 2))
        freed = index.slot("a")
        index.forget("a")
        assert not anybody(index, [1, 2])
        index.store("b", FULL, blocks(3))
        assert index.slot("b") == freed
        assert held(index, "b", FULL, [1, 2, 3]) == [False, False, True]
        index.remove("b", FULL, blocks(2))
        assert index.stats().unknown_removals == 1

    def test_adopting_replaces_everything_in_one_step(self, index: Index) -> None:
        index.store("a", FULL, blocks(1, 2))
        index.store("a", CPU, blocks(1))
        index.store("b", FULL, blocks(1, 3))
        index.store("staged", FULL, blocks(2, 3, 3))
        assert held(index, "a", FULL, [1, 2, 3]) == [True, True, False]
        index.adopt("staged", "a")
        assert index.slot("staged") is None
        assert held(index, "a", FULL, [1, 2, 3]) == [False, True, True]
        assert held(index, "a", CPU, [1]) == [False]
        assert held(index, "b", FULL, [1, 2, 3]) == [True, False, True]
        index.remove("a", FULL, blocks(2, 3))
        assert held(index, "a", FULL, [2, 3]) == [False, True]

    def test_adopting_nothing_forgets(self, index: Index) -> None:
        index.store("a", FULL, blocks(1))
        index.adopt("staged", "a")
        assert index.slot("a") is None
        assert not anybody(index, [1])

    def test_an_engine_may_come_back(self, index: Index) -> None:
        for _ in range(5):
            index.store("a", FULL, blocks(1))
            index.store("a", WINDOW, blocks(2))
            index.forget("a")
        index.store("a", FULL, blocks(2))
        assert held(index, "a", FULL, [1, 2]) == [False, True]
        assert held(index, "a", WINDOW, [2]) == [False]

    def test_more_engines_than_bits_in_a_word(self, index: Index) -> None:
        engines = [f"engine-{number}" for number in range(150)]
        for number, engine_id in enumerate(engines):
            index.store(engine_id, FULL, blocks(7, 1000 + number))
        slots = [index.slot(engine_id) for engine_id in engines]
        assert len(set(slots)) == len(engines)
        assert {slot.word for slot in slots if slot is not None} == {0, 1, 2}
        for engine_id in engines[::7]:
            index.forget(engine_id)
        for number, engine_id in enumerate(engines):
            here = number % 7 != 0
            others = [1000 + (number + 1) % 150]
            assert held(index, engine_id, FULL, [7, 1000 + number, *others]) == [here, here, False]

    def test_many_planes(self, index: Index) -> None:
        planes = [Plane(medium, group) for medium in ("GPU", "CPU", "STORAGE") for group in range(20)]
        for number, plane in enumerate(planes):
            index.store("a", plane, blocks(1, 100 + number))
        for number, plane in enumerate(planes):
            assert held(index, "a", plane, [1, 100 + number, 101 + number]) == [True, True, False]

    def test_a_row_keeps_what_it_said(self, index: Index) -> None:
        index.store("a", FULL, blocks(1))
        rows, slot = index.lookup(blocks(1)), index.slot("a")
        index.store("b", WINDOW, blocks(1))
        index.remove("a", FULL, blocks(1))
        index.forget("a")
        assert int(rows.plane(FULL, slot.word)[0]) >> slot.bit & 1


ENGINES = [f"e{number}" for number in range(70)]
"""More than one word; the first few get most of the traffic."""
BUSY = st.sampled_from(ENGINES[:3]) | st.sampled_from(ENGINES)
PLANES = [FULL, WINDOW, CPU, OWNED, SHARED]
HASHES = list(range(24))


class IndexMachine(RuleBasedStateMachine):
    """Random histories against a plain counter of copies."""

    def new_index(self) -> Index:
        raise NotImplementedError

    def settle(self) -> None:
        """Let background work finish."""

    def __init__(self) -> None:
        super().__init__()
        self.index = self.new_index()
        self.copies: Counter[tuple[str, Plane, int]] = Counter()
        self.unknown = 0

    @rule(engine=BUSY, plane=st.sampled_from(PLANES), hashes=st.lists(st.sampled_from(HASHES), max_size=9))
    def store(self, engine: str, plane: Plane, hashes: list[int]) -> None:
        self.index.store(engine, plane, blocks(*hashes))
        self.copies.update((engine, plane, block) for block in hashes)

    @rule(engine=BUSY, plane=st.sampled_from(PLANES), hashes=st.lists(st.sampled_from(HASHES), max_size=9))
    def remove(self, engine: str, plane: Plane, hashes: list[int]) -> None:
        self.index.remove(engine, plane, blocks(*hashes))
        for block in hashes:
            if self.copies[engine, plane, block]:
                self.copies[engine, plane, block] -= 1
            else:
                self.unknown += 1

    @rule(
        engine=BUSY,
        plane=st.sampled_from(PLANES),
        block=st.sampled_from(HASHES),
        copies=st.integers(0, 3),
    )
    def set_copies(self, engine: str, plane: Plane, block: int, copies: int) -> None:
        self.index.set_copies(engine, plane, BlockHash(block), copies)
        self.copies[engine, plane, block] = copies

    @rule(engine=BUSY, medium=st.sampled_from(["GPU", "CPU", "CPU@host", "STORAGE*0@store", "STORAGE"]))
    def clear(self, engine: str, medium: str) -> None:
        self.index.clear(engine, medium)
        self._drop(lambda key: key[0] == engine and key[1].medium == medium)

    @rule(engine=BUSY)
    def forget(self, engine: str) -> None:
        self.index.forget(engine)
        self._drop(lambda key: key[0] == engine)

    def _drop(self, gone: Callable[[tuple[str, Plane, int]], bool]) -> None:
        self.copies = Counter({key: count for key, count in self.copies.items() if not gone(key)})

    @invariant()
    def is_sound(self) -> None:
        self.settle()
        assert self.index.check_integrity() == []

    @invariant()
    def shows_what_was_counted(self) -> None:
        rows = self.index.lookup(blocks(*HASHES))
        present = {key for key, count in self.copies.items() if count}
        shown = 0
        for engine in ENGINES:
            slot = self.index.slot(engine)
            if slot is None:
                assert not any(key[0] == engine for key in present)
                continue
            for plane in PLANES:
                words = rows.plane(plane, slot.word)
                for position, block in enumerate(HASHES):
                    bit = int(words[position]) >> slot.bit & 1
                    assert bit == ((engine, plane, block) in present)
                    shown += bit
            for place in {plane.medium for plane in PLANES}:
                there = {block for one, plane, block in present if (one, plane.medium) == (engine, place)}
                assert held_in(self.index, engine, place, HASHES) == [one for one in HASHES if one in there]
        bits = sum(int(word).bit_count() for words in rows.columns.values() for word in words)
        assert bits == shown, "bits of unknown engines"

    @invariant()
    def counts_agree(self) -> None:
        stats = self.index.stats()
        present = {key: count for key, count in self.copies.items() if count}
        assert stats.residencies == len(present)
        assert stats.extra_copies == sum(present.values()) - len(present)
        assert stats.unknown_removals == self.unknown
        assert stats.blocks >= len({block for _, _, block in present})
        for engine in ENGINES[:3]:
            for plane in PLANES:
                expected = sum(key[:2] == (engine, plane) for key in present)
                assert self.index.copies(engine, plane) == expected
