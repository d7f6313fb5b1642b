"""Predicted loads of a connector: the rule by example, against the pool's finders, and over random owners."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.events import BlockHash, BlockRemoved, BlockStored, encode_tokens
from kvatlas.publisher.groups import scheduler_block_size
from kvatlas.publisher.pool.hits import HitFinder
from kvatlas.publisher.pool.layout import pool_layout
from kvatlas.router.index.base import Plane, Rows
from kvatlas.router.index.hit_rules import evaluate
from kvatlas.router.index.learn.layout import CacheLayout
from kvatlas.router.index.memory import MemoryIndex
from kvatlas.router.index.offloaded import (
    held_alone,
    loaded,
    shared_part,
    tier_extents,
    tiers,
    usable,
)
from kvatlas.router.index.offloaded_blocks import PLACES_MAX, OffloadedBlocks
from kvatlas.router.index.places import Reach, is_shared, medium_of, owner_of, store_place
from kvatlas.router.index.query_plan import NOWHERE, EngineQuery, PlanRows, PromptHits
from tests.router.index.rules.layouts import (
    ENGINE,
    full,
    hashes_of,
    layout_of,
    mamba,
    models,
    residencies,
    window,
)
from tests.support.examples import examples

Units = dict[int, set[int]]
HOST, STORE = "CPU@host", "STORAGE@store"


def rows_of(layout: CacheLayout, num_tokens: int, held: dict[str, Units]) -> Rows:
    """Rows of one engine that holds these hash blocks, by place and group."""
    index = MemoryIndex()
    for place, units in held.items():
        for group, numbers in units.items():
            index.store(ENGINE, Plane(place, group), [BlockHash(1000 + number) for number in numbers])
    return index.lookup(hashes_of(num_tokens, layout))


def loads(
    layout: CacheLayout, num_tokens: int, held: dict[str, Units], *stores: str, first: bool = False
) -> tuple[int, dict[str, int]]:
    """The GPU hit, and the tokens loaded beyond it by medium, of an engine that uses ``stores``."""
    rows = rows_of(layout, num_tokens, held)
    on_gpu = evaluate(rows, layout, num_tokens)
    extents = usable(tier_extents(rows, layout, num_tokens, 0, on_gpu), frozenset(stores))
    return on_gpu.hit[0], loaded(extents, 0, on_gpu.hit[0], first=first)


def some(*numbers: int) -> Units:
    return {0: set(numbers)}


class TestOneConnector:
    def test_it_need_not_hold_what_the_gpu_holds(self) -> None:
        held = {"GPU": some(0, 1), HOST: some(2, 3)}
        assert loads(layout_of(full()), 100, held) == (32, {"CPU": 32})

    def test_it_must_hold_all_from_the_gpu_hit_on(self) -> None:
        held = {"GPU": some(0, 1, 4), HOST: some(2, 3, 5)}
        assert loads(layout_of(full()), 100, held) == (32, {"CPU": 32}), "block 4 lies on the GPU alone"

    def test_blocks_on_the_gpu_beyond_its_hit_are_not_joined(self) -> None:
        layout = layout_of(full(0), window(1, 33))
        held = {
            "GPU": {0: set(range(6)), 1: {0, 1}},
            HOST: {1: {4, 5}},
        }
        assert loads(layout, 100, held) == (32, {}), "full attention from 2 on lies on the GPU alone"
        held[HOST][0] = {2, 3, 4, 5}
        assert loads(layout, 100, held) == (32, {"CPU": 64})

    def test_a_window_may_reach_back_into_what_the_gpu_gives(self) -> None:
        layout = layout_of(full(0), window(1, 65))
        held = {"GPU": {0: set(range(4)), 1: set(range(4))}, HOST: {0: {4}, 1: {4}}}
        assert loads(layout, 100, held) == (64, {"CPU": 16})

    def test_every_group_must_be_there(self) -> None:
        layout = layout_of(full(0), mamba(1))
        held = {"GPU": {0: {0}, 1: {0}}, HOST: {0: set(range(1, 6)), 1: {3}}}
        assert loads(layout, 100, held) == (16, {"CPU": 48})
        held[HOST][1].clear()
        assert loads(layout, 100, held) == (16, {})

    def test_nothing_beyond_the_gpu_hit_is_no_load(self) -> None:
        held = {"GPU": some(0, 1, 2, 3), HOST: some(0, 1, 2)}
        assert loads(layout_of(full()), 100, held) == (64, {})

    def test_a_hit_inside_a_block_gives_way_to_a_longer_load(self) -> None:
        layout = layout_of(full(0, 16), mamba(1, "align", 64), unit=16)
        assert (layout.alignment, scheduler_block_size(layout.groups)) == (16, 64)
        gpu: Units = {0: {0, 1, 2, 3, 4}, 1: {3, 4}}
        host: Units = {0: {4, 5, 6, 7}, 1: {7}}
        assert loads(layout, 200, {"GPU": gpu, HOST: host}) == (80, {"CPU": 48})
        host[0].discard(4)
        assert loads(layout, 200, {"GPU": gpu, HOST: host}) == (80, {}), "it is asked from token 64 on"

    def test_the_block_that_a_load_ends_in_is_named_by_its_end(self) -> None:
        layout = layout_of(full(0, 64), mamba(1, "align", 64), unit=16)
        assert layout.alignment == 16
        held: dict[str, Units] = {"GPU": {0: {3}, 1: {3}}, HOST: {0: {6}, 1: {5}}}
        assert loads(layout, 200, held) == (64, {}), "the pool would find the longer part, a load cannot"
        assert loads(layout, 200, {"GPU": {0: {3, 6}, 1: {3, 5}}}) == (96, {})
        held[HOST][0].add(5)
        assert loads(layout, 200, held) == (64, {"CPU": 32})

    def test_with_eagle_loads_end_on_whole_blocks(self) -> None:
        layout = layout_of(full(0, 64, is_eagle=True), mamba(1, "align", 64), unit=16)
        assert layout.alignment == 16
        held: dict[str, Units] = {"GPU": {0: set(), 1: set()}, HOST: {0: {3, 4, 5, 6, 7}, 1: {3, 4, 5}}}
        assert loads(layout, 200, held) == (0, {"CPU": 64})


def chunked_reading(num_tokens: int, gpu: int, chunks: set[int], blocks: int) -> int:
    """Tokens loaded of a prompt by vLLM's own offloading, full attention alone (``_lookup_complete_chunks``,
    offloading/scheduler.py, 0.33), which ends a load before the last token here."""
    size = 16 * blocks
    end = start = gpu // size
    while end in chunks and (end + 1) * size < num_tokens:
        end += 1
    tokens = end * size - gpu if end > start else 0
    return tokens if tokens >= size else 0


@settings(max_examples=examples(200))
@given(st.integers(1, 400), st.integers(0, 24), st.sets(st.integers(0, 12)), st.sampled_from([1, 2, 3, 4, 8]))
def test_chunks_are_loaded_as_vllm_loads_them(
    num_tokens: int, gpu: int, chunks: set[int], blocks: int
) -> None:
    layout = replace(layout_of(full()), blocks_per_chunk=blocks)
    gpu = min(gpu, (num_tokens - 1) // 16)
    held = {"GPU": some(*range(gpu)), "CPU": some(*[(chunk + 1) * blocks - 1 for chunk in chunks])}
    expected = chunked_reading(num_tokens, 16 * gpu, chunks, blocks)
    assert loads(layout, num_tokens, held) == (16 * gpu, {"CPU": expected} if expected else {})


def test_other_connectors_have_no_chunks_of_vllms_own() -> None:
    layout = replace(layout_of(full()), blocks_per_chunk=4)
    assert loads(layout, 100, {"GPU": some(), HOST: some(0, 1, 2)}) == (0, {"CPU": 48})


def test_all_groups_have_chunks_of_as_many_blocks() -> None:
    layout = replace(layout_of(full(0), window(1, 33)), blocks_per_chunk=2)
    held: dict[str, Units] = {"GPU": {}, "CPU": {0: {1, 3, 5}, 1: {3}}}
    assert loads(layout, 200, held) == (0, {"CPU": 64})
    held["CPU"][1] = {5}
    assert loads(layout, 200, held) == (0, {"CPU": 96})


class TestSeveralPlaces:
    def test_connectors_are_not_joined(self) -> None:
        held = {"GPU": some(0), HOST: some(1), STORE: some(2, 3)}
        assert loads(layout_of(full()), 100, held) == (16, {"CPU": 16})

    def test_the_one_that_reaches_furthest_loads(self) -> None:
        held = {"GPU": some(0), HOST: some(1), STORE: some(1, 2, 3)}
        assert loads(layout_of(full()), 100, held) == (16, {"STORAGE": 48})
        held[HOST] = some(1, 2, 3)
        assert loads(layout_of(full()), 100, held) == (16, {"CPU": 48}), "of equals the nearest"

    def test_in_vllms_multi_connector_the_first_loads(self) -> None:
        held = {"GPU": some(0), HOST: some(1), STORE: some(1, 2, 3)}
        assert loads(layout_of(full()), 100, held, first=True) == (16, {"CPU": 16})
        del held[HOST]
        assert loads(layout_of(full()), 100, held, first=True) == (16, {"STORAGE": 48})

    def test_places_without_an_owner_are_one_connectors(self) -> None:
        held = {"GPU": some(0), "CPU": some(1), "STORAGE": some(2, 3), "STORAGE@kvcr": some(4)}
        assert loads(layout_of(full()), 100, held) == (16, {"CPU": 16, "STORAGE": 48})

    def test_a_shared_store_serves_those_who_use_it(self) -> None:
        held = {"GPU": some(0), "STORAGE*0@redis": some(1), "STORAGE*1@redis": some(2)}
        assert loads(layout_of(full()), 100, held, "redis") == (16, {"STORAGE": 32})
        assert loads(layout_of(full()), 100, held) == (16, {})
        assert loads(layout_of(full()), 100, held, "other") == (16, {})

    def test_vllms_mooncake_connector_asks_its_store_from_the_first_token_on(self) -> None:
        store = {"STORAGE*0@mooncake": some(1, 2, 3)}
        assert loads(layout_of(full()), 100, {"GPU": some(0), **store}, "mooncake") == (16, {})
        store["STORAGE*1@mooncake"] = some(0)
        assert loads(layout_of(full()), 100, {"GPU": some(0), **store}, "mooncake") == (16, {"STORAGE": 48})

    @pytest.mark.parametrize(
        ("reach", "store", "found"),
        [
            (Reach(alone=True, chunk_tokens=0), (0, 1, 2, 3), 48),
            (Reach(alone=True, chunk_tokens=0), (1, 2, 3), 0),
            (Reach(alone=False, chunk_tokens=0), (1, 2, 3), 48),
            (Reach(alone=True, chunk_tokens=32), (1, 3), 48),
            (Reach(alone=True, chunk_tokens=32), (0, 2, 3), 0),
            (Reach(alone=False, chunk_tokens=32), (1, 3), 48),
            (Reach(alone=False, chunk_tokens=64), (3,), 0),
            (Reach(alone=True, chunk_tokens=40), (0, 1, 2, 3), 0),
        ],
    )
    def test_a_store_with_a_feed_of_its_own(self, reach: Reach, store: tuple[int, ...], found: int) -> None:
        place = store_place("pool", reach)
        assert (is_shared(place), medium_of(place), owner_of(place)) == (True, "STORAGE", "pool")
        held = {"GPU": some(0), place: some(*store)}
        expected = {"STORAGE": found} if found else {}
        assert loads(layout_of(full()), 100, held, "pool") == (16, expected)
        assert loads(layout_of(full()), 100, held) == (16, {}), "not for who does not load from it"

    def test_writes_of_other_engines_count(self) -> None:
        layout, index = layout_of(full()), MemoryIndex()
        hashes = hashes_of(100, layout)
        index.store("reader", Plane("GPU", 0), hashes[:1])
        for number in range(70):  # the writer's bit stands in another word
            index.store(f"other{number}", Plane("GPU", 0), hashes[:1])
        index.store("writer", Plane("STORAGE*0@redis", 0), hashes[:4])
        rows = index.lookup(hashes)
        slot = index.slot("reader")
        assert slot is not None
        on_gpu = evaluate(rows, layout, 100, word=slot.word)
        found = loaded(tier_extents(rows, layout, 100, slot.word, on_gpu), slot.bit, 16)
        assert found == {"STORAGE": 48}

    def test_rows_of_other_replicas_add_shared_stores_alone(self) -> None:
        layout = layout_of(full())
        elsewhere = rows_of(layout, 100, {"GPU": some(0, 1, 2), "STORAGE*1@redis": some(0, 1)})
        told = shared_part(elsewhere)
        assert {plane.medium for plane, _ in told.columns} == {"STORAGE*1@redis"}
        assert all(word < -1 for _, word in told.columns), "no engine's own word"
        rows = Rows(told.num_hashes, rows_of(layout, 100, {"GPU": some(0)}).columns | told.columns)
        on_gpu = evaluate(rows, layout, 100)
        assert on_gpu.hit[0] == 16
        assert loaded(tier_extents(rows, layout, 100, 0, on_gpu), 0, 16) == {"STORAGE": 16}

    def test_the_order_does_not_depend_on_who_spoke_first(self) -> None:
        names = ["STORAGE*0@z", "CPU@b", "STORAGE", "CPU", "CPU@a", "STORAGE*1@z"]
        for order in (names, names[::-1]):
            rows = Rows(0, {(Plane(name, 0), 0): np.zeros(0, np.uint64) for name in order})
            asked = [tier.layers for tier in tiers(rows)]
            assert asked == [
                (("CPU", ("CPU",)), ("STORAGE", ("CPU", "STORAGE"))),
                (("CPU", ("CPU@a",)),),
                (("CPU", ("CPU@b",)),),
                (("STORAGE", ("STORAGE*0@z", "STORAGE*1@z")),),
            ]


def plain_reading(layout: CacheLayout, num_tokens: int, gpu: Units, tier: Units) -> tuple[int, int]:
    """GPU hit and whole hit, found as the engine's loop finds them: the second over the tier's blocks and all
    blocks before the GPU hit, shorter and shorter until the blocks that it ends in can be named."""
    pool = pool_layout(layout.groups, HashScheme(hash_block_size=layout.hash_block_size), None)
    unit = layout.hash_block_size

    def find(units: Units, limit: int, *, load: bool = False) -> int:
        maps = [{1000 + number: 1 for number in units[group.group_idx]} for group in layout.groups]
        rules = pool
        if load and pool.uses_eagle:
            rules = replace(pool, alignment=pool.scheduler_block_size, partial_hits=False)
        finder = HitFinder(rules, maps)  # type: ignore[arg-type]
        return finder.find(hashes_of(num_tokens, layout), limit).length

    hit = find(gpu, num_tokens - 1)
    before = set(range(hit // pool.scheduler_block_size * pool.scheduler_block_size // unit))
    there = {group: numbers | before for group, numbers in tier.items()}
    whole = find(there, num_tokens - 1, load=True)
    while whole > hit and not all(
        whole // unit - 1 in there[group.group_idx] for group in layout.groups if whole % group.block_size
    ):
        whole = find(there, whole - 1, load=True)
    return hit, max(hit, whole)


cases = st.tuples(models(), st.integers(1, 420)).flatmap(
    lambda case: st.tuples(st.just(case[0]), st.just(case[1]), residencies(*case), residencies(*case))
)


@settings(max_examples=examples(300))
@given(cases)
def test_equals_what_an_engine_loads(case: tuple[CacheLayout, int, Units, Units]) -> None:
    layout, num_tokens, gpu, tier = case
    hit, by_medium = loads(layout, num_tokens, {"GPU": gpu, HOST: tier})
    assert (hit, hit + by_medium.get("CPU", 0)) == plain_reading(layout, num_tokens, gpu, tier)


@settings(max_examples=examples(200))
@given(cases)
def test_host_memory_alone_equals_the_load_without_a_gpu_hit(
    case: tuple[CacheLayout, int, Units, Units],
) -> None:
    layout, num_tokens, gpu, tier = case
    nothing: Units = {group: set() for group in gpu}
    rows = rows_of(layout, num_tokens, {"GPU": gpu, "CPU": tier, HOST: gpu, "STORAGE": gpu})
    found = held_alone(rows, layout, num_tokens, 0)
    assert (found[0] if found else 0) == plain_reading(layout, num_tokens, nothing, tier)[1]


def test_other_connectors_memory_serves_no_other_engine() -> None:
    rows = rows_of(layout_of(full()), 100, {HOST: some(0, 1, 2), "STORAGE": some(0, 1, 2)})
    assert held_alone(rows, layout_of(full()), 100, 0) == []


@given(cases)
def test_offloaded_blocks_never_change_the_gpu_hit(case: tuple[CacheLayout, int, Units, Units]) -> None:
    layout, num_tokens, gpu, tier = case
    alone, _ = loads(layout, num_tokens, {"GPU": gpu})
    assert loads(layout, num_tokens, {"GPU": gpu, HOST: tier, "STORAGE*0@s": tier}, "s")[0] == alone


@settings(max_examples=examples(200))
@given(st.data())
def test_engines_in_groups_load_what_each_would_by_itself(data: st.DataObject) -> None:
    """Equal hits are worked out once: each engine has the hit that it has with details, where it is alone."""
    layout, num_tokens = data.draw(models(), "layout"), data.draw(st.integers(1, 300), "tokens")
    pieces = data.draw(st.lists(residencies(layout, num_tokens), min_size=1, max_size=3), "pieces")
    index, hashes = MemoryIndex(), hashes_of(num_tokens, layout)
    for number in range(data.draw(st.sampled_from([0, 62]), "engines before")):  # of the first word
        index.store(f"before{number}", Plane("GPU", 0), [BlockHash(1)])
    queries: list[EngineQuery] = []
    for number in range(data.draw(st.integers(1, 6), "engines")):
        name, stores = f"e{number}", data.draw(st.sampled_from([frozenset(), frozenset({"s"})]))
        index.store(name, Plane("GPU", 0), [BlockHash(1)])
        for place in ("GPU", "CPU", HOST, "STORAGE*0@s"):
            for group, numbers in data.draw(st.sampled_from([{}, *pieces])).items():
                index.store(name, Plane(place, group), [BlockHash(1000 + block) for block in numbers])
        queries.append(
            EngineQuery(name, HashScheme(), layout, index.slot(name) or NOWHERE, None, frozenset(stores))
        )
    plan, rows = PlanRows(queries), index.lookup(hashes)
    alone = PromptHits(*plan.hits(rows, num_tokens, detail=True), plan.nothing).by_engine()
    alike, single = plan.hits(rows, num_tokens, detail=False)
    assert not single
    grouped = PromptHits(alike, {}, plan.nothing).by_engine()
    assert grouped == {name: replace(hit, by_class=()) for name, hit in alone.items()}
    assert len({hit for hit, _ in alike}) == len(alike)


# -- the writer's side ------------------------------------------------------------------------------------


def stored(*hashes: int, owner: str | None, medium: str = "CPU", remote: bool = False) -> BlockStored:
    locality = "REMOTE" if remote else "LOCAL"
    return BlockStored(
        list(hashes), None, encode_tokens([]), 0, None, medium, None, locality=locality, ownership=owner
    )


def gone(*hashes: int, owner: str | None, medium: str = "CPU", remote: bool = False) -> BlockRemoved:
    locality = "REMOTE" if remote else "LOCAL"
    return BlockRemoved(list(hashes), medium, None, locality, owner)


class Told:
    """One engine's connectors, and what the index makes of their events."""

    def __init__(self) -> None:
        self.index = MemoryIndex()
        self.rejected: Counter[str] = Counter()
        self.outside = OffloadedBlocks(ENGINE, self.index, self.rejected)

    def held(self, block: int, medium: str = "CPU") -> set[str]:
        """The places of a medium that hold a block, by owner."""
        planes = [p for p in self.index.planes(ENGINE) if medium_of(p.medium) == medium]
        bits = int(self.index.held_in(ENGINE, planes, [BlockHash(block)])[0])
        return {owner_of(plane.medium) for number, plane in enumerate(planes) if bits >> number & 1}


