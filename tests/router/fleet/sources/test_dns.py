"""Engines by DNS against a real server on the loopback interface, and its messages against any bytes."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.identity import Engine
from router.fleet.settings import DnsSettings
from router.fleet.sources.base import Sighting
from router.fleet.sources.dns.message import AAAA, SRV, A, BadMessageError, Service, parse, question
from router.fleet.sources.dns.resolver import ResolveError, Resolver, Where, parse_server, read_resolv_conf
from router.fleet.sources.dns.source import DnsSource
from tests.router.fleet.sources.dns_server import CNAME, DnsServer, a, dns_server, name, srv


class Seeing:
    def __init__(self, source: DnsSource) -> None:
        self.source = source
        self.told: list[list[str]] = []
        self.latest: Sequence[Sighting] = ()

    def tell(self, sightings: Sequence[Sighting]) -> None:
        self.latest = sightings
        self.told.append([one.engine.base_url for one in sightings])

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end, f"never happened: {what}; {self.told} {self.source.stats}"
            await asyncio.sleep(0.003)

    async def sees(self, *urls: str) -> None:
        await self.until(lambda: bool(self.told) and self.told[-1] == list(urls), f"{urls}")


@asynccontextmanager
async def seeing(server: DnsServer, *names: str, **changes: Any) -> AsyncIterator[Seeing]:
    defaults: dict[str, Any] = {
        "names": names,
        "servers": (f"127.0.0.1:{server.port}",),
        "interval_s_min": 0.01,
        "interval_s_max": 0.05,
        "timeout_s": 1.0,
    }
    source = DnsSource(DnsSettings(**{**defaults, **changes}), jitter=random.Random(1))
    seen = Seeing(source)
    task = asyncio.create_task(source.run(seen.tell))
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()


def test_addresses_come_and_go() -> None:
    async def main() -> None:
        async with dns_server() as server:
            server.records["vllm.example"] = [a("10.0.0.2"), a("10.0.0.1")]
            async with seeing(server, "vllm.example.:8000") as seen:
                await seen.sees("http://10.0.0.1:8000", "http://10.0.0.2:8000")
                assert seen.source.stats.synced
                server.records["vllm.example"] = [a("10.0.0.3")]
                await seen.sees("http://10.0.0.3:8000")
                assert seen.source.stats.updates == 2

    asyncio.run(main())


def test_srv_records_tell_ports_and_the_lowest_priority_counts() -> None:
    async def main() -> None:
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
                assert seen.latest[0].engine == Engine(
                    "http://10.0.0.1:8001", None, "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"
                )
                assert ("b.example", A) not in server.asked
                assert ("c.example", A) not in server.asked

    asyncio.run(main())


def test_ipv6_is_asked_for_where_there_is_no_ipv4() -> None:
    async def main() -> None:
        async with dns_server() as server:
            server.records["six.example"] = [a("fd00::1")]
            server.records["both.example"] = [a("10.0.0.1"), a("fd00::2")]
            async with seeing(server, "six.example.:80", "both.example.:80") as seen:
                await seen.sees("http://10.0.0.1:80", "http://[fd00::1]:80")

    asyncio.run(main())


def test_an_alias_is_followed_with_the_shortest_ttl() -> None:
    async def main() -> None:
        async with dns_server() as server:
            server.records["vllm.example"] = [(CNAME, 3, name("real.example")), a("10.0.0.1", ttl=600)]
            resolver = Resolver(lambda: Where((("127.0.0.1", server.port),)), timeout_s=1)
            answer = await resolver.ask("vllm.example.", A)
            assert [record.value for record in answer.records] == ["10.0.0.1"]
            assert answer.ttl_s == 3

    asyncio.run(main())


@pytest.mark.parametrize("trouble", ["silent", "servfail", "refused"])
def test_while_it_fails_what_was_known_stays(trouble: str) -> None:
    async def main() -> None:
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

    asyncio.run(main())


@pytest.mark.parametrize("exists", [True, False])
def test_an_empty_answer_is_believed_after_some_in_a_row(exists: bool) -> None:
    async def main() -> None:
        async with dns_server() as server:
            server.records["vllm.example"] = [a("10.0.0.1")]
            async with seeing(server, "vllm.example.:8000", empty_answers=4) as seen:
                await seen.sees("http://10.0.0.1:8000")
                full = server.records.pop("vllm.example")
                if exists:
                    server.records["vllm.example"] = []
                asked = len(server.asked)
                await seen.sees()
                assert server.asked[asked:].count(("vllm.example", A)) >= 4
                server.records["vllm.example"] = full
                await seen.sees("http://10.0.0.1:8000")

    asyncio.run(main())


def test_the_ttl_says_when_to_ask_again() -> None:
    async def main() -> None:
        async with dns_server() as server:
            server.records["long.example"] = [a("10.0.0.1", ttl=1000)]
            server.records["short.example"] = [a("10.0.0.2", ttl=0)]
            async with seeing(server, "long.example.:80", "short.example.:80", interval_s_max=1000.0) as seen:
                await seen.until(lambda: server.asked.count(("short.example", A)) >= 5, "asked often")
                assert server.asked.count(("long.example", A)) == 1

    asyncio.run(main())


def test_a_truncated_answer_is_fetched_over_tcp() -> None:
    async def main() -> None:
        async with dns_server() as server:
            server.truncate = True
            server.records["vllm.example"] = [a(f"10.0.{n // 200}.{n % 200 + 1}") for n in range(400)]
            async with seeing(server, "vllm.example.:8000") as seen:
                await seen.until(lambda: bool(seen.told), "told")
                assert len(seen.told[0]) == 400
                assert server.by_tcp >= 1

    asyncio.run(main())


def test_answers_to_other_questions_are_dropped() -> None:
    async def main() -> None:
        async with dns_server() as server:
            server.records["vllm.example"] = [a("10.0.0.1")]
            server.records["evil.example"] = [a("6.6.6.6")]
            wrong_name = server.answer(question(1, "evil.example", A), udp=True)
            wrong_number = server.answer(question(1, "vllm.example", A), udp=True)[2:]
            server.forge = [b"", b"\x00" * 11, wrong_name, b"\xff\xff" + wrong_number[:-4] + b"\x06" * 4]
            async with seeing(server, "vllm.example.:8000") as seen:
                await seen.sees("http://10.0.0.1:8000")

    asyncio.run(main())


def test_the_next_server_is_asked_where_one_fails() -> None:
    async def main() -> None:
        async with dns_server() as bad, dns_server() as good:
            bad.code = 2
            good.records["vllm.example"] = [a("10.0.0.1")]
            servers = tuple(f"127.0.0.1:{s.port}" for s in (bad, good))
            async with seeing(good, "vllm.example.:80", servers=servers) as seen:
                await seen.sees("http://10.0.0.1:80")
                assert bad.asked

    asyncio.run(main())


def test_short_names_are_completed_as_resolv_conf_says(tmp_path: Path) -> None:
    conf = tmp_path / "resolv.conf"
    conf.write_text(
        "# made by a kubelet\nnameserver 10.96.0.10\nnameserver fd00::a\n"
        "search serving.svc.cluster.local svc.cluster.local .\noptions edns0 ndots:5\n"
    )
    where = read_resolv_conf(conf)
    assert where.servers == (("10.96.0.10", 53), ("fd00::a", 53))
    assert where.candidates("vllm") == [
        "vllm.serving.svc.cluster.local",
        "vllm.svc.cluster.local",
        "vllm",
    ]
    assert where.candidates("a.b.c.d.e.f")[0] == "a.b.c.d.e.f"
    assert where.candidates("vllm.example.") == ["vllm.example."]
    conf.write_text("search x\n")
    with pytest.raises(ResolveError, match="no nameserver"):
        read_resolv_conf(conf)
    with pytest.raises(ResolveError, match="nowhere"):
        read_resolv_conf(tmp_path / "nowhere")


def test_the_first_completed_name_with_an_answer_counts() -> None:
    async def main() -> None:
        async with dns_server() as server:
            server.records["vllm.b.example"] = [a("10.0.0.1")]
            where = Where((("127.0.0.1", server.port),), ("a.example", "b.example"), 2)
            answer = await Resolver(lambda: where, timeout_s=1).ask("vllm", A)
            assert [record.value for record in answer.records] == ["10.0.0.1"]
            assert [name for name, _ in server.asked] == ["vllm.a.example", "vllm.b.example"]

    asyncio.run(main())


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


@pytest.mark.parametrize("bad", ["", "a..b", "x" * 64 + ".example", ".".join(["abcdefgh"] * 30), "ä.example"])
def test_names_that_cannot_be_asked_for(bad: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        question(1, bad, A)


def answer_of(*records: tuple[int, int, bytes], kind: int = A) -> bytes:
    server = DnsServer()
    server.records["x.example"] = list(records)
    return server.answer(question(7, "x.example", kind), udp=True)


def test_an_answer_is_read_as_it_was_written() -> None:
    got = parse(answer_of(srv(1, 2, "T.Example"), kind=SRV), 7, "x.example", SRV)
    assert [record.value for record in got.records] == [Service(1, 10, 2, "t.example")]
    got = parse(answer_of(a("::5", ttl=1 << 31), kind=AAAA), 7, "X.example.", AAAA)
    assert [(record.value, record.ttl_s) for record in got.records] == [("::5", 0)]


@pytest.mark.timeout(10)
@pytest.mark.parametrize("pointer", [b"\xc0\x0c", b"\xc0\x0e", b"\xc0\x30", b"\x01a\xc0\x0c", b"\xff\xff"])
def test_names_that_point_at_themselves_or_forward_end(pointer: bytes) -> None:
    head = b"\x00\x07\x81\x80\x00\x01\x00\x00\x00\x00\x00\x00"
    with pytest.raises(BadMessageError):
        parse(head + pointer + b"\x00\x01\x00\x01" + bytes(64), 7, "x.example", A)


@given(st.binary(max_size=80))
def test_any_bytes_are_an_answer_or_refused(data: bytes) -> None:
    with pytest.raises(BadMessageError):
        parse(data, 7, "x.example", A)


@given(st.data())
def test_a_damaged_answer_is_read_or_refused(data: st.DataObject) -> None:
    whole = bytearray(answer_of(a("10.0.0.1"), srv(1, 2, "t.example"), a("10.0.0.2")))
    for _ in range(data.draw(st.integers(1, 6))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    try:
        answer = parse(bytes(whole[:cut]), 7, "x.example", A)
    except BadMessageError:
        return
    assert len(answer.records) <= 4096
