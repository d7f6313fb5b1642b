"""The meaning of a removal is found from the publisher's events; phantoms are noticed."""

from __future__ import annotations

import random

import pytest

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.block_pool import HybridBlockPool
from kvatlas.publisher.events import BlockHash, BlockRemoved, BlockStored, DecodedBatch, Event, encode_tokens
from kvatlas.publisher.groups import GroupSpec
from kvatlas.router.index.base import Plane
from kvatlas.router.index.engine import EngineResidency
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.learn.removals import Removals
from kvatlas.router.index.memory import MemoryIndex

FULL = Plane("GPU", 0)


def engine() -> EngineResidency:
    return EngineResidency("e", MemoryIndex(), ModelFacts())


def apply(residency: EngineResidency, *events: Event) -> None:
    residency.apply(DecodedBatch(1.0, list(events), 0, None, []))


def stored(*hashes: int) -> BlockStored:
    tokens = encode_tokens(list(range(len(hashes) * 4)))
    return BlockStored(list(hashes), 1, tokens, 4, None, "GPU", None, None, 0, "full_attention")


def removed(*hashes: int, left: list[int | None] | None = None) -> BlockRemoved:
    return BlockRemoved(list(hashes), "GPU", 0, remaining_copy_counts=left)


def held(residency: EngineResidency, block: int) -> bool:
    slot = residency.index.slot("e")
    assert slot is not None
    words = residency.index.lookup([BlockHash(block)]).plane(FULL, slot.word)
    return bool(int(words[0]) >> slot.bit & 1)


def test_two_removals_in_a_row_mean_copies_are_reported_one_by_one() -> None:
    e = engine()
    apply(e, stored(1), stored(1), stored(1), removed(1))
    assert e.removals.semantics is Removals.UNDECIDED
    assert held(e, 1)
    apply(e, removed(1))
    assert e.removals.semantics is Removals.PER_COPY
    assert held(e, 1)


def test_a_store_between_removals_proves_nothing() -> None:
    e = engine()
    for _ in range(5):
        apply(e, stored(1), stored(1), removed(1), stored(1), removed(1), stored(1))
    assert e.removals.removed_again == 0
    assert e.removals.semantics is Removals.UNDECIDED


def test_told_counts_are_believed() -> None:
    e = engine()
    apply(e, stored(1), stored(1), stored(1), removed(1, left=[1]))
    assert e.removals.semantics is Removals.COUNTED
    assert e.index.physical("e", "GPU") == 1
    apply(e, removed(1, left=[0]))
    assert not held(e, 1)


def last_copy_events(e: EngineResidency, *, turns: int) -> None:
    """A publisher that has two copies of every block, and tells only when the last is gone."""
    for number in range(turns):
        apply(e, stored(number), stored(number))
        if number >= 20:
            apply(e, removed(number - 20))


def test_long_lived_copies_are_no_evidence() -> None:
    e = engine()
    apply(e, *[stored(number) for number in range(64)] * 2)
    apply(e, *[removed(number) for number in range(64)])  # one copy each stays, and is hit all the time
    for number in range(100, 5000):
        apply(e, stored(number), removed(number))
    assert e.removals.semantics is Removals.UNDECIDED
    assert all(held(e, number) for number in range(64))


def test_a_wrong_verdict_is_withdrawn_by_proof() -> None:
    e = engine()
    apply(e, *[stored(1) for _ in range(10)])
    assert not e.audit(5)
    assert e.removals.semantics is Removals.LAST_COPY
    apply(e, stored(2), stored(2), removed(2), removed(2))
    assert e.removals.semantics is Removals.PER_COPY


def test_more_copies_than_blocks_raise_the_alarm_and_settle_it() -> None:
    e = engine()
    last_copy_events(e, turns=60)
    assert e.removals.semantics is Removals.UNDECIDED
    assert e.audit(200)
    assert not e.audit(40)
    assert e.removals.semantics is Removals.LAST_COPY
    assert e.audit(40)
    assert not held(e, 3)


def test_phantoms_of_a_publisher_known_to_tell_every_copy_are_re_reports() -> None:
    e = engine()
    apply(e, stored(1), stored(1), removed(1), removed(1))
    apply(e, *[stored(number) for number in range(2, 50)])
    assert not e.audit(40)
    assert e.removals.semantics is Removals.PER_COPY
    assert e.removals.re_reports_suspected
    assert held(e, 3)


def test_a_restart_resets_the_evidence() -> None:
    e = engine()
    apply(e, stored(1), stored(1), removed(1), removed(1))
    e.forget()
    assert e.removals.semantics is Removals.UNDECIDED


def test_blocks_stored_under_several_hashes_raise_no_alarm() -> None:
    """Where hits end inside a block, its parts have hashes of their own: a full pool is no phantom."""
    groups = (GroupSpec(0, "full_attention", 64), GroupSpec(1, "mamba", 16, mamba_cache_mode="align"))
    scheme = HashScheme(hash_block_size=16)
    pool = HybridBlockPool(groups, num_blocks=40, scheme=scheme, dcp_world_size=4)
    e = EngineResidency("e", MemoryIndex(), ModelFacts(mamba_cache_mode="align", decode_ranks=4))
    rng = random.Random(0)
    text = [rng.randrange(1000) for _ in range(400)]
    most = 0
    for end in [*range(400, 17, -16), *range(17, 400, 16)]:
        request = pool.request(text[:end])
        assert pool.start(request) is not None
        while (chunk := pool.next_chunk(request, 64)) and pool.compute(request, chunk):
            pool.end_step()
        pool.finish(request)
        apply(e, *pool.take_events())
        assert e.audit(40)
        most = max(most, e.index.physical("e", "GPU"))
    assert most > 40, "the pool never held more hashes than blocks"
    assert e.removals.semantics in {Removals.PER_COPY, Removals.UNDECIDED}


@pytest.mark.parametrize("seed", range(8))
def test_a_real_pool_is_never_taken_for_anything_but_per_copy(seed: int) -> None:
    rng = random.Random(seed)
    groups = (GroupSpec(0, "full_attention", 16), GroupSpec(1, "sliding_window", 16, sliding_window=64))
    num_blocks = rng.choice((60, 200))
    pool = HybridBlockPool(groups, num_blocks=num_blocks, scheme=HashScheme(hash_block_size=16))
    e = engine()
    shared_prefixes = [[rng.randrange(1000) for _ in range(128)] for _ in range(3)]
    for _ in range(400):
        tokens = rng.choice(shared_prefixes)[: 16 * rng.randint(1, 8)] + [rng.randrange(1000)] * rng.randint(
            0, 40
        )
        request = pool.request(tokens)
        started = pool.start(request)
        if started is not None:
            while (chunk := pool.next_chunk(request, 64)) and pool.compute(request, chunk):
                pool.end_step()
        pool.finish(request)
        apply(e, *pool.take_events())
        assert e.audit(num_blocks)
    for group in groups:
        assert e.index.copies("e", Plane("GPU", group.group_idx)) == len(pool.resident(group.group_idx))
    assert e.removals.semantics in {Removals.PER_COPY, Removals.UNDECIDED}