def test_a_removal_by_one_owner_leaves_the_others() -> None:
    told = Told()
    told.outside.stored(stored(1, 2, owner="kvatlas-host"))
    told.outside.stored(stored(1, owner=None))
    told.outside.removed(gone(1, owner=None))
    assert told.held(1) == {"kvatlas-host"}
    told.outside.removed(gone(1, owner="kvatlas-host"))
    assert (told.held(1), told.held(2)) == (set(), {"kvatlas-host"})
    assert told.index.stats().unknown_removals == 0


def test_copies_of_one_owner_are_counted() -> None:
    told = Told()
    told.outside.stored(stored(1, 1, owner=None))
    told.outside.removed(gone(1, owner=None))
    assert told.held(1) == {""}
    told.outside.removed(gone(1, owner=None))
    assert told.held(1) == set()


def test_media_are_apart() -> None:
    told = Told()
    told.outside.stored(stored(1, owner="a"))
    told.outside.stored(stored(1, owner="a", medium="STORAGE"))
    told.outside.removed(gone(1, owner="a"))
    assert (told.held(1), told.held(1, "STORAGE")) == (set(), {"a"})


def test_a_shared_store_knows_presence_alone() -> None:
    told = Told()
    for _ in range(3):
        told.outside.stored(stored(1, owner="s", medium="STORAGE", remote=True))
    assert told.outside.stores == {"s"}
    told.outside.removed(gone(1, owner="s", medium="STORAGE", remote=True))
    assert told.held(1, "STORAGE") == set()


