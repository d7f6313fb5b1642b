"""Stores with feeds of their own, behind a whole router: who loads from them, and what a lost event costs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec
import pytest

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.feeds.store_settings import StoreSettings
from kvatlas.router.feeds.stores import StoreFeed
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.openai.apis import COMPLETION
from kvatlas.router.placement.candidate import PolicySettings
from tests.support.store_publishers import (
    CHUNK_TOKENS,
    ChunkStore,
    ChunkTier,
    FileStore,
    FileTier,
    MooncakeStore,
    MooncakeTier,
    mooncake_event,
    mooncake_key,
    mooncake_payload,
)
from tests.support.waiting import until
from tests.support.whole_router import MODEL, Rig, configure, routing, running

ENDPOINT = "tcp://127.0.0.1:19998"
POOL = StoreSettings(name="pool", kind="mooncake", events=(ENDPOINT,), model=MODEL)
EVICTOR = "tcp://127.0.0.1:19999"
KINDS: dict[str, tuple[StoreSettings, Any, Any]] = {
    "mooncake": (POOL, lambda: MooncakeStore(ENDPOINT), MooncakeTier),
    "lmcache": (
        msgspec.structs.replace(POOL, kind="lmcache", chunk_tokens=CHUNK_TOKENS),
        lambda: ChunkStore(ENDPOINT),
        ChunkTier,
    ),
    "llmd-files": (
        msgspec.structs.replace(POOL, kind="llmd-files", events=(ENDPOINT, EVICTOR)),
        lambda: FileStore(ENDPOINT, EVICTOR),
        FileTier,
    ),
}
"""Settings, the store, and what engines have of it."""
ALTERNATE = PolicySettings(policy="round-robin")


def address(engine: SimulatedEngine) -> EngineAddress:
    return EngineAddress(engine.base_url, events=engine.events_endpoint, replay=engine.replay_endpoint)


class Pool(NamedTuple):
    """A router before two engines that load from a store."""

    rig: Rig
    engines: list[SimulatedEngine]
    store: MooncakeStore

    @property
    def feed(self) -> StoreFeed:
        (feed,) = self.rig.router.lifecycle.stores
        return feed

    async def ask(self, text: str, *, stream: bool = False) -> tuple[str, int, int, int | None]:
        """Send a prompt; returns its outcome, what was predicted in all and from storage, and the hit."""
        usage = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        await self.rig.ok("POST", COMPLETION, {"model": MODEL, "max_tokens": 1, "prompt": text, **usage})
        await until(lambda: self.rig.idle, "answered")
        await self.rig.caught_up(*self.engines)
        await self.caught_up()
        receipt = list(self.rig.router.accounts.receipts.latest)[-1]
        return receipt.outcome, receipt.predicted_tokens or 0, receipt.storage_tokens, receipt.actual_tokens

    async def caught_up(self) -> None:
        """Every batch of the store was applied."""
        await until(lambda: self.feed.stats.batches == self.store.sent, "every batch of the store applied")

    async def stores(self) -> dict[str, Any]:
        (found,) = await self.rig.ok("GET", "/kvatlas/stores")
        return dict(found)


@asynccontextmanager
async def pool(
    *, loaders: tuple[int, ...] = (0, 1), kind: str = "mooncake", **settings: Any
) -> AsyncIterator[Pool]:
    own, make, tier = KINDS[kind]
    async with running(*[{"groups": "full", **settings}] * 2) as engines:
        store = make()
        for number in loaders:
            engines[number].scheduler._tier = tier(store)
        chosen = msgspec.structs.replace(own, engines=tuple(engines[one].base_url for one in loaders))
        listed = [address(engine) for engine in engines]
        async with routing(configure(*listed, stores=(chosen,), policy=ALTERNATE)) as rig:
            made = Pool(rig, engines, store)
            await until(lambda: made.feed.stats.connected, "the store")
            # The hash scheme of both is known from here on.
            for number in range(2):
                await made.ask(f"Warm up number {number}. " * 20)
            yield made
        store.close()


def story(number: int) -> str:
    return f"Story {number}. " + "It goes on and on. " * 30


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_loads_the_others_chunks_until_they_are_removed(kind: str) -> None:
    async with pool(kind=kind) as made:
        told = [await made.ask(story(number // 2)) for number in range(6)]
        assert {outcome for outcome, *_ in told} == {"exact"}
        assert all(storage > 100 for _, _, storage, _ in told[1::2]), "the second engine loads"
        seen = await made.stores()
        assert (seen["store"], seen["connected"], seen["incomplete"]) == ("pool", True, 0)
        early = seen["unused"].pop("chunks before the engines' hash scheme is known", 0)
        assert seen["unused"] == {}
        assert kind == "lmcache" or not early, "other stores name their chunks as the engines do"
        assert seen["chunks"] == len(made.store.held) - early > 10
        assert sorted(seen["loaders"]) == sorted(engine.base_url for engine in made.engines)
        await made.ask(story(9))
        made.store.evict(len(made.store.held))
        await made.caught_up()
        assert await made.ask(story(9)) == ("exact", 0, 0, 0), "the other one holds nothing of it"
        page = await made.rig.page()
        assert 'kvatlas_store_chunks{store="pool"}' in page


@pytest.mark.parametrize("kind", KINDS)
async def test_prompts_that_grow_end_their_hits_where_their_engine_does(kind: str) -> None:
    """In chunks, from the GPU's hit on, or from the first token, with parts of the store gone."""
    async with pool(kind=kind, num_blocks=80) as made:
        rng, outcomes, loaded = random.Random(3), Counter[str](), 0
        stories = [story(number) for number in range(5)]
        for turn in range(40):
            number = rng.randrange(len(stories))
            stories[number] += rng.choice(("", f"Turn {rng.random()}. " * rng.randrange(1, 6)))
            outcome, _, storage, _ = await made.ask(stories[number])
            outcomes[outcome] += 1
            loaded += storage
            if turn % 8 == 7:
                made.store.evict(rng.randrange(1, 12))
                await made.caught_up()
        assert outcomes.keys() == {"exact"}
        assert loaded > 1000


