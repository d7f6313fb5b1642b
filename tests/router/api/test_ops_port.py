"""The ops port: what tells of others' requests is not on the public port, and from afar wants a token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog

from kvatlas.router.api.admin_auth import AdminSettings
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.config.load import load
from kvatlas.router.config.schema import OPS_PORT, Config, ServerConfig
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.http.client import HttpClient
from kvatlas.router.http.server import ListenError
from kvatlas.router.simulation.advise import see
from kvatlas.router.simulation.fetch import fetch_usage
from kvatlas.router.startup_check import check
from kvatlas.router.tools.doctor.examine import query_router
from kvatlas.router.tools.doctor.http import Http
from kvatlas.router.tools.explain import ExplainOptions, run_explain
from kvatlas.router.tools.top import take_snapshot
from tests.support.whole_router import MODEL, Rig, configure, number, routing, running

TOKEN = "0123456789abcdefgh"
PATHS = [
    ("GET", "/metrics"),
    ("GET", "/kvatlas/engines"),
    ("GET", "/kvatlas/sources"),
    ("GET", "/kvatlas/receipts"),
    ("GET", "/kvatlas/usage"),
    ("GET", "/kvatlas/sessions"),
    ("POST", "/kvatlas/explain"),
    ("GET", "/kvatlas/openapi.json"),
]
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


async def at(rig: Rig, url: str | None, method: str, path: str, token: str | None = None) -> tuple[int, Any]:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    json = BODY if method == "POST" else None
    async with rig.session.request(method, f"{url}{path}", json=json, headers=headers) as answer:
        is_json = answer.content_type == "application/json"
        return answer.status, await answer.json() if is_json else await answer.text()


async def test_the_public_port_shows_nothing_of_others_and_names_the_ops_port(tmp_path: Path) -> None:
    async with running({}) as engines, routing(configure(*engines)) as rig:
        await rig.chat("a secret question")
        for method, path in PATHS:
            for spelled in (path, path.replace("kv", "%6bv").replace("met", "m%65t")):
                status, body = await at(rig, rig.url, method, spelled)
                assert (status, body["error"]["code"]) == (404, "ops_port")
                assert f"port {number(rig.ops_url)} of 127.0.0.1" in body["error"]["message"]
            ops = (await at(rig, rig.ops_url, method, path))[0]
            assert ops == (404 if path.endswith("usage") else 200)  # none is written here
        for path in ("//metrics", "/x/../metrics", "/kvatlas", "/KVATLAS/engines", "/metrics/"):
            assert (await at(rig, rig.url, "GET", path))[0] == 404
        for path in ("/health", "/ready", "/version", "/v1/models"):
            assert (await at(rig, rig.url, "GET", path))[0] == 200
            assert (await at(rig, rig.ops_url, "GET", path))[0] == 200
        status, body = await at(rig, rig.ops_url, "POST", "/v1/chat/completions")
        assert (status, body["error"]["code"]) == (404, "path_not_found")


@pytest.mark.parametrize("setting", ["off", "public"])
async def test_without_a_port_of_its_own(setting: Any) -> None:
    server = ServerConfig(port=0, ops_port=setting)
    async with running({}) as engines, routing(configure(*engines, server=server)) as rig:
        assert rig.router.ops.base_url is None
        for method, path in PATHS[:4] + PATHS[5:]:
            status, body = await at(rig, rig.url, method, path)
            assert status == (200 if setting == "public" else 404)
            if setting == "off":
                assert "which is off (server.ops_port)" in body["error"]["message"]


@pytest.mark.parametrize("key", ["server.ops_token_file", "admin.token_file"])
async def test_from_other_machines_it_wants_a_token(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"prometheus:{TOKEN}\n", encoding="ascii")
    own = key.startswith("server")
    server = ServerConfig(port=0, ops_host="0.0.0.0", ops_token_file=str(path) if own else None)
    admin = AdminSettings(enabled=not own, token_file=None if own else str(path), requests_per_minute=60)

    seldom = FleetSettings(poll_interval_s=30.0, gauge_interval_s=30.0)  # a minute passes
    changes = {"server": server, "admin": admin, "fleet": seldom}
    async with running({}) as engines, routing(configure(*engines, **changes)) as rig:
        for method, where in PATHS[:2]:
            status, body = await at(rig, rig.ops_url, method, where)
            assert (status, body["error"]["code"]) == (401, "ops_unauthorized")
            assert key in body["error"]["message"]
        statuses = [401]
        while statuses[-1] == 401:
            statuses.append((await at(rig, rig.ops_url, "GET", "/metrics", "wrong-0123456789abcdef"))[0])
        assert statuses[-1] == 429
        for _ in range(8):  # a scrape is never too often
            assert (await at(rig, rig.ops_url, "GET", "/metrics", TOKEN))[0] == 200
        assert (await at(rig, rig.ops_url, "GET", "/health"))[0] == 200
        assert (await at(rig, rig.url, "GET", "/metrics", TOKEN))[0] == 404
        await asyncio.sleep(60)  # some more may be wrong
        async with HttpClient() as client:
            http = Http(client, 10.0)
            assert key in (await take_snapshot(http, rig.ops_url)).problem
            monkeypatch.setenv("KVATLAS_OPS_TOKEN", TOKEN)
            assert (await take_snapshot(http, rig.ops_url)).problem == ""
            assert (await query_router(http, rig.ops_url)).engines
        assert (await asyncio.to_thread(see, rig.ops_url)).engines == 1


async def test_open_means_open() -> None:
    server = ServerConfig(port=0, ops_host="0.0.0.0", ops_open=True)
    async with running({}) as engines, routing(configure(*engines, server=server)) as rig:
        assert (await at(rig, rig.ops_url, "GET", "/kvatlas/engines"))[0] == 200


async def test_a_tool_given_the_public_port_gets_the_name_of_the_ops_port(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running({}) as engines, routing(configure(*engines)) as rig:
        told = f"port {number(rig.ops_url)} of 127.0.0.1 (server.ops_port)"
        async with HttpClient() as client:
            http = Http(client, 10.0)
            assert told in (await take_snapshot(http, rig.url)).problem
            assert told in (await query_router(http, rig.url)).engines_answer.description
        with pytest.raises(ConfigError) as refused:
            await asyncio.to_thread(see, rig.url)
        assert told in str(refused.value)
        with pytest.raises(OSError, match="ops port"):
            await asyncio.to_thread(fetch_usage, rig.url, tmp_path / "log")
        file = tmp_path / "body.json"
        file.write_bytes(b'{"model": "kvatlas-demo", "prompt": "hello"}')
        options = ExplainOptions(file, router=rig.url)
        assert await asyncio.to_thread(run_explain, options, as_json=False) == 1
        assert told in capsys.readouterr().err


async def test_a_port_in_use_is_reported_and_nothing_starts() -> None:
    async with running({}) as (taken,):
        server = ServerConfig(port=0, ops_port=number(taken.base_url))
        with structlog.testing.capture_logs() as logs, pytest.raises(ListenError):
            async with routing(configure(server=server), wait=False):
                pytest.fail("it must not start")
    (line,) = [line for line in logs if line["event"] == "not started"]
    where = f"127.0.0.1:{server.ops_port}"
    said = f"server.ops_port: cannot listen on {where}: address already in use; stop "
    assert line["problem"].startswith(said)


def settings(tmp_path: Path, server: str, rest: str = "") -> Config:
    path = tmp_path / "kvatlas.toml"
    path.write_text(f'[server]\n{server}\n{rest}\n[[engines]]\nbase_url = "http://a:1"\n', encoding="utf-8")
    return load(path, environ={}).config


def test_where_it_listens_by_default(tmp_path: Path) -> None:
    assert settings(tmp_path, "").server.ops_listens_on == OPS_PORT
    assert settings(tmp_path, "port = 0").server.ops_listens_on == 0
    assert settings(tmp_path, 'ops_port = "public"').server.ops_listens_on is None
    flags = {"server.ops_port": "9005"}  # as text, from a flag or a variable
    assert load(flags=flags, environ={}).config.server.ops_listens_on == 9005


@pytest.mark.parametrize(
    ("server", "told"),
    [
        ("port = 9001", "server.ops_port: 9001 is the public port"),
        ("ops_port = 70000", "server.ops_port: 70000 is not a port number, 0 to 65535"),
        ('ops_port = "none"', "server.ops_port = 'none'"),
        ('ops_host = "0.0.0.0"', "server.ops_host = '0.0.0.0': anyone who reaches it could read"),
        ('ops_open = true\nops_token_file = "x"', "server.ops_open: with it no token is needed"),
    ],
)
def test_settings_that_cannot_be_used_are_named(tmp_path: Path, server: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(tmp_path, server)
    assert str(refused.value).startswith(told)


def test_it_is_not_the_admin_port(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server.ops_port: 9001 is admin.port"):
        settings(tmp_path, "", '[admin]\nenabled = true\ntoken_file = "x"\nport = 9001')


def test_an_unusable_token_file_is_an_error_at_start(tmp_path: Path) -> None:
    server = ServerConfig(port=0, ops_token_file=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"^server.ops_token_file: .*no such file"):
        check(configure(server=server))


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(
            (host, 200)
            for host in ("127.0.0.1:1", "10.1.2.3", "[::1]:9001", "localhost", "LOCALHOST.:9001", "ops.a", "")
        ),
        *(
            (host, 421)
            for host in (
                "evil.example",
                "evil.example:9001",
                "127.0.0.1.evil.example",
                "localhost.evil.example",
            )
        ),
    ],
)
async def test_without_a_token_the_port_answers_by_names_of_its_own_only(host: str, status: int) -> None:
    """Else a page that a browser shows could have its own name lead here (DNS rebinding)."""
    async with running({}) as engines, routing(configure(*engines, server=NAMED)) as rig:
        line = f"Host: {host}\r\n" if host else ""
        for path in ("/metrics", "/kvatlas/engines", "/health"):
            reader, writer = await asyncio.open_connection("127.0.0.1", number(rig.ops_url))
            writer.write(f"GET {path} HTTP/1.0\r\n{line}\r\n".encode())
            assert int((await reader.read()).split()[1]) == status
            writer.close()


NAMED = ServerConfig(port=0, ops_names=("Ops.A",))


@pytest.mark.parametrize("kind", ["text/plain", "", "multipart/form-data; boundary=a"])
async def test_explain_takes_json_only(kind: str) -> None:
    """A page of another origin may send anything else without asking (CORS)."""
    async with running({}) as engines, routing(configure(*engines)) as rig:
        url, body = f"{rig.ops_url}/kvatlas/explain", b'{"model":"kvatlas-demo","prompt":"a"}'
        async with rig.session.post(url, data=body, headers={"content-type": kind}) as answer:
            assert answer.status == 415
        headers = {"content-type": "application/json; charset=utf-8"}
        async with rig.session.post(url, data=body, headers=headers) as answer:
            assert answer.status == 200
