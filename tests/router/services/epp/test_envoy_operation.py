"""The picker in operation: health checks, flags, certificates, tenants, ranks and its end behind Envoy."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import pytest

from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR
from kvatlas.router.admission.admission_queue import QueueSettings
from kvatlas.router.admission.key_file import KeySettings, digest_of
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.services.epp.grpc import message_frame
from kvatlas.router.services.epp.protobuf import bytes_field
from kvatlas.router.services.epp.settings import EppSettings
from tests.router.app.test_queue import ONE, busy
from tests.router.services.epp.test_envoy import (
    CHAT,
    FORMS,
    body,
    endpoint,
    epp,
    gateway,
    port_of,
    recorder,
    stats_of,
)
from tests.support.envoy import envoy, program
from tests.support.h2_peer import H2Peer, h2_peer
from tests.support.pki import make_authority, make_certificate
from tests.support.ports import free_ports
from tests.support.waiting import patience, until
from tests.support.whole_router import MODEL, TEXT, configure, routing, running

pytestmark = pytest.mark.envoy


@pytest.fixture(autouse=True)
def _needs_envoy() -> None:
    program()


async def test_only_gateways_with_a_certificate_are_answered(tmp_path: Path) -> None:
    make_authority(tmp_path)
    for name in ("picker", "gateway"):
        make_certificate(tmp_path, name)
    files = {
        "tls_cert_file": str(tmp_path / "picker.crt"),
        "tls_key_file": str(tmp_path / "picker.key"),
        "client_ca_file": str(tmp_path / "ca.crt"),
    }
    own = {
        "certificate_chain": {"filename": str(tmp_path / "gateway.crt")},
        "private_key": {"filename": str(tmp_path / "gateway.key")},
    }
    trusted = {"validation_context": {"trusted_ca": {"filename": str(tmp_path / "ca.crt")}}}
    secured = epp(tls=True, **files)
    async with running({}) as engines, routing(configure(*engines, epp=secured)) as rig:
        names = [endpoint(engine) for engine in engines]
        for folder, tls, answered in (
            ("known", {"tls_certificates": [own], **trusted}, True),
            ("unknown", trusted, False),
        ):
            (tmp_path / folder).mkdir()
            async with envoy(tmp_path / folder, names, [port_of(rig)], tls=tls) as through:
                status, _, _ = await through.ask("override_host", CHAT, body(TEXT))
                assert (status == 200) is answered
        assert stats_of(rig).picks == {"duplex": 1}


async def test_a_tenant_over_its_limit_gets_429_from_the_gateway(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    digest = digest_of("key-of-small")
    keys.write_text(
        f'[tenants.small]\nrequests_per_minute = 1\n[[keys]]\ntenant = "small"\nsha256 = "{digest}"\n'
    )
    async with (
        running({}) as engines,
        gateway(tmp_path, *engines, keys=KeySettings(file=str(keys))) as (_, through),
    ):
        own = {"authorization": "Bearer key-of-small"}
        status, _, answer = await through.ask("override_host", CHAT, body(TEXT))
        assert (status, json.loads(answer)["error"]["code"]) == (401, "invalid_api_key")
        status, headers, _ = await through.ask("override_host", CHAT, body(TEXT), headers=own)
        assert status == 200
        assert headers["x-ratelimit-remaining-requests"] == "0"
        for form in FORMS:
            status, headers, answer = await through.ask(form, CHAT, body(TEXT), headers=own)
            assert (status, json.loads(answer)["error"]["code"]) == (429, "rate_limit_exceeded")
            assert int(headers["retry-after"]) > 0
            assert headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"


async def test_ranks_behind_one_port_are_distinguished_by_a_header(tmp_path: Path) -> None:
    async with recorder() as engine:
        ranks = [EngineAddress(engine.url, rank) for rank in (0, 1)]
        async with routing(configure(*ranks, epp=epp(fallbacks=1)), wait=False) as rig:
            await until(lambda: all(status.up for status in rig.router.fleet), "both ranks are up")
            names = [engine.url.removeprefix("http://")]
            async with envoy(tmp_path, names, [port_of(rig)]) as through:
                for form in FORMS:
                    for number in range(4):
                        asked = {"model": MODEL, "input": f"{number} {TEXT}"}
                        # A client's own is replaced: it would reach another rank than the one chosen.
                        own = {"x-data-parallel-rank": "7"}
                        status, headers, answer = await through.ask(
                            form, "/v1/embeddings", asked, headers=own
                        )
                        assert status == 200
                        rank = headers["x-kvatlas-engine"].rpartition("#dp")[2]
                        assert json.loads(answer)["fields"]["x-data-parallel-rank"] == rank


@pytest.mark.parametrize("form", ["buffered", "buffered_original_dst"])
async def test_a_body_that_envoy_cannot_buffer_is_its_413(tmp_path: Path, form: str) -> None:
    async with recorder() as engine, AsyncExitStack() as stack:
        rig = await stack.enter_async_context(
            routing(configure(EngineAddress(engine.url), epp=epp()), wait=False)
        )
        await until(lambda: all(status.up for status in rig.router.fleet), "the engine is up")
        names = [engine.url.removeprefix("http://")]
        through = await stack.enter_async_context(envoy(tmp_path, names, [port_of(rig)]))
        status, _, answer = await through.ask(form, "/v1/embeddings", b"x" * 3_000_000)
        assert (status, answer) == (413, b"Payload Too Large")
        await until(lambda: rig.idle, "the request has ended")
        assert (stats_of(rig).gateways_own, stats_of(rig).calls_refused) == (1, {})
        sent = {"model": MODEL, "input": "a"}
        assert (await through.ask(form, "/v1/embeddings", sent))[0] == 200


@pytest.mark.parametrize("form", FORMS)
async def test_a_request_that_waits_longer_than_envoy_does_is_its_504(tmp_path: Path, form: str) -> None:
    queue = QueueSettings(saturation_s=60.0, engine_requests_max=1, wait_s_max=600.0)
    async with running(ONE) as (engine,), AsyncExitStack() as stack:
        rig = await stack.enter_async_context(routing(configure(engine, epp=epp(), queue=queue)))
        gateway = envoy(tmp_path, [endpoint(engine)], [port_of(rig)], idle_s=1.0)
        through = await stack.enter_async_context(gateway)
        await stack.enter_async_context(busy(rig))
        asked = {"model": MODEL, "prompt": "nothing of it is in flight", "max_tokens": 1}
        status, _, answer = await through.ask(form, "/v1/completions", asked)
        assert (status, answer) == (504, b"stream timeout")
        await until(lambda: not len(rig.router.accounts.room), "it has left")
        assert (stats_of(rig).gateways_own, stats_of(rig).calls_refused) == (1, {})


@contextmanager
def picker_process(port: int, ops_port: int, *engines: str) -> Iterator[subprocess.Popen[bytes]]:
    """``kvatlas epp`` in a process of its own."""
    command = [sys.executable, "-m", "kvatlas", "epp", "--listen", f"127.0.0.1:{port}", "--no-tls"]
    command += ["--tokenizer", str(DEMO_TOKENIZER_DIR), "--set", f"server.ops_port={ops_port}"]
    # In which Envoy, that asks every 0.1 s, has to notice.
    command += ["--set", f"epp.drain_delay_s={3 * patience()}", "--set", "fleet.poll_interval_s=0.2"]
    for engine in engines:
        command += ["--engine", engine]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.process
async def test_a_picker_that_is_terminated_leaves_without_a_failed_request(tmp_path: Path) -> None:
    first, second, *ops = free_ports(4)
    async with running({}, {}) as engines:
        urls = [engine.base_url for engine in engines]
        names = [endpoint(engine) for engine in engines]
        with picker_process(first, ops[0], *urls) as goes, picker_process(second, ops[1], *urls) as stays:
            async with envoy(tmp_path, names, [first, second]) as through:

                async def healthy(count: int) -> bool:
                    return await through.stat("cluster.picker.membership_healthy") == count

                await until(lambda: healthy(2), "both pickers are ready")
                statuses: list[int] = []
                ended = asyncio.Event()

                async def asks(who: int) -> None:
                    while not ended.is_set():
                        text = f"{who} {len(statuses)} {TEXT}"
                        status, _, _ = await through.ask("override_host", CHAT, body(text))
                        statuses.append(status)

                async with asyncio.TaskGroup() as tasks:
                    for who in range(4):
                        tasks.create_task(asks(who))
                    await until(lambda: len(statuses) > 20, "requests are answered")
                    goes.send_signal(signal.SIGTERM)
                    await until(lambda: goes.poll() is not None, "the picker has ended")
                    answered = len(statuses)
                    await until(lambda: len(statuses) > answered + 20, "the other one goes on")
                    ended.set()
                assert set(statuses) == {200}
                assert goes.returncode == 0
                assert stays.poll() is None


SERVICES = (b"liveness", b"readiness", b"envoy.service.ext_proc.v3.ExternalProcessor")
OK = {"grpc-status": "0"}


async def check(peer: H2Peer, service: bytes) -> tuple[bytes, dict[str, str]]:
    """The answer's message, and its last fields."""
    number = peer.open("/grpc.health.v1.Health/Check")
    await peer.send(number, message_frame(bytes_field(1, service)), end=True)
    await peer.until_over(number)
    return peer.data[number][5:], peer.headers[number][-1]


