"""Frames of stores, and the chunks that a store holds after them."""

from __future__ import annotations

from contextlib import suppress
from itertools import chain, product
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.events import BlockHash, EventDecodeError, to_block_hash
from kvatlas.router.feeds.store_events import StoreDecoder
from kvatlas.router.feeds.store_settings import StoreSettings
from kvatlas.router.feeds.stores import Sequence
from kvatlas.router.index import stores
from kvatlas.router.index.base import Plane
from kvatlas.router.index.memory import MemoryIndex
from kvatlas.router.index.places import store_place
from kvatlas.router.index.stores import StoreChange, StoreContent
from tests.support.event_writer import Writer, tokens
from tests.support.examples import examples
from tests.support.store_publishers import (
    llmd_payload,
    llmd_removed,
    llmd_stored,
    lmcache_payload,
    lmcache_stored,
    mooncake_event,
    mooncake_key,
    mooncake_payload,
)

SCHEME = HashScheme()
BLOCKS = [bytes([number]) * 32 for number in range(1, 6)]


def settings_of(kind: str = "mooncake", **more: Any) -> StoreSettings:
    fields = {"name": "pool", "kind": kind, "events": ["tcp://h:1"], "model": "org/kvatlas-demo", **more}
    return msgspec.convert(fields, StoreSettings)


class Held:
    """A store, as the router keeps it."""

    def __init__(self, chosen: StoreSettings, scheme: HashScheme | None = SCHEME) -> None:
        self.decoder = StoreDecoder(chosen, lambda: scheme)
        self.content = StoreContent(chosen.name, chosen.reach, chosen.parts)
        self.index = MemoryIndex()
        self.content.attach(self.index)
        self._place = store_place(chosen.name, chosen.reach)

    def take(self, payload: bytes, topic: str = "") -> None:
        for change in chain.from_iterable(one or () for one in self.decoder.decode(topic.encode(), payload)):
            if change is None:
                self.content.clear()
            else:
                self.content.apply(change)
        assert self.index.check_integrity() == []

    def blocks(self, group: int = 0) -> set[int]:
        """Blocks that count, of the test's own."""
        rows = self.index.lookup([to_block_hash(block) for block in BLOCKS])
        columns = [
            column for (plane, _), column in rows.columns.items() if plane == Plane(self._place, group)
        ]
        return {at for at in range(len(BLOCKS)) if any(column[at] for column in columns)}


def say(held: Held, kind: str, block: int, medium: str = "cpu", **rank: Any) -> None:
    held.take(mooncake_payload([mooncake_event(kind, mooncake_key(BLOCKS[block], **rank), medium)]))


@pytest.mark.parametrize("legacy", [True, False])
def test_a_mooncake_master(legacy: bool) -> None:
    held = Held(settings_of())
    keys = [mooncake_key(block) for block in BLOCKS]
    held.take(mooncake_payload([mooncake_event("stored", key, legacy=legacy) for key in keys]))
    assert held.blocks() == {0, 1, 2, 3, 4}
    held.take(mooncake_payload([mooncake_event("removed", keys[1], legacy=legacy)] * 2))
    assert held.blocks() == {0, 2, 3, 4}
    held.take(mooncake_payload([mooncake_event("cleared", None, None), mooncake_event("stored", keys[3])]))
    assert (held.blocks(), held.decoder.unused) == ({3}, {})


def test_an_object_is_there_while_any_medium_has_it() -> None:
    held = Held(settings_of())
    say(held, "stored", 0)
    say(held, "stored", 0, "disk")
    say(held, "removed", 0)
    assert held.blocks() == {0}
    say(held, "removed", 0, "disk")
    assert held.blocks() == set()


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({}, [{}]),
        ({"tensor_parallel": 4}, [{"tp": tp} for tp in range(4)]),
        ({"pipeline_parallel": 2}, [{"pp": pp} for pp in range(2)]),
        (
            {"tensor_parallel": 2, "pipeline_parallel": 2, "prefill_context_parallel": 2},
            [{"tp": a, "pp": b, "pcp": c} for a, b, c in product(range(2), repeat=3)],
        ),
        (
            {"tensor_parallel": 4, "decode_context_parallel": 2},
            [{"tp": tp, "dcp": tp % 2} for tp in range(4)],
        ),
    ],
)
def test_a_chunk_counts_while_all_ranks_have_their_part(sizes: dict[str, int], ranks: list[Any]) -> None:
    held = Held(settings_of(**sizes))
    for at, rank in enumerate(ranks):
        assert held.blocks() == set()
        say(held, "stored", 0, "disk" if at % 2 else "cpu", **rank)
    assert (held.blocks(), held.content.whole, held.content.chunks) == ({0}, 1, 1)
    say(held, "removed", 0, "disk" if (len(ranks) - 1) % 2 else "cpu", **ranks[-1])
    assert (held.blocks(), held.content.whole) == (set(), 0)


