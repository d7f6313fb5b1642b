"""Hits from a followed Mooncake store, and keys that are read, against vLLM's own MooncakeStoreConnector."""

from __future__ import annotations

import json
import os

import pytest

from kvatlas.publisher.events import BlockHash
from kvatlas.router.feeds.store_events import StoreDecoder
from kvatlas.router.feeds.store_settings import StoreSettings
from kvatlas.router.index.base import Plane
from kvatlas.router.index.hit_rules import evaluate
from kvatlas.router.index.memory import MemoryIndex
from kvatlas.router.index.offloaded import loaded, tier_extents, usable
from kvatlas.router.index.places import store_place
from tests.router.index.rules.layouts import full, layout_of, window
from tests.support.store_publishers import mooncake_event, mooncake_payload
from tests.vllm.forked import driven

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
SEED, COUNT = int(os.environ.get("SEED", "0")) + 1, 1500
POOL = StoreSettings(
    name="pool",
    kind="mooncake",
    events=("tcp://h:1",),
    model="org/model",
    tensor_parallel=2,
    decode_context_parallel=2,
)


def test_hits_and_keys_are_those_of_the_connector(vllm_python: str) -> None:
    hits = 0
    for line in driven(vllm_python, "tests.vllm.drive_mooncake", str(SEED), str(COUNT), timeout=240.0):
        groups, tokens, unit, held, hit, keys = json.loads(line)
        layout = layout_of(
            *(
                full(number, size) if kind == "full" else window(number, tokens_of, size)
                for number, (kind, size, tokens_of) in enumerate(groups)
            ),
            unit=unit,
        )
        index, place = MemoryIndex(), store_place("pool", POOL.reach)
        index.store("engine", Plane("GPU", 0), [BlockHash(5)])
        for number, ends in held.items():
            index.store("store", Plane(place, int(number)), [BlockHash(1000 + end) for end in ends])
        rows = index.lookup([BlockHash(1000 + number) for number in range(tokens // unit)])
        extents = tier_extents(rows, layout, tokens, 0, evaluate(rows, layout, tokens))
        found = loaded(usable(extents, frozenset({"pool"})), 0, 0)
        assert found.get("STORAGE", 0) == hit, line
        hits += hit > 0
        decoder = StoreDecoder(POOL, lambda: None)
        payload = mooncake_payload(mooncake_event("stored", key) for key in keys)
        read = [change for piece in decoder.decode(b"", payload) for change in piece or ()]
        assert decoder.unused == {}
        assert [change and (change.group_idx, change.part) for change in read] == [
            (number, 1) for number in range(len(groups))
        ]
    assert hits > COUNT / 3
