"""Through a real Envoy: the same engine and the same receipt as through ``serve``, whatever happens."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.admission.key_file import KeySettings, TenantRules, digest_of
from kvatlas.router.config.schema import ServerConfig
from kvatlas.router.fleet.engine_client import Shown
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.salt_proof import SaltProof, SaltProver
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.http.settings import ListenSettings
from kvatlas.router.services.epp.settings import EppSettings, EppStats
from tests.support.envoy import Envoy, envoy, program
from tests.support.ports import free_port
from tests.support.waiting import until
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routing, running

pytestmark = pytest.mark.envoy
CHAT = "/v1/chat/completions"
FORMS = ["original_dst", "override_host", "buffered", "buffered_original_dst"]
SELDOM = FleetSettings(poll_interval_s=60.0, poll_down_interval_s=0.05, gauge_interval_s=60.0)
"""With polls this rare a dead engine goes unnoticed for a while."""


@pytest.fixture(autouse=True)
def _needs_envoy() -> None:
    program()


def epp(**changes: Any) -> EppSettings:
    return EppSettings(**{"listen": "127.0.0.1:0", "tls": False, **changes})


def endpoint(engine: SimulatedEngine) -> str:
    return engine.base_url.removeprefix("http://")


def port_of(rig: Rig) -> int:
    assert rig.router.picker is not None
    return rig.router.picker.addresses["listen"][1]


def stats_of(rig: Rig) -> EppStats:
    assert rig.router.picker is not None
    return rig.router.picker.stats


def body(text: str, **changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "max_tokens": 3, "ignore_eos": True, **changes}


@asynccontextmanager
async def gateway(
    folder: Path,
    *engines: SimulatedEngine,
    subset: list[str] | None = None,
    tls: dict[str, Any] | None = None,
    **changes: Any,
) -> AsyncIterator[tuple[Rig, Envoy]]:
    """Envoy, and a router that is both picker and proxy."""
    config = configure(*engines, **{"epp": epp(), **changes})
    async with routing(config) as rig:
        names = [endpoint(engine) for engine in engines]
        async with envoy(folder, names, [port_of(rig)], subset=subset, tls=tls) as through:
            yield rig, through
            await until(lambda: rig.idle, "every request has ended")
            rig.check_books()


def told(rig: Rig) -> tuple[Any, ...]:
    """The last receipt without the fields that differ from request to request."""
    receipt = rig.router.accounts.receipts.latest[-1]
    asked = receipt.engine_id, receipt.mode, receipt.prompt_tokens, receipt.predicted_tokens
    return *asked, receipt.actual_tokens, receipt.reported_prompt_tokens, receipt.api, receipt.outcome


@pytest.mark.parametrize("form", FORMS)
async def test_the_same_engine_and_receipt_as_through_serve(tmp_path: Path, form: str) -> None:
    async with running({}, {}, {}) as engines, gateway(tmp_path, *engines) as (rig, through):
        for number in range(4):
            text = f"Story {number}. " + TEXT * (3 + number)
            await rig.chat(text, model=MODEL)  # one engine has it now
            await rig.caught_up(*engines)
            await rig.chat(text)
            expected = told(rig)
            for stream in (False, True):
                asked = body(text, stream=stream)
                if stream:
                    asked["stream_options"] = {"include_usage": True}
                status, headers, _ = await through.ask(form, CHAT, asked)
                assert status == 200
                assert headers["x-kvatlas-engine"] == expected[0]
                await until(lambda: rig.idle, "the receipt is written")
                assert told(rig) == expected
            assert expected[-1] == "exact"
        mode = "buffered" if form.startswith("buffered") else "duplex"
        assert stats_of(rig).picks == {mode: 8}
        assert stats_of(rig).connections_broken == 0


async def test_errors_have_the_shape_of_the_api(tmp_path: Path) -> None:
    async with running({}) as engines, gateway(tmp_path, *engines) as (rig, through):
        for form in FORMS:
            status, headers, answer = await through.ask(form, CHAT, body("hi", model="nobody"))
            assert status == 404
            assert headers["content-type"] == "application/json"
            assert json.loads(answer)["error"]["code"] == "model_not_found"
            status, _, answer = await through.ask(form, "/reset_prefix_cache", b"{}")
            assert (status, json.loads(answer)["error"]["code"]) == (403, "path_not_proxied")
            status, _, answer = await through.ask(form, CHAT, b"no json")
            assert (status, json.loads(answer)["error"]["code"]) == (400, "invalid_json")
            status, _, answer = await through.ask(form, "/v1/models")
            assert (status, json.loads(answer)["data"][0]["id"]) == (200, MODEL)
            status, _, _ = await through.ask(form, "/metrics")
            assert status == 404
        await engines[0].stop()
        await until(lambda: not rig.router.readiness().ready, "the engine is known to be down")
        status, headers, answer = await through.ask("original_dst", CHAT, body("hi"))
        assert (status, json.loads(answer)["error"]["code"]) == (503, "no_ready_engine")
        assert headers["retry-after"] == "1"
        assert headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"


async def test_a_misconfigured_gateway_gets_an_error(tmp_path: Path) -> None:
    async with running({}) as engines, gateway(tmp_path, *engines) as (rig, through):
        status, _, _ = await through.ask("streamed", CHAT, body("hi"))
        assert status == 500
        assert stats_of(rig).calls_refused == {"mode": 1}
        assert "request_body_mode STREAMED" in (tmp_path / "envoy.log").read_text()


async def test_clients_cannot_choose_the_destination(tmp_path: Path) -> None:
    async with running({}, {}) as engines, gateway(tmp_path, *engines) as (_, through):
        own = {"x-gateway-destination-endpoint": "127.0.0.1:1"}
        for form in FORMS:
            status, headers, _ = await through.ask(form, CHAT, body(TEXT), headers=own)
            assert status == 200
            assert headers["x-kvatlas-engine"] in {engine.base_url for engine in engines}


async def test_only_engines_of_the_subset_are_chosen(tmp_path: Path) -> None:
    async with running({}, {}, {}) as engines:
        allowed = [endpoint(engines[2])]
        async with gateway(tmp_path, *engines, subset=allowed) as (_, through):
            for number in range(4):
                for form in FORMS:
                    _, headers, _ = await through.ask(form, CHAT, body(f"{number} {TEXT}"))
                    assert headers["x-kvatlas-engine"] == engines[2].base_url
        async with gateway(tmp_path, *engines, subset=[]) as (_, through):
            status, _, answer = await through.ask("original_dst", CHAT, body(TEXT))
            assert (status, json.loads(answer)["error"]["code"]) == (503, "no_ready_engine")


async def test_a_dead_engine_is_an_error_or_its_fallback_serves(tmp_path: Path) -> None:
    async with running({}, {}, {}) as engines:
        slow = {"fleet": SELDOM, "epp": epp(fallbacks=2)}
        async with gateway(tmp_path, *engines, **slow) as (rig, through):
            chosen = (await rig.chat(TEXT * 20)).headers["x-kvatlas-engine"]
            await rig.caught_up(*engines)
            dead = next(engine for engine in engines if engine.base_url == chosen)
            await dead.stop()
            status, headers, _ = await through.ask("override_host", CHAT, body(TEXT * 20))
            assert status == 200
            assert headers["x-kvatlas-engine"] != chosen
            await until(lambda: rig.idle, "the receipt is written")
            assert told(rig)[0] == headers["x-kvatlas-engine"]
            assert stats_of(rig).fallbacks_served == 1
            assert rig.router.proxy.stats.engine_failures == {"refused": 1}


async def test_a_dead_engine_without_fallback_is_an_error_of_ours(tmp_path: Path) -> None:
    async with running({}) as engines, gateway(tmp_path, *engines, fleet=SELDOM) as (rig, through):
        await engines[0].stop()
        status, headers, answer = await through.ask("original_dst", CHAT, body(TEXT))
        assert (status, headers["content-type"]) == (502, "application/json")
        assert json.loads(answer)["error"]["code"] == "engine_unreachable"
        assert rig.router.proxy.stats.engine_failures == {"refused": 1}


@pytest.mark.parametrize("form", ["original_dst", "override_host", "buffered"])
async def test_a_client_that_leaves_ends_its_request_in_the_accounts(tmp_path: Path, form: str) -> None:
    async with (
        running({"decode_s_per_token": 0.05}) as engines,
        gateway(tmp_path, *engines) as (rig, through),
    ):
        asked = json.dumps(body(TEXT, stream=True, max_tokens=5000)).encode()
        headers = {"content-type": "application/json"}
        async with through.session.post(through.url(form) + CHAT, data=asked, headers=headers) as answer:
            assert await answer.content.readany()
            assert not rig.idle
        await until(lambda: rig.idle, "the request has ended")
        assert rig.router.proxy.stats.clients_gone == 1


class Recorder:
    """An engine that says what came to it."""

    def __init__(self) -> None:
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            card = {"id": MODEL, "object": "model", "created": 1, "owned_by": "me"}
            return web.json_response({"object": "list", "data": [card]})
        if request.method == "GET":
            return web.json_response({}, status=404)
        data = await request.read()
        digest = hashlib.sha256(data).hexdigest()
        fields = {name.lower(): value for name, value in request.headers.items()}
        # As long an answer as the request: it too comes back byte by byte as it was.
        return web.json_response(
            {"sha256": digest, "bytes": len(data), "fields": fields, "echo": data.decode()}
        )


@asynccontextmanager
async def recorder() -> AsyncIterator[Recorder]:
    engine = Recorder()
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", engine.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port := free_port())
    await site.start()
    engine.url = f"http://127.0.0.1:{port}"
    try:
        yield engine
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("size", [0, 1, 61_999, 62_000, 62_001, 65_536, 1_500_000, 8 << 20])
async def test_bodies_arrive_byte_for_byte(tmp_path: Path, size: int) -> None:
    async with recorder() as engine, AsyncExitStack() as stack:
        rig = await stack.enter_async_context(
            routing(configure(EngineAddress(engine.url), epp=epp()), wait=False)
        )
        await until(lambda: all(status.up for status in rig.router.fleet), "the engine is up")
        names = [engine.url.removeprefix("http://")]
        through = await stack.enter_async_context(envoy(tmp_path, names, [port_of(rig)]))
        sent = json.dumps({"model": MODEL, "input": "".join(chr(97 + i % 26) for i in range(size))}).encode()
        sent = sent if size else b""
        forms = FORMS if size < 1_000_000 else ["original_dst", "override_host"]  # 413 is Envoy's beyond
        for form in forms:
            status, _, answer = await through.ask(form, "/v1/embeddings", sent)
            found = json.loads(answer)
            assert (status, found["bytes"]) == (200, len(sent))
            assert found["sha256"] == hashlib.sha256(sent).hexdigest()
            assert found["echo"].encode() == sent
            assert "x-gateway-destination-endpoint" in found["fields"]
        await until(lambda: rig.idle, "every request has ended")


async def test_a_body_that_is_changed_arrives_changed(tmp_path: Path) -> None:
    async with recorder() as engine, AsyncExitStack() as stack:
        config = configure(EngineAddress(engine.url), epp=epp(), aliases={"small": MODEL})
        rig = await stack.enter_async_context(routing(config, wait=False))
        await until(lambda: all(status.up for status in rig.router.fleet), "the engine is up")
        names = [engine.url.removeprefix("http://")]
        through = await stack.enter_async_context(envoy(tmp_path, names, [port_of(rig)]))
        sent = b'{"model": "small", "input": "a", "kv_transfer_params": {"x": 1}}'
        for form in FORMS:
            status, _, answer = await through.ask(form, "/v1/embeddings", sent)
            assert status == 200
            assert json.loads(answer)["echo"] == f'{{"model": "{MODEL}", "input": "a"}}'


async def test_the_salt_of_its_tenant_reaches_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def prove(_: SaltProver, proof: SaltProof) -> None:
        proof.apis["/v1/embeddings"] = Shown("proven")  # the recorder computes nothing

    monkeypatch.setattr(SaltProver, "prove", prove)
    async with recorder() as engine, AsyncExitStack() as stack:
        rules, secret = tmp_path / "keys.toml", tmp_path / "secret"
        rules.write_text(
            "".join(
                f'[tenants.{name}]\n[[keys]]\ntenant = "{name}"\nsha256 = "{digest_of(name)}"\n'
                for name in ("ada", "eve")
            )
        )
        secret.write_text("s" * 32)
        keys = KeySettings(file=str(rules), isolate="tenant", isolate_secret_file=str(secret))
        config = configure(EngineAddress(engine.url), epp=epp(), keys=keys)
        rig = await stack.enter_async_context(routing(config, wait=False))
        await until(lambda: all(status.up for status in rig.router.fleet), "the engine is up")
        names = [engine.url.removeprefix("http://")]
        through = await stack.enter_async_context(envoy(tmp_path, names, [port_of(rig)]))
        isolation = rig.router.gate.isolation  # type: ignore[union-attr]
        assert isolation is not None
        sent = b'{"model": "%b", "input": "a", "cache_salt": "mine"}' % MODEL.encode()
        for form in FORMS:
            for tenant in ("ada", "eve"):
                headers = {"authorization": f"Bearer {tenant}"}
                code, _, answer = await through.ask(form, "/v1/embeddings", sent, headers=headers)
                assert code == 200, answer
                salt = isolation.salt(tenant, TenantRules(), b'"mine"')
                assert json.loads(json.loads(answer)["echo"])["cache_salt"] == salt


UNSEEN = ["original_dst", "override_host", "buffered", "no_answers", "buffered_no_answers"]


@pytest.mark.parametrize("form", UNSEEN)
async def test_unwatched_answers_reach_the_client_and_leave_the_accounts(tmp_path: Path, form: str) -> None:
    async with (
        running({"decode_s_per_token": 0.02}, {}) as engines,
        gateway(tmp_path, *engines, epp=epp(answers_watched_share=0.0)) as (rig, through),
    ):
        asked = [body(f"{number} {TEXT}", stream=number % 2 == 1, max_tokens=40) for number in range(4)]
        answers = await asyncio.gather(*(through.ask(form, CHAT, each) for each in asked))
        assert [status for status, _, _ in answers] == [200] * 4
        assert all(b"chat.completion" in answer for _, _, answer in answers)
        assert stats_of(rig).unwatched == 4
        assert rig.router.proxy.stats.clients_gone == 0
        await until(lambda: rig.idle, "the engines' numbers show that all have ended")
        assert rig.router.accounts.load_stats.ended_by_gauges == 4
        assert stats_of(rig).ends_estimated == stats_of(rig).cut_before_answer == 0
        statuses = {status for _, _, status in rig.router.proxy.requests.counts}
        assert statuses == {"unseen"}
        assert not rig.router.accounts.receipts.latest


async def test_every_fourth_answer_is_watched(tmp_path: Path) -> None:
    async with (
        running({}) as engines,
        gateway(tmp_path, *engines, epp=epp(answers_watched_share=0.25)) as (rig, through),
    ):
        for number in range(8):
            status, _, _ = await through.ask("override_host", CHAT, body(f"{number} {TEXT}"))
            assert status == 200
        await until(lambda: rig.idle, "all have ended")
        assert stats_of(rig).unwatched == 6
        assert len(rig.router.accounts.receipts.latest) == 2


async def test_a_picker_that_ends_waits_for_no_answer_that_it_does_not_see(tmp_path: Path) -> None:
    slow = {"fleet": SELDOM, "epp": epp(answers_watched_share=0.0)}
    async with running({}) as engines, routing(configure(*engines, **slow)) as rig:
        names = [endpoint(engine) for engine in engines]
        async with envoy(tmp_path, names, [port_of(rig)]) as through:
            status, _, _ = await through.ask("override_host", CHAT, body(TEXT))
            assert status == 200
            assert not rig.idle
    assert rig.idle


async def test_tls_with_a_certificate_of_its_own(tmp_path: Path) -> None:
    async with running({}) as engines, gateway(tmp_path, *engines, tls={}, epp=epp(tls=True)) as (_, through):
        status, _, _ = await through.ask("override_host", CHAT, body(TEXT))
        assert status == 200


async def test_two_hundred_streams_with_a_stalled_one(tmp_path: Path) -> None:
    async with running({}, {}, {}) as engines, gateway(tmp_path, *engines) as (_, through):
        asked = json.dumps(body(TEXT, stream=True, max_tokens=15_000)).encode()
        headers = {"content-type": "application/json"}
        url = through.url("override_host") + CHAT
        async with through.session.post(url, data=asked, headers=headers, read_bufsize=1024) as stalled:
            assert stalled.status == 200  # and nothing of its body is read
            texts = [f"{number} {TEXT}" for number in range(200)]
            answers = await asyncio.gather(
                *(through.ask("override_host", CHAT, body(text)) for text in texts)
            )
            assert [status for status, _, _ in answers] == [200] * 200


async def test_a_picker_is_replaced_without_a_failed_request(tmp_path: Path) -> None:
    async with running({}, {}) as engines, AsyncExitStack() as stack:
        server = ServerConfig(port=0, expose_decision=True)
        config = configure(*engines, epp=epp(), server=server)
        config = msgspec.structs.replace(config, listen=ListenSettings(drain_s_max=20.0))
        stays = await stack.enter_async_context(routing(config))
        goes = await stack.enter_async_context(routing(config))
        names = [endpoint(engine) for engine in engines]
        pickers = [port_of(stays), port_of(goes)]
        through = await stack.enter_async_context(envoy(tmp_path, names, pickers))
        statuses: list[int] = []
        ended = asyncio.Event()

        async def asks(who: int) -> None:
            while not ended.is_set():
                status, _, _ = await through.ask("override_host", CHAT, body(f"{who} {len(statuses)} {TEXT}"))
                statuses.append(status)

        async with asyncio.TaskGroup() as tasks:
            for who in range(4):
                tasks.create_task(asks(who))
            await until(lambda: sum(stats_of(goes).picks.values()) > 20, "both pickers are asked")
            goes.router.draining = lambda: True  # health checks fail, all else goes on

            async def noticed() -> bool:
                return await through.stat("cluster.picker.membership_healthy") == 1

            await until(noticed, "the gateway has noticed")
            goes.server.drain()
            await until(lambda: not stats_of(goes).connections_open, "the gateway has left")
            answered = len(statuses)
            await until(lambda: len(statuses) > answered + 20, "the other one goes on")
            ended.set()
        assert set(statuses) == {200}
        assert stats_of(goes).streams_refused == 0


async def test_without_a_picker_the_gateway_says_so(tmp_path: Path) -> None:
    """For operators: a gateway in full duplex never fails open for requests with a body."""

    async with running({}) as engines, envoy(tmp_path, [endpoint(engines[0])], [free_port()]) as through:
        with pytest.raises(aiohttp.ClientResponseError, match=r"50[03]"):
            async with through.session.post(
                through.url("override_host") + CHAT, json=body("hi"), raise_for_status=True
            ):
                pass
