"""Engines of every kind: without events or tokenizer, restarted, gone, of several ranks, with adapters."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import openai
import pytest

from kvatlas.publisher.block_hash import HashScheme, PromptExtras
from kvatlas.publisher.block_pool import HybridBlockPool
from kvatlas.publisher.groups import GroupSpec
from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.publisher.zmq_publisher import ZmqPublisher
from kvatlas.router.config.load import parse_engine
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.placement.shadow import ShadowSettings
from kvatlas.router.prompts.settings import ANY_MODEL, PromptSettings
from tests.support.front import Front, fronting
from tests.support.ports import free_ports
from tests.support.waiting import until
from tests.support.whole_router import (
    LOCAL,
    MODEL,
    TEXT,
    Rig,
    configure,
    number,
    routed,
    routing,
    running,
)

NEVER = FleetSettings(poll_interval_s=1000.0, gauge_interval_s=1000.0, poll_timeout_s=10.0)
"""Polled once: later changes are for requests to find out."""


async def hits(rig: Rig, text: str, **fields: Any) -> tuple[int, int, str]:
    """Predicted (-1: nothing was promised) and reported hit of one chat, and the engine."""
    raw = await rig.chat(text, **fields)
    reported = raw.parse().usage.prompt_tokens_details.cached_tokens
    return int(raw.headers.get("x-kvatlas-hit-tokens", -1)), reported, raw.headers["x-kvatlas-engine"]


async def check_exact(rig: Rig, engines: list[SimulatedEngine], *texts: str) -> int:
    """Each text twice, every prediction exact; returns the reported hit tokens."""
    total = 0
    for text in [text for text in texts for _ in range(2)]:
        predicted, reported, _ = await hits(rig, text)
        assert predicted == reported
        total += reported
        await rig.caught_up(*engines)
    return total


@asynccontextmanager
async def started(**changes: Any) -> AsyncIterator[SimulatedEngine]:
    """One engine; a test may stop it before."""
    async with running(changes) as (engine,):
        yield engine


async def stopped(rig: Rig, engine: SimulatedEngine) -> None:
    """The engine is stopped, and the router knows."""
    await engine.stop()
    await until(lambda: not rig.router.fleet.ready(None), "the engine is seen to be down")


@asynccontextmanager
async def behind_front(
    answers: dict[str, tuple[int, Any]], *settings: dict[str, Any], **changes: Any
) -> AsyncIterator[tuple[Rig, Front, list[SimulatedEngine]]]:
    """A router that knows a front before engines; these answers are the front's own from the start."""
    async with running(*(settings or ({},))) as engines, fronting(*engines) as front:
        front.overrides |= {path: lambda answer=answer: answer for path, answer in answers.items()}  # type: ignore[misc]
        async with routing(configure(EngineAddress(front.base_url), **changes)) as rig:
            yield rig, front, engines


def own_ports() -> dict[str, int]:
    """For an engine that comes back: no other test gets these meanwhile."""
    return dict(zip(("port", "events_port", "replay_port"), free_ports(3), strict=True))


async def test_engines_without_events_are_predicted_by_a_shadow_of_their_pool() -> None:
    settings = {"publish_events": False, "groups": "gptoss-like", "num_blocks": 150}
    shadow = ShadowSettings(block_size=16, sliding_window=128, num_blocks=150)
    models = {ANY_MODEL: msgspec.structs.replace(LOCAL, shadow=shadow)}
    async with running(settings, settings) as engines, routing(configure(*engines, models=models)) as rig:
        rng = random.Random(3)
        stems = [TEXT * rng.randint(5, 20) for _ in range(6)]
        right = reported_tokens = 0
        for _ in range(60):
            text = rng.choice(stems) + " ".join(rng.choices(TEXT.split(), k=rng.randint(1, 40)))
            predicted, reported, _ = await hits(rig, text, max_tokens=1)
            right += predicted == reported
            reported_tokens += reported
        assert reported_tokens > 1000
        assert right >= 55
        assert {e["mode"] for e in (await rig.ask("GET", "/kvatlas/engines"))[1]} == {"shadow"}
        receipts = rig.router.accounts.receipts.latest
        assert {receipt.mode for receipt in receipts} == {"shadow"}
        rig.check_books()