def test_groups_have_other_parts_and_planes_of_their_own() -> None:
    held = Held(settings_of(group_tensor_parallel={"1": 2}))
    say(held, "stored", 0)
    say(held, "stored", 0, group=1)
    assert (held.blocks(0), held.blocks(1)) == ({0}, set())
    say(held, "stored", 0, group=1, tp=1)
    assert (held.blocks(0), held.blocks(1)) == ({0}, {0})


def test_everything_else_is_counted_by_its_reason() -> None:
    held = Held(settings_of())
    key = mooncake_key(BLOCKS[0])
    held.take(
        mooncake_payload(
            [
                mooncake_event("stored", mooncake_key(BLOCKS[0], "other")),
                mooncake_event("stored", mooncake_key(BLOCKS[0], tp=1)),
                mooncake_event("stored", f"org_{BLOCKS[0].hex()}_0_k"),
                mooncake_event("stored", None),
                mooncake_event("stored", key, "tape"),
                mooncake_event("stored", key, tenant="b"),
                mooncake_event("moved", key),
            ]
        )
    )
    assert held.content.chunks == 0
    assert held.decoder.unused == {
        "keys of other": 1,
        "ranks beyond the parallel sizes, as tp_rank:1@pcp0@dcp0@pp_rank:0": 1,
        "keys of another form than vLLM's": 1,
        "events without object_key": 1,
        "medium tape": 1,
        "tenant b": 1,
        "event type moved": 1,
    }
    for number in range(100):
        held.take(mooncake_payload([mooncake_event("stored", key, tenant=f"t{number}" * 99)]))
    assert len(held.decoder.unused) == 17
    assert all(len(reason) <= 80 for reason in held.decoder.unused)


def test_the_prefix_and_namespace_of_keys_can_be_given() -> None:
    whole = "team@kvatlas-demo@store_tp:2@store_pp:1@store_format:x"
    held = Held(settings_of(key_model=whole))
    held.take(mooncake_payload([mooncake_event("stored", mooncake_key(BLOCKS[0], whole))]))
    assert held.blocks() == {0}


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x90", msgspec.msgpack.encode([1, [5], 0]), bytes(9999)])
@pytest.mark.parametrize("kind", ["mooncake", "llmd-files"])
def test_unreadable_batches_are_errors(kind: str, payload: bytes) -> None:
    held = Held(settings_of(kind))
    with pytest.raises(EventDecodeError):
        held.take(payload, "kv@SHARED_STORAGE@org/kvatlas-demo")


@settings(max_examples=examples(200))
@given(st.binary(max_size=80) | st.builds(lambda inner: msgspec.msgpack.encode([1, [inner], 0]), st.binary()))
def test_no_bytes_do_anything_else(payload: bytes) -> None:
    for kind in ("mooncake", "llmd-files", "lmcache"):
        held = Held(settings_of(kind))
        with suppress(EventDecodeError):
            held.take(payload, "kv@pool:s3@org/kvatlas-demo")


def test_llmds_file_store() -> None:
    held = Held(settings_of("llmd-files"))
    short = [int.from_bytes(block[-8:], "big") for block in BLOCKS]
    topic = "kv@SHARED_STORAGE@org/kvatlas-demo"
    held.take(llmd_payload(llmd_stored(short[:3]), llmd_stored(short[3:], "OBJECT_STORE")), topic)
    assert held.blocks() == {0, 1, 2, 3, 4}
    held.take(llmd_payload(llmd_removed([short[0], 1])), topic)
    assert held.blocks() == {1, 2, 3, 4}
    held.take(llmd_payload(llmd_stored(short)), "kv@SHARED_STORAGE@another")
    held.take(llmd_payload(llmd_stored(short)), "gpu")
    held.take(llmd_payload(llmd_stored(short, "TAPE")), topic)
    assert held.blocks() == {1, 2, 3, 4}
    assert held.decoder.unused == {"topic of another": 1, "topic gpu": 1, "medium TAPE": 1}


