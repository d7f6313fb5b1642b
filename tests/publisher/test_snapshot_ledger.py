"""The snapshot ledger: exact at its cut whatever comes while it is taken down, and bounded."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    DecodedBatch,
    Event,
    encode_tokens,
    to_block_hash,
)
from kvatlas.publisher.snapshot import Snapshot, SnapshotLedger

Held = Counter[tuple[str, int | None, int]]


def stored(hashes: list[int], *, group: int = 0, medium: str = "GPU", size: int = 4) -> BlockStored:
    tokens = encode_tokens(list(range(len(hashes) * size)))
    return BlockStored(list(hashes), None, tokens, size, None, medium, None, None, group, "full_attention")


def batch(*events: Event) -> DecodedBatch:
    return DecodedBatch(1.0, list(events), 0, None, [])


def replay(chunks: list[bytes]) -> Held:
    """Copies by block after a reader has counted the events."""
    held: Held = Counter()
    for chunk in chunks:
        for event in decode_batch(chunk).events:
            assert not isinstance(event, AllBlocksCleared)
            step = 1 if isinstance(event, BlockStored) else -1
            for block in event.block_hashes:
                key = event.medium or "GPU", event.group_idx, int(to_block_hash(block))
                held[key] += step
                assert held[key] >= 0
    return +held


def whole(snapshot: Snapshot) -> Held:
    while snapshot.step():
        pass
    assert snapshot.done
    return replay(snapshot.chunks)


HASHES = st.integers(0, 3000)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.lists(HASHES, min_size=1, max_size=6), st.integers(0, 1)),
        st.tuples(st.just("remove"), st.lists(HASHES, min_size=1, max_size=2), st.integers(0, 1)),
        st.tuples(st.just("offload"), st.lists(HASHES, min_size=1, max_size=3), st.integers(0, 1)),
        st.tuples(st.just("clear"), st.just([]), st.just(0)),
        st.tuples(st.just("step"), st.just([]), st.integers(1, 40)),
        st.tuples(st.just("open"), st.just([]), st.just(0)),
    ),
    max_size=60,
)


@given(operations)
def test_every_snapshot_is_exact_at_its_cut(script: list[tuple[str, list[int], int]]) -> None:
    ledger = SnapshotLedger()
    truth: Held = Counter()
    open_ones: list[tuple[Snapshot, Held]] = []
    for kind, hashes, number in script:
        event: Event | None = None
        match kind:
            case "store":
                event = stored(hashes, group=number)
                truth.update(("GPU", number, block) for block in hashes)
            case "offload":
                event = stored(hashes, group=number, medium="CPU")
                truth.update(("CPU", number, block) for block in hashes)
            case "remove":
                event = BlockRemoved(list(hashes), "GPU", number)
                truth.subtract(("GPU", number, block) for block in hashes)
                truth = +truth
            case "clear":
                event = AllBlocksCleared()
                truth = Counter({key: count for key, count in truth.items() if key[0] != "GPU"})
            case "open":
                open_ones.append((ledger.snapshot(), Counter(truth)))
            case _:
                for snapshot, _ in open_ones:
                    for _ in range(number):
                        snapshot.step()
        if event is not None:
            ledger.apply(batch(event))
    open_ones.append((ledger.snapshot(), truth))
    assert len(ledger) == len(truth)
    for snapshot, expected in open_ones:
        assert whole(snapshot) == expected


def test_it_teaches_the_beginning_of_a_prompt_per_group() -> None:
    ledger = SnapshotLedger()
    ledger.apply(batch(stored([7, 8, 9, 10, 11, 12]), stored([7, 9], group=1, size=16)))
    ledger.apply(batch(BlockRemoved([7], "GPU", 0)))
    snapshot = ledger.snapshot()
    assert whole(snapshot)["GPU", 0, 7] == 0
    taught = [
        event
        for chunk in snapshot.chunks
        for event in decode_batch(chunk).events
        if isinstance(event, BlockStored) and event.block_size
    ]
    assert [(event.group_idx, event.block_size) for event in taught] == [(0, 4), (1, 16)]
    assert taught[0].tokens() == list(range(16))  # four blocks of a prompt, however long it was
    assert taught[0].block_hashes == [7, 8, 9, 10]


def test_remaining_copy_counts_are_believed() -> None:
    ledger = SnapshotLedger()
    ledger.apply(batch(stored([1, 1, 2])))
    ledger.apply(batch(BlockRemoved([1, 2], "GPU", 0, remaining_copy_counts=[2, 0])))
    assert ledger.copies("GPU", 0, BlockHash(1)) == 2
    assert ledger.copies("GPU", 0, BlockHash(2)) == 0


def test_too_much_is_lost_rather_than_wrong_until_a_clear() -> None:
    ledger = SnapshotLedger(blocks_max=3)
    ledger.apply(batch(stored([1, 2, 3])))
    assert not ledger.lost
    open_one = ledger.snapshot()
    ledger.apply(batch(stored([4])))
    assert "3 blocks" in ledger.lost
    assert open_one.failed
    ledger.apply(batch(stored([5])))
    assert len(ledger) == 0
    ledger.apply(batch(AllBlocksCleared(), stored([6])))
    assert not ledger.lost
    assert whole(ledger.snapshot()) == Counter({("GPU", 0, 6): 1})


def test_an_event_that_could_not_be_read_costs_the_snapshot() -> None:
    ledger = SnapshotLedger()
    ledger.apply(DecodedBatch(1.0, [stored([1])], 0, None, ["strange"]))
    assert ledger.lost
