"""Header fields at this hop, redirects of engines, and other names of models."""

from __future__ import annotations

import json
from collections import Counter

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.openai.members import at_once, with_value
from kvatlas.router.openai.request import Session
from kvatlas.router.pd.settings import KV_SOURCE, PREFILLER
from kvatlas.router.proxy.aliases import Aliases
from tests.support.clients import openai_client
from tests.support.proxy_rig import CHAT, Call, Engine, Script, answer, ask, request, routing, says, writes

HOP_BY_HOP = {
    "connection": "keep-alive, X-Private , close",
    "x-private": "1",
    "keep-alive": "timeout=5",
    "proxy-authorization": "Basic x",
    "proxy-connection": "keep-alive",
    "te": "trailers",
    "expect": "100-continue",
}


@pytest.mark.parametrize(
    ("sent", "got"),
    [
        pytest.param(
            (
                "authorization: Bearer secret",
                "X-Custom: a",
                "x-custom: b",
                "traceparent: 0",
                "openai-organization: o",
                "cookie: c=1",
            ),
            {
                "authorization": ["Bearer secret"],
                "x-custom": ["a", "b"],
                "traceparent": ["0"],
                "openai-organization": ["o"],
                "cookie": ["c=1"],
            },
            id="end-to-end fields pass, in order and repeated",
        ),
        pytest.param(
            tuple(f"{name}: {value}" for name, value in HOP_BY_HOP.items()),
            {name: [] for name in HOP_BY_HOP},
            id="hop-by-hop fields and those the client named do not",
        ),
        pytest.param(
            tuple(f"{name.decode()}: http://10.0.0.9:1" for name in (PREFILLER, KV_SOURCE)),
            {name.decode(): [] for name in (PREFILLER, KV_SOURCE)},
            id="nor a client's own word to a sidecar",
        ),
        pytest.param(
            ("connection: x-one", "x-one: 1", "connection: x-two", "x-two: 2"),
            {"x-one": [], "x-two": []},
            id="every connection field names fields",
        ),
        pytest.param(
            ("connection: content-length, authorization", "authorization: Bearer x"),
            {"content-length": ["2"], "authorization": ["Bearer x"]},
            id="connection cannot drop the length or the authorization",
        ),
        pytest.param((), {"x-session-id": []}, id="no session"),
        pytest.param(
            ("x-claude-code-session-id: s", "x-claude-code-agent-id: helper"),
            {"x-session-id": ["s"]},
            id="the session goes under vLLM's name",
        ),
        pytest.param(
            ("x-session-id: child", "x-parent-session-id: s"),
            {"x-session-id": ["child"]},
            id="a child's own session",
        ),
        pytest.param((), {"x-forwarded-for": ["127.0.0.1"]}, id="forwarded-for is made"),
        pytest.param(
            ("x-forwarded-for: 10.0.0.1", "x-forwarded-for: 10.0.0.2"),
            {"x-forwarded-for": ["10.0.0.1, 10.0.0.2, 127.0.0.1"]},
            id="forwarded-for is appended to, in one field",
        ),
        # Usage cannot be read from a compressed answer, and tenants are charged by it.
        pytest.param((), {"accept-encoding": ["identity"]}, id="answers uncompressed"),
        pytest.param(
            ("accept-encoding: gzip, br",), {"accept-encoding": ["identity"]}, id="uncompressed despite gzip"
        ),
        pytest.param(
            ("connection: accept-encoding", "accept-encoding: br"),
            {"accept-encoding": ["identity"]},
            id="uncompressed despite a connection field",
        ),
    ],
)
async def test_fields_an_engine_gets(sent: tuple[str, ...], got: dict[str, list[str]]) -> None:
    async with Engine(says(200, b"{}")) as engine, routing(engine.url) as rig:
        await ask(rig, request(b"{}", *sent))
        fields = engine.calls[0].head.fields
        assert {name: [value for field, value in fields if field == name] for name in got} == got
        hosts = [value for field, value in fields if field == "host"]
        assert len(hosts) == 1
        assert hosts[0].startswith("127.0.0.1:")


async def test_request_id_is_kept_or_made_and_given_back() -> None:
    async with Engine(says(200, b"{}")) as engine, routing(engine.url) as rig:
        got = await ask(rig, request(b"{}", "x-request-id: mine"))
        assert got.head["x-request-id"] == engine.calls[0].head["x-request-id"] == "mine"
        first = await ask(rig, request(b"{}"))
        second = await ask(rig, request(b"{}"))
        assert first.head["x-request-id"] == engine.calls[1].head["x-request-id"]
        assert len({first.head["x-request-id"], second.head["x-request-id"], ""}) == 3


async def test_engines_own_request_id_is_not_doubled() -> None:
    async with Engine(says(200, b"{}", "X-Request-Id: theirs")) as engine, routing(engine.url) as rig:
        assert (await ask(rig)).head["x-request-id"] == "theirs"


