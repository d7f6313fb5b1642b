"""Facts that are not configured: found, read of ``config.json``, or shown as missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.groups import GroupSpec
from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR
from kvatlas.publisher.zmq_publisher import ZmqPublisher
from kvatlas.router.config.schema import ModelConfig
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.prompts.settings import ANY_MODEL
from tests.support.event_writer import Writer
from tests.support.front import fronting
from tests.support.waiting import until
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routing, running

DRAFTED = {"groups": (GroupSpec(0, "full_attention", 16, is_eagle=True),)}
"""An engine whose look-ups drop the last block, as with EAGLE in vLLM before 0.33."""
PLAIN = {"groups": (GroupSpec(0, "full_attention", 16),)}


async def twice(rig: Rig, engine: SimulatedEngine, count: int) -> Sequence[str]:
    """Outcomes of the second request for each of some prompts, in order."""
    publisher, (status,) = engine.publisher, rig.router.fleet
    feed = rig.router.lifecycle.feeds.stats[status.engine_id]
    for number in range(count):
        body = {"model": MODEL, "prompt": f"{number} {TEXT * 3}", "max_tokens": 2}
        for _ in range(2):
            assert (await rig.ask("POST", "/v1/completions", body))[0] == 200
            await until(lambda: feed.last_seq == publisher.next_seq - 1, "every batch applied")
    return [one.outcome for one in rig.router.accounts.receipts.latest][1::2]


async def found(rig: Rig) -> dict[str, Any]:
    """The fact about dropped blocks, as the status page and explain show it."""
    _, engines = await rig.ask("GET", "/kvatlas/engines")
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 1}
    _, explained = await rig.ask("POST", "/kvatlas/explain?path=/v1/completions", body)
    assert explained["engines"][0]["facts"] == engines[0]["facts"]
    (fact,) = [fact for fact in engines[0]["facts"] if fact["name"] == "eagle_groups"]
    return fact


async def test_a_drafter_in_the_metrics_is_reckoned_with_from_the_first_request() -> None:
    async with running(DRAFTED) as (engine,), routing(configure(engine)) as rig:
        (status,) = rig.router.fleet
        await until(lambda: status.stated is not None, "metrics")
        assert await found(rig) == fact("all", "metrics", "assumed")
        assert set(await twice(rig, engine, 9)) == {"exact"}
        assert await found(rig) == fact("all", "metrics", "confirmed")


@pytest.mark.parametrize(("settings", "wrong", "value"), [(DRAFTED, "over", "all"), (PLAIN, "under", [])])
async def test_receipts_overrule_metrics(settings: dict[str, Any], wrong: str, value: object) -> None:
    """The page hides the drafter, or tells of one that holds no KV (n-gram)."""
    async with running(settings) as (engine,), fronting(engine) as front:
        drafts = b'vllm:spec_decode_num_drafts_total{engine="0"} 1.0\n' if wrong == "under" else b""
        labels = b'vllm:cache_config_info{block_size="16",engine="0"} 1.0\n'
        gauges = b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n"
        front.overrides["/metrics"] = lambda: (200, labels + gauges + drafts)
        async with routing(configure(front)) as rig:  # type: ignore[arg-type]  # it has a base_url
            (status,) = rig.router.fleet
            await until(lambda: status.stated is not None, "metrics")
            outcomes = await twice(rig, engine, 8)
            assert outcomes == [wrong] * 4 + ["exact"] * 4
            assert await found(rig) == fact(value, "receipts", "likely")


async def test_server_info_shows_it_immediately() -> None:
    async with running(PLAIN) as (engine,), fronting(engine) as front:
        config = {"cache_config": {"block_size": 16}, "speculative_config": {"method": "ngram"}}
        front.overrides["/server_info"] = lambda: (200, {"vllm_config": config})
        async with routing(configure(front)) as rig:  # type: ignore[arg-type]  # it has a base_url
            assert set(await twice(rig, engine, 3)) == {"exact"}
            assert await found(rig) == fact([], "server_info", "certain")


def fact(value: object, source: str, certainty: str) -> dict[str, object]:
    return {"name": "eagle_groups", "value": value, "source": source, "certainty": certainty}


SCHEME = HashScheme()
OLD = (Writer(SCHEME, kind=None), Writer(SCHEME, kind=None, group=1))
"""Events as those of vLLM 0.20 and 0.21."""
NEW = (Writer(SCHEME, kind="sliding_window", window=32), Writer(SCHEME, group=1))
TOKENS = list(range(3, 103))


def model_folder(folder: Path) -> Path:
    shutil.copytree(DEMO_TOKENIZER_DIR, folder)
    content = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 4}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


async def show(rig: Rig, publisher: ZmqPublisher, writers: tuple[Writer, ...]) -> None:
    publisher.publish([writer.stored(TOKENS) for writer in writers])
    (engine,) = rig.router.fleet
    await until(lambda: engine.layout is not None and len(engine.layout.groups) == len(writers), "groups")


@pytest.mark.parametrize(
    ("writers", "kinds", "windows"),
    [
        (OLD, ["sliding_window", "full_attention"], [64, None]),
        (OLD[:1], ["full_attention"], [None]),
        (NEW, ["sliding_window", "full_attention"], [32, None]),
    ],
    ids=["named by no event", "another number of groups", "named by the events"],
)
async def test_kinds_and_windows_of_groups(
    tmp_path: Path, writers: tuple[Writer, ...], kinds: list[str], windows: list[int | None]
) -> None:
    publisher = ZmqPublisher("tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")

    try:
        publisher.start()
        async with running({"publish_events": False}) as (engine,):
            given = EngineAddress(engine.base_url, None, publisher.endpoint, publisher.replay_endpoint)
            model = ModelConfig(tokenizer=str(model_folder(tmp_path / "model")))
            config = configure(given, models={ANY_MODEL: model})
            with capture_logs() as logs:
                async with routing(config) as rig:
                    await show(rig, publisher, writers)
                    (one,) = rig.router.fleet

                    def seen() -> tuple[list[str], list[int | None]]:
                        groups = () if one.layout is None else one.layout.groups
                        return [g.kind for g in groups], [g.sliding_window for g in groups]

                    following = rig.router.lifecycle
                    await until(lambda: MODEL in following._layouts, "compared")
                    await until(lambda: seen() == (kinds, windows), lambda: f"{seen()}")
            other = [entry for entry in logs if "config_json_tokens" in entry]
            assert len(other) == (writers is NEW)
    finally:
        publisher.close()


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
        engine.publisher._ledger = None  # it would refuse what it cannot read
        engine.publisher.publish_payload(payload)

        async def problems() -> list[dict[str, str]]:
            found = (await rig.ask("GET", "/kvatlas/problems"))[1][engine.base_url]
            return [problem for problem in found if "could be used" in problem["seen"]]

        status = rig.router.fleet.get(engine.base_url)
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
