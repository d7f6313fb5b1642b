"""Resources of all clients together: connections, by address too, bodies, descriptors; and probes get in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from typing import Any

import pytest
import structlog

from kvatlas.router.http import descriptors
from kvatlas.router.http.listener import Capacity, client_key
from kvatlas.router.http.settings import ListenSettings
from tests.support.proxy_rig import (
    CHAT,
    Call,
    Engine,
    Paths,
    Rig,
    answer,
    ask,
    read_answer,
    request,
    routing,
    says,
    writes,
)
from tests.support.waiting import run, until

GOOD = says(200, b"{}")


class _Spare:
    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


def _probed(app: Any) -> Any:
    async def health(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"well"})

    return Paths(app, {"/health": health})


async def _health(rig: Rig) -> None:
    got = await ask(rig, request(b"", method="GET", target="/health"))
    assert (got.status, got.body, got.head["connection"]) == (200, b"well", "close")


async def test_probes_get_in_where_others_hold_every_connection() -> None:
    listen = ListenSettings(connections_max=2, drain_s_max=0.5)
    async with Engine(GOOD) as engine, routing(engine.url, listen=listen, wrap=_probed) as rig:
        held = [await rig.connect() for _ in range(2)]
        await until(lambda: len(rig.server.server_state.connections) == 2, "held")
        hogs = [await rig.connect() for _ in range(100)]  # more than there are spares
        await _health(rig)
        got = await ask(rig)
        assert (got.status, got.json()["error"]["code"]) == (503, "too_many_connections")
        assert not engine.calls
        for _, writer in (*held, *hogs):
            writer.close()
        await until(lambda: not rig.server.server_state.connections, "all gone")
        assert (await ask(rig)).status == 200


def test_one_address_holds_its_share_of_connections() -> None:
    room = Capacity(ListenSettings(connections_max=1000, client_share_max=0.1))
    assert [room.add_connection("a") for _ in range(101)] == [True] * 100 + [False]
    assert room.add_connection("b")
    room.remove_connection("a")
    assert room.add_connection("a")
    assert [room.add_connection(f"{i}") for i in range(900)] == [True] * 899 + [False]
    small = Capacity(ListenSettings(connections_max=70, client_share_max=0.1))
    assert sum(small.add_connection("a") for _ in range(70)) == 64


def test_all_addresses_together_hold_no_more_connections_than_there_are() -> None:
    room = Capacity(ListenSettings(connections_max=2))
    assert [room.add_connection(client) for client in "abc"] == [True, True, False]
    room.remove_connection("a")
    assert [room.add_connection(client) for client in "cd"] == [True, False]


def test_newest_spare_takes_the_oldest_ones_place() -> None:
    room, spares = Capacity(ListenSettings()), [_Spare() for _ in range(66)]
    for spare in spares[:64]:
        room.add_probe_only(spare)
    room.remove_probe_only(spares[0])
    room.add_probe_only(spares[64])
    assert not any(spare.aborted for spare in spares)
    room.add_probe_only(spares[65])
    assert [spare.aborted for spare in spares[:3]] == [False, True, False]


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        (("10.0.0.1", 5), "10.0.0.1"),
        (("::ffff:10.0.0.1", 5, 0, 0), "10.0.0.1"),
        (("2001:db8::1", 5, 0, 0), "2001:db8::/64"),
        (("2001:db8::ff:1", 5, 0, 0), "2001:db8::/64"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::/64"),
        ("", ""),
        (None, ""),
    ],
)
def test_the_owner_of_a_connection(peer: Any, client: str) -> None:
    assert client_key(peer) == client


async def _when_told(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
    await engine.go.wait()
    writer.write(answer(200, b"{}"))


async def test_all_bodies_together_are_bounded() -> None:
    listen = ListenSettings(bodies_bytes_max=1_000_000, drain_s_max=0.5)
    async with Engine(_when_told) as engine, routing(engine.url, listen=listen) as rig:
        room = rig.server.config.capacity  # type: ignore[attr-defined]
        body = b'{"model":"m","x":"%b"}' % (b"x" * 600_000)
        first = asyncio.ensure_future(ask(rig, request(body)))
        await until(lambda: len(engine.calls) == 1, "the first is asked")
        assert room.body_bytes == len(body)
        got = await ask(rig, request(body))
        assert (got.status, got.json()["error"]["code"]) == (503, "too_many_bodies")
        assert got.head["retry-after"] == "1"
        assert rig.listen_stats.bodies_refused == 1
        engine.go.set()
        assert (await first).status == 200
        await until(lambda: room.body_bytes == 0, "given back")
        assert (await ask(rig, request(body))).status == 200
        await until(lambda: room.body_bytes == 0, "given back")
        _, writer = await rig.connect()  # one that leaves in the middle, with a second one queued
        writer.write(request(body) * 2)
        await until(lambda: len(engine.calls) >= 3, "asked")
        writer.close()
        await until(lambda: room.body_bytes == 0, "given back")


async def test_a_queued_body_that_is_refused_gives_back_what_came_of_it() -> None:
    listen = ListenSettings(bodies_bytes_max=1000, drain_s_max=0.5)
    async with Engine(_when_told) as engine, routing(engine.url, listen=listen) as rig:
        room = rig.server.config.capacity  # type: ignore[attr-defined]
        reader, writer = await rig.connect()
        body = b'{"model":"m","x":"%b"}' % (b"x" * 600)
        writer.write(request(body))
        await until(lambda: engine.calls, "the first is asked")
        queued = request(body)
        writer.write(queued[:-300])
        await until(lambda: room.body_bytes == 2 * len(body) - 300, "a part of the second has come")
        writer.write(queued[-300:])
        await until(lambda: rig.listen_stats.bodies_refused, "it is refused")
        assert room.body_bytes == len(body)
        engine.go.set()
        assert [(await read_answer(reader)).status for _ in range(2)] == [200, 503]
        assert room.body_bytes == 0


async def test_bytes_after_a_refused_body_begin_no_request() -> None:
    listen = ListenSettings(bodies_bytes_max=1000, drain_s_max=0.5)
    async with Engine(writes(answer(200, b"{}"))) as engine, routing(engine.url, listen=listen) as rig:
        reader, writer = await rig.connect()
        writer.write(request(b"x" * 2000) + request(b"{}"))  # both in one read
        assert (await read_answer(reader)).status == 503
        assert await reader.read() == b""
        for _ in range(100):
            await asyncio.sleep(0)
        assert not engine.calls


@pytest.mark.parametrize("body", [CHAT, b"refused immediately"], ids=["waits", "is answered"])
async def test_a_pipeline_without_end_is_not_read_ahead(body: bytes) -> None:
    async with Engine(writes(then="hang")) as engine, routing(engine.url) as rig:
        room = rig.server.config.capacity  # type: ignore[attr-defined]
        _, writer = await rig.connect()
        writer.write(request(body + b" " * 10_000) * 2000)
        await until(lambda: rig.listen_stats.pipeline_pauses >= 1, "reading pauses")
        for _ in range(1000):
            await asyncio.sleep(0)
            assert room.body_bytes < 1_000_000, "of 20 million"


@pytest.mark.real  # descriptors
def test_running_out_of_descriptors_is_no_engines_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "_LOG_INTERVAL_S", 3600.0)

    async def main() -> None:
        async with Engine(GOOD) as engine, routing(engine.url) as rig:
            reader, writer = await rig.connect()
            writer.write(request(b"", method="GET", target="/nothing"))
            assert (await read_answer(reader)).status == 404
            monkeypatch.setattr(descriptors._LastLog, "next_at", 0.0)
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            taken: list[int] = []
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
            try:
                with contextlib.suppress(OSError):
                    while True:
                        taken.append(os.dup(0))
                for _ in range(20):  # more than open a breaker
                    writer.write(request())
                    got = await read_answer(reader)
                    assert (got.status, got.json()["error"]["code"]) == (503, "no_ready_engine")
                assert rig.planner.available(engine.url)
                assert rig.stats.descriptor_shortages == 20
            finally:
                for descriptor in taken:
                    os.close(descriptor)
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            writer.write(request())
            assert (await read_answer(reader)).status == 200

    run(main())
    out = capsys.readouterr()
    assert (out.out + out.err).count("out of file descriptors") == 1


@pytest.mark.real  # descriptors
@pytest.mark.parametrize("last", [0, 1 << 40])
async def test_connections_that_have_the_last_descriptors_are_counted(
    last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "_LAST_DESCRIPTORS", last)  # of all that there are, none or each
    async with Engine(GOOD) as engine, routing(engine.url) as rig:
        assert (await ask(rig)).status == 200
        assert rig.listen_stats.descriptor_shortages == (last > 0)


def test_soft_limit_is_raised_and_a_shortage_is_logged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = (1024, 4096)

    def set_limits(kind: int, wanted: tuple[int, int]) -> None:
        nonlocal limits
        limits = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    assert descriptors.raise_descriptor_limit(100) == 100
    assert limits == (1024, 4096)
    assert descriptors.raise_descriptor_limit(1000) == 1000
    assert limits == (2256, 4096)
    assert not capsys.readouterr().out
    assert descriptors.raise_descriptor_limit(10_000) == 1920
    assert limits == (4096, 4096)
    out = capsys.readouterr().out
    assert "listen.connections_max" in out
    assert "4096" in out
    limits = (1024, resource.RLIM_INFINITY)
    assert descriptors.raise_descriptor_limit(10_000) == 10_000


@pytest.mark.parametrize(
    ("hard", "asked", "level"),
    [(20_000, 10_000, "debug"), (20_000, 10_001, "warning"), (4096, 10_000, "warning"), (30_000, 10_000, "")],
)
def test_a_default_that_can_mostly_be_held_is_no_warning(
    hard: int, asked: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: None)
    with structlog.testing.capture_logs() as logs:
        held = descriptors.raise_descriptor_limit(asked, default=10_000)
    assert [line["log_level"] for line in logs] == [level] * bool(level)
    assert held == min(asked, (hard - 256) // 2)
