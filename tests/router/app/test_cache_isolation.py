"""A whole router that isolates caches: tenants with the same prompt share nothing on any engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvatlas.router.observe.usage import UsageSettings
from kvatlas.router.openai.apis import BATCH, CHAT, COHERE, COMPLETION, GENERATE, MESSAGES, RESPONSES
from kvatlas.router.proxy.settings import ProxySettings
from tests.support.waiting import until
from tests.support.whole_router import MODEL, Rig, routed, tenants

TEXT = "the same long story about a small engine and its famous garden. " * 10
RULES = {"ada": 'cache_group = "red"', "bob": 'cache_group = "red"', "eve": 'cache_group = "blue"'}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1},
    COMPLETION: {"prompt": TEXT, "max_tokens": 1},
    MESSAGES: {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1},
    RESPONSES: {"input": TEXT, "max_output_tokens": 1},
}


SECRET = "a secret of 32 bytes or more than that"
SGLANG: dict[str, Any] = {"kind": "sglang", "groups": "full"}


@asynccontextmanager
async def isolating(
    tmp_path: Path, *fleet: dict[str, Any], router: Mapping[str, Any] | None = None, **keys: Any
) -> AsyncIterator[Rig]:
    """``router``: other parts of its configuration."""
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    settings = tenants(tmp_path, RULES, isolate_secret_file=str(secret), **keys)
    async with routed(*fleet or ({},), keys=settings, **(router or {})) as (rig, engines):
        rig.engines = engines  # type: ignore[attr-defined]
        yield rig


async def ask(rig: Rig, tenant: str, path: str, **fields: Any) -> tuple[int, str]:
    body = {"model": MODEL, **BODIES.get(path, {}), **fields}
    headers = {"authorization": f"Bearer key-of-{tenant}"}
    async with rig.session.post(rig.url + path, json=body, headers=headers) as answer:
        text = await answer.text()
    await until(lambda: rig.idle, "answered")
    await rig.caught_up(*rig.engines)  # type: ignore[attr-defined]
    return answer.status, text


@pytest.mark.parametrize("path", BODIES)
async def test_a_prompt_is_a_hit_for_its_own_tenant_alone(path: str, tmp_path: Path) -> None:
    async with isolating(tmp_path, isolate="tenant") as rig:
        for tenant in ("ada", "eve", "ada", "bob"):
            status, text = await ask(rig, tenant, path)
            assert status == 200, text
        receipts = list(rig.router.accounts.receipts.latest)
        assert [bool(receipt.actual_tokens) for receipt in receipts] == [False, False, True, False]
        assert [receipt.outcome for receipt in receipts] == ["exact"] * 4
        assert not any(receipt.salted for receipt in receipts)


async def test_tenants_of_a_group_share_what_they_cached(tmp_path: Path) -> None:
    async with isolating(tmp_path, isolate="group") as rig:
        for tenant in ("ada", "bob", "eve"):
            await ask(rig, tenant, CHAT)
        receipts = list(rig.router.accounts.receipts.latest)
        assert [bool(receipt.actual_tokens) for receipt in receipts] == [False, True, False]
        assert [receipt.outcome for receipt in receipts] == ["exact"] * 3


@pytest.mark.parametrize(
    ("isolate", "foreign"), [("tenant", [False, True, False, True]), ("group", [False, True, False, False])]
)
async def test_the_price_is_what_another_group_sent_before(
    isolate: str, foreign: list[bool], tmp_path: Path
) -> None:
    async with isolating(tmp_path, isolate=isolate) as rig:
        for tenant in ("ada", "eve", "ada", "bob"):
            await ask(rig, tenant, COMPLETION, prompt=TEXT * 20)
        await ask(rig, "eve", COMPLETION, prompt="other text " + TEXT * 20)
        await ask(rig, "bob", COMPLETION, prompt="salted " + TEXT * 20)
        await ask(rig, "eve", COMPLETION, prompt="salted " + TEXT * 20, cache_salt="own")
        receipts = list(rig.router.accounts.receipts.latest)
        assert [bool(receipt.isolated_tokens) for receipt in receipts] == [*foreign, False, False, False]
        price = receipts[1].isolated_tokens
        assert 1024 <= price <= (receipts[1].prompt_tokens or 0)
        _, page = await rig.ask("GET", "/metrics")
        labels = f'model="{MODEL}",reason="isolated",tenant="%s"'
        for tenant in ("eve", "bob") if isolate == "tenant" else ("eve",):
            assert f"kvatlas_cache_missed_tokens_total{{{labels % tenant}}} {float(price)}" in page
        assert labels % "ada" not in page
        assert "kvatlas_isolation_prefixes_dropped_total 0.0" in page


async def test_a_tenants_answers_tell_nothing_of_the_price(tmp_path: Path) -> None:
    async with isolating(tmp_path, isolate="tenant") as rig:
        answers = []
        for prompt in ("sent by ada, too. " + TEXT * 20, "sent by eve only. " + TEXT * 20):
            if "ada" in prompt:
                await ask(rig, "ada", COMPLETION, prompt=prompt)
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
            fields = {"authorization": "Bearer key-of-eve", "x-request-id": "one"}
            async with rig.session.post(rig.url + COMPLETION, json=body, headers=fields) as answer:
                usage = (await answer.json())["usage"]
                answers.append(({n: v for n, v in answer.headers.items() if n != "date"}, usage))
            await until(lambda: rig.idle, "answered")
        receipts = rig.router.accounts.receipts.latest
        assert [bool(receipt.isolated_tokens) for receipt in receipts] == [False, True, False]
        assert answers[0][0].keys() == answers[1][0].keys()
        assert answers[0][0]["x-kvatlas-hit-tokens"] == answers[1][0]["x-kvatlas-hit-tokens"] == "0"
        assert answers[0][1]["prompt_tokens_details"] == answers[1][1]["prompt_tokens_details"]


async def test_a_tenant_cannot_reach_another_ones_cache_by_a_salt(tmp_path: Path) -> None:
    """Any salt, also the one that the router made for the other."""
    async with isolating(tmp_path, isolate="tenant") as rig:
        gate = rig.router.gate
        stolen = gate.isolation.salt("ada", gate.keys.rules("ada"), b"")
        await ask(rig, "ada", CHAT)
        await ask(rig, "eve", CHAT, cache_salt=stolen)
        await ask(rig, "ada", CHAT, cache_salt="own")
        receipts = list(rig.router.accounts.receipts.latest)
        assert [receipt.actual_tokens for receipt in receipts] == [0, 0, 0]
        _, metrics = await rig.ask("GET", "/metrics")
        assert "kvatlas_keys_salted_total 4.0" in metrics, "one of them by this test"


def with_salt(stolen: str) -> list[tuple[str, bytes, dict[str, str]]]:
    """Path, text of the body behind its model, and header fields of requests with another tenant's salt."""
    prompt = json.dumps({"prompt": TEXT, "max_tokens": 1})[1:-1].encode()
    salt = json.dumps(stolen).encode()
    nested = b'{"cache_salt":%b}' % salt
    escaped = b'"cache\\u005fsalt":%b' % salt
    return [
        (COMPLETION, b'"cache_salt":%b,%b' % (salt, prompt), {}),
        (COMPLETION, b'%b,"cache_salt":"x",%b' % (prompt, escaped), {}),
        (COMPLETION, b'%b,%b,"cache_salt":%b' % (escaped, prompt, salt), {}),
        (COMPLETION, b'%b,"vllm_xargs":%b,"extra_body":%b' % (prompt, nested, nested), {}),
        (COMPLETION, b'%b,"metadata":{"cache_salt":%b}' % (prompt, salt), {}),
        (COMPLETION, prompt, {"cache_salt": stolen, "cache-salt": stolen, "x-cache-salt": stolen}),
        (
            COMPLETION,
            b'"cache_salt":%b,%b' % (salt, prompt),
            {"content-type": "application/json; charset=latin-1"},
        ),
        (COMPLETION + "/", b'"cache_salt":%b,%b' % (salt, prompt), {}),
        (COMPLETION + "?cache_salt=" + stolen, prompt, {"x-kvatlas-tenant": "ada", "tenant": "ada"}),
        (COMPLETION, b'"cache_salt":%b,"user":"ada",%b' % (salt, prompt), {"content-encoding": "identity"}),
    ]


