"""Clients with keys before a whole router: let in, limited, refused, and their keys kept from engines."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import openai
import pytest
import structlog

from kvatlas.router.admission.gate import KeyGate
from kvatlas.router.admission.isolation import read_secret
from kvatlas.router.admission.key_file import KeyFile
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.http.refusal_log import RefusalLog
from kvatlas.router.proxy.app import ProxyApp
from tests.support.clients import anthropic_client, openai_client
from tests.support.proxy_rig import Engine, ask, request, says, served
from tests.support.proxy_rig import routing as proxying
from tests.support.waiting import until
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routed, routing, tenants

RULES = {
    "free": "",
    "small": "requests_per_minute = 1",
    "long": "uncached_tokens_per_minute = 50",
    "other": 'models = ["another-*"]',
    "one": "concurrent_requests = 1",
    "high": 'priority = "high"',
    "low": 'priority = "low"',
    "limited": f'models = ["{MODEL}"]',
}


@asynccontextmanager
async def guarded(tmp_path: Path, **settings: Any) -> AsyncIterator[Rig]:
    async with routed({}, keys=tenants(tmp_path, RULES, **settings)) as (rig, _):
        yield rig


def client(rig: Rig, tenant: str) -> openai.AsyncOpenAI:
    return openai_client(rig.url, key=f"key-of-{tenant}")


async def chat(rig: Rig, tenant: str, text: str = "hi", model: str = MODEL) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    async with client(rig, tenant) as api:
        return await api.chat.completions.with_raw_response.create(
            model=model, messages=messages, max_tokens=3
        )


async def models(rig: Rig, tenant: str) -> list[str]:
    async with client(rig, tenant) as api:
        return [card.id for card in (await api.models.list()).data]


async def test_each_refusal_as_the_openai_client_sees_it(tmp_path: Path) -> None:
    async with guarded(tmp_path) as rig:
        with pytest.raises(openai.AuthenticationError) as unknown:
            await chat(rig, "nobody")
        assert unknown.value.code == "invalid_api_key"
        assert "key-of-nobody" not in str(unknown.value)
        with pytest.raises(openai.PermissionDeniedError) as forbidden:
            await chat(rig, "other")
        assert forbidden.value.code == "model_not_allowed"
        first = await chat(rig, "small")
        assert first.headers["x-ratelimit-limit-requests"] == "1"
        assert first.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError) as limited:
            await chat(rig, "small")
        assert limited.value.code == "rate_limit_exceeded"
        assert int(limited.value.response.headers["retry-after"]) > 30
        assert (await chat(rig, "free")).http_response.status_code == 200, "others are not concerned"


async def test_uncached_tokens_are_what_counts(tmp_path: Path) -> None:
    async with guarded(tmp_path) as rig:
        await chat(rig, "free", TEXT * 20)
        await until(lambda: rig.idle, "request over")
        await chat(rig, "long", TEXT * 20)  # in the cache but for its last block
        await until(lambda: rig.idle, "request over")
        long = rig.router.gate.tenants()["long"]  # type: ignore[union-attr]
        assert long.cached_tokens > 200
        assert 0 < long.uncached_tokens < 50
        await chat(rig, "long", "Another one altogether. " + TEXT * 20)
        with pytest.raises(openai.RateLimitError) as limited:
            await chat(rig, "long")
        assert "uncached_tokens_per_minute = 50" in str(limited.value)
        _, page = await rig.ask("GET", "/metrics")
        assert 'kvatlas_tenant_refused_total{reason="uncached_tokens_per_minute",tenant="long"} 1.0' in page
        assert 'kvatlas_tenant_active{tenant="long"} 0.0' in page


async def test_models_are_listed_for_those_who_may_use_them(tmp_path: Path) -> None:
    async with guarded(tmp_path) as rig:
        assert await models(rig, "free") == [MODEL]
        assert await models(rig, "other") == []
        with pytest.raises(openai.AuthenticationError):
            await models(rig, "nobody")
        async with client(rig, "other") as api:
            with pytest.raises(openai.NotFoundError):
                await api.models.retrieve(MODEL)
        assert (await rig.ask("GET", "/health"))[0] == 200


async def test_the_anthropic_client_and_its_error_shape(tmp_path: Path, anthropic: ModuleType) -> None:
    async with guarded(tmp_path) as rig:
        messages: Any = [{"role": "user", "content": "hi"}]

        async def asked(tenant: str) -> Any:
            async with anthropic_client(anthropic, rig.url, key=f"key-of-{tenant}") as api:
                return await api.messages.create(model=MODEL, max_tokens=3, messages=messages)

        assert (await asked("free")).content
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            await asked("nobody")
        assert unknown.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


@pytest.mark.parametrize(
    ("forward", "seen"), [(False, ("Bearer of-the-fleet", "")), (True, ("Bearer key-of-free", "key-of-free"))]
)
async def test_engines_get_the_routers_key_and_not_the_clients(
    tmp_path: Path, forward: bool, seen: tuple[str, str]
) -> None:
    wrap = gated(tmp_path, forward=forward, engine_fields=[(b"authorization", b"Bearer of-the-fleet")])
    async with served(says(200, b"{}"), wrap=wrap) as (engine, rig):
        await ask(rig, request(b"{}", "authorization: Bearer key-of-free", "x-api-key: key-of-free"))
        head = engine.calls[0].head
        assert (head["authorization"], head["x-api-key"]) == seen


def gated(folder: Path, **options: Any) -> Any:
    path = Path(tenants(folder, RULES).file)

    def wrap(app: ProxyApp) -> ProxyApp:
        app._gate = KeyGate(KeyFile(path, clock=lambda: 0.0), clock=lambda: 0.0, **options)
        return app

    return wrap


PRIORITIES = [
    ("low", '"priority":-5', '"priority":1'),
    ("low", '"priority":0', '"priority":1'),
    ("low", '"priority":7', '"priority":7'),
    ("low", '"priority":"-5"', '"priority":1'),
    ("low", '"priority":-5.0', '"priority":1'),
    ("low", '"priority":false', '"priority":1'),
    ("low", '"prior\\u0069ty":-5', '"prior\\u0069ty":1'),
    ("low", '"priority":3,"priority":-5', '"priority":3,"priority":1'),
    ("low", '"priority":null', '"priority":null'),
    ("low", '"x":1', '"x":1'),
    ("free", '"priority":-5', '"priority":0'),
    ("free", '"priority":0', '"priority":0'),
    ("free", '"priority":2', '"priority":2'),
    ("high", '"priority":-5', '"priority":-5'),
    ("high", '"priority":2', '"priority":2'),
]


@pytest.mark.parametrize("size", [0, 5 << 20], ids=["small", "above 4 MiB"])
async def test_no_priority_is_above_the_tenants_class(tmp_path: Path, size: int) -> None:
    paths = ["/v1/completions"] if size else ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    async with served(says(200, b"{}"), wrap=gated(tmp_path)) as (engine, rig):
        for (tenant, sent, passed), path in itertools.product(PRIORITIES, paths):
            text = '{"model":"m",%s,"messages":["' + "x" * size + '"]}'
            key = f"authorization: Bearer key-of-{tenant}"
            got = await ask(rig, request((text % sent).encode(), key, target=path))
            assert got.status == 200, (tenant, sent)
            assert engine.calls.pop().body == (text % passed).encode(), (tenant, sent)


async def test_engines_that_schedule_by_priority_get_a_tenants_class(tmp_path: Path) -> None:
    wrap = gated(tmp_path, engine_priorities=True)
    async with Engine(says(200, b"{}")) as engine, proxying(engine.url, wrap=wrap) as rig:
        for tenant, body, passed in (
            ("low", b'{"model":"m"}', b'{"priority":1,"model":"m"}'),
            ("low", b" {} ", b' {"priority":1} '),
            ("low", b'{"model":"m","priority":-1}', b'{"model":"m","priority":1}'),
            ("free", b'{"model":"m"}', b'{"model":"m"}'),
            ("high", b'{"model":"m"}', b'{"priority":-1,"model":"m"}'),
            ("high", b'{"model":"m","priority":2}', b'{"model":"m","priority":2}'),
        ):
            key = f"authorization: Bearer key-of-{tenant}"
            assert (await ask(rig, request(body, key, target="/v1/completions"))).status == 200
            assert engine.calls.pop().body == passed


async def test_a_client_that_leaves_gives_its_place_back(tmp_path: Path) -> None:
    async with guarded(tmp_path) as rig:
        messages: Any = [{"role": "user", "content": "a long answer"}]
        async with client(rig, "one") as api:
            stream = await api.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
            )
            await anext(stream)
            with pytest.raises(openai.RateLimitError):
                await chat(rig, "one")
            await stream.close()
        gate = rig.router.gate
        await until(lambda: gate.tenants()["one"].active == 0, "the place is free")
        assert (await chat(rig, "one")).http_response.status_code == 200


WORDS = "a word " * 3000
CHARGED = [
    (
        "/v1/embeddings",
        {"model": "m", "input": WORDS},
        {"usage": {"prompt_tokens": 3000, "total_tokens": 3000}},
        3000,
    ),
    ("/v1/score", {"model": "m", "text_1": WORDS}, {"usage": {"prompt_tokens": 3000}}, 3000),
    ("/v1/rerank", {"model": "m", "query": WORDS}, {"usage": {"prompt_tokens": 3000}}, 3000),
    ("/v2/rerank", {"model": "m", "query": WORDS}, {"usage": {"prompt_tokens": 3000}}, 3000),
    ("/pooling", {"model": "m", "input": WORDS}, {"usage": {"prompt_tokens": 3000}}, 3000),
    ("/classify", {"model": "m", "input": WORDS}, {"usage": {"prompt_tokens": 3000}}, 3000),
    ("/v2/embed", {"model": "m", "texts": [WORDS]}, {"meta": {"billed_units": {"input_tokens": 3000}}}, 3000),
    ("/v1/audio/transcriptions", None, {"text": "x", "usage": {"type": "duration", "seconds": 61}}, 3050),
    ("/v1/embeddings", {"model": "m", "input": WORDS}, {"no": "usage"}, 5250),
    ("/v1/completions", {"model": "m", "prompt_embeds": WORDS}, {"usage": {"prompt_tokens": 7}}, 7),
    ("/tokenize", {"model": "m", "prompt": WORDS}, {"tokens": [1], "count": 1}, 328),
]


@pytest.mark.parametrize(("path", "body", "answer", "charged"), CHARGED)
async def test_every_api_is_charged_by_what_the_engine_reports_else_by_size(
    tmp_path: Path, path: str, body: Any, answer: Any, charged: int
) -> None:
    async with Engine(says(200, json.dumps(answer).encode(), "content-type: application/json")) as engine:
        config = configure(EngineAddress(engine.url), keys=tenants(tmp_path, RULES))
        engine.script = serving("m", engine.script)
        async with routing(config) as rig:
            if body is None:
                form = aiohttp.FormData()
                form.add_field("model", "m")
                form.add_field("file", b"x" * 100_000, filename="a.wav")
                sent: Any = {"data": form}
            else:
                sent = {"json": body}
            headers = {"authorization": "Bearer key-of-free"}
            async with rig.session.post(rig.url + path, headers=headers, **sent) as got:
                assert got.status == 200
            await until(lambda: rig.idle, "request over")
            found = rig.router.gate.tenants()["free"].uncached_tokens  # type: ignore[union-attr]
            assert abs(found - charged) <= 20


def serving(model: str, script: Any) -> Any:
    """An engine that also says which model it serves."""
    models = says(200, json.dumps({"data": [{"id": model}]}).encode(), "content-type: application/json")

    async def both(engine: Engine, call: Any, writer: Any) -> None:
        chosen = models if call.head.first[1].startswith("/v1/models") else script
        await chosen(engine, call, writer)

    return both


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
async def test_a_refused_request_costs_no_tokens(tmp_path: Path, status: int) -> None:
    async with Engine(says(status, b"{}")) as engine:
        engine.script = serving("m", engine.script)
        config = configure(EngineAddress(engine.url), keys=tenants(tmp_path, RULES))
        async with routing(config) as rig:
            headers = {"authorization": "Bearer key-of-long"}
            for _ in range(3):
                body = {"model": "m", "prompt": WORDS}
                async with rig.session.post(f"{rig.url}/v1/completions", headers=headers, json=body) as got:
                    assert got.status >= 400
                    assert "limit" not in await got.text()
            await until(lambda: rig.idle, "requests over")
            assert rig.router.gate.tenants()["long"].uncached_tokens == 0  # type: ignore[union-attr]


async def test_requests_for_which_no_engine_is_there_cost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with guarded(tmp_path) as rig:
        monkeypatch.setattr(type(rig.router.fleet), "ready", lambda fleet, model: [])
        for _ in range(3):
            with pytest.raises(openai.InternalServerError) as refused:
                await chat(rig, "small")
            assert refused.value.code == "no_ready_engine"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/x", "/v1/chat/completions"])
async def test_an_unknown_key_is_answered_with_an_id_and_logged(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.router.api.asgi._refusals", RefusalLog(lambda: 0.0))
    async with guarded(tmp_path) as rig:
        for given in ({}, {"x-request-id": "mine"}):
            headers = {"authorization": "Bearer wrong", **given}
            with structlog.testing.capture_logs() as logs:
                async with rig.session.get(rig.url + path, headers=headers) as got:
                    assert got.status == 401
                    request_id = got.headers["x-request-id"]
            assert request_id == given.get("x-request-id", request_id)
            assert [line["request_id"] for line in logs if line["event"] == "request refused"] == [request_id]


async def test_a_tenant_reaches_no_adapter_past_its_models(tmp_path: Path) -> None:
    """SGLang takes ``lora_path`` beside a model that the key may use."""
    async with guarded(tmp_path) as rig:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        refused: list[tuple[int, str, str, dict[str, Any]]] = [
            (403, "model_not_allowed", "limited", {"lora_path": "secret"}),
            (403, "model_not_allowed", "limited", {"sampling_params": {"lora_path": ["secret"]}}),
            (400, "field_not_accepted", "free", {"session_params": {"id": "eve's"}}),
            (400, "field_not_accepted", "free", {"vllm_xargs": {"extra_key": "x"}}),
        ]
        for status, code, tenant, more in refused:
            headers = {"authorization": f"Bearer key-of-{tenant}"}
            async with rig.session.post(
                rig.url + "/v1/chat/completions", json=body | more, headers=headers
            ) as got:
                assert (got.status, (await got.json())["error"]["code"]) == (status, code), more
        headers = {"authorization": "Bearer key-of-free"}
        async with rig.session.post(
            rig.url + "/v1/chat/completions", json=body | {"lora_path": "a"}, headers=headers
        ) as got:
            assert got.status == 200


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o604])
def test_a_secret_that_everybody_can_read_is_named_in_the_log_once(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "isolate.secret"
    path.write_text("s" * 32)
    path.chmod(mode)
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            read_secret(path, "keys.isolate_secret_file")
    assert [(line["setting"], line["remedy"]) for line in logs] == (
        [("keys.isolate_secret_file", f"chmod 600 {path}")] if mode & 0o004 else []
    )


@pytest.mark.parametrize("page", ["docs/tenants.md", "docs/connectors.md"])
def test_the_documented_command_makes_a_private_file(page: str) -> None:
    text = (Path(__file__).parents[3] / page).read_text()
    for command in re.findall(r"\(?[^(\n`]*openssl rand[^);\n`]*> *[\w.]+\)?", text):
        assert "umask 077" in command, command