def test_events_of_vllms_mooncake_connector_are_of_a_store_that_others_read() -> None:
    """``medium="cpu", group_idx=...`` (mooncake/store/worker.py, 0.33); LMCache names no group."""
    told = Told()
    event = stored(1, owner=None, medium="cpu")
    event.group_idx = 0
    told.outside.stored(event)
    assert told.outside.stores == {"mooncake"}
    assert (told.held(1), told.held(1, "STORAGE")) == (set(), {"mooncake"})
    told.outside.age(0.0, 10.0)
    told.outside.age(5.0, 10.0)
    told.outside.age(10.0, 10.0)
    assert told.held(1, "STORAGE") == set(), "it publishes no removals"


def test_a_local_store_is_not_shared() -> None:
    told = Told()
    told.outside.stored(stored(1, owner="s", medium="STORAGE"))
    told.outside.stored(stored(1, owner=None, medium="STORAGE", remote=True))
    assert told.outside.stores == frozenset()


def test_hints_of_a_shared_store_grow_old() -> None:
    told = Told()

    def say(block: int) -> None:
        told.outside.stored(stored(block, owner="s", medium="STORAGE", remote=True))

    say(1)
    told.outside.stored(stored(9, owner="host"))
    told.outside.age(0.0, 100.0)
    told.outside.age(49.0, 100.0)
    say(2)
    told.outside.age(50.0, 100.0)
    say(1)
    say(3)
    assert all(told.held(block, "STORAGE") for block in (1, 2, 3))
    told.outside.age(100.0, 100.0)
    assert [bool(told.held(block, "STORAGE")) for block in (1, 2, 3)] == [True, False, True]
    told.outside.age(150.0, 100.0)
    assert [bool(told.held(block, "STORAGE")) for block in (1, 2, 3)] == [False, False, False]
    assert told.held(9) == {"host"}, "host memory does not grow old"
    assert told.outside.stores == {"s"}, "it still uses the store"
    assert told.index.check_integrity() == []


