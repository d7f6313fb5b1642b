"""Every encoding of events since vLLM 0.20, field by field, and recorded payloads byte by byte."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.publisher import event_decoder
from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import (
    GROUPS_MAX,
    TYPE_CHARS_MAX,
    UNKNOWN_TYPES_MAX,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventDecodeError,
    encode_batch,
    encode_tokens,
    to_block_hash,
)
from tests.support.paths import TRACES

encode = msgspec.msgpack.Encoder().encode
WHOLE = b"\x01" * 24 + (12345).to_bytes(8, "big")
BIG = (1 << 64) - 1


def decode_one(event: Any) -> Any:
    batch = decode_batch(encode([1.5, [event], 3]))
    assert (batch.ts, batch.data_parallel_rank, batch.rejected) == (1.5, 3, [])
    (decoded,) = batch.events
    return decoded


def rejected(event: Any) -> str:
    """Why an event is refused; a good one beside it is not."""
    batch = decode_batch(encode([1.5, [{"type": "AllBlocksCleared"}, event], 0]))
    assert batch.events == [AllBlocksCleared()]
    (reason,) = batch.rejected
    return reason


ARRAYS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "0.14": (["lora"], {"lora_name": "lora"}),
    "0.17": (["lora", [["lora"], None]], {"extra_keys": [["lora"], None]}),
    "0.20": (["lora", None, 2], {"group_idx": 2}),
    "0.22": (
        [None, None, 1, "sliding_window", 128],
        {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 128},
    ),
    "0.23 and fields to come": ([None, None, 1, "mamba", None, "LOCAL", 7], {"kv_cache_spec_kind": "mamba"}),
}


@pytest.mark.parametrize("version", ARRAYS)
def test_stored_as_an_array(version: str) -> None:
    tail, expected = ARRAYS[version]
    event = decode_one(["BlockStored", [1, WHOLE], BIG, [10, 11, 12, 13], 2, 0, "GPU", *tail])
    assert isinstance(event, BlockStored)
    assert [to_block_hash(wire) for wire in event.block_hashes] == [1, 12345]
    assert (event.parent_block_hash, event.block_size, event.lora_id, event.medium) == (BIG, 2, 0, "GPU")
    assert (event.tokens(), event.num_tokens()) == ([10, 11, 12, 13], 4)
    for name, value in expected.items():
        assert getattr(event, name) == value


def test_removed_and_cleared_as_arrays() -> None:
    assert decode_one(["BlockRemoved", [5], "GPU"]) == BlockRemoved([5], "GPU")
    assert decode_one(["BlockRemoved", [WHOLE], "GPU", 4]) == BlockRemoved([WHOLE], "GPU", 4)
    assert decode_one(["AllBlocksCleared"]) == AllBlocksCleared()


BASE = {
    "type": "BlockStored",
    "block_hashes": [1, WHOLE],
    "parent_block_hash": None,
    "token_ids": [10, 11, 12, 13],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}
MAPS: dict[str, dict[str, Any]] = {
    "0.24": {"extra_keys": [None, ["salt"]], "group_idx": 1, "kv_cache_spec_kind": "full_attention"},
    "0.26": {"locality": "LOCAL"},
    "0.29": {"locality": "LOCAL", "ownership": "tier"},
    "0.30": {"ownership": "tier", "session_id": "s-1"},
    "0.33": {"lookahead_token_ids": [[12], [14]]},
}


@pytest.mark.parametrize("version", MAPS)
def test_stored_as_a_map(version: str) -> None:
    event = decode_one(BASE | MAPS[version])
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [1, WHOLE]
    assert event.tokens() == [10, 11, 12, 13]
    for name in ("extra_keys", "group_idx", "locality", "ownership", "session_id", "lookahead_token_ids"):
        assert getattr(event, name) == MAPS[version].get(name)


def test_removed_and_cleared_as_maps() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [5], "medium": "CPU", "group_idx": 0}
    assert decode_one(removed) == BlockRemoved([5], "CPU", 0)
    counted = removed | {"remaining_copy_counts": [2, None], "locality": "REMOTE"}
    assert decode_one(counted).remaining_copy_counts == [2, None]
    assert decode_one({"type": "AllBlocksCleared"}) == AllBlocksCleared()


def test_fields_come_in_any_order_and_unknown_ones_are_ignored() -> None:
    shuffled = {"colour": {"deep": [1, None]}, **dict(reversed(BASE.items())), "zone": 7}
    assert decode_one(shuffled) == decode_one(BASE)
    cleared = {"type": "AllBlocksCleared", "medium": "GPU"}
    assert decode_one(cleared) == AllBlocksCleared()


def test_map_and_array_events_in_one_batch() -> None:
    batch = decode_batch(encode([0.0, [BASE, ["BlockRemoved", [5], "GPU"], ["AllBlocksCleared"]], None]))
    assert [type(event) for event in batch.events] == [BlockStored, BlockRemoved, AllBlocksCleared]
    assert batch.data_parallel_rank is None


REFUSED: dict[str, Any] = {
    "empty type": {"type": ""},
    "type of a wrong type": {"type": 7},
    "no type": {"block_hashes": [1]},
    "missing field": {name: value for name, value in BASE.items() if name != "token_ids"},
    "missing array field": ["BlockStored", [1], None, [1]],
    "hash of a wrong type": BASE | {"block_hashes": ["abc"]},
    "float hash": BASE | {"block_hashes": [1.5]},
    "no hashes": BASE | {"block_hashes": None},
    "negative block size": BASE | {"block_size": -1},
    "huge block size": BASE | {"block_size": 1 << 40},
    "negative group": BASE | {"group_idx": -1},
    "group out of bounds": BASE | {"group_idx": GROUPS_MAX},
    "group out of bounds in an array": ["BlockRemoved", [1], "GPU", GROUPS_MAX],
    "negative window": BASE | {"kv_cache_spec_sliding_window": -5},
    "medium of a wrong type": BASE | {"medium": 3},
    "look-ahead of a wrong type": BASE | {"lookahead_token_ids": [1, 2]},
    "negative copies": {
        "type": "BlockRemoved",
        "block_hashes": [1],
        "medium": "GPU",
        "remaining_copy_counts": [-1],
    },
    "a number": 7,
    "nothing": None,
    "text": "BlockStored",
    "empty array": [],
    "empty map": {},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_event_affects_no_other(name: str) -> None:
    assert rejected(REFUSED[name])


@pytest.mark.parametrize("name", ["parent_block_hash", "lora_id", "medium", "lora_name"])
def test_a_stored_event_without_a_field_that_may_be_none(name: str) -> None:
    """SGLang leaves out what is None (srt/disaggregation/kv_events.py of 0.5.23)."""
    lacking = {key: value for key, value in BASE.items() if key != name}
    assert decode_one(lacking) == decode_one(BASE | {name: None})


def test_events_with_nothing_but_what_they_need() -> None:
    stored = {"type": "BlockStored", "block_hashes": [1], "token_ids": [7, 8], "block_size": 2}
    event = decode_one(stored)
    assert (event.parent_block_hash, event.medium, event.lora_name, event.tokens()) == (
        None,
        None,
        None,
        [7, 8],
    )
    assert decode_one({"type": "BlockRemoved", "block_hashes": [1]}) == BlockRemoved([1], None)
    assert decode_one(["BlockRemoved", [1]]) == BlockRemoved([1], None)
    assert decode_one(["BlockStored", [1], None, [7, 8], 2]) == decode_one(stored)


def test_the_salt_of_an_event_of_sglang() -> None:
    assert decode_one(BASE | {"cache_salt": "tenant"}).cache_salt == "tenant"
    assert "cache_salt" in str(rejected(BASE | {"cache_salt": 7}))


INACTIVE = {"type": "BlockInactive", "block_hashes": [1], "group_idx": 0}


@pytest.mark.parametrize("event", [INACTIVE, ["BlockInactive", [1]]], ids=["map", "array"])
def test_an_event_of_an_unknown_type_is_counted_apart(event: Any) -> None:
    batch = decode_batch(encode([1.5, [BASE, event, BASE, event], 3]))
    assert [type(one) for one in batch.events] == [BlockStored, BlockStored]
    assert (batch.rejected, batch.unknown) == ([], ["BlockInactive"] * 2)


def test_a_batch_with_an_unknown_type_is_decoded_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = encode([1.5, [BASE, INACTIVE, {"type": "AllBlocksCleared"}], 3])
    monkeypatch.setattr(event_decoder._Maps, "now", event_decoder._MapDecoders())
    first = decode_batch(payload)
    monkeypatch.setattr(event_decoder, "_decode_by_event", None)  # the slow way
    assert decode_batch(payload) == first
    assert first.unknown == ["BlockInactive"]


def test_many_unknown_types_are_skipped_too() -> None:
    names = [f"New{number}" for number in range(3 * UNKNOWN_TYPES_MAX)] + ["x" * 5000]
    for _ in range(2):
        batch = decode_batch(encode([1.5, [BASE, *({"type": name} for name in names)], 3]))
        assert (len(batch.events), batch.rejected) == (1, [])
        assert batch.unknown == [name[:TYPE_CHARS_MAX] for name in names]
    assert len(event_decoder._Maps.now.names) <= UNKNOWN_TYPES_MAX


def test_negative_hashes_are_taken_as_unsigned() -> None:
    event = decode_one(BASE | {"block_hashes": [-1, -(1 << 63)]})
    assert [to_block_hash(wire) for wire in event.block_hashes] == [BIG, 1 << 63]


def test_short_and_long_byte_hashes() -> None:
    assert to_block_hash(b"") == 0
    assert to_block_hash(b"\x01\x00") == 256
    assert to_block_hash(b"\xff" * 40) == BIG


@pytest.mark.parametrize(
    "payload", [b"", b"\xc0", b"\x93", encode({}), encode([]), encode([1.0]), encode(["x", [], 0])]
)
def test_no_batch_at_all(payload: bytes) -> None:
    with pytest.raises(EventDecodeError, match="batch is not"):
        decode_batch(payload)


@pytest.mark.parametrize("rank", ["0", 1.5, [0], b"x"])
def test_a_rank_of_a_wrong_type_does_not_cost_the_events(rank: Any) -> None:
    batch = decode_batch(encode([1.0, [BASE], rank]))
    assert len(batch.events) == 1
    assert batch.data_parallel_rank is None
    assert len(batch.rejected) == 1


def test_tokens_are_read_late() -> None:
    event = decode_one(BASE | {"token_ids": ["a", "b"]})
    assert event.num_tokens() == 2
    with pytest.raises(EventDecodeError, match="token_ids"):
        event.tokens()


@pytest.mark.parametrize("count", [0, 15, 16, 65_535, 65_536])
def test_the_number_of_tokens_is_read_from_the_header(count: int) -> None:
    event = decode_one(BASE | {"token_ids": [7] * count})
    assert event.num_tokens() == count == len(event.tokens())


@pytest.mark.parametrize("tokens", [None, 7, "abc", {"a": 1}, b"abc"])
def test_token_ids_that_are_no_array_count_none(tokens: Any) -> None:
    assert decode_one(BASE | {"token_ids": tokens}).num_tokens() == 0


def test_an_array_header_that_promises_more_than_there_is() -> None:
    event = BlockStored([1], None, msgspec.Raw(b"\xdd\xff\xff\xff\xff"), 16, None, None, None)
    assert event.num_tokens() == (1 << 32) - 1
    with pytest.raises(EventDecodeError):
        event.tokens()


def wire(hashes: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    text = st.none() | st.text(max_size=5)
    stored = st.builds(
        BlockStored,
        st.lists(hashes, max_size=4),
        st.none() | hashes,
        st.lists(st.integers(0, 1 << 32), max_size=20).map(encode_tokens),
        st.integers(0, 1 << 31),
        st.none() | st.integers(0, 9),
        text,
        text,
        extra_keys=st.none() | st.lists(st.none() | st.lists(st.text(max_size=3)), max_size=3),
        group_idx=st.none() | st.integers(0, GROUPS_MAX - 1),
        kv_cache_spec_kind=text,
        kv_cache_spec_sliding_window=st.none() | st.integers(0, 1 << 31),
        locality=text,
        ownership=text,
        session_id=text,
        cache_salt=text,
        lookahead_token_ids=st.none() | st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=3),
    )
    removed = st.builds(
        BlockRemoved,
        st.lists(hashes, max_size=4),
        text,
        st.none() | st.integers(0, GROUPS_MAX - 1),
        remaining_copy_counts=st.none() | st.lists(st.none() | st.integers(0, 9), max_size=4),
    )
    return stored | removed | st.builds(AllBlocksCleared)


@given(
    st.lists(wire(st.integers(0, BIG) | st.binary(max_size=32)), max_size=5), st.none() | st.integers(0, 99)
)
def test_encoding_and_decoding_round_trip(events: list[Any], rank: int | None) -> None:
    batch = decode_batch(encode_batch(2.5, events, rank))
    assert batch.events == events
    assert (batch.ts, batch.data_parallel_rank, batch.rejected) == (2.5, rank, [])


def payloads(path: Path) -> Iterator[bytes]:
    with gzip.open(path, "rt") as lines:
        for line in lines:
            entry = json.loads(line)
            if "events" in entry:
                yield base64.b64decode(entry["events"])


def test_there_are_recorded_payloads() -> None:
    assert len(TRACES) >= 20


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_recorded_payloads_decode_whole_and_encode_to_the_same_bytes(path: Path) -> None:
    seen = 0
    for payload in payloads(path):
        batch = decode_batch(payload)
        assert batch.rejected == []
        events = len(batch.events)
        again = encode_batch(batch.ts, batch.events, batch.data_parallel_rank)
        if path.name.startswith("v033_"):
            # 0.33 has one field more, which changes the form of a map's header; what it says is the same
            assert msgspec.msgpack.decode(again) == msgspec.msgpack.decode(payload)
        else:
            assert again == payload
        seen += events
    assert seen > 0
