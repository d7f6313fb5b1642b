"""An engine whose events cannot be used is shown as such on the page, in /ready and in the metrics."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.waiting import until
from tests.support.whole_router import TEXT, configure, routing, running

STORED = {
    "type": "BlockStored",
    "block_hashes": [1],
    "parent_block_hash": None,
    "token_ids": list(range(16)),
    "block_size": 16,
}
UNUSABLE = {
    "rejected": ([{"type": "BlockStored", "block_hashes": [1]}], "undecodable 1", "missing required field"),
    "of an unknown type": ([{"type": "BlockMoved"}], "unknown type BlockMoved 1", ""),
    "of another kind": ([STORED | {"kv_cache_spec_kind": "hologram"}], "unknown_kind 1", ""),
    "no batch": (None, "payload_undecodable 1", ""),
}


@pytest.mark.parametrize("kind", UNUSABLE)
async def test_events_that_cannot_be_used_are_a_problem(kind: str) -> None:
    events, reason, detail = UNUSABLE[kind]
    payload = b"\xc1" if events is None else msgspec.msgpack.encode([1.0, events, 0])

    async with running({}) as (engine,), routing(configure(engine)) as rig:
        assert engine.publisher is not None
        engine.publisher._ledger = None  # it would refuse what it cannot read
        engine.publisher.publish_payload(payload)

        async def problems() -> list[dict[str, str]]:
            found = (await rig.ask("GET", "/kvatlas/problems"))[1][engine.base_url]
            return [problem for problem in found if "could be used" in problem["seen"]]

        status = rig.router.fleet.get(engine.base_url)
        assert status is not None
        await until(lambda: status.unusable_events > 0, "seen")
        (problem,) = await problems()
        assert reason in problem["seen"]
        assert detail in problem["seen"]
        assert problem["severity"] == "error"
        assert "kvatlas record" in problem["remedy"]
        _, ready = await rig.ask("GET", "/ready")
        assert f"feeds whose events cannot be used: {engine.base_url}" in ready["reason"]
        metric = f'kvatlas_feed_unusable_events{{engine="{engine.base_url}"}} 1.0'
        assert metric in (await rig.ask("GET", "/metrics"))[1]
        await rig.chat(TEXT * 20)
        await until(lambda: status.unusable_events == 0, "events that can be used")
        assert not await problems()
        assert (await rig.ask("GET", "/ready"))[1]["reason"] == ""
