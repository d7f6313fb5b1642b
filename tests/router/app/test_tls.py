"""TLS on the public port and to engines: certificates checked on both sides, renewed while running."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.config.checks import check_engine
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.config.schema import Config, ServerConfig
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.http.tls import Certificates, TlsFiles, client_context, server_context
from kvatlas.router.startup_check import check
from kvatlas.router.tools.doctor.examine import ExamineSettings, examine
from tests.support.pki import make_authority, make_certificate
from tests.support.waiting import until
from tests.support.whole_router import MODEL, OFTEN, configure, routing, running

pytestmark = pytest.mark.real  # TLS


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pki")
    for ca in ("ca", "other"):
        make_authority(folder, ca)
    for name, ca in (("server", "ca"), ("next", "other"), ("ann", "ca"), ("eve", "other")):
        make_certificate(folder, name, by=ca)
    return folder


def trusting(pki: Path, ca: str = "ca", name: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(pki / f"{ca}.crt"))
    if name is not None:
        context.load_cert_chain(pki / f"{name}.crt", pki / f"{name}.key")
    return context


def serving(pki: Path, *engines: SimulatedEngine, **files: str) -> Config:
    config = configure(*engines)
    given = {"tls_cert_file": "server.crt", "tls_key_file": "server.key", **files}
    paths = {key: str(pki / name) for key, name in given.items()}
    return msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, **paths))


async def chat(url: str, context: ssl.SSLContext) -> int:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", json=body, ssl=context) as answer,
    ):
        await answer.read()
        return answer.status


async def test_clients_speak_https_and_a_renewed_certificate_is_taken(pki: Path, tmp_path: Path) -> None:
    for kind in ("crt", "key"):
        shutil.copy(pki / f"server.{kind}", tmp_path / f"server.{kind}")
    async with running({}) as engines, routing(serving(tmp_path, *engines)) as rig:
        assert rig.url.startswith("https://")
        assert await chat(rig.url, trusting(pki)) == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await chat(rig.url, trusting(pki, "other"))
        for kind in ("crt", "key"):
            shutil.copy(pki / f"next.{kind}", tmp_path / f"server.{kind}")
        rig.router.certificates.reload_changed()
        assert await chat(rig.url, trusting(pki, "other")) == 200
        (tmp_path / "server.crt").write_text("half a cert")
        rig.router.certificates.reload_changed()
        assert await chat(rig.url, trusting(pki, "other")) == 200, "the old one stays"


@pytest.mark.parametrize("first", ["crt", "key"])
@pytest.mark.parametrize("role", ["server", "client"])
async def test_a_pair_is_renewed_when_both_of_it_are_there(
    pki: Path, tmp_path: Path, role: str, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until then handshakes have the old one: whichever file comes first, for listeners and for clients."""
    other = "key" if first == "crt" else "crt"
    for kind in ("crt", "key"):
        shutil.copy(pki / f"server.{kind}", tmp_path / f"used.{kind}")
    files = TlsFiles(str(tmp_path / "used.crt"), str(tmp_path / "used.key"), str(pki / "ca.crt"))
    context = server_context(files, "a") if role == "server" else client_context(files, "a")
    certificates = Certificates()
    certificates.add(context, files, "a")

    peer = "server" if role == "client" else "client"
    trust = TlsFiles(str(pki / "ann.crt"), str(pki / "ann.key"), str(pki / "ca.crt"))
    trust_next = msgspec.structs.replace(trust, ca=str(pki / "other.crt"))
    make = server_context if peer == "server" else client_context
    assert await shakes_hands(context, make(trust, "b"), role)
    shutil.copy(pki / f"next.{first}", tmp_path / f"used.{first}")
    for _ in range(3):
        certificates.reload_changed()
        assert await shakes_hands(context, make(trust, "b"), role)
    shutil.copy(pki / f"next.{other}", tmp_path / f"used.{other}")
    certificates.reload_changed()
    assert await shakes_hands(context, make(trust_next, "b"), role)
    assert not await shakes_hands(context, make(trust, "b"), role)
    assert capsys.readouterr().out.count("certificate not renewed") == 1