PROMPT = tokens(400)
ENDS = [Writer(SCHEME).hashes(PROMPT)[end - 1] for end in (4, 8, 12)]
POOL = "kv@pool:s3@org/kvatlas-demo"


class TestLmcache:
    """Chunks of four blocks, found by their tokens."""

    def held(self, **more: Any) -> Held:
        return Held(settings_of("lmcache", chunk_tokens=64, **more))

    def ends(self, held: Held) -> list[bool]:
        rows = held.index.lookup([to_block_hash(end) for end in ENDS])
        return [any(column[at] for column in rows.columns.values()) for at in range(3)]

    def chunk(self, at: int, **more: Any) -> bytes:
        return lmcache_payload(lmcache_stored(PROMPT, at, 64, **more))

    def test_chunks_count_under_the_engines_hash_at_their_end(self) -> None:
        held = self.held()
        for at in range(3):
            held.take(self.chunk(at), POOL)
        assert self.ends(held) == [True, True, True]
        removed = ["BlockRemoved", [lmcache_stored(PROMPT, 1, 64)[1][0]], "lmcache-l2-s3"]
        held.take(lmcache_payload(removed, removed), POOL)
        assert self.ends(held) == [True, False, True]
        held.take(lmcache_payload(["AllBlocksCleared"]), POOL)
        held.take(self.chunk(1), POOL)
        assert self.ends(held) == [False] * 3, "the one before it is unknown again"

    def test_a_chunk_behind_an_unknown_one_has_no_position(self) -> None:
        held = self.held()
        held.take(self.chunk(1), POOL)
        assert (self.ends(held), held.decoder.unused) == ([False] * 3, {"chunks behind unknown ones": 1})

    def test_one_text_with_two_hashes_is_not_promised(self) -> None:
        held = self.held()
        held.take(self.chunk(0), POOL)
        held.take(self.chunk(0, extra=b"adapter"), POOL)
        assert self.ends(held) == [False] * 3
        held.take(self.chunk(0), POOL)
        assert self.ends(held) == [False] * 3, "not even when it comes again"

    def test_the_memory_of_an_instance_counts_for_who_names_it(self) -> None:
        topic = "kv@node-1@org/kvatlas-demo"
        for instances, counts in (((), False), (("node-1",), True), (("node-2",), False)):
            held = self.held(instances=instances)
            held.take(self.chunk(0, medium="lmcache-l1"), topic)
            assert self.ends(held)[0] is counts

    def test_without_a_hash_scheme_nothing_is_placed(self) -> None:
        held = Held(settings_of("lmcache", chunk_tokens=64), None)
        held.take(self.chunk(0), POOL)
        assert self.ends(held) == [False] * 3
        assert held.decoder.unused == {"chunks before the engines' hash scheme is known": 1}

    def test_names_beyond_the_bound_go_with_their_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvatlas.router.index.lmcache.CHUNKS_MAX", 2)
        held = self.held()
        for at in range(3):
            held.take(self.chunk(at), POOL)
        assert self.ends(held) == [False, True, True]


Change = st.tuples(st.booleans(), st.integers(0, 1), st.integers(1, 4), st.integers(0, 2), st.integers(0, 1))


@settings(max_examples=examples(200))
@given(st.lists(Change, max_size=60), st.integers(0, 60), st.booleans())
def test_the_index_holds_the_chunks_that_are_whole(
    changes: list[Any], attached_at: int, at_the_end: bool
) -> None:
    """Also while the chunks of before are written, one in each step."""
    with patch.object(stores, "_WRITTEN_AT_ONCE", 1):
        check_whole(changes, attached_at, at_the_end=at_the_end)


def check_whole(changes: list[Any], attached_at: int, *, at_the_end: bool) -> None:
    chosen = settings_of(tensor_parallel=3, group_tensor_parallel={"1": 1})
    content, truth = StoreContent(chosen.name, chosen.reach, chosen.parts), set[Any]()
    index = MemoryIndex()
    for at, (stored, group, block, part, medium) in enumerate(changes):
        if at == attached_at:
            content.attach(index)
        content.apply(StoreChange(stored, group, BlockHash(block), part, medium))
        (truth.add if stored else truth.discard)((group, block, part, medium))
        content.step()
    if at_the_end or attached_at >= len(changes):
        content.attach(index)
    while content.step():
        pass
    parts = {(group, block, part) for group, block, part, _ in truth}
    whole = {
        (group, block)
        for group, block in product((0, 1), range(1, 5))
        if all((group, block, part) in parts for part in range(1 if group else 3))
    }
    rows, place = index.lookup([BlockHash(block) for block in range(1, 5)]), store_place("pool", chosen.reach)
    shown = {
        (plane.group_idx, block)
        for (plane, _), column in rows.columns.items()
        for block in range(1, 5)
        if plane.medium == place and column[block - 1]
    }
    assert shown == whole
    assert (content.whole, content.chunks) == (len(whole), len({each[:2] for each in truth}))
    content.clear()
    assert (content.whole, content.chunks, index.check_integrity()) == (0, 0, [])


