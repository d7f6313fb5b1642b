"""Engines whose hashes cannot be computed, seen by replicas that do not follow them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.router.feeds.base import FeedState
from kvatlas.router.feeds.frames import parse_live
from kvatlas.router.index.learn import hash_scheme as detect
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.index.query_plan import EngineQuery
from kvatlas.router.replication.descriptions import engine_facts
from kvatlas.router.replication.load_gossip import LoadGossip
from kvatlas.router.replication.lookup_fallback import IndexLookup
from tests.router.index.learn.test_foreign import conversations
from tests.router.replication.backend import MODEL, make_settings
from tests.router.replication.replicas import Replicas
from tests.support.event_writer import Prompt, Writer, batch, removed, tokens
from tests.support.foreign_publishers import MAKERS, ForeignEngine, Maker
from tests.support.redis_servers import AnyServer


class Stranger:
    """A replica that follows nothing."""

    others_alive = True

    def follows(self, engine_id: str) -> bool:
        return False

    holds_exclusively = follows


class Pair:
    """A replica that follows engine ``e``, and what another one finds out about it."""

    def __init__(self, replicas: Replicas) -> None:
        self.mirror = replicas["one"].mirror
        self.fleet = FleetResidency(ModelFacts(), self.mirror)
        gossip = LoadGossip("two", lambda now: {}, started=1)
        clock = asyncio.get_running_loop().time
        self._lookup = IndexLookup(lambda: replicas.reader, Stranger(), gossip, clock=clock)

    async def write(self) -> None:
        engine, query = self.fleet.engine("e"), self.fleet.residency("e").query()
        learned = query.learned if isinstance(query, EngineQuery) else None
        self.mirror.describe("e", engine_facts(engine, query, FeedState.READY, 0), learned)
        await self.mirror.flush()

    async def hit(self, prompt: list[int]) -> tuple[str, int]:
        """Mode and hit, as the other replica predicts."""
        await self.write()
        found = await self._lookup.look(Prompt(prompt), {"e": MODEL})
        assert found.problem == ""
        return found.hits["e"].mode, found.hits["e"].hit_tokens


@asynccontextmanager
async def pair(server: AnyServer) -> AsyncIterator[Pair]:
    async with Replicas(make_settings(server.url), "one", "two") as replicas:
        await replicas["one"].take("e")
        yield Pair(replicas)


def apply(fleet: FleetResidency, message: list[bytes]) -> None:
    decoded = parse_live(message).batch
    assert decoded is not None
    fleet.apply("e", decoded)


@pytest.mark.parametrize("maker", MAKERS[:3], ids=lambda maker: maker.name)
async def test_other_replicas_know_every_hit_too(maker: Maker, plain_server: AnyServer) -> None:
    async with pair(plain_server) as both:
        engine, hits = ForeignEngine(maker, blocks=100), 0
        for number, prompt in enumerate(conversations(5, 25)):
            if number:
                assert await both.hit(prompt) == ("learned", engine.hit(prompt))
                hits += engine.hit(prompt) > 0
            apply(both.fleet, engine.run(prompt))
        assert hits > 8
        both.fleet.forget("e")
        assert (await both.hit(prompt))[1] == 0, "the engine restarted"
        apply(both.fleet, ForeignEngine(maker).run(prompt))
        assert await both.hit(prompt) == ("learned", (len(prompt) - 1) // maker.block_size * maker.block_size)


async def test_a_prefix_under_two_hashes_is_taken_back(plain_server: AnyServer) -> None:
    async with pair(plain_server) as both:
        engine, prompt = ForeignEngine(MAKERS[0]), tokens(200)
        apply(both.fleet, engine.run(prompt, b"one"))
        assert await both.hit(prompt) == ("learned", 192)
        apply(both.fleet, engine.run(prompt, b"two"))
        assert await both.hit(prompt) == ("learned", 0)


async def test_when_the_scheme_is_found_blocks_are_written_under_their_hashes(
    plain_server: AnyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detect, "SEEDS_MAX", 4)
    async with pair(plain_server) as both:
        writer, prompt = Writer(HashScheme(seed="3")), tokens(200)
        both.fleet.apply("e", batch(writer.stored(prompt)))
        assert await both.hit(prompt) == ("learned", 192)
        both.fleet.engine("e").finish_detection()
        assert await both.hit(prompt) == ("native", 192)
        both.fleet.apply("e", batch(removed(writer.hashes(prompt)[5])))
        assert await both.hit(prompt) == ("native", 80)
