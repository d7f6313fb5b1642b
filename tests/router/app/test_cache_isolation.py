"""A whole router that isolates caches: tenants with the same prompt share nothing on any engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from router.openai.request import CHAT, COHERE, COMPLETION, MESSAGES, RESPONSES
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


@asynccontextmanager
async def isolating(tmp_path: Path, **keys: Any) -> AsyncIterator[Rig]:
    secret = tmp_path / "secret"
    secret.write_text("a secret of 32 bytes or more than that")
    settings = tenants(tmp_path, RULES, isolate_secret_file=str(secret), **keys)
    async with routed({}, keys=settings) as (rig, engines):
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
    """Whatever salt it sends, also the one that the router made for the other."""
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
        for shown in ("/metrics", "/kvatlas/receipts", "/kvatlas/engines", "/kvatlas/requests"):
            assert stolen not in str(await rig.ask("GET", shown))


async def test_what_cannot_be_isolated_is_refused(tmp_path: Path) -> None:
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
