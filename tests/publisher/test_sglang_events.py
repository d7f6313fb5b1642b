"""The events of a simulated SGLang engine are those of SGLang, byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import msgspec
import pytest

from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    encode_sglang_batch,
    encode_tokens,
)
from kvatlas.publisher.simulator.server import LoadStat
from tests.support.sglang_wire import LOADS, classes, wheel_path

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


def test_loads_of_the_wheel_are_written_and_read() -> None:
    from kvatlas.router.feeds.sglang_load import LoadReading  # noqa: PLC0415  # imports structlog

    theirs = classes("wheel", LOADS).LoadStat(3, 4, 50, 600, 1, 7, 8, 9, 10, 11)
    written = msgspec.msgpack.encode(theirs)
    assert msgspec.msgpack.encode(LoadStat(3, 4, 50, 600, 1, 7, 8, 9, 10, 11)) == written
    assert msgspec.msgpack.decode(written, type=LoadReading) == LoadReading(3, 4, 50, 600)


def test_media_of_the_wheel_are_known() -> None:
    from kvatlas.router.index.places import ON_GPU, medium_named  # noqa: PLC0415

    media = [medium.value for medium in classes("wheel").StorageMedium]
    assert media[0] in ON_GPU
    assert [medium_named(name) for name in media[1:]] == ["CPU", "STORAGE", "STORAGE"]


def test_the_radix_tree_of_the_wheel_has_the_same_hits_evictions_and_events() -> None:
    """Also with host memory, for each write policy."""
    assert run_beside_the_wheel("120") > 10_000


@pytest.mark.parametrize("part", ["windows", "states"])
def test_events_of_the_wheel_tell_the_full_attention_part_beside_others(part: str) -> None:
    """No hit is above what they tell, and some are below. With write_back it publishes pages of host memory
    again, and some of which only windows are there."""
    found = run_beside_the_wheel("64", part)
    assert len(found) == (4 if part == "windows" else 1)
    for policy, counted in found.items():
        assert counted["events"] > 500
        others = {name for name, count in counted.items() if count} - {"events"}
        assert others == {"below", *(("twice CPU_PINNED", "only told") if policy == "write_back" else ())}


def test_rules_for_windows_and_states_are_those_of_the_wheel() -> None:
    """With pages of 1, 16 and 64 tokens, one request at a time and four. Some of these are looked up before
    an event tells what is there."""
    found = run_beside_the_wheel("2", module="real_parts")
    for part in ("windows", "states"):
        lookups = exact = 0
        for name, counted in found.items():
            if name.startswith(part):
                lookups, exact = lookups + counted["lookups"], exact + counted["exact"]
                assert counted["exact"] >= 0.94 * counted["lookups"], (name, counted)
        assert exact >= 0.97 * lookups
        assert lookups > 1000


def run_beside_the_wheel(*arguments: str, module: str = "real_radix") -> Any:
    """Run ``tests.support.real_radix``, or another module there, and return its output."""
    wheel, python = wheel_path(), os.environ.get("KVATLAS_VLLM_PYTHON")
    if not python:
        pytest.skip("KVATLAS_VLLM_PYTHON names no interpreter with torch; make test-sglang sets it")
    command = [python, "-m", f"tests.support.{module}", wheel, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
