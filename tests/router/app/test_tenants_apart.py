"""Tenants before a whole router: nothing of one's responses is seen by another, by any way."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import yarl

from kvatlas.router.proxy.settings import ProxySettings
from tests.support.clients import openai_client
from tests.support.whole_router import MODEL, Rig, routed, tenants

RULES = {"ada": f'models = ["{MODEL}"]', "eve": "", "low": 'priority = "low"'}


@asynccontextmanager
async def guarded(tmp_path: Path, proxy: ProxySettings | None = None) -> AsyncIterator[Rig]:
    keys = tenants(tmp_path, RULES)
    async with routed({}, {}, keys=keys, proxy=proxy or ProxySettings()) as (rig, _):
        yield rig


def client(rig: Rig, tenant: str) -> openai.AsyncOpenAI:
    return openai_client(rig.url, key=f"key-of-{tenant}")


async def ask(rig: Rig, tenant: str, method: str, path: str, body: Any = None) -> tuple[int, str]:
    data = io.BytesIO(json.dumps(body).encode()) if body is not None else None
    headers = {"authorization": f"Bearer key-of-{tenant}", "content-type": "application/json"}
    url = yarl.URL(rig.url + path, encoded=True)  # as it is spelled
    async with rig.session.request(method, url, data=data, headers=headers) as answer:
        content = (await answer.json(content_type=None) if answer.status >= 400 else {}) or {}
        return answer.status, content.get("error", {}).get("code", "")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_there_for_its_tenant_alone(tmp_path: Path, stream: bool) -> None:
    async with guarded(tmp_path) as rig, client(rig, "ada") as ada, client(rig, "eve") as eve:
        made: Any = await ada.responses.create(
            model=MODEL, input="a secret", max_output_tokens=4, stream=stream
        )
        if stream:
            made = [event async for event in made][-1].response
        assert (await ada.responses.retrieve(made.id)).id == made.id
        with pytest.raises(openai.NotFoundError) as missing:
            await eve.responses.retrieve(made.id)
        assert missing.value.code == "response_not_found"
        for refused in (eve.responses.cancel, eve.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await refused(made.id)
        with pytest.raises(openai.NotFoundError):
            await eve.responses.create(model=MODEL, input="go on", previous_response_id=made.id)
        more = await ada.responses.create(
            model=MODEL, input="go on", previous_response_id=made.id, max_output_tokens=4
        )
        assert more.id != made.id


async def test_no_spelling_of_a_path_or_body_gets_at_a_response(tmp_path: Path) -> None:
    async with guarded(tmp_path) as rig, client(rig, "ada") as ada:
        made = await ada.responses.create(model=MODEL, input="a secret", max_output_tokens=4)
        known = f"/v1/responses/{made.id}"
        for path in (
            known,
            known + "/",
            known + "/input_items",
            known + "?stream=true",
            f"/v1//responses/{made.id}",
            f"/v1/./responses/{made.id}",
            f"/v1/x/../responses/{made.id}",
            f"/v1/responses/./{made.id}",
            f"/v1/responses/%72{made.id[1:]}",
            f"/v1/%72esponses/{made.id}",
            f"/v1/Responses/{made.id}",
        ):
            for method in ("GET", "DELETE", "HEAD"):
                status, _ = await ask(rig, "eve", method, path)
                assert status in (403, 404), (method, path)
        body = {"model": MODEL, "input": "x", "previous_response_id": made.id}
        assert await ask(rig, "eve", "POST", "/v1/responses", body) == (404, "response_not_found")
        assert await ask(rig, "eve", "POST", "/v1/responses/render", body) == (404, "response_not_found")
        padded = body | {"instructions": "x" * (5 << 20)}
        assert await ask(rig, "eve", "POST", "/v1/responses", padded) == (404, "response_not_found")
        own = {"model": MODEL, "input": "x", "request_id": made.id}
        assert await ask(rig, "eve", "POST", "/v1/responses", own) == (400, "id_in_use")
        assert (await ask(rig, "ada", "GET", known))[0] == 200
        # a key for some models only may end its own
        status, code = await ask(rig, "ada", "POST", known + "/cancel")
        assert code not in ("model_not_allowed", "response_not_found")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/files", None),
        ("GET", "/v1/batches/batch_1", None),
        ("POST", "/v1/batches", {"input_file_id": "file_1"}),
        ("POST", "/v1/conversations", {}),
        # A model named beside makes nothing one's own.
        ("POST", "/v1/batches", {"input_file_id": "file_1", "model": MODEL}),
        ("POST", "/v1/batches/batch_1/cancel", {"model": MODEL}),
        ("POST", "/v1/conversations", {"model": MODEL}),
        ("POST", "/v1/chat/completions/chat_1", {"model": MODEL, "metadata": {}}),
        ("POST", "/v1//responses", {"model": MODEL, "input": "x", "request_id": "resp_1"}),
        ("POST", "/v1/vector_stores/vs_1/search", {"model": MODEL, "query": "x"}),
        ("GET", "/v1/conversations/conv_1/items", None),
        ("DELETE", "/v1/files/file_1", None),
        ("GET", "/v1/chat/completions/chat_1", None),
    ],
)
async def test_paths_that_engines_do_not_separate_by_key_are_refused(
    tmp_path: Path, method: str, path: str, body: Any
) -> None:
    async with guarded(tmp_path) as rig:
        for tenant in ("ada", "eve"):
            assert await ask(rig, tenant, method, path, body) == (403, "path_not_kept_apart")
        status, _ = await ask(rig, "eve", "POST", "/v1/images/generations", {"model": MODEL})
        assert status == 404  # the engine's: a model is named, nothing is kept
    open_paths = ProxySettings(passed_paths=frozenset({path}))
    async with guarded(tmp_path, open_paths) as rig:
        assert (await ask(rig, "eve", method, path, body))[1] != "path_not_kept_apart"


async def test_without_keys_a_response_is_found_by_all() -> None:
    async with routed({}, {}) as (rig, _):
        made = await rig.api.responses.create(model=MODEL, input="x", max_output_tokens=4)
        assert (await rig.api.responses.retrieve(made.id)).id == made.id
