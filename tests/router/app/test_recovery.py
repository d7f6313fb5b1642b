"""The router's own part in recovery: resets it passes on, phantoms it notices, requests it screens."""

from __future__ import annotations

import pytest

from kvatlas.publisher.events import BlockHash
from kvatlas.router.feeds.base import FeedSettings, FeedState
from kvatlas.router.fleet.engine_metrics import read_pool_blocks
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.index.base import Plane
from kvatlas.router.proxy.paths import Verdict, cache_reset, judge
from kvatlas.router.proxy.settings import REFUSED_PATHS, ProxySettings
from tests.support.waiting import until
from tests.support.whole_router import MODEL, TEXT, configure, routing, running


async def test_a_reset_that_is_passed_on_empties_the_view_immediately() -> None:
    passing = ProxySettings(passed_paths=frozenset({"/reset_prefix_cache"}))
    async with running({}) as (engine,), routing(configure(engine, proxy=passing)) as rig:
        await rig.chat(TEXT * 20)
        await rig.caught_up(engine)
        again = await rig.chat(TEXT * 20)
        assert int(again.headers["x-kvatlas-hit-tokens"]) > 0
        await rig.caught_up(engine)
        published = engine.publisher.next_seq
        status, answer = await rig.ask("POST", "/reset_prefix_cache")
        assert (status, answer) == (200, {"success": True})
        assert engine.publisher.next_seq == published  # the engine has not said anything yet
        residency = rig.router.scopes.engine(engine.base_url)
        assert residency.index.physical(engine.base_url, "GPU") == 0
        after = await rig.chat(TEXT * 20)
        assert int(after.headers["x-kvatlas-hit-tokens"]) == 0
        usage = after.parse().usage
        assert usage.prompt_tokens_details.cached_tokens == 0


async def test_blocks_stored_after_a_missed_sleep_are_kept() -> None:
    """The poll shows the call when the events have shown the reset, and the blocks stored since."""
    async with running({}) as (engine,), routing(configure(engine)) as rig:
        (status,) = rig.router.fleet

        async def asked() -> int:
            answer = await rig.chat(TEXT * 20)
            await rig.caught_up(engine)
            return int(answer.headers["x-kvatlas-hit-tokens"])

        assert await asked() == 0
        async with rig.session.post(f"{engine.base_url}/reset_prefix_cache") as answer:
            assert answer.status == 200
        assert await asked() > 0, "the engine has not said anything yet"
        status.polled_clears = status.clears - 1
        rig.router.lifecycle.engine_asleep(status, woke=True)
        assert await asked() > 0
        status.polled_clears = status.clears
        rig.router.lifecycle.engine_asleep(status, woke=True)
        assert await asked() == 0


@pytest.mark.parametrize(
    ("call", "emptied"),
    [
        ("/reset_prefix_cache", "gpu"),
        ("/reset_prefix_cache?reset_external=true&reset_running_requests=true", "all"),
        ("/flush_cache", "gpu"),
        ("/sleep", "all"),
        ("/sleep?level=2", "all"),
        ("/sleep?level=0", ""),
        ("/pause?mode=wait", "all"),
        ("/pause?clear_cache=False", ""),
        ("/wake_up", ""),
    ],
)
def test_the_caches_that_a_call_empties(call: str, emptied: str) -> None:
    path, _, query = call.partition("?")
    assert cache_reset(path, query.encode()) == emptied


def test_paths_are_passed_by_their_exact_spelling_only() -> None:
    passed = frozenset({"/reset_prefix_cache"})
    assert judge("/reset_prefix_cache", REFUSED_PATHS, passed) is Verdict.FORWARD
    assert judge("//reset_prefix_cache", REFUSED_PATHS, passed) is Verdict.REFUSE
    assert judge("/reset_prefix_cache", REFUSED_PATHS) is Verdict.REFUSE


async def test_requests_for_full_reports_are_refused_by_name_where_configured() -> None:
    strict = ProxySettings(kv_cache_report_mode="refuse")
    async with running({}) as (engine,), routing(configure(engine, proxy=strict)) as rig:
        body = {
            "model": MODEL,
            "prompt": "x",
            "max_tokens": 1,
            "vllm_xargs": {"kv_cache_report_mode": "full"},
        }
        status, answer = await rig.ask("POST", "/v1/completions", body)
        assert (status, answer["error"]["code"]) == (400, "kv_cache_report_mode_refused")
        del body["vllm_xargs"]
        assert (await rig.ask("POST", "/v1/completions", body))[0] == 200


async def test_more_blocks_than_the_engine_has_raise_an_alarm_and_are_gone_after_it() -> None:
    async with running({}) as (engine,), routing(configure(engine)) as rig:
        await rig.chat(TEXT * 20)
        await rig.caught_up(engine)
        router, engine_id = rig.router, engine.base_url
        status, stats = router.fleet.get(engine_id), router.lifecycle.feeds.stats[engine_id]
        residency = router.scopes.engine(engine_id)
        status.pool_blocks = 2048
        router.lifecycle._audit.audit(status)
        assert stats.phantom_alarms == 0
        phantoms = [BlockHash(number) for number in range(5000)]
        residency.index.store(engine_id, Plane("GPU", 0), phantoms)
        status.pool_blocks = 2048
        router.lifecycle._audit.audit(status)
        assert stats.phantom_alarms == 1
        router.lifecycle._audit.audit(status)
        assert stats.phantom_alarms == 1  # under way

        def clean() -> bool:
            fresh = router.scopes.engine(engine_id)
            return fresh is not None and 0 < fresh.index.physical(engine_id, "GPU") <= 2048

        await until(clean, "everything was fetched again")


async def test_a_feed_that_hears_nothing_of_what_its_engine_computed_is_stale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "kvatlas.publisher.simulator.server.SnapshotLedger", lambda: None
    )  # no heartbeats, as vLLM
    async with running({}) as (engine,):
        events = EngineAddress(engine.base_url, events=engine.publisher.endpoint)  # no replay to mend it with
        feeds = FeedSettings(stale_after_s=0.3)
        async with routing(configure(events, feeds=feeds), wait=False) as rig:
            (known,) = rig.router.fleet
            await until(lambda: known.feed is not None, "followed")
            await rig.chat(TEXT * 20)
            await rig.caught_up(engine)
            await rig.chat(TEXT * 20)  # held there already: nothing is computed, and no event is due
            await rig.chat(f"Another story. {TEXT * 20}")
            await rig.caught_up(engine)
            assert known.feed_state == FeedState.READY
            monkeypatch.setattr(engine.publisher, "publish", lambda *_: None)
            await rig.chat(f"A third story. {TEXT * 20}")
            await until(lambda: known.feed_state == FeedState.STALE, "stale")


METRICS = b"""# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="160",num_cpu_blocks="None"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="170"} 1.0
"""


def test_the_size_of_the_pool_is_read_by_rank() -> None:
    assert read_pool_blocks(METRICS, 0) == 160
    assert read_pool_blocks(METRICS, 1) == 170
    assert read_pool_blocks(METRICS, None) == 170
    assert read_pool_blocks(b"", None) is None