@pytest.mark.parametrize("case", range(10))
async def test_no_spelling_of_a_salt_reaches_another_tenants_cache(case: int, tmp_path: Path) -> None:
    async with isolating(tmp_path, isolate="tenant") as rig:
        gate = rig.router.gate
        path, text, fields = with_salt(gate.isolation.salt("ada", gate.keys.rules("ada"), b""))[case]
        assert (await ask(rig, "ada", COMPLETION))[0] == 200
        headers = {"authorization": "Bearer key-of-eve", "content-type": "application/json", **fields}

        async def in_chunks() -> AsyncIterator[bytes]:
            yield b'{"model":"%b",' % MODEL.encode()
            yield text
            yield b"}"

        async with rig.session.post(rig.url + path, data=in_chunks(), headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            usage = (await answer.json())["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        await until(lambda: rig.idle, "answered")
        assert rig.router.accounts.receipts.latest[-1].outcome == "exact"


async def test_secret_and_salts_are_shown_nowhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "usage.jsonl"
    router = {"usage": UsageSettings(path=str(record))}
    async with isolating(tmp_path, router=router, isolate="tenant") as rig:
        gate = rig.router.gate
        salts = [gate.isolation.salt(name, gate.keys.rules(name), b"") for name in ("ada", "eve")]
        for tenant in ("ada", "eve", "ada"):
            assert (await ask(rig, tenant, CHAT))[0] == 200
        assert (await ask(rig, "ada", CHAT, max_tokens=-1))[0] == 400
        assert (await ask(rig, "ada", CHAT, cache_salt=7))[0] == 400
        paths = (await rig.ok("GET", "/kvatlas/openapi.json"))["paths"]
        pages = [path for path, ways in paths.items() if "get" in ways and "{" not in path]
        shown = [str(await rig.ask("GET", path)) for path in ("/metrics", *pages)]
        body = {"model": MODEL, **BODIES[CHAT]}
        shown.append(str(await rig.ok("POST", "/kvatlas/explain?tenant=ada", body)))
        assert len(shown) >= 8
    shown += [record.read_text(), *capfd.readouterr()]
    for secret in (SECRET, *salts, "key-of-ada"):
        assert not [text[:200] for text in shown if secret in text]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{**IMAGE, "uuid": "logo"}]}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"image_url": None, "uuid": 7}]}]}),
        (BATCH, {"messages": [[{"role": "user", "content": [{"type": "video_url", "uuid": "logo"}]}]]}),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": [{**IMAGE, "uuid": "logo"}]}]}),
        ("/score", {"text_1": "a", "text_2": {"content": [{**IMAGE, "uuid": "logo"}]}}),
        (GENERATE, {"token_ids": [1], "features": {"mm_hashes": {"image": ["logo"]}}}),
    ],
)
async def test_an_image_by_the_name_of_another_tenants_is_refused(
    path: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    async with isolating(tmp_path, isolate="tenant") as rig:
        for body in (json.dumps(fields), json.dumps(fields).replace("uuid", "uu\\u0069d")):
            headers = {"authorization": "Bearer key-of-eve", "content-type": "application/json"}
            data = f'{{"model": "{MODEL}", {body[1:]}'
            async with rig.session.post(rig.url + path, data=data, headers=headers) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["code"]) == (400, "media_name_not_accepted")


