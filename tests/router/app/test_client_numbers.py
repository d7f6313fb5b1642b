"""Numbers that clients send are bounded where they are read: no request fails with an error of the router."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.router.http.client_head import ClientHead
from kvatlas.router.openai.apis import CHAT, COMPLETION, MESSAGES, RESPONSES
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.openai.request import Usage
from kvatlas.router.proxy.headers import read_request_headers
from kvatlas.router.proxy.usage_reports import read_usage
from tests.router.app.test_keys import RULES
from tests.support.whole_router import MODEL, routed, tenants

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    COMPLETION: {"prompt": "hi", "max_tokens": 3},
    MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    RESPONSES: {"input": "hi", "max_output_tokens": 3},
}
LONG = [19, 309, 4300, 4301]
"""Digits: beyond 64 bits, beyond floating point, and the most that Python reads."""


@pytest.mark.parametrize("keys", [False, True])
async def test_a_priority_of_too_many_digits_is_refused_in_every_api(tmp_path: Path, keys: bool) -> None:
    changes = {"keys": tenants(tmp_path, RULES)} if keys else {}
    fields = {"authorization": "Bearer key-of-high"} if keys else {}
    async with routed({}, **changes) as (rig, _):
        for path, body in BODIES.items():
            whole = {"model": MODEL, **body}
            for digits in LONG:
                for sign in ("", "-", "+"):
                    named = {**fields, "x-vllm-priority": sign + "9" * digits}
                    status, answer = await rig.ask("POST", path, whole, named)
                    assert status == 400, (path, digits, answer)
                    assert "x-vllm-priority" in str(answer)
                text = msgspec.json.encode(whole)[:-1] + b',"priority":%b}' % (b"9" * digits)
                status, answer = await rig.ask("POST", path, text, fields)
                assert status == 400, (path, digits, answer)
            named = {**fields, "x-vllm-priority": "9" * 18}
            assert (await rig.ask("POST", path, whole, named))[0] == 200
        await rig.over()
        assert all(engine.breaker.allows(rig.router.accounts.now()) for engine in rig.router.fleet)


@pytest.mark.parametrize("digits", [10, 19, 309, 4300])
async def test_other_numbers_of_a_body_are_the_engines_to_judge(digits: int) -> None:
    async with routed({}) as (rig, _):
        for path, body in BODIES.items():
            for name in (
                "max_tokens",
                "max_completion_tokens",
                "max_output_tokens",
                "n",
                "truncate_prompt_tokens",
            ):
                given = {"model": MODEL, **body}
                given.pop(name, None)
                text = msgspec.json.encode(given)[:-1] + b',"%b":%b}' % (name.encode(), b"9" * digits)
                _, answer = await rig.ask("POST", path, text)
                assert "internal_error" not in str(answer), (path, name)
        await rig.over()


@pytest.mark.parametrize("length", [b"-1", b"+5", b"9" * 19, b"9" * 5000, b"1_0", b"x", b""])
def test_an_invalid_length_is_refused(length: bytes) -> None:
    head = ClientHead("POST", CHAT, CHAT.encode(), b"", [], {b"content-length": length})
    with pytest.raises(ApiError) as raised:
        read_request_headers(head, b"")
    assert raised.value.status == 400


@pytest.mark.parametrize("number", ["-1", "1" + "0" * 13, "9" * 20, "9" * 400, "1e300"])
@pytest.mark.parametrize(
    "shape",
    [
        '{"usage":{"prompt_tokens":%s,"completion_tokens":1}}',
        '{"usage":{"prompt_tokens":1,"completion_tokens":%s}}',
        '{"usage":{"prompt_tokens":1,"prompt_tokens_details":{"cached_tokens":%s}}}',
        '{"usage":{"input_tokens":1,"output_tokens":%s}}',
        '{"usage":{"tokens":{"input_tokens":%s}}}',
        '{"usage":{"seconds":%s}}',
        '{"meta":{"billed_units":{"input_tokens":%s}}}',
    ],
)
def test_an_engines_report_out_of_range_is_not_believed(shape: str, number: str) -> None:
    with pytest.raises(msgspec.MsgspecError):
        read_usage((shape % number).encode())
    good = read_usage((shape % "7").encode())
    assert isinstance(good, Usage)