@pytest.mark.parametrize("scale_out", [True, False], ids=["render", "tokenize"])
async def test_without_a_tokenizer_the_engine_is_asked_for_tokens(scale_out: bool) -> None:
    settings = {"enable_scale_out": scale_out}
    async with running(settings) as engines, routing(configure(*engines, models={})) as rig:
        assert await check_exact(rig, engines, TEXT * 20, TEXT * 9 + "or not") > 100
        stats = rig.router.reader.stats
        assert (stats.engine, stats.local) == (4, 0)
        assert stats.not_local["no_tokenizer"] == 4
        # Where rendering is refused, that is remembered.
        assert stats.engine_calls == (4 if scale_out else 5)


async def test_a_render_server_spares_the_engines_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.router.prompts.render_servers.HEALTH_CHECK_S", 0.05)
    async with running({"enable_scale_out": True}) as servers, running({}) as engines:
        settings = PromptSettings(renderers=(servers[0].base_url,))
        async with routing(configure(*engines, models={}, prompts=settings)) as rig:
            assert await check_exact(rig, engines, TEXT * 20, TEXT * 9 + "or not") > 100
            stats = rig.router.reader.stats
            assert (stats.renderer, stats.engine, stats.engine_calls) == (4, 0, 0)
            _, told = await rig.ask(
                "POST", "/kvatlas/explain", {"model": MODEL, "messages": [{"role": "user", "content": TEXT}]}
            )
            assert (told["prompt"]["read"], told["prompt"]["by"]) == ("renderer", servers[0].base_url)
            await servers[0].stop()
            await until(lambda: not any(rig.router.reader.renderers.up.values()))
            await check_exact(rig, engines, TEXT * 12, TEXT * 7)
            assert stats.engine > 0


async def test_where_no_engine_gives_tokens_text_affinity_places() -> None:
    settings = PromptSettings(engine_timeout_s=1e-6)
    async with routed({}, {}, {}, models={}, prompts=settings) as (rig, _):
        texts = {text: set() for text in (f"number {n}: {TEXT * 20}" for n in range(4))}
        for text in [*texts, *texts, *texts]:
            raw = await rig.chat(text)
            assert "x-kvatlas-hit-tokens" not in raw.headers  # nothing is promised
            texts[text].add(raw.headers["x-kvatlas-engine"])
        assert all(len(engines_of) == 1 for engines_of in texts.values())
        stats = rig.router.reader.stats
        assert stats.affinity["no_tokenizer"] == 12
        assert stats.engine == stats.local == 0
        assert stats.engine_failures > 0
        assert 'kvatlas_prompts_affinity_total{reason="no_tokenizer"} 12.0' in await rig.page()
        rig.check_books()


async def test_engine_that_breaks_the_connection_when_asked_for_tokens_costs_no_request() -> None:
    answers = {"/v1/chat/completions/render": (0, None), "/tokenize": (200, {"tokens": "many"})}
    async with behind_front(answers, {"publish_events": False}, models={}) as (rig, _, _):
        assert (await rig.chat("hello")).parse().choices
        assert rig.router.reader.stats.affinity["no_tokenizer"] == 1


@pytest.mark.parametrize("moved", [False, True], ids=["same-ports", "other-event-ports"])
async def test_a_restarted_engine_is_known_to_be_empty(moved: bool) -> None:
    ports = own_ports()
    async with started(**ports) as first, routing(configure(first)) as rig:
        assert await check_exact(rig, [first], TEXT * 20) > 100
        held = rig.router.scopes.scope(MODEL).stats().residencies
        assert held > 10
        await stopped(rig, first)
        with pytest.raises(openai.InternalServerError):
            await rig.chat("hello")
        again = {"port": ports["port"]} if moved else ports
        async with started(**again) as second:
            await rig.ready()
            await until(lambda: not rig.router.scopes.scope(MODEL).stats().residencies, "forgotten")
            predicted, reported, _ = await hits(rig, TEXT * 20)
            assert (predicted, reported) == (0, 0)
            await rig.caught_up(second)
            assert await check_exact(rig, [second], TEXT * 20, TEXT * 7) > 200
            rig.check_books()


async def test_an_engine_that_restarts_between_polls_is_not_credited_with_its_old_blocks() -> None:
    ports = own_ports()
    async with started(**ports) as first, routing(configure(first, fleet=NEVER)) as rig:
        assert await check_exact(rig, [first], TEXT * 20) > 100
        (engine,) = rig.router.fleet
        feed = engine.feed
        await first.stop()
        await until(lambda: feed.unconfirmed, "the event socket is lost")
        elsewhere = own_ports() | {"port": ports["port"]}
        async with started(**elsewhere):  # it answers before the router hears of its events
            assert engine.up
            assert (await hits(rig, TEXT * 20))[:2] == (-1, 0)
        async with started(**ports) as second:
            await until(lambda: not feed.unconfirmed, "the process that speaks is known")
            assert (await hits(rig, TEXT * 20))[:2] == (0, 0)
            await rig.caught_up(second)
            assert await check_exact(rig, [second], TEXT * 20, TEXT * 7) > 200
        rig.check_books()