async def test_a_rendered_prompt_gets_its_salt_when_it_is_generated(tmp_path: Path) -> None:
    """Engines show the salt of a rendered request; the client sends it to be generated."""
    async with isolating(tmp_path, isolate="tenant", client_salts="refuse") as rig:
        assert (await ask(rig, "ada", CHAT))[0] == 200
        status, text = await ask(rig, "ada", CHAT + "/render", **BODIES[CHAT])
        rendered = json.loads(text)
        assert (status, rendered["cache_salt"]) == (200, None)
        for tenant in ("ada", "eve"):
            status, text = await ask(rig, tenant, GENERATE, **rendered)
            assert status == 200, text
        receipts = list(rig.router.accounts.receipts.latest)
        assert [bool(receipt.actual_tokens) for receipt in receipts] == [False, True, False]


async def test_an_audio_form_is_refused_unless_its_path_is_passed(tmp_path: Path) -> None:
    path = "/v1/audio/transcriptions"
    for passed in (frozenset[str](), frozenset({path})):
        proxy = ProxySettings(passed_paths=passed)
        async with isolating(tmp_path, isolate="tenant", router={"proxy": proxy}) as rig:
            form = aiohttp.FormData({"model": MODEL})
            form.add_field("file", b"x" * 100, filename="a.wav")
            headers = {"authorization": "Bearer key-of-ada"}
            async with rig.session.post(rig.url + path, data=form, headers=headers) as answer:
                assert answer.status == (404 if passed else 400)
                assert ("cache_salt_not_accepted" in await answer.text()) == (not passed)