async def test_the_light_pickers_service_serves_once_the_pool_is_known() -> None:
    """Of the Inference Extension's manifests: also while nothing is ready."""

    settings = EppSettings(listen="127.0.0.1:0", health_listen="127.0.0.1:0", tls=False)
    gone = EngineAddress("http://127.0.0.1:9")
    async with routing(configure(gone, epp=settings), wait=False) as rig:
        assert rig.router.picker is not None
        async with h2_peer(rig.router.picker.addresses["health_listen"][1]) as peer:
            assert await check(peer, b"readiness") == (b"\x08\x02", OK)
            assert await check(peer, b"inference-extension") == (b"\x08\x01", OK)
            rig.router.fleet_sources.unsynced = lambda: ["kubernetes"]  # type: ignore[method-assign]
            assert await check(peer, b"inference-extension") == (b"\x08\x02", OK)


async def test_a_router_that_leaves_is_alive_and_not_ready() -> None:
    settings = EppSettings(listen="127.0.0.1:0", health_listen="127.0.0.1:0", tls=False)
    async with running({}) as engines, routing(configure(*engines, epp=settings)) as rig:
        assert rig.router.picker is not None
        for _, port in rig.router.picker.addresses.values():
            async with h2_peer(port) as peer:
                rig.router.draining = lambda: False
                assert [await check(peer, name) for name in SERVICES] == [(b"\x08\x01", OK)] * 3
                rig.router.draining = lambda: True
                answers = [await check(peer, name) for name in SERVICES]
                assert answers == [(b"\x08\x01", OK), (b"\x08\x02", OK), (b"\x08\x02", OK)]
                message, fields = await check(peer, b"nobody")
                assert (message, fields["grpc-status"]) == (b"", "5")


Kvatlas = Callable[..., subprocess.CompletedProcess[str]]


def test_the_light_pickers_flags(kvatlas: Kvatlas) -> None:
    """As conformance/resources/base.yaml of the Inference Extension has them."""
    flags = ["--pool-name", "primary", "--pool-namespace", "apps", "--zap-encoder", "json"]
    ports = ["--grpc-port", "9002", "--grpc-health-port", "9003"]
    told = kvatlas("epp", *flags, *ports, "--print-config")
    assert told.returncode == 0
    for line in (
        'fleet.kubernetes.inference_pool = "primary"',
        'fleet.kubernetes.namespaces = ["apps"]',
        'epp.listen = "0.0.0.0:9002"',
        'epp.health_listen = "0.0.0.0:9003"',
        'server.log_format = "json"',
    ):
        assert f"{line}  # flag" in told.stdout


def test_a_port_given_twice_is_an_error(kvatlas: Kvatlas) -> None:
    for port, address in (("--grpc-port", "--listen"), ("--grpc-health-port", "--health-listen")):
        told = kvatlas("epp", port, "9002", address, "127.0.0.1:1", "--print-config")
        assert told.returncode != 0
        assert f"{port} 9002 and {address} 127.0.0.1:1: give one of them" in told.stderr