async def shakes_hands(one: ssl.SSLContext, other: ssl.SSLContext, role: str) -> bool:
    """Whether a connection between these two is made, and used."""
    server, client = (one, other) if role == "server" else (other, one)

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(await reader.read(1))
        writer.close()

    listener = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=server)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
            writer.write(b"x")
            said = await reader.read(1)
            writer.close()
        except OSError:
            return False
    return said == b"x"


async def test_with_a_client_authority_other_clients_are_refused(pki: Path) -> None:
    config = serving(pki, client_ca_file="ca.crt")
    async with running({}) as engines:
        listed = tuple(EngineAddress(engine.base_url) for engine in engines)
        async with routing(msgspec.structs.replace(config, engines=listed)) as rig:
            assert await chat(rig.url, trusting(pki, name="ann")) == 200
            for stranger in (None, "eve"):
                with pytest.raises(aiohttp.ClientError):
                    await chat(rig.url, trusting(pki, name=stranger))
            assert rig.router.proxy.stats.requests == 1


async def _relay(engine: SimulatedEngine, context: ssl.SSLContext) -> asyncio.Server:
    """TLS in front of an engine: bytes in, bytes out."""
    port = int(engine.base_url.rpartition(":")[2])

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

    return await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)


async def test_engines_are_verified_by_their_own_authority_and_see_the_routers_certificate(pki: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki / "server.crt", pki / "server.key")
    context.load_verify_locations(pki / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED

    def fleet(**files: str) -> FleetSettings:
        return msgspec.structs.replace(OFTEN, **{key: str(pki / name) for key, name in files.items()})

    async def up(engine: EngineAddress, settings: FleetSettings, *, wanted: bool) -> Any:
        async with routing(configure(engine, fleet=settings), wait=wanted) as rig:
            if wanted:
                return (await rig.chat("hi")).http_response.status_code
            status = rig.router.fleet.get(engine.engine_id)
            await until(lambda: status.problem != "not contacted yet", "the refusal is noticed")
            assert not status.up
            return None

    async with running({}) as (one,):
        server = await _relay(one, context)
        port = server.sockets[0].getsockname()[1]
        engine = EngineAddress(f"https://127.0.0.1:{port}")
        check_engine(engine)
        check_engine(engine)
        own = {"client_cert_file": "ann.crt", "client_key_file": "ann.key"}
        assert await up(engine, fleet(ca_file="ca.crt", **own), wanted=True) == 200
        await up(engine, fleet(ca_file="ca.crt"), wanted=False)
        await up(engine, fleet(ca_file="other.crt", **own), wanted=False)
        config = Config(engines=(engine,), fleet=fleet(ca_file="ca.crt", **own))
        asked = ExamineSettings(seconds=0.0, timeout_s=60.0)
        seen = await examine(config, asked, router_url=None, progress=lambda _text: None)
        assert seen.engines[0].server.models, "the doctor has the same authority and certificate"
        server.close()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tls_cert_file": "no-such.crt"}, "server.tls_cert_file"),
        ({"tls_cert_file": "ann.key"}, "server.tls_cert_file.*no PEM files that fit together"),
        ({"client_ca_file": "ann.key"}, "client_ca_file"),
    ],
)
def test_unusable_files_are_named_at_start(pki: Path, files: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(serving(pki, **files))


def test_certificate_and_key_are_required_together() -> None:
    with pytest.raises(ValueError, match="give tls_key_file too"):
        ServerConfig(tls_cert_file="a.crt")
    with pytest.raises(ValueError, match="client_ca_file"):
        ServerConfig(client_ca_file="a.crt")
    with pytest.raises(ValueError, match="client_key_file"):
        FleetSettings(client_cert_file="a.crt")
