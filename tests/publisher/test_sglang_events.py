"""The events of a simulated SGLang engine are those of SGLang, byte for byte."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from publisher.event_decoder import decode_batch
from publisher.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    encode_sglang_batch,
    encode_tokens,
)
from tests.support.sglang_wire import classes

HASHES = [-(1 << 63), (1 << 63) - 1, 7]


@pytest.fixture(params=["own", "wheel"])
def theirs(request: pytest.FixtureRequest) -> Any:
    return classes(request.param)


def stored(parent: int | None, salt: str | None) -> BlockStored:
    return BlockStored(HASHES, parent, encode_tokens([1, 2, 300]), 1, medium="GPU", cache_salt=salt)


@pytest.mark.parametrize("parent", [None, -5])
@pytest.mark.parametrize("salt", [None, "tenant"])
def test_stored_pages(theirs: Any, parent: int | None, salt: str | None) -> None:
    event = theirs.BlockStored(HASHES, parent, [1, 2, 300], 1, None, "GPU", salt)
    same(theirs, [event], [stored(parent, salt)])


def test_removals_and_clears(theirs: Any) -> None:
    events = [theirs.BlockRemoved(HASHES, "GPU"), theirs.AllBlocksCleared()]
    same(theirs, events, [BlockRemoved(HASHES, "GPU"), AllBlocksCleared()])


def same(theirs: Any, events: list[Any], ours: list[Event]) -> None:
    written = msgspec.msgpack.encode(theirs.KVEventBatch(ts=1.5, events=events, attn_dp_rank=0))
    assert encode_sglang_batch(1.5, ours) == written
    batch = decode_batch(written)
    assert (batch.rejected, batch.unknown, batch.events) == ([], [], ours)


def test_media_of_the_wheel_are_known() -> None:
    from router.index.base import ON_GPU, medium_named  # noqa: PLC0415  # imports numpy

    media = [medium.value for medium in classes("wheel").StorageMedium]
    assert media[0] in ON_GPU
    assert [medium_named(name) for name in media[1:]] == ["CPU", "STORAGE", "STORAGE"]
