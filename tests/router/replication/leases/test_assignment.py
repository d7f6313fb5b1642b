"""Division of feeds: whatever replicas come, go and want, every engine is followed and the load is even."""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import AsyncMock

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.replication.assignment import Member, plan_assignment
from kvatlas.router.replication.leases import Held, LeaseManager, ModelLeases
from kvatlas.router.replication.members import MemberRecord, Membership
from tests.support.examples import examples

ENGINES = [f"http://e{number}" for number in range(9)]
REPLICAS = [f"r{number}" for number in range(5)]
PATIENCE_S = 3.0


class World:
    """Leases and replicas, a tick a second; all decide from the same picture, a lease goes to the first."""

    def __init__(self, wants: dict[str, set[str]]) -> None:
        self.wants = wants
        self.holder: dict[str, str | None] = dict.fromkeys({e for w in wants.values() for e in w})
        self.free_s = dict.fromkeys(self.holder, 0.0)
        self.moves = 0

    def tick(self) -> None:
        picture = dict(self.holder)
        members = {r: Member(w, count(self, r)) for r, w in self.wants.items()}
        for me, wanted in self.wants.items():
            seen = {engine: picture[engine] for engine in wanted}
            plan = plan_assignment(me, seen, members, free_s=self.free_s, patience_s=PATIENCE_S)
            for engine in plan.acquire:
                assert seen[engine] is None
                if self.holder[engine] is None:
                    self.holder[engine] = me
                    self.moves += 1
            if plan.release is not None:
                assert seen[plan.release] == me
                self.holder[plan.release] = None
                self.moves += 1
        for engine, holder in self.holder.items():
            self.free_s[engine] = self.free_s[engine] + 1 if holder is None else 0.0

    def settle(self) -> None:
        for _ in range(60):
            self.tick()

    def die(self, replica: str) -> None:
        for engine, holder in self.holder.items():
            if holder == replica:
                self.holder[engine] = None
        del self.wants[replica]


def count(world: World, replica: str) -> int:
    return sum(holder == replica for holder in world.holder.values())


@given(st.integers(1, 5), st.integers(1, 9))
@settings(max_examples=examples(60))
def test_feeds_come_out_even_and_then_stay(replicas: int, engines: int) -> None:
    world = World({r: set(ENGINES[:engines]) for r in REPLICAS[:replicas]})
    world.settle()
    assert None not in world.holder.values()
    assert max(count(world, r) for r in world.wants) <= -(-engines // replicas)
    moves = world.moves
    world.settle()
    assert world.moves == moves


def test_a_replica_that_joins_gets_its_share_one_at_a_time() -> None:
    world = World({"r0": set(ENGINES[:8])})
    world.settle()
    world.wants["r1"] = set(ENGINES[:8])
    world.tick()
    assert list(world.holder.values()).count(None) <= 1
    world.settle()
    assert (count(world, "r0"), count(world, "r1")) == (4, 4)
    assert world.moves == 8 + 2 * 4


def test_the_engines_of_a_dead_replica_are_taken_by_the_others() -> None:
    world = World({r: set(ENGINES) for r in REPLICAS[:3]})
    world.settle()
    world.die("r1")
    world.settle()
    assert None not in world.holder.values()
    assert sorted(count(world, r) for r in world.wants) == [4, 5]


@given(st.lists(st.sets(st.sampled_from(ENGINES), min_size=1), min_size=1, max_size=4))
@settings(max_examples=examples(80))
def test_every_engine_that_somebody_wants_is_followed_whatever_the_others_want(wants: list[set[str]]) -> None:
    world = World(dict(zip(REPLICAS, wants, strict=False)))
    world.settle()
    assert None not in world.holder.values()
    assert all(
        holder is not None and engine in world.wants[holder] for engine, holder in world.holder.items()
    )
    moves = world.moves
    world.settle()
    assert world.moves == moves  # nothing goes round in circles


def test_a_lease_is_exclusive_until_it_may_have_expired() -> None:
    now = [10.0]
    leases = LeaseManager(
        "r0",
        lambda model: cast("ModelLeases", None),
        on_acquired=AsyncMock(),
        on_ended=lambda model, engine: None,
        lease_s=3.0,
        renew_s=1.0,
        clock=lambda: now[0],
    )
    assert not leases.holds_exclusively("e")
    leases.held["e"] = Held("m", 1, until_s=13.0)
    assert leases.holds_exclusively("e")
    now[0] = 13.0
    assert leases.follows("e"), "its feed runs on until the server says that the lease is lost"
    assert not leases.holds_exclusively("e"), "another replica may follow it from now on"


async def test_replicas_that_fall_silent_or_cannot_be_read_do_not_count_and_are_deleted() -> None:
    now, fields = 100.0, {b"nonsense": b"?", b"other": msgspec.msgpack.encode(MemberRecord(1, 1, 2, []))}

    async def command(name: str, key: bytes, *args: Any) -> Any:
        assert key == b"replicas"
        match name:
            case "HSET":
                fields[args[0].encode()] = args[1]
            case "HDEL":
                for field in args:
                    del fields[field.encode()]
        return dict(fields)

    me = Membership(cast("Any", command), b"replicas", "me", started=1, lease_s=3.0, clock=lambda: now)
    for after_s, live, kept in (
        (0.0, {"me", "other"}, {b"me", b"other"}),
        (3.0, {"me", "other"}, {b"me", b"other"}),
        (3.1, {"me"}, {b"me", b"other"}),
        (30.0, {"me"}, {b"me", b"other"}),
        (30.1, {"me"}, {b"me"}),
    ):
        now = 100.0 + after_s
        members = await me.report([EngineAddress("http://e")], 1)
        assert (set(members), fields.keys()) == (live, kept), after_s
        assert members["me"] == Member(frozenset({"http://e"}), 1)
    await me.leave()
    assert fields == {}
