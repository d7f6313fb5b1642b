"""SGLang engines behind a whole router: every receipt is exact, also beside vLLM's.

The engines are simulated: SGLang's radix tree, its own events over ZMQ, ``/server_info`` and gauges.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvatlas.publisher.events import to_block_hash
from kvatlas.publisher.pool.radix import RadixPool
from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.observe.findings import Severity
from kvatlas.router.openai.apis import CHAT, COMPLETION
from kvatlas.router.pd.settings import PdSettings
from kvatlas.router.placement.engine import Engine
from kvatlas.router.placement.load import EngineLoad
from kvatlas.router.proxy.settings import ProxySettings
from kvatlas.router.tools.record import resolve
from tests.router.tools.doctor.rig import examined, http_server
from tests.support.front import fronting
from tests.support.waiting import until
from tests.support.whole_router import MODEL, TEXT, Rig, configure, number, routed, routing, running

SGLANG: dict[str, Any] = {"kind": "sglang", "groups": "full", "max_model_len": 4096}
EAGLE: dict[str, Any] = {**SGLANG, "speculative_algorithm": "EAGLE"}
# The stories of ``reread`` fit neither the GPU nor host memory.
HICACHE: dict[str, Any] = {**SGLANG, "num_blocks": 60, "max_model_len": 600, "host_blocks": 90}
BACK: dict[str, Any] = {**HICACHE, "hicache_write_policy": "write_back"}
SELECTIVE: dict[str, Any] = {**HICACHE, "hicache_write_policy": "write_through_selective"}
PINNED = ProxySettings(pin_header=True)


def bodies(salt: str | None = None) -> list[tuple[str, dict[str, Any]]]:
    """Completions and chats about two stories, each sent again, cut, and continued."""
    extra = {} if salt is None else {"cache_salt": salt}
    made: list[tuple[str, dict[str, Any]]] = []
    for name in ("first", "second"):
        story = f"The {name} story. {TEXT * 20}"
        for text in (story, story, story[: len(story) // 2], story + TEXT):
            body = {"model": MODEL, "max_tokens": 20, "ignore_eos": True, **extra}
            made.append((COMPLETION, {**body, "prompt": text}))
            made.append((CHAT, {**body, "messages": [{"role": "user", "content": text}]}))
    return made


async def ask(rig: Rig, engine: SimulatedEngine, path: str, body: dict[str, Any]) -> int:
    """One request at this engine; returns its cached tokens, when the router knows what it stored."""
    headers = {"x-kvatlas-engine": engine.base_url}
    answer = await rig.ok("POST", path, body, headers)
    await until(lambda: rig.idle, "answered")
    await rig.caught_up(engine)
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def reread(rig: Rig, engine: SimulatedEngine, count: int = 60) -> int:
    """Stories read again in random order, cut or continued; returns the tokens loaded from host memory."""
    rng = random.Random(1)
    for _ in range(count):
        story = f"Story {rng.choice((1, 1, 2, 3, 4, 5, 6, 7))}. {TEXT * 10}"
        text = story[: rng.randint(len(story) // 2, len(story))] + rng.choice(("", "It goes on."))
        await ask(rig, engine, COMPLETION, {"model": MODEL, "max_tokens": 20, "prompt": text})
    check(rig)
    pool = engine.pool
    assert isinstance(pool, RadixPool)
    pool.check_integrity()
    residency = rig.router.scopes.engine(engine.base_url)
    assert residency is not None
    held = [residency.index.physical(engine.base_url, medium) for medium in ("GPU", "CPU")]
    assert held == [len(pool.resident(0)), len(pool.in_host())]
    (known,) = rig.router.fleet
    return known.receipts.predicted_by_medium.get("CPU", 0)


async def exchange(rig: Rig, engines: Sequence[SimulatedEngine], salt: str | None = None) -> None:
    """All bodies at each engine: every receipt is exact, and repeated prompts hit."""
    for engine in engines:
        hits = [await ask(rig, engine, path, body) for path, body in bodies(salt)]
        assert sum(hit > 0 for hit in hits) >= len(hits) // 2
    check(rig)


def check(rig: Rig) -> None:
    receipts = list(rig.router.accounts.receipts.latest)
    assert receipts
    assert {receipt.outcome for receipt in receipts} == {"exact"}, [
        (one.outcome, one.predicted_tokens, one.actual_tokens) for one in receipts if one.outcome != "exact"
    ]


@pytest.mark.parametrize("settings", [SGLANG, EAGLE], ids=["plain", "eagle"])
async def test_every_receipt_is_exact(settings: dict[str, Any]) -> None:
    async with running(settings) as engines, routing(configure(*engines)) as rig:
        await exchange(rig, engines)
        await exchange(rig, engines, salt="tenant")
        (shown,) = (await rig.ask("GET", "/kvatlas/engines"))[1]
        assert (shown["frontend"], shown["mode"]) == ("sglang", "native")
        engines[0].pool.check_integrity()


async def test_a_small_pool_evicts_and_receipts_stay_exact() -> None:
    small = {**SGLANG, "num_blocks": 40, "max_model_len": 600}
    async with running(small) as engines, routing(configure(*engines)) as rig:
        for number_ in range(12):
            text = f"Story {number_ % 5}. {TEXT * 8}"
            await ask(rig, engines[0], COMPLETION, {"model": MODEL, "max_tokens": 4, "prompt": text})
        check(rig)
        (known,) = rig.router.fleet
        await until(lambda: known.pool_blocks == 40, "its gauges were read")
        assert known.evictions.blocks == 0, "vLLM's order of eviction is not SGLang's"
        residency = rig.router.scopes.engine(engines[0].base_url)
        assert residency.index.physical(engines[0].base_url, "GPU") <= 39


@pytest.mark.parametrize(
    "settings",
    [HICACHE, {**HICACHE, "speculative_algorithm": "EAGLE"}, SELECTIVE, BACK],
    ids=["through", "through-eagle", "selective", "back"],
)
async def test_pages_loaded_from_host_memory_are_predicted(settings: dict[str, Any]) -> None:
    async with running(settings) as (engine,), routing(configure(engine)) as rig:
        assert await reread(rig, engine) > 500


async def test_less_than_ten_tokens_are_computed_and_not_loaded() -> None:
    """With pages of 4 tokens two pages are too few; three are loaded."""
    small = {**HICACHE, "block_size": 4, "num_blocks": 27, "max_model_len": 104}
    async with running(small) as (engine,), routing(configure(engine)) as rig:
        body = {"model": MODEL, "max_tokens": 1}
        for pages, hit in ((2, 0), (3, 12)):
            short, long = [[base + pages] * tokens for base, tokens in ((3, 4 * pages + 1), (13, 100))]
            hits = [await ask(rig, engine, COMPLETION, {**body, "prompt": p}) for p in (short, long, short)]
            assert hits == [0, 0, hit]
        check(rig)


@pytest.mark.parametrize("settings", [SGLANG, EAGLE], ids=["plain", "eagle"])
async def test_a_router_that_starts_late_knows_what_the_engine_holds(settings: dict[str, Any]) -> None:
    async with running(settings) as engines:
        async with routing(configure(*engines)) as rig:
            await exchange(rig, engines)
        async with routing(configure(*engines)) as late:
            path, body = bodies()[0]
            assert await ask(late, engines[0], path, body) > 0
            await exchange(late, engines)


@pytest.mark.parametrize("settings", [HICACHE, BACK], ids=["through", "back"])
async def test_a_router_that_starts_late_knows_what_host_memory_holds(settings: dict[str, Any]) -> None:
    async with running(settings) as (engine,):
        async with routing(configure(engine)) as rig:
            await reread(rig, engine)
        async with routing(configure(engine)) as late:
            await late.caught_up(engine)
            assert await reread(late, engine) > 500


async def test_prompts_of_every_length_are_exact_with_pages_of_token_pairs() -> None:
    async with running(EAGLE) as (engine,), routing(configure(engine)) as rig:
        ids = [3 + (7 * at) % 200 for at in range(100)]
        hits = []
        for length in (100, *range(28, 52)):
            body = {"model": MODEL, "max_tokens": 1, "prompt": ids[:length]}
            hits.append(await ask(rig, engine, COMPLETION, body))
        check(rig)
        # A page of 16 pairs needs 17 tokens, and the last token of the prompt is computed.
        assert hits == [0, *((length - 2) // 16 * 16 for length in range(28, 52))]


@pytest.mark.parametrize("settings", [SGLANG, EAGLE, HICACHE], ids=["plain", "eagle", "host-memory"])
async def test_an_engine_that_restarts_holds_nothing(settings: dict[str, Any]) -> None:
    async with running(settings) as (engine,), routing(configure(engine)) as rig:
        await (reread(rig, engine) if settings is HICACHE else exchange(rig, [engine]))
        assert engine.events_endpoint is not None
        assert engine.replay_endpoint is not None
        ports = {
            "port": number(engine.base_url),
            "events_port": number(engine.events_endpoint),
            "replay_port": number(engine.replay_endpoint),
        }
        await engine.stop()
        (status,) = rig.router.fleet
        await until(lambda: not status.up, "the router saw it end")
        async with running({**settings, **ports}) as (again,):
            await rig.ready()
            path, body = bodies()[0]
            assert await ask(rig, again, path, {**body, "prompt": body["prompt"][:2000]}) == 0
            await (reread(rig, again) if settings is HICACHE else exchange(rig, [again]))


async def test_vllm_and_sglang_engines_of_one_model() -> None:
    """Their hashes, and for some chats their tokens, differ; each engine is predicted by its own."""
    async with routed({"groups": "full"}, SGLANG, {}, EAGLE, proxy=PINNED) as (rig, engines):
        await exchange(rig, engines)
        shown = (await rig.ask("GET", "/kvatlas/engines"))[1]
        assert [one["frontend"] for one in shown] == ["python", "sglang", "python", "sglang"]
        await asyncio.gather(*(rig.ask("POST", path, body) for path, body in bodies("tenant")))
        await rig.over()


NO_GAUGES = FleetSettings(gauge_interval_s=3600.0)


async def test_the_load_comes_from_the_engine_s_socket() -> None:
    """Without gauges, and of requests that this router has not sent."""
    settings = {**SGLANG, "load_port": 0, "decode_s_per_token": 0.002}
    async with running(settings) as (engine,), routing(configure(engine, fleet=NO_GAUGES)) as rig:
        (known,) = rig.router.fleet
        known.pool_blocks = None
        body = {"model": MODEL, "max_tokens": 3000, "ignore_eos": True, "prompt": TEXT}
        async with asyncio.TaskGroup() as others:
            foreign = others.create_task(
                rig.session.post(engine.base_url + COMPLETION, json=body).__aenter__()
            )
            await until(lambda: load_of(known).running == 1, "its running request is known")
            assert known.pool_blocks == engine.settings.num_blocks
            foreign.cancel()
        await until(lambda: load_of(known).running == 0, "its end is known")
        assert rig.router.accounts.load_stats.socket_readings > 1
        assert rig.router.accounts.load_stats.socket_malformed == 0


async def test_gauges_count_once_the_socket_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    page = b"sglang:num_running_reqs 7.0\nsglang:num_queue_reqs 0.0\n"
    async with running({**SGLANG, "load_port": 0}) as (engine,), fronting(engine) as front:
        front.overrides["/metrics"] = lambda: (200, page)
        fast = FleetSettings(gauge_interval_s=0.05)
        async with routing(configure(EngineAddress(front.base_url), fleet=fast)) as rig:
            (known,) = rig.router.fleet
            await until(lambda: rig.router.lifecycle.loads.is_fresh(known.engine_id), "the socket is read")
            await until(lambda: load_of(known).running == 0, "the socket counts")
            asked = front.asked("/metrics")
            await until(lambda: front.asked("/metrics") > asked + 2, "gauges were read")
            assert load_of(known).running == 0
            monkeypatch.setattr("kvatlas.router.feeds.sglang_load.LOAD_FRESH_S", -1.0)
            await until(lambda: load_of(known).running == 7, "the gauges count")


def load_of(engine: Engine) -> EngineLoad:
    return engine.load.current(time.monotonic())


@pytest.mark.parametrize(
    "changes",
    [
        {"groups": "gemma3-like"},
        {"groups": "gptoss-like"},
        {"role": "decode"},
        {"decode_context_parallel_size": 2},
    ],
)
async def test_unsupported_features_of_the_simulation_are_refused(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ValueError, match=f"{name} = .*sglang"):
        async with running({**SGLANG, **changes}):
            pass


@pytest.mark.parametrize("prefill", ["vllm", "sglang"])
async def test_no_prompt_is_computed_by_an_engine_of_the_other_software(prefill: str) -> None:
    """Not even where versions may be mixed: SGLang knows nothing of vLLM's transfer parameters."""
    role = "prefill" if prefill == "vllm" else "decode"
    async with running({"groups": "full", "role": role}, SGLANG) as (vllm, sglang):
        helper, decoder = (vllm, sglang) if prefill == "vllm" else (sglang, vllm)
        engines = (
            EngineAddress(helper.base_url, role="prefill"),
            EngineAddress(decoder.base_url, role="decode"),
        )
        pd = PdSettings(mix_versions=True, min_remote_tokens=64)
        async with routing(configure(*engines, pd=pd)) as rig:
            for text in ("one", "two", "three"):
                body = {"model": MODEL, "max_tokens": 2, "prompt": f"Story {text}. {TEXT * 30}"}
                await rig.ok("POST", COMPLETION, body)
                await until(lambda: rig.idle, "answered")
            reason = "short" if prefill == "vllm" else "no_prefill_engine"
            assert rig.router.proxy.pd_stats.aggregated == {reason: 3}
        assert helper.scheduler.stats.prompt_tokens == 0


