"""The embedded index: the contract of every backend, its housekeeping, and the views of a mirror."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from kvatlas.router.index import memory
from kvatlas.router.index.base import Index, Plane
from kvatlas.router.index.memory import MemoryIndex
from tests.support.examples import examples
from tests.support.index_contract import (
    CPU,
    FULL,
    HUGE,
    WINDOW,
    IndexContract,
    IndexMachine,
    anybody,
    blocks,
    held,
)


class TestMemoryContract(IndexContract):
    @pytest.fixture
    def make(self) -> Callable[[], Index]:
        return MemoryIndex


class MemoryMachine(IndexMachine):
    def new_index(self) -> Index:
        return MemoryIndex()


class CrampedMachine(IndexMachine):
    """Rows and steps are dropped all the time, leftovers are swept two at a time."""

    def new_index(self) -> Index:
        return MemoryIndex()

    def __init__(self) -> None:
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(memory, "_SWEEP_SLICE", 2)
        self._patch.setattr(memory, "_ROWS_MAX", 3)
        self._patch.setattr(memory, "_STEPS_MAX", 5)
        super().__init__()

    def teardown(self) -> None:
        self._patch.undo()


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(max_examples=examples(40), stateful_step_count=25)
TestCrampedMachine = CrampedMachine.TestCase
TestCrampedMachine.settings = settings(max_examples=examples(60), stateful_step_count=30)


@pytest.fixture
def index() -> Iterator[MemoryIndex]:
    made = MemoryIndex()
    yield made
    assert made.check_integrity() == []


def write_something(index: MemoryIndex, times: int) -> None:
    """Writes that change nothing but give housekeeping its turns."""
    for _ in range(times):
        index.store("writer", FULL, [])


def test_blocks_of_a_forgotten_engine_are_swept(index: MemoryIndex) -> None:
    index.store("a", FULL, blocks(*range(2000)))
    index.store("b", FULL, blocks(*range(1000, 1100)))
    index.forget("a")
    assert not anybody(index, range(1000))
    write_something(index, 10)
    assert index.stats().blocks == 100
    assert held(index, "b", FULL, range(1000, 1100)) == [True] * 100


def test_blocks_stored_again_before_the_sweep_reaches_them_stay(index: MemoryIndex) -> None:
    index.store("a", FULL, blocks(*range(2000)))
    index.forget("a")
    index.store("b", WINDOW, blocks(*range(0, 2000, 2)))
    write_something(index, 10)
    assert index.stats().blocks == 1000
    assert held(index, "b", WINDOW, [0, 1, 2]) == [True, False, True]


def test_blocks_removed_before_the_sweep_reaches_them_are_no_trouble(index: MemoryIndex) -> None:
    index.store("a", FULL, blocks(*range(2000)))
    index.store("b", FULL, blocks(*range(2000)))
    index.forget("a")
    index.remove("b", FULL, blocks(*range(2000)))
    write_something(index, 10)
    assert index.stats().blocks == 0
    assert index.stats().unknown_removals == 0


def test_a_transition_from_before_an_engine_went_leaves_no_blocks_behind(index: MemoryIndex) -> None:
    index.store("a", FULL, blocks(*range(2000)))
    index.store("b", FULL, blocks(*range(2000)))
    index.remove("b", FULL, blocks(0))  # from here on it is known where a block of both goes
    index.forget("a")
    write_something(index, 10)
    index.remove("b", FULL, blocks(*range(1, 2000)))
    assert index.stats().blocks == 0


def test_a_second_forget_during_a_sweep(index: MemoryIndex) -> None:
    for engine_id in ("a", "b", "c"):
        index.store(engine_id, FULL, blocks(*range(1500)))
    index.forget("a")
    write_something(index, 1)
    index.forget("b")
    write_something(index, 1)
    index.clear("c", "GPU")
    write_something(index, 10)
    assert index.stats().blocks == 0


def test_unused_rows_are_dropped(index: MemoryIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_ROWS_MAX", 100)
    index = MemoryIndex()
    rng, engines = random.Random(1), [f"e{number}" for number in range(12)]
    expected: dict[str, set[int]] = {engine_id: set() for engine_id in engines}
    for _ in range(3000):
        engine_id, block = rng.choice(engines), rng.randrange(30)
        if block in expected[engine_id]:
            index.remove(engine_id, FULL, blocks(block))
            expected[engine_id].remove(block)
        else:
            index.store(engine_id, FULL, blocks(block))
            expected[engine_id].add(block)
        assert index.stats().patterns <= 101 + 1
    for engine_id in engines:
        assert held(index, engine_id, FULL, range(30)) == [b in expected[engine_id] for b in range(30)]


def test_remembered_steps_are_bounded(index: MemoryIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_STEPS_MAX", 200)
    index = MemoryIndex()
    rng = random.Random(2)
    for _ in range(5000):
        engine_id, plane = f"e{rng.randrange(10)}", rng.choice([FULL, WINDOW, CPU])
        write = index.store if rng.random() < 0.5 else index.remove
        write(engine_id, plane, blocks(rng.randrange(50)))
        lanes = [lane for planes in index._lanes.values() for lane in planes.values()]
        assert sum(len(lane.set) + len(lane.clear) for lane in lanes) <= 202
    assert index.check_integrity() == []


def test_blocks_of_one_prefix_share_a_row(index: MemoryIndex) -> None:
    for engine_id in ("a", "b", "c"):
        for plane in (FULL, Plane("GPU", 1)):
            index.store(engine_id, plane, blocks(*range(10_000)))
    assert index.stats().patterns <= 7


@pytest.mark.parametrize("breakage", ["count", "extra", "row0", "left"])
def test_check_integrity_notices(breakage: str) -> None:
    index = MemoryIndex()
    index.store("a", FULL, blocks(1, 2))
    match breakage:
        case "count":
            index._lanes["a"][FULL].count += 1
        case "extra":
            index._lanes["a"][FULL].extra[blocks(9)[0]] = 1
        case "left":
            index.store("b", FULL, blocks(7))
            index._patterns.drop(0, 1)
            index._lanes.pop("b")
        case _:
            index._patterns.row(0)[0] = 1
    assert len(index.check_integrity()) >= 1


def test_one_engine_at_a_time() -> None:
    index = MemoryIndex()
    index.store("a", FULL, blocks(1, 2, HUGE))
    index.store("a", CPU, blocks(2, 3))
    index.store("b", WINDOW, blocks(2, 9))
    assert set(index.planes("a")) == {FULL, CPU}
    assert index.planes("nobody") == ()
    assert sorted(index.blocks_of("a").tolist()) == [1, 2, 3, HUGE]
    assert sorted(index.blocks_of("b").tolist()) == [2, 9]
    assert index.blocks_of("nobody").tolist() == []
    asked = blocks(0, 1, 2, 3, HUGE)
    assert index.held_in("a", [FULL, WINDOW, CPU], asked).tolist() == [0, 1, 5, 4, 1]
    assert index.held_in("b", [FULL, WINDOW, CPU], asked).tolist() == [0, 0, 2, 0, 0]
    assert index.held_in("nobody", [FULL], asked).tolist() == [0] * 5
    assert index.held_in("a", [], blocks(1)).tolist() == [0]


def test_nothing_is_left_of_what_went() -> None:
    index = MemoryIndex()
    index.store("a", FULL, blocks(1, 1, 2))
    index.store("a", CPU, blocks(2))
    index.remove("a", FULL, blocks(1))
    assert sorted(index.blocks_of("a").tolist()) == [1, 2], "one copy is left"
    index.clear("a", "GPU")
    assert index.planes("a") == (CPU,)
    assert index.blocks_of("a").tolist() == [2]
    assert index.held_in("a", [FULL, CPU], blocks(1, 2)).tolist() == [0, 2]
    index.forget("a")
    assert index.planes("a") == ()
    assert index.blocks_of("a").tolist() == []


def test_more_planes_than_bits() -> None:
    index = MemoryIndex()
    for group in range(70):
        index.store("a", Plane("GPU", group), blocks(100 + group))
    assert sorted(index.blocks_of("a").tolist()) == list(range(100, 170))


def test_against_look_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_ROWS_MAX", 50)
    index, rng = MemoryIndex(), random.Random(4)
    planes, engines = [FULL, WINDOW, CPU], [f"e{number}" for number in range(70)]
    for _ in range(3000):
        engine_id, plane = rng.choice(engines), rng.choice(planes)
        write = index.store if rng.random() < 0.6 else index.remove
        write(engine_id, plane, blocks(*rng.choices(range(60), k=5)))
        if rng.random() < 0.02:
            index.forget(engine_id)
    rows = index.lookup(blocks(*range(60)))
    for engine_id in engines:
        slot, held = index.slot(engine_id), index.held_in(engine_id, planes, blocks(*range(60)))
        present = set()
        for number, plane in enumerate(planes):
            for block in range(60):
                expected = slot is not None and int(rows.plane(plane, slot.word)[block]) >> slot.bit & 1
                assert int(held[block]) >> number & 1 == expected
                present |= {block} if expected else set()
        assert set(index.blocks_of(engine_id).tolist()) == present
