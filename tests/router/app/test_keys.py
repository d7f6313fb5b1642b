"""Clients with keys before a whole router: let in, limited, refused, and their keys kept from engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import openai
import pytest

from router.admission.gate import KeyGate
from router.admission.key_file import KeyFile, digest_of
from router.admission.settings import KeySettings
from router.proxy.app import ProxyApp
from tests.support.proxy_rig import Engine, ask, request, says
from tests.support.proxy_rig import routing as proxying
from tests.support.waiting import run, until
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routing, running

RULES = """
[tenants.free]
[tenants.small]
requests_per_minute = 1
[tenants.long]
uncached_tokens_per_minute = 50
[tenants.other]
models = ["another-*"]
[tenants.one]
concurrent_requests = 1
[tenants.high]
priority = "high"
[tenants.low]
priority = "low"
""" + "".join(
    f'[[keys]]\ntenant = "{name}"\nsha256 = "{digest_of(f"key-of-{name}")}"\n'
    for name in ("free", "small", "long", "other", "one", "high", "low")
)


@asynccontextmanager
async def guarded(tmp_path: Path, **settings: Any) -> AsyncIterator[Rig]:
    path = tmp_path / "keys.toml"
    path.write_text(RULES)
    async with (
        running({}) as engines,
        routing(configure(*engines, keys=KeySettings(file=str(path), **settings))) as rig,
    ):
        yield rig


def client(rig: Rig, tenant: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key=f"key-of-{tenant}", max_retries=0)


async def chat(rig: Rig, tenant: str, text: str = "hi", model: str = MODEL) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    async with client(rig, tenant) as api:
        return await api.chat.completions.with_raw_response.create(
            model=model, messages=messages, max_tokens=3
        )


async def models(rig: Rig, tenant: str) -> list[str]:
    async with client(rig, tenant) as api:
        return [card.id for card in (await api.models.list()).data]


def test_each_refusal_as_the_openai_client_sees_it(tmp_path: Path) -> None:
    async def main() -> None:
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

    run(main())


def test_uncached_tokens_are_what_counts(tmp_path: Path) -> None:
    async def main() -> None:
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
            assert (
                'kvatlas_tenant_refused_total{reason="uncached_tokens_per_minute",tenant="long"} 1.0' in page
            )
            assert 'kvatlas_tenant_active{tenant="long"} 0.0' in page

    run(main())


def test_models_are_listed_for_those_who_may_use_them(tmp_path: Path) -> None:
    async def main() -> None:
        async with guarded(tmp_path) as rig:
            assert await models(rig, "free") == [MODEL]
            assert await models(rig, "other") == []
            with pytest.raises(openai.AuthenticationError):
                await models(rig, "nobody")
            async with client(rig, "other") as api:
                with pytest.raises(openai.NotFoundError):
                    await api.models.retrieve(MODEL)
            assert (await rig.ask("GET", "/health"))[0] == 200

    run(main())


def test_the_anthropic_client_and_its_error_shape(tmp_path: Path, anthropic: ModuleType) -> None:
    async def main() -> None:
        async with guarded(tmp_path) as rig:
            messages: Any = [{"role": "user", "content": "hi"}]

            async def asked(tenant: str) -> Any:
                async with anthropic.AsyncAnthropic(
                    base_url=rig.url, api_key=f"key-of-{tenant}", max_retries=0
                ) as api:
                    return await api.messages.create(model=MODEL, max_tokens=3, messages=messages)

            assert (await asked("free")).content
            with pytest.raises(anthropic.AuthenticationError) as unknown:
                await asked("nobody")
            assert unknown.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]

    run(main())


def test_engines_get_the_routers_key_and_not_the_clients(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(RULES)

    def gated(*, forward: bool) -> Any:
        gate = KeyGate(
            KeyFile(path, clock=lambda: 0.0),
            clock=lambda: 0.0,
            forward=forward,
            engine_fields=[(b"authorization", b"Bearer of-the-fleet")],
        )

        def wrap(app: ProxyApp) -> ProxyApp:
            app._gate = gate
            return app

        return wrap

    async def sent(forward: bool) -> str:
        async with (
            Engine(says(200, b"{}")) as engine,
            proxying(engine.url, wrap=gated(forward=forward)) as rig,
        ):
            await ask(rig, request(b"{}", "authorization: Bearer key-of-free", "x-api-key: key-of-free"))
            call = engine.calls[0]
            return f"{call.head['authorization']} {call.head['x-api-key']}"

    assert run(sent(forward=False)) == "Bearer of-the-fleet "
    assert run(sent(forward=True)) == "Bearer key-of-free key-of-free"


def gated(path: Path, **options: Any) -> Any:
    path.write_text(RULES)

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
@pytest.mark.parametrize(("tenant", "sent", "passed"), PRIORITIES)
def test_no_priority_is_above_the_tenants_class(
    tmp_path: Path, tenant: str, sent: str, passed: str, size: int
) -> None:
    async def main() -> None:
        async with (
            Engine(says(200, b"{}")) as engine,
            proxying(engine.url, wrap=gated(tmp_path / "keys.toml")) as rig,
        ):
            for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
                if size and path != "/v1/completions":
                    continue
                text = '{"model":"m",%s,"messages":["' + "x" * size + '"]}'
                key = f"authorization: Bearer key-of-{tenant}"
                got = await ask(rig, request((text % sent).encode(), key, target=path))
                assert got.status == 200
                assert engine.calls.pop().body == (text % passed).encode()

    run(main())


def test_engines_that_schedule_by_priority_are_told_a_tenants_class(tmp_path: Path) -> None:
    async def main() -> None:
        wrap = gated(tmp_path / "keys.toml", engine_priorities=True)
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

    run(main())


def test_a_client_that_leaves_gives_its_place_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with guarded(tmp_path) as rig:
            messages: Any = [{"role": "user", "content": "a long answer"}]
            async with client(rig, "one") as api:
                stream = await api.chat.completions.create(
                    model=MODEL,
                    messages=messages,
                    max_tokens=2000,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                await anext(stream)
                with pytest.raises(openai.RateLimitError):
                    await chat(rig, "one")
                await stream.close()
            gate = rig.router.gate
            assert gate is not None
            await until(lambda: gate.tenants()["one"].active == 0, "the place is free")
            assert (await chat(rig, "one")).http_response.status_code == 200

    run(main())