async def test_passed_paths_open_no_way_around_a_salt(tmp_path: Path) -> None:
    """They are for paths that take none."""
    router = {"proxy": ProxySettings(passed_paths=frozenset({CHAT, COMPLETION}))}
    async with isolating(tmp_path, router=router, isolate="tenant") as rig:
        for tenant in ("ada", "eve"):
            assert (await ask(rig, tenant, COMPLETION))[0] == 200
        assert [receipt.actual_tokens for receipt in rig.router.accounts.receipts.latest] == [0, 0]
        named = [{"role": "user", "content": [{**IMAGE, "uuid": "logo"}]}]
        assert "media_name_not_accepted" in (await ask(rig, "eve", CHAT, messages=named))[1]
        headers = {"authorization": "Bearer key-of-eve", "content-type": "application/json"}
        data = json.dumps({"model": MODEL, "prompt": TEXT}).encode("utf-16")
        async with rig.session.post(rig.url + COMPLETION, data=data, headers=headers) as answer:
            assert answer.status == 400


async def test_sglang_gets_no_prompt_whose_salt_it_would_drop(tmp_path: Path) -> None:
    """Its Messages API has no ``cache_salt``; its chats have."""
    async with isolating(tmp_path, SGLANG, isolate="tenant") as rig:
        status, text = await ask(rig, "ada", MESSAGES)
        assert (status, "/v1/messages takes no cache_salt at SGLang engines" in text) == (400, True)
        assert [(await ask(rig, tenant, CHAT))[0] for tenant in ("ada", "eve")] == [200, 200]
        assert [one.actual_tokens for one in rig.router.accounts.receipts.latest] == [0, 0]
    async with isolating(tmp_path, SGLANG, {}, isolate="tenant") as rig:
        for tenant in ("ada", "eve", "ada", "eve"):
            status, text = await ask(rig, tenant, MESSAGES)
            assert status == 200, text
        receipts = list(rig.router.accounts.receipts.latest)
        assert {one.engine_id for one in receipts} == {rig.engines[1].base_url}  # type: ignore[attr-defined]
        assert [bool(one.actual_tokens) for one in receipts] == [False, False, True, True]


async def test_prompts_that_cannot_be_isolated_are_refused(tmp_path: Path) -> None:
    async with isolating(tmp_path, isolate="tenant", client_salts="refuse") as rig:
        status, text = await ask(rig, "ada", CHAT, cache_salt="own")
        assert (status, "cache_salt_not_accepted" in text) == (400, True)
        status, text = await ask(rig, "ada", COHERE, messages=[{"role": "user", "content": "a"}])
        assert (status, "takes no cache_salt" in text) == (400, True)
        headers = {"authorization": "Bearer key-of-ada", "content-type": "application/json"}
        data = '{"model": "m", "prompt": "a"}'.encode("utf-16")
        async with rig.session.post(rig.url + COMPLETION, data=data, headers=headers) as answer:
            assert answer.status == 400
            assert "UTF-8" in await answer.text()
