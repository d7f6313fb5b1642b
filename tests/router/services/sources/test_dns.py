"""Engines by DNS against a real server on the loopback interface, with answers of any kind."""

from __future__ import annotations

import asyncio
import gc
import random
import warnings
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import dns.message
import pytest
from dns.rdatatype import SRV, A, RdataType

from kvatlas.router.fleet.engines import DiscoveredEngine, EngineAddress
from kvatlas.router.fleet.settings import DnsSettings, parse_server
from kvatlas.router.services.dns_source import DnsSource, ResolveError, Resolver
from tests.router.services.sources.dns_server import CNAME, DnsServer, a, dns_server, name, srv
from tests.support.seen_sources import Seeing, at_work
from tests.support.waiting import WAIT_S, run

pytestmark = pytest.mark.real  # UDP


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.router.services.dns_source._PAUSE_S_MIN", 0.01)


class SeenUrls(Seeing):
    """Sightings as base URLs, in order."""

    def shown(self, sightings: Sequence[DiscoveredEngine]) -> list[str]:
        return [one.engine.base_url for one in sightings]

    async def sees(self, *urls: str) -> None:
        await super().sees(list(urls))


def seeing(server: DnsServer, *names: str, **changes: Any) -> AbstractAsyncContextManager[SeenUrls]:
    defaults: dict[str, Any] = {
        "names": names,
        "servers": (f"127.0.0.1:{server.port}",),
        "interval_s_max": 0.05,
        "timeout_s": WAIT_S,
    }
    source = DnsSource(DnsSettings(**{**defaults, **changes}), jitter=random.Random(1))
    return at_work(SeenUrls(source))


async def ask(server: DnsServer, name: str, kind: RdataType, **changes: Any) -> tuple[list[str], int] | None:
    """Records as text, and for how long they are good."""
    resolver = Resolver([f"127.0.0.1:{server.port}"], **{"timeout_s": WAIT_S, **changes})
    answer = await resolver.ask(name, kind)
    if answer is None:
        return None
    return [record.to_text() for record in answer], answer.chaining_result.minimum_ttl


async def test_addresses_come_and_go() -> None:
    async with dns_server() as server:
        server.records["vllm.example"] = [a("10.0.0.2"), a("10.0.0.1")]
        async with seeing(server, "vllm.example.:8000") as seen:
            await seen.sees("http://10.0.0.1:8000", "http://10.0.0.2:8000")
            assert seen.source.stats.synced
            server.records["vllm.example"] = [a("10.0.0.3")]
            await seen.sees("http://10.0.0.3:8000")
            assert seen.source.stats.updates == 2


async def test_srv_records_tell_ports_and_the_lowest_priority_counts() -> None:
    async with dns_server() as server:
        server.records["_http._tcp.vllm.example"] = [
            srv(10, 8001, "a.example"),
            srv(10, 8002, "b.example"),
            srv(20, 8003, "c.example"),
        ]
        server.records |= {"a.example": [a("10.0.0.1")], "c.example": [a("10.0.0.3")]}
        server.extra = [("b.example", a("10.0.0.2"))]  # sent along, so it is not asked for
        async with seeing(server, "_http._tcp.vllm.example.", events_port=5557, replay_port=5558) as seen:
            await seen.sees("http://10.0.0.1:8001", "http://10.0.0.2:8002")
            assert seen.latest[0].engine == EngineAddress(
                "http://10.0.0.1:8001", None, "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"
            )
            assert ("b.example", A) not in server.asked
            assert ("c.example", A) not in server.asked


async def test_ipv6_is_asked_for_where_there_is_no_ipv4() -> None:
    async with dns_server() as server:
        server.records["six.example"] = [a("fd00::1")]
        server.records["both.example"] = [a("10.0.0.1"), a("fd00::2")]
        async with seeing(server, "six.example.:80", "both.example.:80") as seen:
            await seen.sees("http://10.0.0.1:80", "http://[fd00::1]:80")


async def test_an_alias_is_followed_with_the_shortest_ttl() -> None:
    async with dns_server() as server:
        server.records["vllm.example"] = [(CNAME, 3, name("real.example"))]
        server.records["real.example"] = [a("10.0.0.1", ttl=600)]
        assert await ask(server, "vllm.example.", A) == (["10.0.0.1"], 3)


