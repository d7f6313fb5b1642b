"""A client never meets an engine's redirect: it names the engine, and leads past keys and limits."""

from __future__ import annotations

import openai
import pytest

from tests.support.proxy_rig import CHAT, Call, Engine, Script, answer, ask, request, routing, says


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
        async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.NotFoundError, match="base_url that has it already"):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        assert not engine.calls