def test_a_large_store_is_attached_in_steps() -> None:
    chosen, index = settings_of(), MemoryIndex()
    content = StoreContent("pool", chosen.reach, chosen.parts)
    for block in range(5000):
        content.apply(StoreChange(True, 0, BlockHash(block)))
    content.attach(index)
    assert index.stats().blocks == 1024
    content.apply(StoreChange(False, 0, BlockHash(0)))
    steps = 0
    while content.step():
        steps += 1
    assert (steps, index.stats().blocks) == (3, 4999)
    content.attach(None)
    assert index.stats().residencies == 0


def test_chunks_grow_old_unless_stored_again() -> None:
    chosen = settings_of("llmd-files")
    assert (chosen.expires_s, settings_of().expires_s) == (1800.0, None)
    content, index = StoreContent("pool", chosen.reach, chosen.parts), MemoryIndex()
    content.attach(index)

    def say(block: int) -> None:
        content.apply(StoreChange(True, 0, BlockHash(block)))

    say(1)
    say(2)
    content.age(0.0, 100.0)
    content.age(50.0, 100.0)
    say(1)
    content.age(99.0, 100.0)
    assert content.whole == 2
    content.age(100.0, 100.0)
    assert (content.whole, content.chunks) == (1, 1)
    content.age(150.0, 100.0)
    assert (content.whole, index.check_integrity()) == (0, [])


def test_many_chunks_grow_old_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_DISCARDED_AT_ONCE", 2)
    chosen = settings_of()
    content = StoreContent("pool", chosen.reach, chosen.parts)
    for block in range(1, 6):
        content.apply(StoreChange(True, 0, BlockHash(block)))
    assert not content.age(0.0, 10.0)
    assert not content.age(5.0, 10.0)
    assert content.age(10.0, 10.0)
    assert content.whole == 3
    content.apply(StoreChange(True, 0, BlockHash(4)))
    assert not content.age(10.0, 10.0)
    assert (content.whole, content.chunks) == (1, 1), "the one that was stored again"


def test_chunks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "CHUNKS_MAX", 3)
    chosen = settings_of()
    content = StoreContent("pool", chosen.reach, chosen.parts)
    for block in (1, 2, 3, 4, 3):
        content.apply(StoreChange(True, 0, BlockHash(block)))
    assert (content.chunks, content.overflows) == (3, 1)


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ((0, 1, 2), ["", "", ""]),
        ((1, 2, 4), ["", "", "gap"]),
        ((900, 901), ["", ""]),
        ((5, 6, 1, 2), ["", "", "restart", ""]),
        ((5, 5), ["", "restart"]),
    ],
)
def test_numbers(numbers: tuple[int, ...], told: list[str]) -> None:
    sequence = Sequence()
    assert [sequence.take(number) for number in numbers] == told


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"name": "a b"}, "name"),
        ({"name": "x" * 65}, "name"),
        ({"events": []}, "events"),
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"tensor_parallel": 3, "decode_context_parallel": 2}, "decode_context_parallel"),
        ({"tensor_parallel": 1024, "pipeline_parallel": 2}, "parallel sizes"),
        ({"group_tensor_parallel": {"a": 1}}, "group_tensor_parallel"),
        ({"group_tensor_parallel": {"64": 1}}, "group_tensor_parallel"),
        ({"chunk_tokens": 16}, "chunk_tokens"),
        ({"kind": "lmcache", "chunk_tokens": 0}, "chunk_tokens"),
        ({"kind": "lmcache", "chunk_tokens": 65537}, "chunk_tokens"),
        ({"ttl_s": 0.0}, "ttl_s"),
        ({"instances": ["a"]}, "instances"),
    ],
)
def test_settings_that_cannot_be(wrong: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        settings_of(**wrong)
    for size in (1, 65536):
        settings_of("lmcache", chunk_tokens=size)
