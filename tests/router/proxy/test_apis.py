"""Errors, usage and responses that are to be found again, in the shape of each API, at the real proxy."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from kvatlas.router.openai.error_bodies import error_body, error_event
from kvatlas.router.openai.errors import no_ready_engine, stream_broken
from kvatlas.router.openai.members import at_once
from kvatlas.router.openai.request import Usage
from kvatlas.router.proxy.answers import SseRelay
from kvatlas.router.proxy.paths import Verdict, judge
from kvatlas.router.proxy.screen import Rules, screen
from kvatlas.router.proxy.usage_reports import read_usage
from tests.support.clients import openai_client
from tests.support.ports import free_port
from tests.support.proxy_rig import SSE_HEAD, chunk, routing, served, writes

USAGES: list[tuple[dict[str, Any], Usage]] = [
    (
        {
            "usage": {
                "prompt_tokens": 9,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 4},
            }
        },
        Usage(9, 2, 4),
    ),
    (
        {"usage": {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}},
        Usage(9, 2, 4),
    ),
    (
        {"response": {"usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 0}}}},
        Usage(9, 0, 0),
    ),
    ({"usage": {"input_tokens": 5, "output_tokens": 2, "cache_read_input_tokens": 4}}, Usage(9, 2, 4)),
    (
        {"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 0}}},
        Usage(9, 0, None),
    ),
    (
        {"usage": {"input_tokens": 1, "cache_creation_input_tokens": 3, "cache_read_input_tokens": 5}},
        Usage(9, 0, 5),
    ),
    (
        {"delta": {"usage": {"tokens": {"input_tokens": 9.0, "output_tokens": 2.0}, "cached_tokens": 4.0}}},
        Usage(9, 2, 4),
    ),
]


@pytest.mark.parametrize(("answer", "usage"), USAGES)
def test_usage_in_every_apis_shape(answer: dict[str, Any], usage: Usage) -> None:
    assert read_usage(json.dumps(answer).encode()) == usage


def test_no_usage_where_there_is_none() -> None:
    for body in (
        b"{}",
        b'{"usage":null}',
        b'{"message":"text"}',
        b'{"delta":5,"response":null}',
        b'{"usage":{}}',
    ):
        assert read_usage(body) is None


def test_cached_tokens_of_a_streams_beginning_hold_until_its_end() -> None:
    relay = SseRelay()
    start = {"message": {"usage": {"input_tokens": 5, "cache_read_input_tokens": 4}}}
    relay.feed(b"event: message_start\ndata: %b\n\n" % json.dumps(start).encode())
    end = {"type": "message_delta", "usage": {"input_tokens": 9, "output_tokens": 3}}
    relay.feed(b"event: message_delta\ndata: %b\n\n" % json.dumps(end).encode())
    assert relay.usage == Usage(9, 3, 4)


def test_error_bodies_are_the_apis_own() -> None:
    error = no_ready_engine("nobody")
    anthropic = json.loads(error_body(error, "/v1/messages"))
    assert anthropic == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "nobody", "code": "no_ready_engine"},
    }
    assert json.loads(error_body(error, "/v1/messages/count_tokens")) == anthropic
    assert json.loads(error_body(error, "/cohere/v2/chat")) == {
        "message": "nobody",
        "code": "no_ready_engine",
    }
    for path in ("/v1/responses", "/v1/chat/completions", "/v1/messagesx"):
        assert json.loads(error_body(error, path))["error"]["code"] == "no_ready_engine"


def test_stream_errors_are_the_apis_own() -> None:
    error = stream_broken("gone")
    body, name = error_event(error, "/v1/responses", b'data: {"sequence_number":7}\n\n')
    told = json.loads(body)
    assert (name, told["type"], told["sequence_number"]) == (b"error", "error", 8)
    body, name = error_event(error, "/v1/messages", b"")
    assert (name, json.loads(body)["error"]["type"]) == (b"error", "api_error")
    assert error_event(error, "/v1/chat/completions", b"")[1] == b""


async def test_the_openai_client_gets_the_error_of_a_broken_responses_stream() -> None:
    created = (
        b'event: response.created\ndata: {"type":"response.created","sequence_number":0,'
        b'"response":{"id":"resp_1","object":"response","output":[]}}\n\n'
    )
    text = (
        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",'
        b'"sequence_number":1,"delta":"a","item_id":"m","output_index":0,"content_index":0,"logprobs":[]}\n\n'
    )
    async with (
        served(writes(SSE_HEAD, chunk(created), chunk(text), then="reset")) as (_, rig),
        openai_client(rig.url) as client,
    ):
        stream = await client.responses.create(model="m", input="x", stream=True)
        events = [event async for event in stream]
        names = ["response.created", "response.output_text.delta", "error"]
        assert [event.type for event in events] == names
        assert events[2].code == "engine_stream_broken"
        assert events[2].sequence_number == 2


async def test_errors_before_an_answer_at_the_proxy() -> None:
    async with routing(f"http://127.0.0.1:{free_port()}") as rig, aiohttp.ClientSession() as session:
        body = {"model": "m", "max_tokens": 3, "messages": []}
        async with session.post(rig.url + "/v1/messages", json=body) as answer:
            assert answer.status == 502
            assert (await answer.json())["error"]["type"] == "api_error"
        async with session.post(rig.url + "/v1/messages", data=b"nonsense") as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["type"] == "invalid_request_error"
        async with session.get(rig.url + "/v1/messages") as answer:
            assert answer.status == 405
            assert (await answer.json())["type"] == "error"


def test_paths_of_all_apis_are_forwarded() -> None:
    for path in (
        "/v1/messages/count_tokens",
        "/cohere/v2/chat",
        "/inference/v1/generate",
        "/v1/responses/r/cancel",
    ):
        assert judge(path, frozenset()) is Verdict.FORWARD
    assert judge("/inference/v1/other", frozenset()) is Verdict.UNKNOWN


def test_transfer_parameters_are_taken_out_of_sampling_parameters() -> None:
    given = {
        "token_ids": [1],
        "sampling_params": {"extra_args": {"kv_transfer_params": {"a": 1}, "b": 2}, "n": 1},
    }
    found = at_once(screen(json.dumps(given).encode(), Rules()))
    assert json.loads(bytes(found.body))["sampling_params"] == {"extra_args": {"b": 2}, "n": 1}
    assert found.transfer == 1