async def test_a_connection_that_was_cut_counts_again_once_the_process_is_confirmed() -> None:
    async with started() as engine, routing(configure(engine, fleet=NEVER)) as rig:
        assert await check_exact(rig, [engine], TEXT * 20) > 100
        (known,) = rig.router.fleet
        rig.router.lifecycle.engine_restarted(known)  # as a changed start time in its metrics would say
        assert known.feed.unconfirmed
        await until(lambda: not known.feed.unconfirmed, "confirmed by replay")
        predicted, reported, _ = await hits(rig, TEXT * 20)
        assert predicted == reported > 0
        assert known.feed.restarts == 0


async def test_an_engine_that_begins_to_publish_events_is_followed() -> None:
    async with started(publish_events=False) as mute:
        port = number(mute.base_url)
        async with routing(configure(mute)) as rig:
            await rig.chat(TEXT * 20)
            assert rig.router.fleet.get(mute.base_url).shadow is not None
            await stopped(rig, mute)
            async with started(port=port) as speaking:
                await rig.ready()
                assert await check_exact(rig, [speaking], TEXT * 20) > 100
                assert rig.router.fleet.get(speaking.base_url).shadow is None
                assert rig.router.accounts.receipts.latest[-1].mode == "native"
                await stopped(rig, speaking)
                async with started(port=port, publish_events=False):  # and the other way
                    await rig.ready()
                    await hits(rig, TEXT * 20)
                    predicted, reported, engine = await hits(rig, TEXT * 20)
                    assert predicted == reported > 100
                    assert rig.router.fleet.get(engine).shadow is not None
                    assert rig.router.lifecycle.feeds.stats == {}
                    assert rig.router.scopes.scope(MODEL).stats().residencies == 0


async def test_an_engine_that_comes_back_with_another_model_starts_empty() -> None:
    ports = own_ports()
    async with started(**ports) as first, routing(configure(first)) as rig:
        await check_exact(rig, [first], TEXT * 20)
        await stopped(rig, first)
        async with started(model="other", **ports) as second:
            await rig.ready()
            with pytest.raises(openai.NotFoundError):
                await rig.chat("hello")
            for _ in range(3):
                predicted, reported, _ = await hits(rig, TEXT * 20, model="other")
                assert predicted == reported
                await rig.caught_up(second)
            assert predicted > 100
            assert rig.router.scopes.scope(MODEL).stats().residencies == 0


async def test_the_breaker_keeps_requests_from_an_engine_that_refuses() -> None:
    ports = own_ports()
    async with running({}, ports) as (stays, goes), routing(configure(stays, goes, fleet=NEVER)) as rig:
        await goes.stop()
        for n in range(30):
            assert (await hits(rig, f"{n} {TEXT * 10}"))[2] == stays.base_url
        assert rig.router.fleet.get(goes.base_url).up  # not polled since; only the breaker knows
        failures = rig.router.proxy.stats.engine_failures["refused"]
        assert 3 <= failures < 30
        assert rig.router.accounts.load_stats.failed == failures
        rig.check_books()
        async with started(**ports):
            while not rig.router.fleet.get(goes.base_url).breaker.closed:  # the next probe closes it
                await hits(rig, f"{random.random()} {TEXT}")
                await asyncio.sleep(0.1)
            used, n = set(), 0
            while used != {stays.base_url, goes.base_url}:  # first the one that did less recently
                n += 1
                assert n < 100
                used.add((await hits(rig, f"{n} new {TEXT * 10}"))[2])


async def applied(rig: Rig, engine_id: str, publisher: ZmqPublisher | None) -> None:
    """The router has applied all that this publisher has published, under this engine id."""
    feed = rig.router.lifecycle.feeds.stats[engine_id]
    await until(lambda: feed.last_seq == publisher.next_seq - 1 or not publisher.next_seq, "applied")


async def make_ranks(front: Front) -> None:
    """Let the front speak as one server with a rank for each of its engines."""
    sources = {}
    for rank, engine in enumerate(front.engines):
        async with front._session.get(f"{engine.base_url}/kv_event_sources") as answer:
            sources[str(rank)] = (await answer.json())["0"]
    front.overrides["/kv_event_sources"] = lambda: (200, sources)


