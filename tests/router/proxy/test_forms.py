"""Audio uploads through the proxy: placed by their model, screened, and bound by keys as JSON is."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.proxy.settings import ProxySettings
from tests.support.clients import openai_client
from tests.support.proxy_rig import Engine, Script, ask, routing, says
from tests.support.whole_router import Rig, configure, tenants
from tests.support.whole_router import routing as whole

JSON = "content-type: application/json"
PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
GONE = '{"kv_transfer_params":"x"}'
FIELDS = [
    ("kv_transfer_params", "{}"),
    ("ec_transfer_params", "{}"),
    (" KV_transfer_params", "{}"),
    ("vllm_xargs", GONE),
    ("vllm_xargs", '{"a":1,"ec_transfer_params":["x"]}'),
    ("vllm_xargs", '{"kv\\u005ftransfer_params":"x"}'),
    ("vllm_xargs", '{}, "vllm_xargs": ' + GONE),
    ("vllm_xargs[kv_transfer_params]", "x"),
    ("vllm_xargs[x]", "x"),
    ("Vllm_xargs", GONE),
    ("sampling_params", '{"extra_args":{"kv_transfer_params":1}}'),
]


def form(*fields: tuple[str, str], boundary: str = "x7") -> bytes:
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in (*fields, ('file"; filename="a.wav', "RIFF"))
    ]
    return "".join((*parts, f"--{boundary}--\r\n")).encode()


def upload(body: bytes, path: str, *fields: str, kind: str = "multipart/form-data; boundary=x7") -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "host: a",
        f"content-length: {len(body)}",
        f"content-type: {kind}",
        *fields,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("name", "value"), FIELDS)
async def test_forbidden_fields_are_refused_in_forms_too(path: str, name: str, value: str) -> None:
    async with Engine(says(200, b"{}")) as engine, routing(engine.url) as rig:
        got = await ask(rig, upload(form(("model", "m"), (name, value)), path))
        assert got.status == 400
        assert got.json()["error"]["code"] in ("form_field_refused", "invalid_form", "invalid_json")
        assert not engine.calls
        assert rig.stats.forms_refused == 1
        fine = form(("model", "m"), ("vllm_xargs", '{"top":[1]}'), ("prompt", "kv_transfer_params"))
        assert (await ask(rig, upload(fine, path))).status == 200
        assert engine.calls[0].body == fine


async def test_an_urlencoded_form_is_screened_as_well() -> None:
    async with Engine(says(200, b"{}")) as engine, routing(engine.url) as rig:
        kind = "application/x-www-form-urlencoded"
        for body in (
            b"model=m&kv_transfer_params=1",
            b"model=m&vllm%5Fxargs=%7B%22kv_transfer_params%22:1%7D",
        ):
            assert (await ask(rig, upload(body, PATHS[0], kind=kind))).status == 400
        assert not engine.calls
        assert (await ask(rig, upload(b"model=m&x=1", PATHS[0], kind=kind))).status == 200


async def test_trusted_clients_may_say_it_in_forms() -> None:
    trusting = ProxySettings(trust_client_kv_transfer_params=True)
    async with Engine(says(200, b"{}")) as engine, routing(engine.url, settings=trusting) as rig:
        body = form(("model", "m"), ("vllm_xargs", GONE))
        assert (await ask(rig, upload(body, PATHS[0]))).status == 200
        assert engine.calls[0].body == body


@pytest.mark.parametrize("mode", ["strip", "refuse"])
async def test_the_report_mode_is_refused_in_forms(mode: Any) -> None:
    strict = ProxySettings(kv_cache_report_mode=mode)
    async with Engine(says(200, b"{}")) as engine, routing(engine.url, settings=strict) as rig:
        body = form(("model", "m"), ("vllm_xargs", '{"kv_cache_report_mode":"full"}'))
        assert (await ask(rig, upload(body, PATHS[0]))).status == 400
        assert not engine.calls


async def test_two_content_types_hide_no_form() -> None:
    async with Engine(says(200, b"{}")) as engine, routing(engine.url) as rig:
        body = form(("model", "m"), ("vllm_xargs", GONE))
        assert (await ask(rig, upload(body, PATHS[0], "content-type: text/plain"))).status == 400
        assert not engine.calls


def serving(model: str) -> Script:
    models = says(200, json.dumps({"data": [{"id": model}]}).encode(), JSON)
    text = says(200, json.dumps({"text": model}).encode(), JSON)

    async def both(engine: Engine, call: Any, writer: Any) -> None:
        await (models if call.head.first[1] == "/v1/models" else text)(engine, call, writer)

    return both


async def transcribe(rig: Rig, model: str, key: str = "none") -> str:
    async with openai_client(rig.url, key=key) as client:
        return (await client.audio.transcriptions.create(model=model, file=("a.wav", b"\0" * 4000))).text


async def test_an_upload_goes_to_an_engine_that_serves_its_model(tmp_path: Path) -> None:
    """Also by an alias, and only with a key for that model, however the form is written."""
    async with Engine(serving("tiny")) as tiny, Engine(serving("large")) as large:
        config = configure(
            EngineAddress(tiny.url),
            EngineAddress(large.url),
            keys=tenants(tmp_path, {"all": 'models = ["*"]', "some": 'models = ["tiny"]'}),
            aliases={"best": {"large": 1.0}},
        )
        async with whole(config) as rig:
            for _ in range(6):
                assert await transcribe(rig, "tiny", "key-of-all") == "tiny"
                assert await transcribe(rig, "large", "key-of-all") == "large"
                assert await transcribe(rig, "best", "key-of-all") == "large"
            with pytest.raises(openai.NotFoundError):
                await transcribe(rig, "nothing", "key-of-all")
            assert await transcribe(rig, "tiny", "key-of-some") == "tiny"
            with pytest.raises(openai.PermissionDeniedError):
                await transcribe(rig, "large", "key-of-some")
            for body in (
                form(),
                form(("model", "tiny"), ("model", "large")),
                form(("model", "tiny"), ("Model", "large")),
                form(("model", "large")),
                b'{"model":"tiny"}',
            ):
                headers = {
                    "authorization": "Bearer key-of-some",
                    "content-type": "multipart/form-data; boundary=x7",
                }
                async with rig.session.post(rig.url + PATHS[0], data=body, headers=headers) as got:
                    assert got.status in (400, 403)
            upload = aiohttp.FormData({"model": "tiny", "stream": "true"})
            upload.add_field("file", io.BytesIO(b"\0" * (3 << 20)), filename="a.wav")
            headers = {"authorization": "Bearer key-of-some"}
            async with rig.session.post(rig.url + PATHS[0], data=upload, headers=headers) as got:
                assert (await got.json())["text"] == "tiny"
