"""Limits of tenants that hold for several replicas together, through a real server."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.admission.gate import KeyGate
from kvatlas.router.admission.key_file import KeyFile, KeySettings, digest_of
from kvatlas.router.admission.others_use import SILENCE_S, TENANTS_MAX, Uses
from kvatlas.router.admission.tenants import TenantRequest
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.replication.limits import GONE_S, OtherReplicas, SharedLimits, UseMessage
from kvatlas.router.replication.messages import VERSION
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.settings import IndexSettings
from tests.router.replication.backend import make_settings
from tests.support.redis_servers import AnyServer
from tests.support.waiting import WAIT_S, until
from tests.support.whole_router import MODEL, Rig, configure, routing, running

FIELDS = [(b"authorization", b"Bearer key")]
KEY = {"authorization": "Bearer key"}
PER_MINUTE = 20


def key_file(folder: Path, rules: str) -> Path:
    path = folder / "keys.toml"
    path.write_text(f'[tenants.t]\n{rules}\n[[keys]]\ntenant = "t"\nsha256 = "{digest_of("key")}"\n')
    return path


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Replica:
    """One gate, and what it hears of others, without a server between."""

    def __init__(self, path: Path, name: str, clock: Clock, group: str = "", life: int = 1) -> None:
        self.name, self.life, self.group, self.beat = name, life, group, 0
        self.gate = KeyGate(KeyFile(path, clock=clock), clock=clock)
        self.others = OtherReplicas(name, self.gate, group)
        self.clock = clock

    def says(self) -> bytes:
        self.beat += 1
        return msgspec.msgpack.encode(UseMessage(self.group, self.uses()))

    def uses(self) -> Uses:
        return Uses(self.life, self.beat, True, self.gate.uses())

    def enter(self) -> TenantRequest:
        return self.gate.enter(self.gate.tenant_of(FIELDS))

    def lets_in(self) -> bool:
        try:
            self.enter().leave(None)
        except ApiError:
            return False
        return True

    @property
    def left(self) -> int:
        return int(dict(self.gate.account("t").headers(self.clock()))[b"x-ratelimit-remaining-requests"])


def tell(*replicas: Replica) -> None:
    """Everybody writes, then everybody reads."""
    fields = {one.name: one.says() for one in replicas}
    for one in replicas:
        one.others.receive(fields, one.clock())


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return key_file(tmp_path_factory.mktemp("rules"), f"requests_per_minute = {PER_MINUTE}")


@given(steps=st.lists(st.sampled_from(["a", "b", "c", "tell"]), max_size=80))
def test_together_they_let_in_what_the_limit_says_and_what_was_not_told_yet(
    rules: Path, steps: list[str]
) -> None:
    clock = Clock()
    replicas = {name: Replica(rules, name, clock) for name in "abc"}
    for one in replicas.values():
        one.enter().leave(None)
    tell(*replicas.values())
    tell(*replicas.values())
    untold, let_in = 0, 0
    for step in steps:
        if step == "tell":
            tell(*replicas.values())
            untold = 0
            assert {one.left for one in replicas.values()} == {max(0, PER_MINUTE - 1 - let_in)}
        elif replicas[step].lets_in():
            let_in, untold = let_in + 1, untold + 1
            assert let_in <= PER_MINUTE - 1 + untold


def test_a_newcomer_finds_the_limit_as_far_used_as_the_others_do(rules: Path) -> None:
    clock = Clock()
    one = Replica(rules, "one", clock)
    while one.lets_in():
        pass
    late = Replica(rules, "late", clock)
    tell(one, late)
    assert not late.lets_in()
    clock.now += 60 / PER_MINUTE
    assert late.lets_in()


def test_use_during_a_silence_is_not_charged_in_a_lump(rules: Path) -> None:
    clock = Clock()
    one, two = Replica(rules, "one", clock), Replica(rules, "two", clock)
    assert one.lets_in()
    tell(one, two)
    for _ in range(10):  # ten minutes apart, each by its own counters
        while one.lets_in():
            pass
        clock.now += 60
    assert two.left == PER_MINUTE
    assert one.lets_in()
    tell(one, two)
    assert two.left == PER_MINUTE - 1


def test_places_count_together_and_end_with_who_held_them(tmp_path: Path) -> None:
    path = key_file(tmp_path, "concurrent_requests = 2")
    clock = Clock()
    one, two = Replica(path, "one", clock), Replica(path, "two", clock)
    held = [one.enter(), one.enter()]
    tell(one, two)
    assert not two.lets_in()
    held.pop().leave(None)
    tell(one, two)
    assert two.lets_in()
    other = two.enter()
    assert not two.lets_in()
    clock.now += SILENCE_S + 1  # nothing is heard of ``one``
    two.others.age(clock.now)
    assert two.lets_in()
    again = Replica(path, "one", clock, life=2)
    tell(again, two)
    assert two.lets_in()
    other.leave(None)
    held.pop().leave(None)


def test_workers_of_one_parent_do_not_count_twice(rules: Path) -> None:
    clock = Clock()
    one, two = (Replica(rules, name, clock, group="group") for name in ("one", "two"))
    assert one.lets_in()
    tell(one, two)
    assert two.left == PER_MINUTE


def test_unreadable_messages_are_counted_and_lost_replicas_named(rules: Path) -> None:
    clock = Clock()
    one = Replica(rules, "one", clock)
    fields = {"old": Replica(rules, "old", clock).says(), "bad": b"\xff"}
    assert one.others.receive(fields, clock.now) == []
    clock.now += GONE_S + 1
    assert one.others.receive(fields, clock.now) == ["old", "bad"]
    assert one.others.stats.malformed == 2


FORGED: list[tuple[object, str]] = [
    ([1, 0, 0, 0, 0, -1e18, 0.0], "malformed"),
    ([1, 0, 0, 0, 0, -math.inf, 0.0], "malformed"),
    ([1, 0, 0, 0, 0, math.inf, 0.0], "malformed"),
    ([1, 0, 0, 0, 0, math.nan, 0.0], "any"),
    ([1, 0, 0, 0, 0, 2**63 - 1, 0.0], "malformed"),
    ([1, 0, 0, 0, 0, 1e12, 0.0], "refused"),
    ([2**63 - 1, 0, 0, 0, 0, 0.0, 0.0], "malformed"),
    ([-100, 0, 0, 0, 0, 0.0, 0.0], "malformed"),
    ([1, 50, 0, 0, 0, 0.0, 0.0], "refused"),
    ([1, 0, 0, 0, -5, 0.0, 0.0], "malformed"),
    ([1, 0, 0, 0, 2**62, 0.0, 0.0], "malformed"),
    ([1.5, 0, 0, 0, 0, 0.0, 0.0], "malformed"),
    ("1", "malformed"),
    ({}, "malformed"),
]


@pytest.mark.parametrize(("use", "counted"), FORGED, ids=lambda one: str(one)[:40])
@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_foreign_messages_are_refused_and_counted(
    rules: Path, use: object, counted: str, known: bool
) -> None:
    clock = Clock()
    one, real = Replica(rules, "one", clock), Replica(rules, "forged", clock)
    if known:
        tell(real, one)
    forged = msgspec.msgpack.encode([VERSION, "", [real.life, real.beat + 1, True, {"t": use}]])
    one.others.receive({"forged": forged}, clock.now)
    stats = one.others.stats
    assert stats.malformed + stats.refused == 1
    assert counted == "any" or getattr(stats, counted) == 1
    assert one.left == PER_MINUTE
    assert one.lets_in()
    clock.now += SILENCE_S + 1
    one.others.receive({}, clock.now)
    assert one.lets_in()


def test_a_forged_total_makes_a_tenant_wait_for_one_period_at_most(rules: Path) -> None:
    clock = Clock()
    one, real = Replica(rules, "one", clock), Replica(rules, "real", clock)
    tell(real, one)
    for forged in (10**6, 10**9, 2**53):
        field = [VERSION, "", [real.life, real.beat + forged, True, {"t": [forged, 0, 0, 0, 9, 20.0, 0.0]}]]
        one.others.receive({"real": msgspec.msgpack.encode(field)}, clock.now)
    assert not one.lets_in()
    clock.now += 60 + 60 / PER_MINUTE + 0.01
    tell(real, one)  # what it really says counts again
    assert one.lets_in()


def test_a_forged_refund_fills_no_bucket(rules: Path) -> None:
    clock = Clock()
    one, real = Replica(rules, "one", clock), Replica(rules, "real", clock)
    tell(real, one)
    while one.lets_in():
        pass
    for beat, forged in ((1, [5, 0]), (2, [10**6, 10**6]), (3, [2 * 10**6, 2 * 10**6])):
        field = [VERSION, "", [real.life, real.beat + beat, True, {"t": [*forged, 0, 0, 0, 0.0, 0.0]}]]
        one.others.receive({"real": msgspec.msgpack.encode(field)}, clock.now)
    assert not one.lets_in()


def test_a_replica_whose_field_is_gone_has_no_places(tmp_path: Path) -> None:
    clock = Clock()
    path = key_file(tmp_path, "concurrent_requests = 1")
    one, two = Replica(path, "one", clock), Replica(path, "two", clock)
    held = one.enter()
    tell(one, two)
    assert not two.lets_in()
    two.others.receive({"two": two.says()}, clock.now)
    assert two.lets_in()
    held.leave(None)


@given(
    field=st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.sampled_from("tx"), inner, max_size=2),
        max_leaves=20,
    ).map(msgspec.msgpack.encode)
)
def test_whatever_a_field_holds_requests_go_on(rules: Path, field: bytes) -> None:
    clock = Clock()
    one = Replica(rules, "one", clock)
    one.others.receive({"odd": field}, clock.now)
    assert one.lets_in()
    assert 0 <= one.left < PER_MINUTE


# -- through a server ------------------------------------------------------------------------------------


@asynccontextmanager
async def connected(server: AnyServer) -> AsyncIterator[Client]:
    client = Client(make_settings(server.url))
    try:
        assert await client.start(WAIT_S)
        yield client
    finally:
        await client.close()


async def test_the_server_goes_away_and_comes_back(server: AnyServer, rules: Path) -> None:
    clock = Clock()
    one, two = (Replica(rules, name, clock) for name in ("one", "two"))
    async with connected(server) as client, connected(server) as another:
        shared = [
            SharedLimits(where, b"limits", who.name, 1, who.gate, clock=clock)
            for where, who in ((client, one), (another, two))
        ]

        async def left(count: int) -> bool:
            for each in shared:
                await each.exchange()
            return one.left == two.left == count

        assert one.lets_in()
        for _ in range(2):  # until each has heard the other
            assert await left(PER_MINUTE - 1)
        server.kill()
        await shared[1].exchange()
        assert sum(shared[1].stats.failures.values()) == 1
        assert one.lets_in()  # each by its own counters
        assert two.lets_in()
        server.start()
        await until(partial(left, PER_MINUTE - 3), "both know again")
        await shared[0].withdraw()
        assert server.command("HKEYS", "limits") == [b"two"]


async def test_too_many_tenants_are_published_in_part(server: AnyServer, tmp_path: Path) -> None:
    count = TENANTS_MAX + 3
    path = tmp_path / "keys.toml"
    path.write_text("".join(f"[tenants.t{n}]\nrequests_per_minute = 9\n" for n in range(count)))
    clock = Clock()
    gate = KeyGate(KeyFile(path, clock=clock), clock=clock)
    for number in range(count):
        gate.account(f"t{number}").enter(clock())
    async with connected(server) as client:
        shared = SharedLimits(client, b"limits", "one", 1, gate, clock=clock)
        await shared.exchange()
    assert (shared.stats.exchanges, shared.stats.omitted) == (1, 3)


@asynccontextmanager
async def two_routers(server: AnyServer, path: Path) -> AsyncIterator[list[Rig]]:
    async with AsyncExitStack() as stack:
        engines = await stack.enter_async_context(running({"decode_s_per_token": 0.05}))
        rigs = []
        for name in ("r0", "r1"):
            index = IndexSettings(url=server.url, replica=name, lookup_timeout_s=5.0)
            config = configure(*engines, keys=KeySettings(file=str(path)), index=index)
            rigs.append(await stack.enter_async_context(routing(config)))
        yield rigs


async def test_two_routers_give_one_limit(server: AnyServer, tmp_path: Path) -> None:
    path = key_file(tmp_path, "concurrent_requests = 1")

    async with two_routers(server, path) as (one, other):

        async def lets_in() -> bool:
            body = {"model": MODEL, "prompt": "hello", "max_tokens": 1}
            async with other.session.post(f"{other.url}/v1/completions", json=body, headers=KEY) as answer:
                return answer.status == 200

        async def refuses() -> bool:
            return not await lets_in()

        held = {"model": MODEL, "prompt": "hello", "max_tokens": 2000, "stream": True}
        async with one.session.post(f"{one.url}/v1/completions", json=held, headers=KEY) as answer:
            assert answer.status == 200
            await until(refuses, "the other router has heard")
        await until(lets_in, "and hears that it is over")
        page = (await other.ask("GET", "/metrics"))[1]
        assert "kvatlas_limits_exchanges_total" in page
