"""Stores that engines share, seen by replicas that follow some of the engines each."""

from __future__ import annotations

import asyncio

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.events import BlockStored, encode_tokens, to_block_hash
from kvatlas.router.feeds.base import FeedState
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.index.places import Reach
from kvatlas.router.index.store_parts import Parts
from kvatlas.router.index.stores import StoreChange, StoreContent
from kvatlas.router.replication.descriptions import engine_facts
from kvatlas.router.replication.load_gossip import LoadGossip
from kvatlas.router.replication.lookup_fallback import IndexLookup
from kvatlas.router.replication.registry import EngineFacts
from tests.router.replication.backend import MODEL, make_settings
from tests.router.replication.replicas import Replicas
from tests.support.event_writer import Prompt, Writer, batch, tokens
from tests.support.redis_servers import AnyServer

SCHEME = HashScheme()
WRITER = Writer(SCHEME)
PROMPT = tokens(200)
HASHES = WRITER.hashes(PROMPT)


class Own:
    """A replica that follows one engine, beside others."""

    others_alive = True

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id

    def follows(self, engine_id: str) -> bool:
        return engine_id == self._engine_id

    def holds_exclusively(self, engine_id: str) -> bool:
        return engine_id == self._engine_id


def in_store(*hashes: int | bytes) -> BlockStored:
    none = encode_tokens([])
    return BlockStored(
        list(hashes), None, none, 0, None, "STORAGE", None, group_idx=0, locality="REMOTE", ownership="redis"
    )


def facts_of(fleet: FleetResidency, engine_id: str) -> EngineFacts:
    return engine_facts(fleet.engine(engine_id), fleet.residency(engine_id).query(), FeedState.READY, 0)


async def test_writes_of_one_replicas_engine_count_for_the_engines_of_another(
    plain_server: AnyServer,
) -> None:
    async with Replicas(make_settings(plain_server.url), "one", "two") as replicas:
        fleets = {name: FleetResidency(ModelFacts(), replicas[name].mirror) for name in ("one", "two")}
        for name, engine_id in (("one", "writer"), ("two", "reader"), ("two", "stranger")):
            await replicas[name].take(engine_id)
            fleets[name].apply(engine_id, batch(WRITER.stored(PROMPT, stop=2)))
        fleets["one"].apply("writer", batch(in_store(*HASHES[:8])))
        fleets["two"].apply("reader", batch(in_store(HASHES[11])))
        for name, engine_id in (("one", "writer"), ("two", "reader"), ("two", "stranger")):
            replicas[name].mirror.describe(engine_id, facts_of(fleets[name], engine_id))
        for name in ("one", "two"):
            await replicas[name].mirror.flush()

        models = dict.fromkeys(("writer", "reader", "stranger"), MODEL)
        lookup = IndexLookup(
            lambda: replicas.reader, Own("reader"), LoadGossip("two", lambda now: {}, started=1),
            clock=asyncio.get_running_loop().time,
        )  # fmt: skip
        look = await lookup.look(Prompt(PROMPT), models)
        assert look.problem == ""
        assert (look.hits["writer"].hit_tokens, look.hits["writer"].storage_tokens) == (32, 96)
        assert (look.hits["stranger"].hit_tokens, look.hits["stranger"].storage_tokens) == (32, 0)

        told = look.stores[MODEL]
        own = fleets["two"].predict(Prompt(PROMPT), ["reader", "stranger"], elsewhere=told)
        assert (own["reader"].hit_tokens, own["reader"].storage_tokens) == (32, 96)
        assert (own["stranger"].hit_tokens, own["stranger"].storage_tokens) == (32, 0)
        alone = fleets["two"].predict(Prompt(PROMPT), ["reader"])["reader"]
        assert alone.storage_tokens == 0, "its own replica heard nothing of those blocks"

        fleets["one"].age(0.0)
        fleets["one"].age(1000.0)
        fleets["one"].age(2000.0)
        await replicas["one"].mirror.flush()
        later = await lookup.look(Prompt(PROMPT), models)
        assert (later.hits["writer"].hit_tokens, later.hits["writer"].storage_tokens) == (32, 0)


async def test_each_replica_follows_stores_with_feeds_itself(plain_server: AnyServer) -> None:
    """No shared index has its chunks, but they count for the engines of other replicas too."""
    reach = Reach(alone=True, chunk_tokens=0)
    async with Replicas(make_settings(plain_server.url), "one", "two") as replicas:
        fleets = {name: FleetResidency(ModelFacts(), replicas[name].mirror) for name in ("one", "two")}
        await replicas["one"].take("loader")
        fleets["one"].apply("loader", batch(WRITER.stored(PROMPT, stop=2)))
        fleets["one"].engine("loader").load_from(frozenset({"pool"}))
        for name in ("one", "two"):
            content = StoreContent("pool", reach, Parts())
            content.attach(fleets[name].index)
            held = HASHES[:8] if name == "two" else HASHES[:4]
            for one in held:
                content.apply(StoreChange(True, 0, to_block_hash(one)))
        replicas["one"].mirror.describe("loader", facts_of(fleets["one"], "loader"))
        await replicas["one"].mirror.flush()
        assert fleets["one"].predict(Prompt(PROMPT), ["loader"])["loader"].storage_tokens == 32

        lookup = IndexLookup(
            lambda: replicas.reader, Own("none"), LoadGossip("two", lambda now: {}, started=1),
            clock=asyncio.get_running_loop().time,
        )  # fmt: skip
        lookup.own_rows = lambda model, hashes: fleets["two"].index.lookup(hashes)
        look = await lookup.look(Prompt(PROMPT), {"loader": MODEL})
        assert (look.hits["loader"].hit_tokens, look.hits["loader"].storage_tokens) == (32, 96)