async def test_answer_fields_pass_but_for_hop_by_hop() -> None:
    script = writes(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/x\r\nX-A: 1\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\n"
        b"Date: today\r\nServer: engine\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\n"
        b"Keep-Alive: timeout=5\r\nProxy-Authenticate: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"2\r\nok\r\n0\r\n\r\n"
    )
    async with Engine(script) as engine, routing(engine.url) as rig:
        got = await ask(rig)
        assert got.body == b"ok"
        assert [f for f in got.head.fields if f[0] != "x-request-id"] == [
            ("content-type", "text/x"),
            ("x-a", "1"),
            ("date", "today"),
            ("server", "engine"),
            ("transfer-encoding", "chunked"),
        ]


_OF_THE_ROUTER = (
    "Set-Cookie: a=1",
    "Set-Cookie2: a=1",
    "Via: 1.1 inner",
    "Clear-Site-Data: *",
    "Alt-Svc: h3=:1",
    "Strict-Transport-Security: max-age=9",
    "X-Kvatlas-Engine: http://10.0.0.7:8000",
    "X-Kvatlas-Other: 1",
    "X-RateLimit-Limit-Requests: 9",
    "x-ratelimit-reset-tokens: 1s",
)


@pytest.mark.parametrize("status", [200, 400, 503])
@pytest.mark.parametrize("name", _OF_THE_ROUTER)
async def test_engines_say_nothing_that_is_the_routers_to_say(name: str, status: int) -> None:
    async with Engine(says(status, b"{}", name)) as engine, routing(engine.url) as rig:
        rig.planner.client_headers = ((b"x-kvatlas-hit-tokens", b"7"),)
        got = await ask(rig)
        assert got.status == status
        assert name.partition(":")[0].lower() not in got.head
        if status < 500:
            assert got.head["x-kvatlas-hit-tokens"] == "7"


@pytest.mark.parametrize("name", ["rid", "bootstrap-host", "routed-dp-rank", "priority"])
async def test_no_field_stands_in_for_one_of_the_body(name: str) -> None:
    async with Engine(says(200, b"{}")) as engine, routing(engine.url) as rig:
        await ask(rig, request(b"{}", f"X-Override-{name}: 1"))
        assert f"x-override-{name}" not in engine.calls[0].head


async def test_placement_adds_fields_on_both_sides() -> None:
    async with Engine(says(200, b"{}")) as engine, routing(engine.url) as rig:
        rig.planner.engine_headers = ((b"X-data-parallel-rank", b"1"),)
        rig.planner.client_headers = ((b"x-kvatlas-engine", b"e1"),)
        got = await ask(rig, request(b"{}", "x-data-parallel-rank: 7"))
        assert engine.calls[0].head["x-data-parallel-rank"] == "1"
        assert got.head["x-kvatlas-engine"] == "e1"


async def test_streams_tell_proxies_in_front_not_to_buffer() -> None:
    body = b"data: [DONE]\n\n"
    async with (
        Engine(says(200, body, "content-type: text/event-stream")) as engine,
        routing(engine.url) as rig,
    ):
        got = await ask(rig)
        assert got.head["x-accel-buffering"] == "no"
        assert got.head["content-length"] == str(len(body))


async def test_oversized_answer_head_is_no_answer() -> None:
    big = b"HTTP/1.1 200 OK\r\n" + b"".join(b"x-%d: %b\r\n" % (i, b"v" * 1000) for i in range(80))
    async with Engine(writes(big, then="hang")) as engine, routing(engine.url) as rig:
        got = await ask(rig)
        assert (got.status, got.json()["error"]["code"]) == (502, "engine_unreachable")
        assert rig.planner.placements[0].told == ["reset"]


async def test_second_content_encoding_is_read_too() -> None:
    async with Engine(says(200, b"{}")) as engine, routing(engine.url) as rig:
        got = await ask(rig, request(b"{}", "content-encoding: gzip", "content-encoding: identity"))
        assert (got.status, engine.calls) == (415, [])


def _redirects_slashes() -> Script:
    """As Starlette does for a path that it knows without the slash (``Router.redirect_slashes``)."""

    async def script(engine: Engine, call: Call, writer: object) -> None:
        path = call.head.first[1].partition("?")[0]
        if path.endswith("/"):
            location = f"location: http://{call.head['host']}{path.rstrip('/')}"
            writer.write(answer(307, b"", location))  # type: ignore[attr-defined]
        else:
            writer.write(answer(200, b'{"choices": []}'))  # type: ignore[attr-defined]

    return script


@pytest.mark.parametrize(
    ("sent", "path"),
    [
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/chat/completions///?a=b/", "/v1/chat/completions?a=b/"),
        ("/v1/chat/completions%2F", "/v1/chat/completions"),
        ("/v1/embeddings/", "/v1/embeddings"),
        ("/tokenize/", "/tokenize"),
        ("/v1/responses/resp_1/", "/v1/responses/resp_1"),
    ],
)
async def test_a_slash_at_the_end_is_taken_off(sent: str, path: str) -> None:
    async with Engine(_redirects_slashes()) as engine, routing(engine.url) as rig:
        got = await ask(rig, request(CHAT, target=sent))
        assert got.status == 200, got
        assert [call.head.first[1] for call in engine.calls] == [path]
        assert rig.planner.requests[0].path == path.partition("?")[0]
        assert rig.planner.requests[0].model == "m"


