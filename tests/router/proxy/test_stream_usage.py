"""The router asks for the usage of streams, and a client sees exactly what it asked for."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.openai.apis import CHAT, COMPLETION, MESSAGES, RESPONSES
from kvatlas.router.openai.body import peek
from kvatlas.router.openai.members import at_once
from kvatlas.router.openai.request import Usage
from kvatlas.router.proxy.answers import SseRelay
from kvatlas.router.proxy.stream_usage import with_usage
from tests.support.proxy_rig import DONE, event

LAST = (
    b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":30,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":16}}}\n\n'
)


def asked(body: bytes) -> bytes:
    return bytes(at_once(with_usage(body)))


@pytest.mark.parametrize(
    "own",
    [
        None,
        "null",
        "{}",
        '{"include_usage":false}',
        '{"include_usage":null}',
        '{"continuous_usage_stats":true}',
        '{"include_usage":false,"continuous_usage_stats":true}',
        '{"include_usage":"no"}',
        '{"include_usage":0}',
        '{"include_usage":true,"include_usage":false}',
        '{"x":{"include_usage":true}}',
        '{"x":NaN,"include_usage":false}',
        "7",
        "[]",
        '"x"',
    ],
)
@pytest.mark.parametrize("text", ["hi", 'say \\"stream_options\\": {\\"include_usage\\": true}', "\\u00e9"])
def test_a_client_that_does_not_ask_is_asked_for(own: str | None, text: str) -> None:
    more = "" if own is None else f',"stream_options": {own}'
    body = f'{{"model":"m","messages":[{{"role":"user","content":"{text}"}}],"stream":true{more}}}'.encode()
    found = msgspec.json.decode(asked(body))
    assert found["stream_options"] == {"include_usage": True}
    del found["stream_options"]
    assert found == {name: value for name, value in json.loads(body).items() if name != "stream_options"}


@pytest.mark.parametrize(
    "own",
    [
        '{"include_usage":true}',
        '{"include_usage" : true, "continuous_usage_stats": true}',
        '{"x":{"y":1},"include_usage":true}',
        '{"include_usage":"yes"}',
        '{"include_usage":1}',
        '{"include_usage":false,"include_usage":true}',
    ],
)
def test_a_client_that_asks_is_left_alone(own: str) -> None:
    body = b'{"model":"m","stream_options":%b,"stream":true}' % own.encode()
    assert asked(body) is body or asked(body) == body


def test_a_name_within_a_message_is_no_member() -> None:
    body = b'{"metadata":{"stream_options":{"include_usage":false}},"stream":true}'
    assert msgspec.json.decode(asked(body))["stream_options"] == {"include_usage": True}


TRUE, FALSE = '{"include_usage":true}', '{"include_usage":false}'


@pytest.mark.parametrize(
    "members",
    [
        f'"x":{{"stream_options":{TRUE}}},"stream_options":{FALSE}',
        f'"x":{{"stream_options":{TRUE}}}',
        f'"stream_options":{TRUE},"stream_options":{FALSE}',
        f'"stream_options":{TRUE},"stream_options":null',
        f'"stream\\u005foptions":{FALSE}',
        f'"stream_options":{TRUE},"\\u0073tream_options":{FALSE}',
        f'"stream_o\\u0070tions":{FALSE},"stream":true',
    ],
)
def test_the_last_member_of_its_own_decides_however_it_is_written(members: str) -> None:
    body = asked(f'{{"model":"m",{members}}}'.encode())
    assert json.loads(body)["stream_options"] == {"include_usage": True}
    assert body != f'{{"model":"m",{members}}}'.encode()


@pytest.mark.parametrize("value", ["true", "1", "1.0", '"true"', '" Yes "', '"ON"'])
@pytest.mark.parametrize("more", ["", ',"x":NaN'])
def test_values_that_engines_read_as_a_stream(value: str, more: str) -> None:
    assert peek(f'{{"stream":{value}{more}}}'.encode()).stream


@pytest.mark.parametrize("value", ["false", "null", "0", "2", '"no"', '"2"', "[]", "{}", "[true]"])
@pytest.mark.parametrize("more", ["", ',"x":NaN'])
def test_other_values_are_no_stream(value: str, more: str) -> None:
    assert not peek(f'{{"stream":{value}{more}}}'.encode()).stream


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"no json"])
def test_bodies_without_members_stay(body: bytes) -> None:
    assert asked(body) == body


ENDS = b'data: {"id":"x","choices":[{"index":%d,"delta":{},"finish_reason":"stop"}]}\n\n'
CLOSES = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":3},"system_fingerprint":"vllm-1"}\n\n'


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        ([event("a"), LAST, DONE], [event("a"), DONE]),
        ([event("a"), ENDS % 0, LAST, DONE], [event("a"), ENDS % 0, DONE]),
        ([event("a"), ENDS % 0, DONE], [event("a"), ENDS % 0, DONE]),
        ([event("a"), ENDS % 0], [event("a"), ENDS % 0]),
        ([ENDS % 0, event("a"), ENDS % 1, LAST, DONE], [event("a"), ENDS % 0, ENDS % 1, DONE]),
        # Where the engine names its fingerprint with the usage, it names it at the end otherwise.
        (
            [event("a"), ENDS % 0, CLOSES, DONE],
            [event("a"), (ENDS % 0).replace(b"]}\n", b'],"system_fingerprint":"vllm-1"}\n'), DONE],
        ),
        ([b'data: {"choices":[],"usage":null}\n\n'], [b'data: {"choices":[],"usage":null}\n\n']),
        ([b'data: {"usage":{"prompt_tokens":1}}\n\n'], [b'data: {"usage":{"prompt_tokens":1}}\n\n']),
    ],
)
@pytest.mark.parametrize("apart", [False, True])
def test_only_the_event_of_the_usage_is_taken_out(
    sent: list[bytes], wanted: list[bytes], apart: bool
) -> None:
    relay = SseRelay(CHAT, hides_usage=True)
    pieces = sent if apart else [b"".join(sent)]
    assert b"".join(map(relay.feed, pieces)) + relay.end() == b"".join(wanted)


def test_a_stream_that_breaks_off_loses_nothing_that_waited() -> None:
    relay = SseRelay(CHAT, hides_usage=True)
    out = relay.feed(event("a")) + relay.feed(ENDS % 0) + relay.broken(b'{"error":1}')
    assert out == event("a") + ENDS % 0 + b'data: {"error":1}\n\n'


@pytest.mark.parametrize("ends", [b"", ENDS % 0])
@pytest.mark.parametrize("place", range(1, 5))
def test_an_end_that_is_cut_within_cr_lf_goes_with_its_event(ends: bytes, place: int) -> None:
    before, removed, after = (one.replace(b"\n", b"\r\n") for one in (event("a") + ends, LAST, DONE))
    whole = before + removed + after
    for end in (len(before), len(before) + len(removed)):
        relay, cut = SseRelay(CHAT, hides_usage=True), end - place
        out = relay.feed(whole[:cut]) + relay.feed(whole[cut:]) + relay.end()
        undivided = SseRelay(CHAT, hides_usage=True)
        assert out == undivided.feed(whole) + undivided.end()


@given(st.data())
def test_a_client_that_has_not_asked_sees_all_but_the_usage_however_it_comes(data: st.DataObject) -> None:
    end = data.draw(st.sampled_from([b"\n", b"\r\n"]))
    others = [event("a"), b": ping\n\n", b'data: {"choices":[{"delta":{"content":"b"}}],"usage":null}\n\n']
    parts = data.draw(st.lists(st.sampled_from(others), max_size=5))
    parts = [event("a"), *parts]
    body = (b"".join(parts) + LAST + DONE).replace(b"\n", end)
    wanted = (b"".join(parts) + DONE).replace(b"\n", end)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=20)))
    relay, out = SseRelay(CHAT, hides_usage=True), b""
    for start, stop in zip([0, *cuts], [*cuts, len(body)], strict=True):
        if start < stop:
            out += relay.feed(body[start:stop])
    assert out + relay.end() == wanted
    assert relay.usage == Usage(30, 2, 16)
    assert relay.done


def test_the_last_event_may_come_without_its_blank_line() -> None:
    relay: Any = SseRelay(CHAT, hides_usage=True)
    out = relay.feed(event("a")) + relay.feed(LAST[:-1])
    assert out + relay.end() == event("a")
    assert relay.usage == Usage(30, 2, 16)


def chat_event(delta: str, index: int = 0, finish: str = "null", gap: str = "") -> bytes:
    choice = f'{{"index":{index},"delta":{{{delta}}},"logprobs":null,"finish_reason":{finish}}}'
    return f'data: {{"object":"chat.completion.chunk","choices":{gap}[{choice}]}}\n\n'.encode()


ROLE = '"role":"assistant","content":""'
WORD = '"content":"say \\"choices\\":[{ to me"'
NO_CHOICE = b'data: {"choices":[],"usage":null}\n\n'


def named(name: str, data: str) -> bytes:
    return f'event: {name}\ndata: {{"type":"{name}",{data}}}\n\n'.encode()


STREAMS = {
    "chat": (
        CHAT,
        [chat_event(ROLE), *[chat_event(WORD)] * 5, chat_event("", finish='"stop"'), LAST, DONE],
        6,
    ),
    "three answers": (
        CHAT,
        [
            *(chat_event(ROLE, each) for each in range(3)),
            *(chat_event(WORD, each) for each in (0, 1, 2, 1)),
            DONE,
        ],
        4,
    ),
    "spaces": (CHAT, [chat_event(ROLE, gap=" "), *[chat_event(WORD, gap=" ")] * 3, NO_CHOICE], 3),
    "comments": (
        CHAT,
        [b": wait\n\n", chat_event(ROLE), chat_event(WORD), b": wait\n\n", chat_event(WORD)],
        2,
    ),
    "an error": (CHAT, [chat_event(WORD), b'data: {"error":{"message":"no","code":500}}\n\n', DONE], 1),
    "texts": (COMPLETION, [b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'] * 4 + [DONE], 4),
    "a message": (
        MESSAGES,
        [
            named("message_start", '"message":{"usage":{"input_tokens":3}}'),
            named("content_block_start", '"content_block":{"type":"text","text":""}'),
            *[named("content_block_delta", '"delta":{"type":"text_delta","text":"a"}')] * 4,
            named("content_block_stop", '"index":0'),
            named("message_delta", '"delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":4}'),
            named("message_stop", '"x":0'),
        ],
        4,
    ),
    "a response": (
        RESPONSES,
        [
            named("response.created", '"response":{"status":"in_progress"}'),
            named("response.output_item.added", '"item":{"type":"message"}'),
            *[named("response.reasoning_text.delta", '"delta":"a"')] * 2,
            *[named("response.output_text.delta", '"delta":"a"')] * 3,
            named("response.output_text.done", '"text":"aaa"'),
            *[named("response.function_call_arguments.delta", '"delta":"a"')] * 2,
        ],
        7,
    ),
}


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("together", [1, 2, 3, 100])
@pytest.mark.parametrize("name", STREAMS)
def test_events_with_tokens_are_counted_whatever_else_comes(name: str, together: int, end: bytes) -> None:
    path, events, tokens = STREAMS[name]
    relay, found = SseRelay(path, replaceable=True, hides_usage=path == CHAT), 0
    for at in range(0, len(events), together):
        relay.feed(b"".join(events[at : at + together]).replace(b"\n", end))
        found += relay.count if relay.begun else 0
    assert found == tokens