async def test_the_doctor_names_what_an_engine_was_started_without() -> None:
    async with running(SGLANG) as (engine,):
        healthy = await examined(engine.base_url, probe=True)
        healthy.expect("cache.sglang", Severity.OK, "SGLang 0.5.23, 16 tokens per page")
        healthy.expect("cache.scheme", Severity.OK, "SGLang's page hashes, 16 token(s)")
        healthy.expect("probe.exact", Severity.OK)
        assert healthy.bad() == []
    info = {
        "page_size": 1,
        "enable_cache_report": False,
        "internal_states": [{"memory_usage": {"token_capacity_swa": 64}}],
        "kv_events": None,
    }
    card = {"id": "m", "owned_by": "sglang", "parent": None}
    async with http_server({"/health": {}, "/v1/models": {"data": [card]}, "/server_info": info}) as url:
        found = await examined(url)
        for words in ("--page-size 16", "--enable-metrics", "--enable-cache-report", "windows or Mamba"):
            found.expect("cache.sglang", Severity.WARNING, words)
        found.expect("cache.sglang", Severity.WARNING, "--kv-events-config", "tcp://*:5557")
        assert found.of("http.event_sources") == found.of("http.version") == []


async def test_a_recording_finds_the_event_endpoints() -> None:
    async with running(SGLANG) as (engine,):
        (source,) = await asyncio.to_thread(resolve, [engine.base_url])
        assert (source.events, source.replay) == (engine.events_endpoint, engine.replay_endpoint)


