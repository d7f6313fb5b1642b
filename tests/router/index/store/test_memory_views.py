"""What a mirror asks of the memory index: the planes, blocks and presence of one engine."""

from __future__ import annotations

import random

import pytest

from router.index import memory
from router.index.base import Plane
from router.index.memory import MemoryIndex
from tests.support.index_contract import CPU, FULL, HUGE, WINDOW, blocks


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
