"""The admin API over HTTP: who gets in, what changes, what is written down."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.publisher.simulator.settings import EngineSettings
from kvatlas.router.api.admin_auth import AdminSettings
from kvatlas.router.api.admin_tokens import read_tokens
from kvatlas.router.config.checks import check_config
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.config.load import load
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.http.server import ListenError
from kvatlas.router.proxy.settings import ProxySettings
from kvatlas.router.startup_check import check
from tests.router.api.admin.admin_rig import OTHER, TOKEN, administered, audited, token_file
from tests.support.waiting import until
from tests.support.whole_router import QUICK, configure, routing, running

UNUSED = "http://127.0.0.1:9"


async def test_it_is_off_unless_switched_on() -> None:
    async with running({}) as engines, routing(configure(*engines)) as rig:
        for method, path in (("GET", "/admin/engines"), ("POST", "/admin/engines/drain")):
            status, body = await rig.ask(method, path)
            assert (status, body["error"]["code"]) == (404, "path_not_found")


async def test_a_change_is_answered_after_the_other_workers_have_it(tmp_path: Path) -> None:
    async with running({}) as (one,), administered(tmp_path, one) as admin:
        seen: list[str] = []

        async def settled() -> None:
            await asyncio.sleep(1)
            seen.append((await admin.listed())[one.base_url]["on_hold"])

        admin.rig.router.admin._settled = settled
        for path in ("/drain", "/undrain"):
            assert (await admin.ask("POST", path, {"engine": one.base_url}))[0] == 200
        assert seen == ["drained by ann", ""]


@pytest.mark.parametrize("own_port", [False, True])
async def test_an_engine_is_added_drained_undrained_and_removed(tmp_path: Path, own_port: bool) -> None:
    settings = {"port": 0} if own_port else {}
    async with running({}, {}) as (one, two), administered(tmp_path, one, **settings) as admin:
        await admin.rig.ready()
        status, body, _ = await admin.ask("POST", "", {"base_url": two.base_url + "/"})
        assert (status, body) == (201, {"engine": two.base_url, "sources": ["admin"]})
        await admin.rig.ready()
        assert (await admin.ask("POST", "", {"base_url": two.base_url}))[0] == 200
        listed = await admin.listed()
        assert set(listed) == {one.base_url, two.base_url}
        assert listed[one.base_url]["sources"] == ["static"]
        assert listed[two.base_url]["up"]

        status, body, _ = await admin.ask("POST", "/drain", {"engine": one.base_url})
        assert (status, body) == (200, {"engine": one.base_url, "requests": 0, "moves": 0})
        for _ in range(5):
            answer = await admin.rig.chat("a question of any kind")
            assert answer.headers["x-kvatlas-engine"] == two.base_url
        assert (await admin.listed())[one.base_url]["on_hold"] == "drained by ann"
        status, body, _ = await admin.ask("POST", "/undrain", {"engine": one.base_url})
        assert (status, body) == (200, {"engine": one.base_url, "was_drained": True, "on_hold": ""})

        status, body, _ = await admin.ask("DELETE", params={"engine": two.base_url})
        assert (status, body) == (200, {"engine": two.base_url, "kept_out": False})
        status, body, _ = await admin.ask("DELETE", params={"engine": one.base_url})
        assert (status, body) == (200, {"engine": one.base_url, "kept_out": True})
        status, body, _ = await admin.ask("GET")
        assert body["engines"] == []
        assert body["removed"] == [{"base_url": one.base_url, "by": "ann"}]
        assert body["sources"]["static"]["synced"] is True
        assert (await admin.ask("POST", "", {"base_url": one.base_url}))[0] == 201
        await admin.rig.ready()
        await admin.rig.chat("and it serves again")


async def test_a_stream_goes_on_while_its_engine_is_drained_and_removed(tmp_path: Path) -> None:
    slow = {"decode_s_per_token": 0.01}
    async with running(slow, {}) as (one, two), administered(tmp_path, one) as admin:
        await admin.rig.ready()
        stream = await admin.rig.api.chat.completions.create(
            model="kvatlas-demo",
            messages=[{"role": "user", "content": "tell"}],
            max_tokens=100,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        pieces = [await anext(stream)]
        assert (await admin.ask("POST", "", {"base_url": two.base_url}))[0] == 201
        status, body, _ = await admin.ask("POST", "/drain", {"engine": one.base_url})
        assert (status, body["requests"]) == (200, 1)
        assert (await admin.ask("DELETE", params={"engine": one.base_url}))[0] == 200
        pieces += [piece async for piece in stream]
        assert len(pieces) >= 100
        assert pieces[-1].choices[0].finish_reason == "length"
        await until(lambda: admin.rig.idle, "answered")
        await admin.rig.ready()
        admin.rig.check_books()


async def test_long_answers_leave_before_the_deadline_of_a_drain(tmp_path: Path) -> None:
    """One of 3 s and one of 12 s, of which the first ends where it is."""
    slow = {"decode_s_per_token": 0.02, "num_blocks": 4096}
    changes = {"proxy": ProxySettings(continue_streams=True)}
    async with running(slow, slow) as (one, two), administered(tmp_path, one, changes=changes) as admin:
        await admin.rig.ready()

        async def answer(tokens: int) -> str:
            stream = await admin.rig.api.chat.completions.create(
                model="kvatlas-demo",
                messages=[{"role": "user", "content": f"tell {tokens}"}],
                max_tokens=tokens,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            pieces = [piece async for piece in stream]
            assert pieces[-1].choices[0].finish_reason == "length"
            return "".join(piece.choices[0].delta.content or "" for piece in pieces)

        answers = [asyncio.ensure_future(answer(tokens)) for tokens in (600, 150)]
        await asyncio.sleep(1)
        assert (await admin.ask("POST", "", {"base_url": two.base_url}))[0] == 201
        await admin.rig.ready()
        for deadline_s, moves in ((200, 0), (0, 2), (6.5, 1)):
            drain = {"engine": one.base_url, "deadline_s": deadline_s}
            status, body, _ = await admin.ask("POST", "/drain", drain)
            assert (status, body["requests"], body["moves"]) == (200, 2, moves)
        await asyncio.sleep(4.5)
        assert not [attempt for engine in admin.rig.router.fleet for attempt in engine.waiting]
        assert [len(engine.answering) for engine in admin.rig.router.fleet] == [0, 1]
        for text in await asyncio.gather(*answers):
            assert text
        ended = admin.rig.router.proxy.requests.ended
        assert [(record.continued_from, record.engine) for record in ended] == [
            ("", one.base_url),
            (one.base_url, two.base_url),
        ]
        admin.rig.check_books()


@pytest.mark.parametrize("deadline_s", [-1, 86_401, 1e9])
async def test_a_deadline_that_cannot_be_is_refused(tmp_path: Path, deadline_s: float) -> None:
    async with running({}) as (one,), administered(tmp_path, one) as admin:
        drain = {"engine": one.base_url, "deadline_s": deadline_s}
        status, body, _ = await admin.ask("POST", "/drain", drain)
        error = body["error"]
        assert (status, error["code"], error["param"]) == (400, "invalid_deadline", "deadline_s")
        assert error["message"].startswith(f"deadline_s = {deadline_s:g} is not 0 to 86400: give the seconds")
        assert (await admin.listed())[one.base_url]["on_hold"] == ""


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN[:-1], TOKEN + "x", f"ann:{TOKEN}", "\xff" * 20])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_without_a_token_calls_are_refused(tmp_path: Path, token: str | None, method: str) -> None:
    async with running({}) as (one,), administered(tmp_path, one) as admin:
        with audited() as lines:
            status, body, headers = await admin.ask(method, "", {"base_url": UNUSED}, token=token)
        assert (status, body["error"]["code"]) == (401, "admin_unauthorized")
        assert headers["www-authenticate"].startswith("Bearer ")
        assert list(await admin.listed()) == [one.base_url]
        written = [(line["who"], line["refused"], line["status"]) for line in lines]
        assert written == ([] if method == "GET" else [("unknown", "admin_unauthorized", 401)])
        stats = admin.rig.router.admin.stats  # type: ignore[union-attr]
        assert stats.refused == {"admin_unauthorized": 1}


async def test_every_change_is_in_the_log_with_who_and_what_became_of_it(tmp_path: Path) -> None:
    async with running({}) as (one,), administered(tmp_path, one) as admin:
        with audited() as lines:
            await admin.ask("GET")
            await admin.ask("POST", "", {"base_url": UNUSED})
            await admin.ask("POST", "/drain", {"engine": UNUSED}, token=OTHER)
            await admin.ask("POST", "/undrain", {"engine": UNUSED})
            await admin.ask("DELETE", params={"engine": UNUSED})
            await admin.ask("DELETE", params={"engine": UNUSED})
            await admin.ask("POST", "", raw=b"{")
        told = [(x["action"], x["who"], x["engine"], x.get("refused", "done")) for x in lines]
        assert told == [
            ("add", "ann", UNUSED, "done"),
            ("drain", "bob", UNUSED, "done"),
            ("undrain", "ann", UNUSED, "done"),
            ("remove", "ann", UNUSED, "done"),
            ("remove", "ann", UNUSED, "engine_not_found"),
            ("add", "ann", "", "invalid_json"),
        ]
        assert [line.get("outcome", {}) for line in lines[:1]] == [{"sources": ["admin"]}]
        assert {line["client"] for line in lines} == {"127.0.0.1"}
        assert all(TOKEN not in repr(line) for line in lines)
        stats = admin.rig.router.admin.stats  # type: ignore[union-attr]
        assert stats.changes == {"add": 1, "drain": 1, "undrain": 1, "remove": 1}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "", {"base_url": "ftp://x"}, 400, "invalid_engine"),
        ("POST", "", {"base_url": "http://x:1", "replay": "tcp://x:2"}, 400, "invalid_engine"),
        ("POST", "", {"base_url": "http://x:1", "dp_rank": -1}, 400, "invalid_engine"),
        ("POST", "", {"base_url": 5}, 400, "invalid_type"),
        ("POST", "", {"base_url": "http://x:1", "weight": 5}, 400, "invalid_type"),
        ("POST", "", {}, 400, "invalid_type"),
        ("POST", "", {"base_url": "http://" + "x" * 70_000}, 413, "body_too_large"),
        ("POST", "/drain", {"engine": "http://nobody:1"}, 404, "engine_not_found"),
        ("POST", "/undrain", {"engine": "http://nobody:1"}, 404, "engine_not_found"),
        ("POST", "/drain", {"name": "x"}, 400, "invalid_type"),
        ("POST", "/drain", {"engine": "http://x:1", "deadline_s": "30"}, 400, "invalid_type"),
        ("DELETE", "", None, 400, "not_a_server"),
        ("DELETE", "?engine=http://nobody:1", None, 404, "engine_not_found"),
        ("DELETE", "?engine=http://x:1%23dp0", None, 400, "not_a_server"),
        ("PUT", "", {}, 405, "method_not_allowed"),
        ("GET", "/elsewhere", None, 404, "path_not_found"),
    ],
)
async def test_errors_have_the_shape_of_the_house(
    tmp_path: Path, method: str, path: str, body: Any, status: int, code: str
) -> None:
    async with running({}) as (one,), administered(tmp_path, one) as admin:
        got, answer, _ = await admin.ask(method, path, body)
        assert (got, answer["error"]["code"]) == (status, code)
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        message = answer["error"]["message"]
        assert "%23" not in path or message.endswith("remove the server http://x:1.")
        assert list(await admin.listed()) == [one.base_url]


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({}, "base_url", "missing required field `base_url`"),
        ({"base_url": "http://x:1", "weight": 5}, "weight", "its fields: base_url, "),
        ({"base_url": "http://x:1", "role": "p"}, "role", "role (prefill, decode, both)"),
        ({"base_url": "http://x:1", "dp_rank": "a"}, "dp_rank", "got `str`"),
    ],
)
async def test_a_bad_field_is_named_with_what_is_possible(
    tmp_path: Path, body: Any, param: str, told: str
) -> None:
    async with running({}) as (one,), administered(tmp_path, one) as admin:
        _, answer, _ = await admin.ask("POST", "", body)
        assert answer["error"]["param"] == param
        assert told in answer["error"]["message"]


async def test_a_rate_limit_affects_one_name_only(tmp_path: Path) -> None:
    async with running({}) as (one,), administered(tmp_path, one, requests_per_minute=12.0) as admin:
        answers = [await admin.ask("GET") for _ in range(5)]
        assert [status for status, _, _ in answers] == [200, 200, 200, 429, 429]
        _, body, headers = answers[-1]
        assert body["error"]["code"] == "admin_rate_limited"
        assert 1 <= int(headers["retry-after"]) <= 5
        assert (await admin.ask("GET", token=OTHER))[0] == 200
        wrong = [(await admin.ask("GET", token="wrong"))[0] for _ in range(5)]
        assert wrong == [401, 401, 401, 429, 429]
        assert (await admin.ask("GET", token=OTHER))[0] == 200


async def test_a_rotated_token_counts_immediately_and_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    async with running({}) as (one,), administered(tmp_path, one) as admin:
        assert (await admin.ask("GET"))[0] == 200
        token_file(tmp_path, "new-0123456789abcdefgh\n")
        assert (await admin.ask("GET"))[0] == 401
        assert (await admin.ask("GET", token="new-0123456789abcdefgh"))[0] == 200
        token_file(tmp_path, "short\n")
        assert (await admin.ask("GET", token="short"))[0] == 401
        assert (await admin.ask("GET", token="new-0123456789abcdefgh"))[0] == 200
        (tmp_path / "tokens").unlink()
        assert (await admin.ask("GET", token="new-0123456789abcdefgh"))[0] == 200


async def test_with_a_port_of_its_own_the_routers_port_has_no_admin_api(tmp_path: Path) -> None:
    async with running({}) as (one,), administered(tmp_path, one, port=0) as admin:
        status, body = await admin.rig.ask("GET", "/admin/engines")
        assert (status, body["error"]["code"]) == (404, "path_not_found")
        assert (await admin.ask("GET"))[0] == 200
        async with admin._session.get(f"{admin.url}/metrics") as answer:  # and the other way round
            assert answer.status == 404


async def test_a_port_in_use_is_reported_and_nothing_starts(tmp_path: Path) -> None:
    async with running({}) as (taken,):
        port = int(taken.base_url.rpartition(":")[2])
        admin = AdminSettings(enabled=True, token_file=token_file(tmp_path), port=port)
        with structlog.testing.capture_logs() as logs, pytest.raises(ListenError, match="could not be"):
            async with routing(configure(admin=admin), wait=False):
                pytest.fail("it must not start")
    (line,) = [line for line in logs if line["event"] == "not started"]
    where = f"127.0.0.1:{admin.port}"
    assert line["problem"].startswith(f"admin.port: cannot listen on {where}: address already in use; stop ")


async def test_without_any_engine_the_router_starts_and_takes_them(tmp_path: Path) -> None:
    async with administered(tmp_path, changes={"fleet": FleetSettings(poll_interval_s=0.1)}) as admin:
        status, body = await admin.rig.ask("GET", "/ready")
        assert (status, body["reason"]) == (503, "no engine answers yet")
        engine = SimulatedEngine(EngineSettings(**QUICK))
        await engine.start()
        try:
            await admin.ask("POST", "", {"base_url": engine.base_url})
            await admin.rig.ready()
            await admin.rig.chat("hello")
        finally:
            await engine.stop()


async def test_a_full_fleet_takes_no_more(tmp_path: Path) -> None:
    fleet = {"fleet": FleetSettings(engines_max=1)}
    async with running({}) as (one,), administered(tmp_path, one, changes=fleet) as admin:
        status, body, _ = await admin.ask("POST", "", {"base_url": UNUSED})
        assert (status, body["error"]["code"]) == (409, "fleet_full")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("enabled = true", "admin.enabled: give token_file, or client_ca_file"),
        (
            'enabled = true\ntls_cert_file = "x"\nclient_ca_file = "x"',
            "admin.tls_cert_file: a certificate and",
        ),
        (
            'enabled = true\ntls_cert_file = "x"\ntls_key_file = "x"\nclient_ca_file = "x"',
            "admin.tls_cert_file: TLS needs a port of its own; give port",
        ),
        ('enabled = true\nclient_ca_file = "x"\nport = 1', "admin.client_ca_file: needs tls_cert_file"),
        (
            'enabled = true\ntoken_file = "x"\nport = 70000',
            "admin.port: 70000 is not a port number, 0 to 65535",
        ),
        ('enabled = true\ntoken_file = "x"\nport = 8000', "admin.port: 8000 is the router's own"),
        (
            'enabled = true\nport = 1\ntoken_file = "x"\ntls_cert_file = "/no/c"\ntls_key_file = "/no/k"',
            "admin.tls_cert_file: there is no file /no/c",
        ),
    ],
)
def test_settings_that_cannot_be_used_are_named(tmp_path: Path, settings: str, told: str) -> None:
    path = tmp_path / "kvatlas.toml"
    path.write_text(f'[[engines]]\nbase_url = "http://a:1"\n[admin]\n{settings}\n')
    with pytest.raises(ConfigError) as error:
        load(path, environ={})
    assert str(error.value).startswith(told)


def test_changes_must_be_in_the_log(tmp_path: Path) -> None:
    path = tmp_path / "kvatlas.toml"
    path.write_text('[server]\nlog_level = "error"\n[admin]\nenabled = true\ntoken_file = "x"\n')
    with pytest.raises(ConfigError, match="changes must be logged"):
        check_config(load(path, environ={}).config)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has 0 tokens"),
        ("# only a remark\n", "has 0 tokens"),
        ("ann:short", "line 1: a token is at least 16"),
        ("\nann:0123456789 abcdef", "line 2: a token is at least 16"),
        (":0123456789abcdef", "line 1: expected NAME:TOKEN"),
        ("x" * 65 + ":0123456789abcdef", "line 1: expected NAME:TOKEN"),
        ("x" * 20 + "\n" + "y" * 20 + "\nä", "not ASCII"),
        ("\n".join(f"{n}-0123456789abcdef" for n in range(65)), "has 65 tokens; 1 to 64"),
        (None, "no such file"),
    ],
)
def test_token_files_that_cannot_be_used_are_named_at_start(
    tmp_path: Path, text: str | None, told: str
) -> None:
    path = token_file(tmp_path, text) if text is not None else str(tmp_path / "nowhere")
    with pytest.raises(ConfigError) as error:
        check(configure(admin=AdminSettings(enabled=True, token_file=path)))
    assert str(error.value).startswith("admin.token_file: ")
    assert told in str(error.value)
    assert "0123456789" not in str(error.value)  # never a token


def test_a_token_file_may_have_64_tokens_of_16_characters_and_a_name_of_64(tmp_path: Path) -> None:
    names = ["x" * 64, *(str(number) for number in range(63))]
    path = token_file(tmp_path, "\n".join(f"{name}:{number:016}" for number, name in enumerate(names)))
    assert [name for _, name in read_tokens(Path(path))] == names