@pytest.mark.parametrize("trouble", ["silent", "servfail", "refused"])
async def test_while_it_fails_what_was_known_stays(trouble: str) -> None:
    async with dns_server() as server:
        server.records["vllm.example"] = [a("10.0.0.1")]
        async with seeing(server, "vllm.example.:8000", timeout_s=0.05) as seen:
            await seen.sees("http://10.0.0.1:8000")
            server.silent = trouble == "silent"
            server.code = {"servfail": 2, "refused": 5}.get(trouble, 0)
            await seen.until(lambda: seen.source.stats.errors.get("resolve", 0) >= 3, "failures")
            assert seen.source.stats.failing
            assert "vllm.example" in seen.source.stats.last_error
            assert len(seen.told) == 1
            server.silent, server.code = False, 0
            await seen.until(lambda: not seen.source.stats.failing, "recovered")


@pytest.mark.parametrize("exists", [True, False])
async def test_an_empty_answer_is_believed_after_some_in_a_row(
    exists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.router.services.dns_source.EMPTY_ANSWERS", 4)

    async with dns_server() as server:
        server.records["vllm.example"] = [a("10.0.0.1")]
        async with seeing(server, "vllm.example.:8000") as seen:
            await seen.sees("http://10.0.0.1:8000")
            full = server.records.pop("vllm.example")
            if exists:
                server.records["vllm.example"] = []
            asked = len(server.asked)
            await seen.sees()
            assert server.asked[asked:].count(("vllm.example", A)) >= 4
            server.records["vllm.example"] = full
            await seen.sees("http://10.0.0.1:8000")


async def test_the_ttl_says_when_to_ask_again() -> None:
    async with dns_server() as server:
        server.records["long.example"] = [a("10.0.0.1", ttl=1000)]
        server.records["short.example"] = [a("10.0.0.2", ttl=0)]
        async with seeing(server, "long.example.:80", "short.example.:80", interval_s_max=1000.0) as seen:
            await seen.until(lambda: server.asked.count(("short.example", A)) >= 5, "asked often")
            assert server.asked.count(("long.example", A)) == 1


async def test_a_truncated_answer_is_fetched_over_tcp() -> None:
    async with dns_server() as server:
        server.truncate = True
        server.records["vllm.example"] = [a(f"10.0.{n // 200}.{n % 200 + 1}") for n in range(400)]
        async with seeing(server, "vllm.example.:8000") as seen:
            await seen.until(lambda: bool(seen.told), "told")
            assert len(seen.told[0]) == 400
            assert server.by_tcp >= 1


async def test_answers_to_other_questions_are_dropped() -> None:
    async with dns_server() as server:
        server.records["vllm.example"] = [a("10.0.0.1")]
        server.records["evil.example"] = [a("6.6.6.6")]
        evil, own = (dns.message.make_query(f"{who}.example", A).to_wire() for who in ("evil", "vllm"))
        wrong_name = server.answer(evil, udp=True)
        wrong_number = server.answer(own, udp=True)[2:]
        server.forge = [b"", b"\x00" * 11, wrong_name, b"\xff\xff" + wrong_number[:-4] + b"\x06" * 4]
        async with seeing(server, "vllm.example.:8000") as seen:
            await seen.sees("http://10.0.0.1:8000")


async def test_the_next_server_is_asked_where_one_fails() -> None:
    async with dns_server() as bad, dns_server() as good:
        bad.code = 2
        good.records["vllm.example"] = [a("10.0.0.1")]
        servers = tuple(f"127.0.0.1:{s.port}" for s in (bad, good))
        async with seeing(good, "vllm.example.:80", servers=servers) as seen:
            await seen.sees("http://10.0.0.1:80")
            assert bad.asked


def resolv_conf(path: Path, *lines: str) -> str:
    path.write_text("\n".join(("# made by a kubelet", *lines, "")))
    return str(path)


@pytest.mark.parametrize(
    ("asked", "in_turn"),
    [
        ("vllm", ["vllm.a.example", "vllm.b.example", "vllm"]),
        ("vllm.c", ["vllm.c.a.example", "vllm.c.b.example", "vllm.c"]),
        ("vllm.c.d", ["vllm.c.d", "vllm.c.d.a.example", "vllm.c.d.b.example"]),
        ("vllm.", ["vllm"]),
    ],
)
async def test_short_names_are_completed_as_resolv_conf_says(
    tmp_path: Path, asked: str, in_turn: list[str]
) -> None:
    conf = resolv_conf(
        tmp_path / "resolv.conf", "nameserver 10.96.0.10", "search a.example b.example .", "options ndots:2"
    )

    async with dns_server() as server:
        assert await ask(server, asked, A, resolv_conf=conf) is None
        assert [name for name, _ in server.asked] == in_turn


async def test_the_first_completed_name_with_an_address_counts(tmp_path: Path) -> None:
    """Also behind one that exists without an address, as a wildcard for mail makes it."""
    conf = resolv_conf(tmp_path / "resolv.conf", "nameserver 10.96.0.10", "search a.example b.example")

    async with dns_server() as server:
        server.records |= {"vllm.a.example": [], "vllm.b.example": [a("10.0.0.1")]}
        assert await ask(server, "vllm", A, resolv_conf=conf) == (["10.0.0.1"], 5)
        assert [name for name, _ in server.asked] == ["vllm.a.example", "vllm.b.example"]


async def test_without_servers_those_of_resolv_conf_are_asked_at_every_question(tmp_path: Path) -> None:
    path = tmp_path / "resolv.conf"
    resolver = Resolver([], timeout_s=0.2, resolv_conf=str(path))

    with pytest.raises(ResolveError, match=r"resolv\.conf: cannot open"):
        await resolver.ask("vllm.", A)
    resolv_conf(path, "search x")
    with pytest.raises(ResolveError, match="no nameservers"):
        await resolver.ask("vllm.", A)
    resolv_conf(path, "nameserver 192.0.2.1", "options timeout:60")  # no server there
    with pytest.raises(ResolveError, match=r"vllm\.: .*192\.0\.2\.1"):
        await resolver.ask("vllm.", A)


@pytest.mark.parametrize(
    ("text", "server"),
    [
        ("10.0.0.1", ("10.0.0.1", 53)),
        ("10.0.0.1:5353", ("10.0.0.1", 5353)),
        ("fd00::1", ("fd00::1", 53)),
        ("[fd00::1]:5353", ("fd00::1", 5353)),
    ],
)
def test_servers_as_they_are_written(text: str, server: tuple[str, int]) -> None:
    assert parse_server(text) == server


@pytest.mark.parametrize("bad", ["a..b", "x" * 64 + ".example", ".".join(["abcdefgh"] * 30), "a\udc80."])
async def test_names_that_cannot_be_asked_for(bad: str) -> None:
    with pytest.raises(ResolveError, match=r".+"):
        await Resolver(["127.0.0.1:9"], timeout_s=1).ask(bad, A)


def test_a_query_that_is_cancelled_at_any_step_leaves_no_socket_open() -> None:
    async def cancelled() -> None:
        async with dns_server() as server:
            resolver = Resolver([f"127.0.0.1:{server.port}"], timeout_s=1.0)
            for steps in (*range(12), *range(12), *range(12)):
                query = asyncio.create_task(resolver.ask("vllm.example.", A))
                for _ in range(steps):
                    await asyncio.sleep(0)
                query.cancel()
                await asyncio.gather(query, return_exceptions=True)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(cancelled())
        gc.collect()
    assert not [one for one in said if "UDPTransport" in str(one.message)]


@pytest.mark.parametrize("seed", range(4))
async def test_a_damaged_answer_is_read_or_refused(seed: int) -> None:
    rng = random.Random(seed)

    def damage(whole: bytes) -> bytes:
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        return bytes(damaged[: rng.randint(0, len(damaged))] if rng.random() < 0.5 else damaged)

    async with dns_server() as server:
        server.truncate, server.damage = True, damage
        server.records["x.example"] = [srv(1, 2, "t.example"), srv(3, 4, "a.very.long.name.example")]
        refused = 0
        for _ in range(25):
            try:
                await ask(server, "x.example.", SRV, timeout_s=0.05)
            except ResolveError:
                refused += 1
        assert refused