@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
@pytest.mark.parametrize("location", ["http://10.0.0.7:8000/v1/x", "//engine:8000/v1/x", "/inner/v1/x"])
async def test_a_redirect_of_an_engine_is_not_passed_on(status: int, location: str) -> None:
    script = says(status, b"moved to " + location.encode(), f"Location: {location}")
    async with Engine(script) as engine, routing(engine.url) as rig:
        for method in ("POST", "GET"):
            body = CHAT if method == "POST" else b""
            got = await ask(rig, request(body, method=method, target="/v1/other"))
            assert (got.status, got.json()["error"]["code"]) == (404, "path_not_found")
            assert "location" not in got.head
            assert location.encode() not in got.body
        assert len(engine.calls) == 2  # no other engine is asked, and none is blamed
        assert rig.planner.breakers[engine.url].closed
        assert all(placement.over for placement in rig.planner.placements)


@pytest.mark.parametrize("name", ["Location", "Content-Location", "Refresh"])
async def test_other_answers_lose_the_fields_that_may_name_the_engine(name: str) -> None:
    script = says(201, b"{}", f"{name}: http://10.0.0.7:8000/v1/files/1")
    async with Engine(script) as engine, routing(engine.url) as rig:
        got = await ask(rig, request(b"{}", target="/v1/files"))
        assert (got.status, got.body) == (201, b"{}")
        assert name.lower() not in got.head


@pytest.mark.parametrize("path", ["/v1/v1/chat/completions", "/v1//v1/chat/completions/", "/v1/v1/models"])
async def test_a_doubled_v1_is_answered_here_with_the_remedy(path: str) -> None:
    async with Engine(says(404, b"{}")) as engine, routing(engine.url) as rig:
        got = await ask(rig, request(CHAT, target=path))
        error = got.json()["error"]
        assert (got.status, error["code"]) == (404, "path_not_found")
        assert "/v1 is doubled" in error["message"]
        assert "base_url" in error["message"]
        missing = await ask(rig, request(CHAT, target="/chat/completions"))
        assert "/v1 is missing" in missing.json()["error"]["message"]
        assert not engine.calls


async def test_the_openai_client_reads_the_remedy() -> None:
    async with Engine(says(404, b"{}")) as engine, routing(engine.url) as rig:
        async with openai_client(f"{rig.url}/v1") as client:
            with pytest.raises(openai.NotFoundError, match="base_url that has it already"):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        assert not engine.calls


def test_shares_are_kept_and_a_session_stays() -> None:
    aliases = Aliases({"big": {"a": 3.0, "b": 1.0, "off": 0.0}})
    asked = Counter(aliases.model_for("big", Session(str(n))) for n in range(4000))
    assert set(asked) == {"a", "b"}
    assert 0.70 < asked["a"] / 4000 < 0.80
    agents = [Session("one of them", agent) for agent in ("", "a", "b", "c")]
    assert len({aliases.model_for("big", session) for session in agents * 10}) == 1
    assert {aliases.model_for("big", None) for _ in range(200)} == {"a", "b"}
    assert aliases.model_for("a", None) is None
    assert aliases.model_for(None, None) is None
    assert aliases.items() == [("big", ["a", "b"])]


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ({"x": {}}, "x: expected at least one model"),
        ({"x": {"a": -1.0}}, "x.a = -1.0: expected a weight"),
        ({"x": {"a": 0.0}}, "one weight at least"),
        ({"x": {"y": 1.0}, "y": {"a": 1.0}}, "y is an alias itself"),
    ],
)
def test_invalid_aliases(shares: dict[str, dict[str, float]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Aliases(shares)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@given(body=st.dictionaries(st.text(max_size=6) | st.just("model"), values, max_size=5), indent=st.booleans())
def test_only_the_model_changes(body: dict[str, object], indent: bool) -> None:
    text = json.dumps(body, indent=2 if indent else None).encode()
    changed = at_once(with_value(text, b"model", 'new "name"'))
    if "model" in body:
        assert json.loads(changed) == body | {"model": 'new "name"'}
        assert list(json.loads(changed)) == list(body)
    else:
        assert changed == text


def test_of_equal_keys_the_last_counts_as_engines_read_it() -> None:
    assert (
        at_once(with_value(b'{"model": "x", "mo\\u0064el" : "y"}', b"model", "z"))
        == b'{"model": "x", "mo\\u0064el" : "z"}'
    )


@pytest.mark.parametrize("body", [b"", b"[1]", b'{"model": ', b"not json"])
def test_bodies_that_are_no_object_stay(body: bytes) -> None:
    assert at_once(with_value(body, b"model", "z")) == body
