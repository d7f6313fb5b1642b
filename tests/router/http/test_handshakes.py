"""Half-open TLS handshakes: they count as connections, end in time, and do not block probes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from kvatlas.router.http import descriptors
from kvatlas.router.http.handshakes import Handshakes
from kvatlas.router.http.listen_config import ListenConfig
from kvatlas.router.http.settings import ListenSettings, ListenStats
from kvatlas.router.services.epp.settings import EppSettings
from tests.support.loop_pauses import pauses
from tests.support.pki import make_authority, make_certificate
from tests.support.waiting import HANG_S, run, until
from tests.support.whole_router import Rig, configure, number, routing, running

pytestmark = pytest.mark.real  # TLS


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pki")
    make_authority(folder)
    make_certificate(folder, "server")
    return folder


@asynccontextmanager
async def serving(pki: Path, **listen: float) -> AsyncIterator[tuple[Rig, Handshakes, ListenStats]]:
    pair = {"tls_cert_file": str(pki / "server.crt"), "tls_key_file": str(pki / "server.key")}
    async with running({}) as engines:
        config = configure(*engines, listen=ListenSettings(drain_s_max=1.0, **listen))  # type: ignore[arg-type]
        config = msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, **pair))
        async with routing(config) as rig:
            line, stats = rig.server.config, rig.router.listen_stats
            assert isinstance(line, ListenConfig)
            assert line.handshakes is not None
            assert stats is not None
            yield rig, line.handshakes, stats


async def half_open(port: int, count: int) -> list[asyncio.StreamWriter]:
    """Connections that begin a handshake and go no further."""
    pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    for _, writer in pairs:
        writer.write(b"\x16\x03\x01\x02\x00\x01")
    return [writer for _, writer in pairs]


async def status(rig: Rig, pki: Path, path: str) -> int:
    """On a connection of its own."""
    trust = ssl.create_default_context(cafile=str(pki / "ca.crt"))
    reader, writer = await asyncio.open_connection("127.0.0.1", number(rig.url), ssl=trust)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode())
    said = await reader.read()
    writer.close()
    return int(said.split()[1])


async def test_they_take_places_until_they_leave(pki: Path) -> None:
    limits = {"connections_max": 4, "client_share_max": 1.0, "header_timeout_s": HANG_S}
    async with serving(pki, **limits) as (rig, line, stats):
        assert await status(rig, pki, "/v1/models") == 200
        writers = await half_open(number(rig.url), 5)
        await until(lambda: len(line.open) == 5, "they are seen")
        assert await status(rig, pki, "/health") == 200  # a spare one
        assert await status(rig, pki, "/v1/models") == 503
        for writer in writers:
            writer.close()
        await until(lambda: stats.handshakes_failed == 5, "they have left")
        assert not line.open
        assert await status(rig, pki, "/v1/models") == 200


async def test_their_time_is_bounded(pki: Path) -> None:
    async with serving(pki, header_timeout_s=0.1) as (rig, line, stats):
        writers = await half_open(number(rig.url), 5)
        await until(lambda: stats.handshakes_failed == 5, "their time is over")
        assert not line.open
        for writer in writers:
            writer.close()


async def test_one_address_has_its_share_and_spares_are_few(pki: Path) -> None:
    async with serving(pki, connections_max=10_000, client_share_max=0.0001) as (rig, line, stats):
        writers = await half_open(number(rig.url), 200)
        await until(lambda: stats.handshakes_failed == 200 - 2 * 64, "the oldest spares are gone")
        assert len(line.open) == 2 * 64
        for writer in writers:
            writer.close()
        await until(lambda: not line.open, "they have left")
        assert await status(rig, pki, "/v1/models") == 200


async def test_the_end_of_the_router_does_not_wait_for_them(pki: Path) -> None:
    async with serving(pki) as (rig, line, stats):
        writers = await half_open(number(rig.url), 3)
        await until(lambda: len(line.open) == 3, "they are seen")
    assert not line.open
    assert stats.handshakes_failed == 3
    for writer in writers:
        writer.close()


async def test_those_of_gateways_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.router.services.epp.server.HANDSHAKE_TIMEOUT_S", 1.0)

    epp = EppSettings(listen="127.0.0.1:0", connections_max=2, drain_s_max=0.1)
    async with running({}) as engines, routing(configure(*engines, epp=epp)) as rig:
        stats = rig.router.picker.stats
        writers = await half_open(rig.router.picker.addresses["listen"][1], 100)
        await until(lambda: stats.handshakes_failed == 100, "the oldest ones immediately, the others in time")
        for writer in writers:
            writer.close()


def test_the_last_file_descriptors_are_counted_and_told(
    pki: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(descriptors, "_LAST_DESCRIPTORS", 1 << 40)  # as if all there are were the last ones
    monkeypatch.setattr(descriptors._LastLog, "next_at", 0.0)
    monkeypatch.setattr(descriptors, "_LOG_INTERVAL_S", 3600.0)

    async def main() -> None:
        async with serving(pki) as (rig, _, stats):
            assert await status(rig, pki, "/health") == 200
            assert stats.descriptor_shortages >= 1

    run(main())
    assert capsys.readouterr().out.count("out of file descriptors") == 1


JUNK = {
    "nothing": b"",
    "no TLS": b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
    "half a record": b"\x16\x03\x01\x40\x00" + bytes(100),
    "records of nothing": b"\x16\x03\x01\x00\x00" * 20_000,
    "records of a byte": b"\x16\x03\x01\x00\x01\x01" * 20_000,
    "a long record": b"\x16\x03\x01\x40\x00" + bytes(16_384),
}


def sends(port: int, data: bytes) -> None:
    """Blocking, so that nothing of it is in the loop that is looked at."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as sock,
        contextlib.suppress(ConnectionError),
    ):
        sock.sendall(data)
        sock.recv(1)


@pytest.mark.long
async def test_no_handshake_holds_the_loop(pki: Path) -> None:
    async with serving(pki, header_timeout_s=0.3) as (rig, line, _), pauses() as found:
        for name, data in JUNK.items():

            async def send(data: bytes = data) -> None:
                for _ in range(3):
                    await asyncio.to_thread(sends, number(rig.url), data)
                await until(lambda: not line.open, "all have ended")

            await found.during(name, send)
        assert found.too_long == {}