@pytest.fixture
def with_unseen_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang engines of a model with Mamba states, with storage beyond host memory."""
    own = SimulatedEngine._server_info
    unseen = {"uses_mamba_radix_cache": True, "enable_hierarchical_cache": True}
    unseen["hicache_storage_backend"] = "mooncake"  # type: ignore[assignment]
    monkeypatch.setattr(SimulatedEngine, "_server_info", lambda engine: {**own(engine), **unseen})


@pytest.mark.usefixtures("with_unseen_caches")
async def test_predictions_are_partial_where_events_do_not_tell_of_all_caches() -> None:
    async with running(SGLANG) as (engine,), routing(configure(engine)) as rig:
        body = {"model": MODEL, "max_tokens": 2, "prompt": TEXT * 20}
        assert await ask(rig, engine, COMPLETION, body) == 0
        assert await ask(rig, engine, COMPLETION, body) > 0
        # As if the states were gone: no event tells.
        engine.pool.reset()
        engine.pool.take_events()
        assert await ask(rig, engine, COMPLETION, body) == 0
        receipts = (await rig.ask("GET", "/kvatlas/receipts"))[1]
        told = [(one["mode"], one["outcome"]) for one in receipts]
        assert told == [("partial", "exact"), ("partial", "exact"), ("partial", "over")]
        (shown,) = (await rig.ask("GET", "/kvatlas/engines"))[1]
        (explained,) = (await rig.ask("POST", "/kvatlas/explain", body))[1]["engines"]
        for view in (shown, explained):
            facts = {one["name"]: (one["value"], one["certainty"]) for one in view["facts"]}
            assert view["mode"] == "partial"
            assert facts["other_attention"] == (True, "assumed")
            assert facts["silent_store"] == ("mooncake", "certain")
        (known,) = rig.router.fleet
        assert known.receipts.contradictions == {}, "the engine did not lie"
        assert list(known.receipts.window) == []


@pytest.mark.usefixtures("with_unseen_caches")
async def test_partial_hits_are_discounted_by_receipts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes half of its prompts' pages, as if windows or states of the others were missing."""
    match = RadixPool._match
    monkeypatch.setattr(RadixPool, "_match", lambda pool, request, count: match(pool, request, count // 2))
    async with running(SGLANG) as (engine,), routing(configure(engine)) as rig:
        body = {"model": MODEL, "max_tokens": 1, "prompt": TEXT * 20}
        for _ in range(20):
            actual = await ask(rig, engine, COMPLETION, body)
        receipts = (await rig.ask("GET", "/kvatlas/receipts"))[1]
        first, last = receipts[1], receipts[-1]
        assert first["predicted_tokens"] > 1.9 * actual, "nothing is known yet"
        assert last["mode"] == "partial"
        assert abs(last["predicted_tokens"] - actual) <= 0.1 * actual
        (explained,) = (await rig.ask("POST", "/kvatlas/explain", body))[1]["engines"]
        assert explained["mode"] == "partial"


@pytest.mark.usefixtures("with_unseen_caches")
async def test_the_doctor_names_caches_of_which_no_event_tells() -> None:
    async with running(SGLANG) as (engine,), routing(configure(engine)) as rig:
        await ask(rig, engine, COMPLETION, {"model": MODEL, "max_tokens": 2, "prompt": TEXT})
        found = await examined(engine.base_url, router=rig.ops_url, probe=True)
        found.expect("cache.sglang", Severity.WARNING, "windows or Mamba states", "mode partial")
        found.expect("cache.sglang", Severity.WARNING, "a store beyond host memory (mooncake)")
        found.expect("router.predictions", Severity.OK, "exact (mode partial)")


@pytest.mark.usefixtures("with_unseen_caches")
async def test_a_prediction_that_no_event_can_make_exact_is_no_error_of_the_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    match = RadixPool._match
    monkeypatch.setattr(RadixPool, "_match", lambda pool, request, _count: match(pool, request, 0))
    async with running(SGLANG) as (engine,):
        found = await examined(engine.base_url, probe=True)
        found.expect("probe.exact", Severity.WARNING, "engine reported 0", "cache.sglang")


async def test_states_are_predicted_by_sglangs_rules_beside_its_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine takes a prompt up to the last place where one ended, as with Mamba states; no event tells.
    Pages that two prompts have in common are no such place until the second one was computed."""
    own, ends = SimulatedEngine._server_info, set[int]()
    match, insert = RadixPool._match, RadixPool._insert

    def stated(engine: SimulatedEngine) -> dict[str, Any]:
        info = own(engine)
        info["internal_states"][0] |= {"max_mamba_cache_size": 500, "mamba_radix_cache_strategy": "no_buffer"}
        return {**info, "uses_mamba_radix_cache": True}

    def inserted(pool: RadixPool, request: Any) -> None:
        insert(pool, request)
        ends.add(to_block_hash(request.hashes[pool._whole(request.num_computed) - 1]))

    def matched(pool: RadixPool, request: Any, count: int) -> Any:
        at = [n + 1 for n, block in enumerate(request.hashes[:count]) if to_block_hash(block) in ends]
        return match(pool, request, max(at, default=0))

    monkeypatch.setattr(SimulatedEngine, "_server_info", stated)
    monkeypatch.setattr(RadixPool, "_insert", inserted)
    monkeypatch.setattr(RadixPool, "_match", matched)
    async with running(SGLANG) as (engine,), routing(configure(engine)) as rig:
        hits = []
        for prompt in (TEXT * 20, TEXT * 30, TEXT * 25 + "x" * 900, TEXT * 40, TEXT * 25 + "x" * 1100):
            body = {"model": MODEL, "max_tokens": 1, "prompt": prompt}
            hits.append(await ask(rig, engine, COMPLETION, body))
        receipts = (await rig.ask("GET", "/kvatlas/receipts"))[1]
        told = [(one["mode"], one["outcome"]) for one in receipts]
        assert told == [("partial", "exact")] * 5
        assert hits[0] == 0 < hits[1] == hits[2] < hits[3]
        assert hits[4] > 900, "a character is a token"