async def test_every_data_parallel_rank_is_an_engine_of_its_own() -> None:
    async with running({}, {}) as engines, fronting(*engines) as front:
        await make_ranks(front)
        async with routing(configure(EngineAddress(front.base_url))) as rig:
            ids = [f"{front.base_url}#dp{rank}" for rank in range(2)]
            assert [status.engine_id for status in rig.router.fleet] == ids
            used = []
            for n in (1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6):
                predicted, reported, engine = await hits(rig, f"{n} {TEXT * 10}")
                assert predicted == reported
                used.append(engine)
                for rank, simulated in enumerate(engines):
                    await applied(rig, ids[rank], simulated.publisher)
            assert set(used) == set(ids)
            assert used[:6] == used[6:]  # each came back to the rank that holds it
            said = [f"{front.base_url}#dp{rank}" for rank in front.ranks("/v1/chat/completions")]
            assert said == used
            rig.check_books()


async def test_ranks_that_come_and_go_are_followed() -> None:
    async with behind_front({}, {}, {}) as (rig, front, _):
        fleet = rig.router.fleet
        assert [status.engine_id for status in fleet] == [front.base_url]
        await hits(rig, TEXT * 10)
        await make_ranks(front)
        await until(lambda: len(fleet) == 2, "two ranks")
        await rig.ready()
        assert set(rig.router.lifecycle.feeds.stats) == {status.engine_id for status in fleet}
        assert rig.router.scopes.engine(front.base_url) is None
        assert fleet.get(front.base_url) is None
        await hits(rig, TEXT * 10)
        del front.overrides["/kv_event_sources"]
        await until(lambda: len(fleet) == 1, "one engine")
        await rig.ready()
        rig.check_books()
        page = (await rig.ask("GET", "/metrics"))[1]
        assert "#dp" not in page  # what has left is in no label


async def test_requests_that_outlive_their_engine_leave_nothing_behind() -> None:
    slow = {"decode_s_per_token": 0.02}
    async with behind_front({}, slow, slow) as (rig, front, _):
        task = asyncio.create_task(rig.chat(TEXT * 10, max_tokens=20))
        await until(lambda: rig.router.accounts.load_stats.admitted == 1, "sent")
        (left,) = rig.router.fleet
        await make_ranks(front)
        await until(lambda: len(rig.router.fleet) == 2, "the engine has left")
        assert (await task).parse().choices
        assert left.closed
        assert left.receipts.outcomes == {}
        assert not any(engine.receipts.outcomes for engine in rig.router.fleet)
        assert left.load.check_integrity() == []
        assert rig.router.fleet.get(front.base_url) is None
        rig.check_books()


async def test_endpoints_may_be_given_where_the_engine_cannot_tell_them() -> None:
    async with running({}) as (engine,), fronting(engine) as front:
        front.overrides["/kv_event_sources"] = lambda: (404, {"detail": "Not Found"})
        events, replay = engine.events_endpoint, engine.replay_endpoint
        given = parse_engine(f"{front.base_url},events={events},replay={replay}")
        async with routing(configure(given)) as rig:
            for _ in range(2):
                predicted, reported, _ = await hits(rig, TEXT * 20)
                await applied(rig, front.base_url, engine.publisher)
            assert predicted == reported > 100
            assert front.asked("/kv_event_sources") == 0  # what is configured is not asked for


async def test_event_sources_are_asked_again_after_a_failure_but_not_after_a_no() -> None:
    async with behind_front({"/kv_event_sources": (500, {})}) as (rig, front, _):
        assert rig.router.fleet.get(front.base_url).shadow is not None
        await until(lambda: front.asked("/kv_event_sources") > 2, "asked again")
        del front.overrides["/kv_event_sources"]
        await until(lambda: front.base_url in rig.router.lifecycle.feeds.stats, "followed")
        await rig.ready()
        assert rig.router.fleet.get(front.base_url).shadow is None
    async with behind_front({"/kv_event_sources": (404, {"detail": "Not Found"})}) as (rig, front, _):
        await until(lambda: front.asked("/v1/models") > 4, "polled")
        assert front.asked("/kv_event_sources") == 1
        assert rig.router.fleet.get(front.base_url).shadow is not None


GROUPS = (GroupSpec(0, "full_attention", 16), GroupSpec(1, "sliding_window", 16, sliding_window=64))