@pytest.mark.parametrize("kind", KINDS)
async def test_where_the_store_lacks_the_beginning_some_engines_load_what_is_behind(kind: str) -> None:
    async with pool(kind=kind) as made:
        whole = story(1) + story(2)
        await made.ask(story(1))
        before = len(made.store.held)
        await made.ask(whole)
        made.store.evict(before)
        await made.caught_up()
        outcome, predicted, storage, _ = await made.ask(whole)
        assert (outcome, storage > 100) == ("exact", kind == "llmd-files")
        assert predicted - storage > 100, "on the GPU of the first one"


async def test_an_engine_that_does_not_load_from_it_is_promised_nothing() -> None:
    async with pool(loaders=(0,)) as made:
        told = [await made.ask(story(number // 2)) for number in range(4)]
        assert {outcome for outcome, *_ in told} == {"exact"}
        assert (await made.stores())["loaders"] == [made.engines[0].base_url]


@pytest.mark.parametrize("what", ["gap", "restart", "undecodable", "disconnected"])
async def test_a_lost_event_drops_what_is_known_and_the_store_fills_again(what: str) -> None:
    async with pool() as made:
        await made.ask(story(1))
        assert made.feed.stats.chunks > 20
        other = mooncake_payload([mooncake_event("stored", mooncake_key(bytes(32)))])
        if what == "disconnected":
            made.store.close()
            await until(lambda: not made.feed.stats.connected, "known")
            assert any("store pool" in one["seen"] for one in await problems(made.rig))
        else:
            if what == "restart":
                made.store.number = 0
            made.store.send(b"\xc1" if what == "undecodable" else other, skipped=3 if what == "gap" else 0)
            await until(lambda: made.feed.stats.dropped.get(what) == 1, "dropped")
        assert made.feed.stats.chunks == (0 if what in {"disconnected", "undecodable"} else 1)
        assert made.feed.stats.dropped[what] == 1
        if what != "disconnected":
            before = made.feed.stats.chunks
            await made.ask(story(2))
            assert made.feed.stats.chunks > before


async def problems(rig: Rig) -> list[dict[str, Any]]:
    """Problems of the router itself."""
    return list((await rig.ok("GET", "/kvatlas/problems"))["router"])


async def test_seconds_per_token_are_learned_from_receipts_and_count_in_the_cost() -> None:
    async with pool(load_s_per_token=1e-3) as made:
        assert (await made.stores())["load_s_per_token"] is None
        for number in range(14):
            await made.ask(story(number // 2), stream=True)
        found = (await made.stores())["load_s_per_token"]
        assert found == pytest.approx(1e-3, rel=0.2)
        seen = await made.rig.ok("POST", "/kvatlas/explain", {"model": MODEL, "prompt": story(20)})
        assert {one["cost"]["load_s"] for one in seen["engines"]} == {0.0}
        await made.ask(story(20))
        seen = await made.rig.ok("POST", "/kvatlas/explain", {"model": MODEL, "prompt": story(20)})
        loads = [(one["hit_tokens"]["STORAGE"], one["cost"]["load_s"]) for one in seen["engines"]]
        (loaded,) = [(tokens, load_s) for tokens, load_s in loads if tokens]
        assert loaded[1] == pytest.approx(loaded[0] * found)


async def test_unused_events_are_a_problem_with_its_reason() -> None:
    async with pool() as made:
        made.store.send(mooncake_payload([mooncake_event("stored", mooncake_key(bytes(32), "llama"))]))
        await made.caught_up()
        (found,) = [one for one in await problems(made.rig) if one["check"] == "store.unused"]
        assert "keys of llama 1" in found["seen"]
        assert (await made.stores())["unused"] == {"keys of llama": 1}


async def test_stores_are_changed_while_the_router_runs() -> None:
    async with pool() as made:
        router = made.rig.router
        await made.ask(story(1))
        kept, chunks = made.feed, made.feed.stats.chunks
        router.take(msgspec.structs.replace(router.config, stores=router.config.stores))
        assert (made.feed, made.feed.stats.chunks) == (kept, chunks)
        unused = msgspec.structs.replace(POOL, name="next", engines=("http://other:1",))
        router.take(msgspec.structs.replace(router.config, stores=(unused,)))
        assert (await made.stores())["loaders"] == []
        assert "kvatlas-demo" in router.scopes.models()
        assert router.scopes.check_integrity() == []
        router.take(msgspec.structs.replace(router.config, stores=()))
        assert await made.rig.ok("GET", "/kvatlas/stores") == []
