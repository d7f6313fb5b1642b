"""Replicas that share load and prompts in flight only (``index.share = "load"``): each has its own index."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvatlas.router.replication.leases import parse_leases
from kvatlas.router.replication.service import SharedState
from tests.router.replication.test_recent_work import replicas
from tests.support.redis_servers import AnyServer, Cluster
from tests.support.waiting import until
from tests.support.whole_router import MODEL, Rig

LAYOUTS = ("full", "gemma3-like", "gptoss-like")
LONG = "The quick router reads a long story about a small engine. " * 30


def hit(answer: Any) -> int:
    return int(answer.headers["x-kvatlas-hit-tokens"])


def index_of(rig: Rig) -> SharedState:
    index = rig.router.peers.shared
    assert index is not None
    return index


async def both_know(*rigs: Rig) -> None:
    await until(
        lambda: all(index_of(rig).lease_manager.others_alive for rig in rigs), "the other replica is seen"
    )


async def heard(rig: Rig, text: str) -> None:
    """The router knows by its own feeds, which may be behind another replica's, who holds this prompt."""
    body = {"model": MODEL, "max_tokens": 3, "messages": [{"role": "user", "content": text}]}

    async def known() -> bool:
        told = await rig.ok("POST", "/kvatlas/explain", body)
        return any(engine["hit_tokens"]["GPU"] for engine in told["engines"])

    await until(known, "the events have come")


@pytest.mark.parametrize("groups", LAYOUTS)
async def test_each_replica_predicts_all_engines_by_its_own_index(server: AnyServer, groups: str) -> None:
    async with replicas(server, *[{"groups": groups}] * 3, share="load") as (one, other):
        await both_know(one, other)
        for n in range(4):
            first = await one.chat(f"{n} {LONG}")
            await heard(other, f"{n} {LONG}")
            again = await other.chat(f"{n} {LONG}")
            assert again.headers["x-kvatlas-engine"] == first.headers["x-kvatlas-engine"]
            cached = again.parse().usage.prompt_tokens_details.cached_tokens
            assert hit(again) == cached > 0
        names = {key.rpartition(b":")[2] for key in server.all_keys()}
        assert names <= {b"load", b"flights", b"replicas", b"leases", b"schema"}, "no block, no registry"
        for rig in (one, other):
            page = await rig.page()
            assert "kvatlas_mirror" not in page
            assert "kvatlas_lease_replicas 2.0" in page


@pytest.mark.parametrize("events", [True, False], ids=["events", "silent"])
async def test_a_prompt_in_flight_at_one_replica_attracts_the_same_prompt_at_the_other(
    server: AnyServer, *, events: bool
) -> None:
    slow = {"prefill_s_per_token": 1e-3, "publish_events": events}
    async with replicas(server, slow, slow, slow, share="load") as (one, other):
        await both_know(one, other)
        first = asyncio.create_task(one.chat(LONG))
        inflight = index_of(other).inflight.gossip_stats
        await until(lambda: inflight.current, "the prompt is known at the other replica")
        assert not first.done()
        second = await other.chat(LONG)
        assert second.headers["x-kvatlas-engine"] == (await first).headers["x-kvatlas-engine"]
        await one.chat(f"Another. {LONG}")
        await until(lambda: inflight.current == 0, "the end of both as well")
        # By its events, or without them by what the other replica told.
        if events:
            await heard(other, f"Another. {LONG}")
        assert hit(await other.chat(f"Another. {LONG}")) > 0


@pytest.mark.parametrize(
    "silent", ["killed", "frozen", pytest.param("killed", marks=pytest.mark.real, id="killed-process")]
)
async def test_without_redis_decisions_go_on_by_the_own_index(server: AnyServer, silent: str) -> None:
    async with replicas(server, {}, {}, share="load") as (one, other):
        await both_know(one, other)
        first = await one.chat(LONG)
        server.kill() if silent == "killed" else server.freeze()
        index = index_of(other)
        await until(lambda: index.peers.load is None, "others' load counts as unknown")
        await heard(other, LONG)
        again = await other.chat(LONG)
        assert again.headers["x-kvatlas-engine"] == first.headers["x-kvatlas-engine"]
        assert hit(again) == again.parse().usage.prompt_tokens_details.cached_tokens > 0
        assert "without the shared index" in str(other.router.readiness())
        assert other.router.readiness().ready
        assert index.lookup.stats.fallbacks
        server.start() if silent == "killed" else server.thaw()
        await until(lambda: index.peers.load is not None and not index.problem, "it joins again")
        await both_know(one, other)
        received = index_of(other).inflight.gossip_stats.received

        async def told() -> bool:
            await one.chat(LONG)
            return index_of(other).inflight.gossip_stats.received > received

        await until(told, "prompts in flight are exchanged again")


async def test_one_lease_says_who_acts_for_all_and_alone_nothing_is_sent(server: AnyServer) -> None:
    async with replicas(server, {}, share="load") as (one, other):
        await both_know(one, other)
        rigs = (one, other)
        await until(lambda: sum(rig.router.leads_fleet for rig in rigs) == 1, "one leads")
        (leases,) = [key for key in server.all_keys() if key.endswith(b":leases")]
        flat = server.command("HGETALL", leases)
        held = parse_leases(dict(zip(flat[::2], flat[1::2], strict=True)), server.command("TIME"))
        assert set(held) == {"fleet"}
        other.router.retire()
        index = index_of(one)
        await until(lambda: one.router.leads_fleet and not index.lease_manager.others_alive, "alone")
        await one.chat(LONG)
        assert index.inflight.gossip_stats.sent == 0


@pytest.mark.real  # a Cluster
async def test_in_a_cluster_as_well(cluster: Cluster) -> None:
    async with replicas(cluster, {}, {}, share="load") as (one, other):
        await both_know(one, other)
        await until(lambda: sum(rig.router.leads_fleet for rig in (one, other)) == 1, "one leads")
        first = await one.chat(LONG)
        await heard(other, LONG)
        again = await other.chat(LONG)
        assert again.headers["x-kvatlas-engine"] == first.headers["x-kvatlas-engine"]
        await until(lambda: index_of(other).inflight.gossip_stats.received, "prompts are exchanged")
        # No command is refused, as across slots; a busy machine may answer late.
        assert not {"refused", "fault"} & index_of(other).lookup.stats.fallbacks.keys()
