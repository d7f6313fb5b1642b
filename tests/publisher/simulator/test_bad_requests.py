"""Requests that a simulated engine refuses with vLLM's errors, without any other effect."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import openai
import pytest

from kvatlas.publisher.simulator import http_agents
from tests.publisher.simulator.support import all_blocks_free, client, engine, request

IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hi"}]

CASES: dict[str, tuple[str, Any, int, str, str | None]] = {
    "unknown model": (CHAT, {"model": "x", "messages": USER}, 404, "NotFoundError", "model"),
    "messages missing": (CHAT, {}, 400, "Bad Request", "body.messages"),
    "messages not a list": (CHAT, {"messages": "Hi"}, 400, "Bad Request", "body.messages"),
    "message not an object": (CHAT, {"messages": ["Hi"]}, 400, "Bad Request", "body.messages.0"),
    "no messages": (CHAT, {"messages": []}, 400, "BadRequestError", None),
    "body not an object": (CHAT, [1], 400, "Bad Request", None),
    "image part": (CHAT, {"messages": [IMAGE]}, 400, "BadRequestError", None),
    "no output wanted": (CHAT, {"messages": USER, "max_tokens": 0}, 400, "BadRequestError", "max_tokens"),
    "too many choices": (CHAT, {"messages": USER, "n": 65}, 400, "BadRequestError", "n"),
    "empty salt": (CHAT, {"messages": USER, "cache_salt": ""}, 400, "BadRequestError", "cache_salt"),
    "options without stream": (
        CHAT, {"messages": USER, "stream_options": {}}, 400, "BadRequestError", "stream_options",
    ),
    "foreign template": (CHAT, {"messages": USER, "chat_template": "x"}, 400, "BadRequestError", None),
    "prompt too long": (COMPLETIONS, {"prompt": [5] * 1025}, 400, "BadRequestError", "input_tokens"),
    "no room for output": (COMPLETIONS, {"prompt": [5] * 1024}, 400, "BadRequestError", "max_tokens"),
    "no prompt": (COMPLETIONS, {"prompt": []}, 400, "BadRequestError", None),
    "empty prompt": (COMPLETIONS, {"prompt": ""}, 400, "BadRequestError", "prompt"),
    "mixed prompt": (COMPLETIONS, {"prompt": [1, "b"]}, 400, "BadRequestError", "prompt"),
    "negative token": (COMPLETIONS, {"prompt": [-1]}, 400, "Bad Request", "body.prompt.0"),
    "unknown token": (COMPLETIONS, {"prompt": [99999]}, 400, "BadRequestError", None),
    "wrong number": (COMPLETIONS, {"prompt": "a", "max_tokens": "9"}, 400, "Bad Request", "body.max_tokens"),
    "detokenize nonsense": ("/detokenize", {"tokens": ["x"]}, 400, "Bad Request", "body.tokens.0"),
}  # fmt: skip


async def test_refusals_have_vllms_shape() -> None:
    """Every case is asked of one engine, which must be none the worse for it."""
    async with engine(max_model_len=1024) as running:
        for name, (path, body, status, kind, param) in CASES.items():
            got_status, answer = await request(running, "POST", path, body)
            error = answer["error"]
            assert got_status == status, name
            assert (error["type"], error["param"], error["code"]) == (kind, param, status), name
            assert error["message"], name
            named = f"(parameter={param}" in error["message"]
            assert named is (kind == "BadRequestError" and param is not None), name
        status, _ = await request(running, "POST", CHAT, {"messages": USER})
        assert status == 200
        assert all_blocks_free(running)


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/nothing", 404), ("POST", "/health", 405), ("GET", CHAT, 405)]
)
async def test_unknown_paths_and_methods_are_refused(method: str, path: str, status: int) -> None:
    async with engine() as running:
        got_status, body = await request(running, method, path)
        assert got_status == status
        assert list(body) == ["detail"]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"messages": NaN}'])
async def test_broken_json_is_refused(body: bytes) -> None:
    async with engine() as running:
        headers = {"content-type": "application/json"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(running.base_url + CHAT, data=body, headers=headers) as answer,
        ):
            assert answer.status == 400
            assert (await answer.json())["error"]["code"] == 400


async def test_a_body_that_is_not_json_by_its_type_is_refused() -> None:
    async with (
        engine() as running,
        aiohttp.ClientSession() as session,
        session.post(running.base_url + CHAT, data=json.dumps({"messages": USER})) as answer,
    ):
        assert answer.status == 400
        assert "application/json" in (await answer.json())["error"]["message"]


async def test_a_body_above_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(json.dumps({"messages": USER}))
    async with engine() as running:
        for most, status in ((size, 200), (size - 1, 413)):
            monkeypatch.setattr(http_agents, "BODY_BYTES_MAX", most)
            assert (await request(running, "POST", CHAT, {"messages": USER}))[0] == status


async def test_the_openai_client_sees_message_and_parameter() -> None:
    async with engine() as running, client(running) as api:
        with pytest.raises(openai.NotFoundError, match="The model `x` does not exist") as caught:
            await api.chat.completions.create(model="x", messages=[{"role": "user", "content": "Hi"}])
        assert caught.value.param == "model"