class AdapterEngine:
    """An engine's events for prompts of a LoRA, made by a pool."""

    def __init__(self, path: str) -> None:
        self.extras = PromptExtras("sql", path)
        self.scheme = HashScheme(hash_block_size=16)
        self.pool = HybridBlockPool(GROUPS, num_blocks=200, scheme=self.scheme)
        self.publisher = ZmqPublisher("tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")

    def compute(self, token_ids: list[int], extras: PromptExtras) -> None:
        request = self.pool.request(token_ids, extras)
        assert self.pool.start(request) is not None
        while chunk := self.pool.next_chunk(request):
            assert self.pool.compute(request, chunk)
        self.pool.finish(request)
        self.pool.end_step()
        self.publisher.publish(self.pool.take_events())

    def would_hit(self, token_ids: list[int], extras: PromptExtras) -> int:
        return self.pool.find_hit(self.pool.request(token_ids, extras))


@pytest.mark.parametrize("configured", [False, True], ids=["path-from-engine", "path-configured"])
async def test_adapters_are_predicted_with_the_path_they_were_loaded_from(configured: bool) -> None:
    path = "/adapters/sql"
    cards = [
        {"id": MODEL, "root": MODEL, "parent": None},
        {"id": "sql", "root": "/somewhere/else" if configured else path, "parent": MODEL},
    ]
    model = msgspec.structs.replace(LOCAL, lora_paths={"sql": path} if configured else {})
    async with running({"publish_events": False}) as (engine,), fronting(engine) as front:
        front.overrides["/v1/models"] = lambda: (200, {"object": "list", "data": cards})
        adapter = AdapterEngine(path)
        adapter.publisher.start()
        try:
            publisher = adapter.publisher
            given = EngineAddress(front.base_url, None, publisher.endpoint, publisher.replay_endpoint)
            async with routing(configure(given, models={ANY_MODEL: model})) as rig:
                body = {"prompt": TEXT * 20, "max_tokens": 1}
                prompt = await rig.router.reader.read(_inbound({**body, "model": "sql"}))
                token_ids = list(prompt.token_ids)  # type: ignore[union-attr]
                adapter.compute(token_ids[:200], PromptExtras())  # base model: also shows the scheme
                adapter.compute(token_ids, adapter.extras)
                await applied(rig, front.base_url, publisher)
                for name, extras in ((MODEL, PromptExtras()), ("sql", adapter.extras)):
                    _, told = await rig.ask("POST", "/kvatlas/explain", {**body, "model": name})
                    assert told["prompt"]["read"] == "local"
                    assert told["choice"]["hit_tokens"] == adapter.would_hit(token_ids, extras) > 100
                models = await rig.api.models.list()
                assert {card.id for card in models.data} == {MODEL, "sql"}
        finally:
            adapter.publisher.close()


async def test_an_adapters_path_is_forgotten_with_the_last_engine_that_has_it() -> None:
    with_adapter = [{"id": MODEL, "root": MODEL}, {"id": "sql", "root": "/a/sql", "parent": MODEL}]
    async with running({}) as (engine,), fronting(engine) as one, fronting(engine) as other:
        for front in (one, other):
            front.overrides["/v1/models"] = lambda: (200, {"object": "list", "data": with_adapter})
        config = configure(EngineAddress(one.base_url), EngineAddress(other.base_url))
        async with routing(config) as rig:
            known = rig.router.scopes.scope(MODEL).facts.lora_paths
            for left, paths in ((one, {"sql": "/a/sql"}), (other, {})):
                rig.router.fleet.replace(left.base_url, ())
                await asyncio.sleep(0)  # once for all engines that leave together
                assert known == paths


async def test_an_adapter_whose_path_is_unknown_goes_by_affinity() -> None:
    cards = [{"id": MODEL, "root": MODEL}, {"id": "sql", "parent": MODEL}]
    async with behind_front({"/v1/models": (200, {"object": "list", "data": cards})}) as (rig, _, _):
        _, told = await rig.ask("POST", "/kvatlas/explain", {"model": "sql", "prompt": "x" * 900})
        assert told["prompt"]["why"] == "lora_path_unknown"


async def test_configuring_one_model_leaves_the_others_as_they_were() -> None:
    async with routed({"model": "named"}, {"model": "other"}, models={"named": LOCAL}) as (rig, engines):
        for model in ("named", "other"):
            for _ in range(2):
                predicted, reported, _ = await hits(rig, TEXT * 20, model=model)
                await rig.caught_up(*engines)
            assert predicted == reported > 100
        assert (rig.router.reader.stats.local, rig.router.reader.stats.engine) == (2, 2)


def _inbound(body: dict[str, Any]) -> InboundRequest:
    return InboundRequest("POST", "/v1/completions", b"", [], msgspec.json.encode(body), body["model"])
