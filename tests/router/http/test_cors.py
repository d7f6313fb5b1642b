"""Browsers: preflights and answers as vLLM gives them, one policy per answer, nothing of other clients."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from kvatlas.router.config.schema import ServerConfig
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.http.settings import CorsSettings
from tests.support.proxy_rig import Engine, answer
from tests.support.whole_router import Rig, configure, routing

PAGE = "https://chat.example.com"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}
MODELS = b'{"object":"list","data":[{"id":"m","object":"model","root":"m","parent":null,"max_model_len":99}]}'
BODY = {"model": "m", "prompt": "x"}


async def _script(engine: Engine, call: Any, writer: Any) -> None:
    models = call.head.first[1] == "/v1/models"
    fields = ("access-control-allow-origin: *", "vary: Origin", "content-type: application/json")
    writer.write(answer(200, MODELS if models else b"{}", *fields))


async def _asked(rig: Rig, method: str, path: str, **options: Any) -> aiohttp.ClientResponse:
    async with rig.session.request(method, rig.url + path, **options) as got:
        await got.read()
        return got


def _of(got: aiohttp.ClientResponse, name: str) -> list[str]:
    return got.headers.getall(f"access-control-allow-{name}", [])


def _config(engine: Engine, **changes: Any) -> Any:
    return configure(EngineAddress(engine.url), **changes)


async def test_every_page_may_ask_by_default() -> None:
    async with Engine(_script) as engine, routing(_config(engine)) as rig:
        for path in ("/v1/chat/completions", "/v1/models", "/v1/anything"):
            got = await _asked(rig, "OPTIONS", path, headers=PREFLIGHT)
            assert (got.status, _of(got, "origin")) == (200, ["*"])
            assert "POST" in _of(got, "methods")[0]
            assert _of(got, "headers") == ["authorization,content-type"]
        for method, path, body in (
            ("GET", "/v1/models", None),
            ("POST", "/v1/completions", BODY),
            ("GET", "/nothing", None),
        ):
            got = await _asked(rig, method, path, json=body, headers={"origin": PAGE})
            assert _of(got, "origin") == ["*"], path
            assert got.headers.getall("vary", []) in ([], ["Origin"])
            plain = await _asked(rig, method, path, json=body)
            assert got.status == plain.status
        assert all(call.head.first[0] != "OPTIONS" for call in engine.calls)


@pytest.mark.parametrize(
    ("headers", "method", "refused"),
    [
        ("authorization, X-One, accept", "POST", ""),
        ("authorization, x-two", "POST", "headers"),
        ("authorization", "PUT", "method"),
        (None, "POST", ""),
    ],
)
async def test_some_headers_and_methods_only(headers: str | None, method: str, refused: str) -> None:
    cors = CorsSettings(allowed_headers=("Authorization", "x-one"), allowed_methods=("POST",))
    asked = {"origin": PAGE, "access-control-request-method": method}
    asked |= {} if headers is None else {"access-control-request-headers": headers}
    async with Engine(_script) as engine, routing(_config(engine, cors=cors)) as rig:
        got = await _asked(rig, "OPTIONS", "/v1/completions", headers=asked)
        assert (got.status, await got.text()) == (
            (400, f"Disallowed CORS {refused}") if refused else (200, "OK")
        )
        assert _of(got, "methods") == ["POST"]
        assert {"Authorization", "x-one", "Content-Type"} <= set(_of(got, "headers")[0].split(", "))


async def test_some_pages_only() -> None:
    cors = CorsSettings(allowed_origins=(PAGE,), allow_credentials=True)
    async with Engine(_script) as engine, routing(_config(engine, cors=cors)) as rig:
        for method, path, body in (("GET", "/v1/models", None), ("POST", "/v1/completions", BODY)):
            ours = await _asked(rig, method, path, json=body, headers={"origin": PAGE})
            assert _of(ours, "origin") == [PAGE]
            assert _of(ours, "credentials") == ["true"]
            theirs = await _asked(rig, method, path, json=body, headers={"origin": "https://evil.example"})
            assert _of(theirs, "origin") == []  # the engine's own * is not passed on
            assert ours.status == theirs.status == 200
        refused = {**PREFLIGHT, "origin": "https://evil.example"}
        assert (await _asked(rig, "OPTIONS", "/v1/completions", headers=refused)).status == 400


async def test_left_to_the_engines() -> None:
    cors = CorsSettings(allowed_origins=())
    async with Engine(_script) as engine, routing(_config(engine, cors=cors)) as rig:
        got = await _asked(rig, "POST", "/v1/completions", json=BODY, headers={"origin": PAGE})
        assert _of(got, "origin") == ["*"]
        assert _of(await _asked(rig, "GET", "/v1/models", headers={"origin": PAGE}), "origin") == []
        await _asked(rig, "OPTIONS", "/v1/completions", headers=PREFLIGHT)
        assert any(call.head.first[0] == "OPTIONS" for call in engine.calls)


@pytest.mark.parametrize("path", ["/metrics", "/kvatlas/receipts", "/kvatlas/engines"])
async def test_pages_see_nothing_of_the_fleet(path: str) -> None:
    server = ServerConfig(port=0, ops_port="public")
    async with Engine(_script) as engine, routing(_config(engine, server=server)) as rig:
        got = await _asked(rig, "GET", path, headers={"origin": PAGE})
        assert _of(got, "origin") == []
