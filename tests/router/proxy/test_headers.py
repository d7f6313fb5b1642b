"""Which header fields end at this hop, which are replaced, which are added."""

from __future__ import annotations

from tests.support.proxy_rig import Call, Engine, ask, request, routing, says, writes
from tests.support.waiting import run


async def _seen(*fields: str) -> Call:
    async with Engine(says(200, b"{}")) as engine, routing(engine.url) as rig:
        await ask(rig, request(b"{}", *fields))
        return engine.calls[0]


def test_end_to_end_fields_reach_the_engine_in_order_and_repeated() -> None:
    sent = [
        "authorization: Bearer secret",
        "traceparent: 00-1-2-01",
        "X-Custom: a",
        "x-custom: b",
        "openai-organization: o",
        "cookie: c=1",
    ]
    call = run(_seen(*sent))
    for field in sent:
        name, _, value = field.partition(": ")
        assert (name.lower(), value) in call.head.fields
    assert call.head["x-custom"] == "a, b"


def test_hop_by_hop_and_named_fields_do_not() -> None:
    call = run(
        _seen(
            "connection: keep-alive, X-Private , close",
            "x-private: 1",
            "keep-alive: timeout=5",
            "proxy-authorization: Basic x",
            "proxy-connection: keep-alive",
            "te: trailers",
            "expect: 100-continue",
        )
    )
    for name in (
        "connection",
        "x-private",
        "keep-alive",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "expect",
    ):
        assert name not in call.head


def test_connection_cannot_name_away_what_keeps_the_request_right() -> None:
    call = run(_seen("connection: content-length, authorization", "authorization: Bearer x"))
    assert call.head["content-length"] == "2"
    assert call.head["authorization"] == "Bearer x"


def test_host_is_the_engines() -> None:
    call = run(_seen())
    assert call.head["host"].startswith("127.0.0.1:")
    assert len([name for name, _ in call.head.fields if name == "host"]) == 1


def test_engines_get_the_session_under_vllms_name() -> None:
    assert "x-session-id" not in run(_seen()).head
    call = run(_seen("x-claude-code-session-id: s", "x-claude-code-agent-id: helper"))
    assert call.head["x-session-id"] == "s"
    call = run(_seen("x-session-id: child", "x-parent-session-id: s"))
    assert [value for name, value in call.head.fields if name == "x-session-id"] == ["child"]


def test_forwarded_for_is_appended() -> None:
    assert run(_seen()).head["x-forwarded-for"] == "127.0.0.1"
    call = run(_seen("x-forwarded-for: 10.0.0.1", "x-forwarded-for: 10.0.0.2"))
    assert call.head["x-forwarded-for"] == "10.0.0.1, 10.0.0.2, 127.0.0.1"
    assert len([name for name, _ in call.head.fields if name == "x-forwarded-for"]) == 1


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
            ("set-cookie", "a=1"),
            ("set-cookie", "b=2"),
            ("date", "today"),
            ("server", "engine"),
            ("transfer-encoding", "chunked"),
        ]


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


def test_what_is_said_twice_is_read_twice() -> None:
    async def main() -> None:
        async with Engine(says(200, b"{}")) as engine, routing(engine.url) as rig:
            got = await ask(rig, request(b"{}", "content-encoding: gzip", "content-encoding: identity"))
            assert (got.status, engine.calls) == (415, [])

    run(main())
    call = run(_seen("x-forwarded-for: 10.0.0.1", "x-forwarded-for: 10.0.0.2"))
    assert call.head["x-forwarded-for"].startswith("10.0.0.1, 10.0.0.2, ")
    call = run(_seen("connection: x-one", "x-one: 1", "connection: x-two", "x-two: 2"))
    assert "x-one" not in call.head
    assert "x-two" not in call.head


def test_engines_are_asked_for_answers_that_are_not_packed() -> None:
    """Of a packed answer the usage cannot be read, and tenants are charged by it."""
    for fields in (["accept-encoding: gzip, br"], ["connection: accept-encoding", "accept-encoding: br"], []):
        call = run(_seen(*fields))
        assert [value for name, value in call.head.fields if name == "accept-encoding"] == ["identity"]