def test_a_removal_reaches_both_turns_of_a_shared_store() -> None:
    told = Told()
    told.outside.stored(stored(1, owner="s", medium="STORAGE", remote=True))
    told.outside.age(0.0, 10.0)
    told.outside.age(5.0, 10.0)
    told.outside.stored(stored(1, owner="s", medium="STORAGE", remote=True))
    told.outside.removed(gone(1, owner="s", medium="STORAGE", remote=True))
    assert told.held(1, "STORAGE") == set()


@pytest.mark.parametrize("owner", ["x" * 65, "y" * 10_000])
def test_endless_owners_are_left_out(owner: str) -> None:
    told = Told()
    told.outside.stored(stored(1, owner=owner))
    assert told.rejected == {"owner_too_long": 1}
    assert told.held(1) == set()


def test_places_are_bounded() -> None:
    told = Told()
    for number in range(PLACES_MAX + 5):
        told.outside.stored(stored(1, owner=f"owner{number}"))
    assert len(told.held(1)) == PLACES_MAX
    assert told.rejected == {"too_many_places": 5}


@pytest.mark.parametrize(
    ("name", "medium"),
    [("CPU_PINNED", "CPU"), ("DISK", "STORAGE"), ("EXTERNAL", "STORAGE")],
)
def test_other_names_of_media(name: str, medium: str) -> None:
    told = Told()
    told.outside.stored(stored(1, owner=None, medium=name))
    assert told.held(1, medium) == {""}
    told.outside.removed(gone(1, owner=None, medium=name))
    assert (told.held(1, medium), told.rejected) == (set(), {})


