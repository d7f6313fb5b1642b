"""Chunks that LMCache's connector publishes in an engine's own events: found by their tokens, counted whole.

Format: LMCache #5076 (in 0.5.6) through vLLM's ``BlockStored`` and ``BlockRemoved``: one chunk per event, the
last 8 bytes of LMCache's hash of it and of the chunk before, its tokens, their number as the block size,
no group. The medium is ``cpu``, that of ``LMCacheMPConnector`` is ``CPU`` (``_build_store_kv_events``,
lmcache/integration/vllm/vllm_multi_process_adapter.py, 0.5.6).
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import AllBlocksCleared
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.model import FleetResidency
from tests.support.event_writer import Prompt, Writer, batch, tokens
from tests.support.store_publishers import lmcache_hashes

CHUNK, PROMPT = 64, tokens(300)
WRITER = Writer(HashScheme())


def key(value: bytes) -> int:
    return int.from_bytes(value[-8:], "big")


def stored(at: int, extra: bytes = b"", prompt: list[int] = PROMPT, medium: str = "cpu") -> list[Any]:
    hashes = lmcache_hashes(prompt, CHUNK, extra)
    parent = key(hashes[at - 1]) if at else None
    chunk = prompt[at * CHUNK : (at + 1) * CHUNK]
    return ["BlockStored", [key(hashes[at])], parent, chunk, CHUNK, None, medium]


def removed(*at: int, medium: str = "cpu") -> list[Any]:
    hashes = lmcache_hashes(PROMPT, CHUNK)
    return ["BlockRemoved", [key(hashes[one]) for one in at], medium]


def told(*frames: list[Any], fleet: FleetResidency | None = None) -> FleetResidency:
    """An engine that had the prompt on its GPU, and has it outside only."""
    if fleet is None:
        fleet = FleetResidency(ModelFacts())
        fleet.apply("a", batch(WRITER.stored(PROMPT), AllBlocksCleared()))
    fleet.apply("a", decode_batch(msgspec.msgpack.encode([1.0, list(frames), 0])))
    assert fleet.index.check_integrity() == []
    return fleet


def loads(fleet: FleetResidency, shared: int = len(PROMPT)) -> int:
    return fleet.predict(Prompt([*PROMPT[:shared], *tokens(100, seed=9)]), ["a"])["a"].cpu_tokens


@pytest.mark.parametrize("medium", ["cpu", "CPU"])
@pytest.mark.parametrize(("shared", "hit"), [(48, 0), (64, 64), (127, 64), (128, 128), (300, 256)])
def test_whole_chunks_are_loaded(shared: int, hit: int, medium: str) -> None:
    fleet = told(*(stored(at, medium=medium) for at in range(4)))
    assert loads(fleet, shared) == hit
    assert not fleet.engine("a").unused
    layout = fleet.engine("a").layout
    assert layout is not None
    assert layout.blocks_per_chunk == 1, "nothing is known of vLLM's own offloading"


@pytest.mark.parametrize("medium", ["cpu", "CPU"])
def test_a_hit_begins_with_the_first_chunk(medium: str) -> None:
    fleet = told(*(stored(at, medium=medium) for at in range(4)))
    assert loads(told(removed(0, medium=medium), fleet=fleet)) == 0
    assert loads(told(stored(0, medium=medium), fleet=fleet)) == 256
    assert loads(told(removed(2, 3, medium=medium), fleet=fleet)) == 128


@pytest.mark.parametrize("medium", ["cpu", "CPU"])
@pytest.mark.parametrize("blocks_known", [False, True])
def test_chunks_wait_for_the_hash_scheme(medium: str, blocks_known: bool) -> None:
    """They count once it is proven; what was removed meanwhile does not."""
    fleet, searched = FleetResidency(ModelFacts()), Writer(HashScheme(seed="3"))
    if blocks_known:
        fleet.apply("a", batch(searched.stored(PROMPT), AllBlocksCleared()))
    told(*(stored(at, medium=medium) for at in (0, 1, 1, 2, 3)), removed(3, medium=medium), fleet=fleet)
    assert loads(fleet) == 0
    if not blocks_known:
        fleet.apply("a", batch(searched.stored(PROMPT), AllBlocksCleared()))
    fleet.engine("a").finish_detection()
    assert loads(fleet) == 192
    assert loads(told(stored(3, medium=medium), fleet=fleet)) == 256
    assert loads(told(removed(1, medium=medium), fleet=fleet)) == 64
    assert not fleet.engine("a").unused


def test_chunks_wait_in_bounded_number() -> None:
    fleet, kept = FleetResidency(ModelFacts()), (1 << 16) // CHUNK
    chunks = [["BlockStored", [at], None, PROMPT[:CHUNK], CHUNK, None, "cpu"] for at in range(kept + 7)]
    told(*chunks, fleet=fleet)
    told(["BlockRemoved", [0, 1], "cpu"], *chunks[:2], *chunks[:5], fleet=fleet)
    assert fleet.engine("a").unused == {"LMCache chunks before the hash scheme is proven": 7}


def test_blocks_do_not_wait_where_their_length_is_known() -> None:
    """A connector that names no groups, before the hash scheme is proven."""
    fleet, searched = FleetResidency(ModelFacts()), Writer(HashScheme(seed="3"))
    block = searched.stored(PROMPT[:16])
    fleet.apply("a", batch(msgspec.structs.replace(block, medium="CPU", group_idx=None)))
    assert fleet.index.physical("a", "CPU") == 0
    fleet.apply("a", batch(searched.stored(PROMPT), AllBlocksCleared()))
    assert fleet.index.physical("a", "CPU") == 1


def test_a_chunk_that_comes_twice_goes_with_one_removal() -> None:
    assert loads(told(stored(0), stored(0), removed(0))) == 0
    assert loads(told(removed(0), stored(0), fleet=told(stored(0)))) == 64


def test_the_gpus_clear_leaves_it_and_a_restart_does_not() -> None:
    fleet = told(stored(0))
    fleet.apply("a", batch(AllBlocksCleared()))
    assert loads(fleet) == 64
    fleet.forget("a")
    fleet.apply("a", batch(WRITER.stored(PROMPT), AllBlocksCleared()))
    assert loads(fleet) == 0


def test_one_text_under_two_hashes_is_not_promised() -> None:
    """A salt or an adapter, which no event tells."""
    fleet = told(stored(0), stored(0, extra=b"salt"))
    assert loads(fleet) == 0
    assert list(fleet.engine("a").unused) == ["LMCache chunks with one text and two hashes (salts, adapters)"]


def test_chunks_without_their_beginning_are_counted() -> None:
    fleet = told(stored(1))
    assert loads(fleet) == 0
    assert fleet.engine("a").unused == {"LMCache chunks behind unknown ones": 1}


@pytest.mark.parametrize(
    "event",
    [
        ["BlockStored", [1, 2], None, PROMPT[:64], 64, None, "cpu"],
        ["BlockStored", [1], None, PROMPT[:40], 40, None, "cpu"],
        ["BlockStored", [1], None, [], 0, None, "cpu"],
        ["BlockRemoved", [], "cpu"],
    ],
)
def test_events_of_another_form_change_nothing(event: list[Any]) -> None:
    assert loads(told(event, stored(0))) == 64