def test_places_cleared_with_the_gpu() -> None:
    """SGLang's host cache is one tree with the GPU's; what vLLM's connectors hold stays."""
    for name, stays in (("CPU_PINNED", False), ("CPU", True), ("DISK", True)):
        told = Told()
        told.outside.stored(stored(1, owner=None, medium=name))
        told.outside.gpu_cleared()
        assert any(told.held(1, medium) for medium in ("CPU", "STORAGE")) is stays


@pytest.mark.parametrize("medium", ["TAPE", "Cpu"])
def test_other_media_are_rejected(medium: str) -> None:
    told = Told()
    told.outside.stored(stored(1, owner=None, medium=medium))
    told.outside.removed(gone(1, owner=None, medium=medium))
    assert told.rejected == {"unknown_medium": 2}


OWNERS = [None, "a", "b@c", "d*e"]
steps = st.lists(
    st.tuples(
        st.booleans(),
        st.sampled_from(["CPU", "STORAGE"]),
        st.sampled_from(OWNERS),
        st.lists(st.integers(0, 5), max_size=4),
    ),
    max_size=40,
)


@settings(max_examples=examples(150))
@given(steps)
def test_own_places_hold_what_was_stored_more_often_than_removed(
    history: list[tuple[bool, str, str | None, list[int]]],
) -> None:
    told, copies = Told(), Counter[tuple[str, str, int]]()
    for store, medium, owner, blocks in history:
        if store:
            told.outside.stored(stored(*blocks, owner=owner, medium=medium))
        else:
            told.outside.removed(gone(*blocks, owner=owner, medium=medium))
        for block in blocks:
            key = medium, owner or "", block
            copies[key] = max(0, copies[key] + (1 if store else -1))
    for medium in ("CPU", "STORAGE"):
        for block in range(6):
            expected = {owner or "" for owner in OWNERS if copies[medium, owner or "", block]}
            assert told.held(block, medium) == expected


def test_names_of_places_can_be_read_back() -> None:
    assert not is_shared("CPU@a*b")
    assert (medium_of("STORAGE*0@x@y"), owner_of("STORAGE*0@x@y")) == ("STORAGE", "x@y")
