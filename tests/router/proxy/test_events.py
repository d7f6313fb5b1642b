"""Kinds of events in every API and framing; the relay's replay before the first token."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.openai.apis import BATCH, CHAT, COMPLETION, GENERATE, MESSAGES, RESPONSES
from kvatlas.router.proxy.answers import SseRelay
from kvatlas.router.proxy.events import (
    EVENT_ENDS,
    Kind,
    Said,
    aborted,
    blocks,
    data_of,
    last_event_end,
    read_event,
)
from tests.support.api_streams import LINE_ENDS, SGLANG, STREAMS, event_of, stream_of

PATHS = sorted(STREAMS)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("space", ["", " "])
@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize("end", LINE_ENDS.values(), ids=LINE_ENDS)
def test_an_event_says_the_same_in_every_framing(path: str, space: str, lines: bool, end: bytes) -> None:
    parts = STREAMS[path]

    def kind(named: Any) -> Kind:
        block = event_of(named, end, lines=lines, space=space)
        assert list(blocks(block)) == [block]
        assert last_event_end(block) == len(block)
        return read_event(path, data_of(block)).kind

    assert {kind(one) for one in parts.openings} == {Kind.OPENING}
    assert kind(parts.token) is Kind.TOKEN
    assert kind(parts.abort) is Kind.ABORT
    assert kind(parts.error) is Kind.ERROR
    last = parts.end[-1]
    assert kind(last) is Kind.TOKEN


def test_one_rule_says_what_ends_an_event() -> None:
    """All texts of up to six line ends and letters: what ``EVENT_ENDS`` says, and the position."""
    for length in range(7):
        for letters in itertools.product(b"\r\nx", repeat=length):
            text = bytes(letters)
            assert text.endswith(EVENT_ENDS) == (0 < length == last_event_end(text))


@pytest.mark.parametrize(
    ("path", "data", "kind"),
    [
        (CHAT, b"", Kind.OPENING),
        (CHAT, b"  ", Kind.OPENING),
        (CHAT, b"{}", Kind.OPENING),
        (CHAT, b"[DONE]", Kind.TOKEN),
        (CHAT, b"no json", Kind.TOKEN),
        (CHAT, b"[1]", Kind.TOKEN),
        (CHAT, b'{"other": 1}', Kind.TOKEN),
        (CHAT, b'{"choices":[{"delta":{"reasoning":"a"}}]}', Kind.TOKEN),
        (CHAT, b'{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}', Kind.TOKEN),
        (CHAT, b'{"choices":[{"delta":{"content":""},"token_ids":[5]}]}', Kind.TOKEN),
        (CHAT, b'{"choices":[{"delta":{"content":""},"logprobs":{"content":[]}}]}', Kind.OPENING),
        (CHAT, b'{"choices":[{"delta":{"content":""},"logprobs":{"content":[{"token":""}]}}]}', Kind.TOKEN),
        (CHAT, b'{"choices":[{"delta":{}},{"index":1,"delta":{"content":"x"}}]}', Kind.TOKEN),
        (CHAT, b'{"choices":[],"usage":{"prompt_tokens":5}}', Kind.OPENING),
        (CHAT, b'{"object":"chat.completion.chunk","usage":{"prompt_tokens":5}}', Kind.OPENING),
        (CHAT, b'{"choices":[{"delta":{},"finish_reason":"error"}]}', Kind.ERROR),
        (COMPLETION, b'{"choices":[{"text":"","finish_reason":"stop"}]}', Kind.TOKEN),
        (COMPLETION, b'{"choices":[{"text":"","prompt_token_ids":[5,6]}]}', Kind.OPENING),
        (
            MESSAGES,
            b'{"type":"content_block_start","content_block":{"type":"tool_use","id":"t"}}',
            Kind.TOKEN,
        ),
        (
            MESSAGES,
            b'{"type":"content_block_start","content_block":{"type":"thinking","thinking":""}}',
            Kind.OPENING,
        ),
        (
            MESSAGES,
            b'{"type":"content_block_delta","delta":{"type":"thinking_delta","thinking":"a"}}',
            Kind.TOKEN,
        ),
        (RESPONSES, b'{"type":"response.queued","response":{"status":"queued"}}', Kind.OPENING),
        (
            RESPONSES,
            b'{"type":"response.output_item.added","item":{"type":"function_call","name":"f"}}',
            Kind.TOKEN,
        ),
        (
            RESPONSES,
            b'{"type":"response.output_item.added","item":{"type":"reasoning","summary":[]}}',
            Kind.OPENING,
        ),
        (RESPONSES, b'{"type":"response.reasoning_text.delta","delta":"a"}', Kind.TOKEN),
        (RESPONSES, b'{"type":"response.web_search_call.searching"}', Kind.TOKEN),
        (RESPONSES, b'{"type":"error","code":"server_error","message":"m"}', Kind.ERROR),
        (RESPONSES, b'{"type":"response.completed","response":{"status":"cancelled"}}', Kind.ABORT),
        (
            "/cohere/v2/chat",
            b'{"type":"message-start","delta":{"message":{"role":"assistant"}}}',
            Kind.OPENING,
        ),
        (
            "/cohere/v2/chat",
            b'{"type":"content-start","delta":{"message":{"content":{"type":"text","text":""}}}}',
            Kind.OPENING,
        ),
        (
            "/cohere/v2/chat",
            b'{"type":"content-delta","delta":{"message":{"content":{"text":"a"}}}}',
            Kind.TOKEN,
        ),
        ("", b'{"choices":[{"delta":{"content":""}}]}', Kind.OPENING),
        (SGLANG, b'{"text":"","meta_info":{"finish_reason":null,"completion_tokens":0}}', Kind.OPENING),
        (SGLANG, b'{"text":"","meta_info":{"finish_reason":null,"completion_tokens":1}}', Kind.TOKEN),
    ],
)
def test_kinds_of_events(path: str, data: bytes, kind: Kind) -> None:
    assert read_event(path, data).kind is kind


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b'{"error":{"message":"m","code":503}}', 503),
        (b'{"error":{"message":"m","code":"odd"}}', 500),
        (b'{"error":"gone"}', 500),
        (b'{"object":"error","message":"m","code":400}', 400),
        (b'{"type":"response.failed","response":{"status":"failed","error":{"code":"server_error"}}}', 500),
        (b'{"error":null,"choices":[]}', 0),
        (b'{"type":"response.created","response":{"error":null}}', 0),
    ],
)
def test_the_status_that_an_error_names(data: bytes, status: int) -> None:
    assert read_event(CHAT, data).status == status


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("", Said(Kind.ABORT)),
        (',"status_code":null', Said(Kind.ABORT)),
        (',"status_code":"400"', Said(Kind.ABORT)),
        (',"status_code":200', Said(Kind.ABORT)),
        (',"status_code":400', Said(Kind.ERROR, 400)),
        (',"status_code":413', Said(Kind.ERROR, 413)),
        (',"status_code":500', Said(Kind.ERROR, 500)),
        (',"status_code":503', Said(Kind.ERROR, 503)),
    ],
)
def test_an_abort_of_sglangs_that_names_a_status_is_an_error(named: str, said: Said) -> None:
    data = b'{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"m"%b}}}' % named.encode()
    assert read_event(SGLANG, data) == said
    # Whole, a refusal of the request is its answer, and anything else is given up.
    assert aborted(SGLANG, data) is not (400 <= said.status < 500)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (CHAT, b'{"choices":[{"finish_reason": "abort"}]}', True),
        (CHAT, b'{"choices":[{"message":{"content":"\\"abort\\""},"finish_reason":"stop"}]}', False),
        (MESSAGES, b'{"type": "message", "content": []}', True),
        (MESSAGES, b'{"type": "message", "stop_reason": "end_turn"}', False),
        (RESPONSES, b'{"status": "cancelled"}', True),
        (RESPONSES, b'{"status":"completed","usage":{"output_tokens": 0}}', True),
        (RESPONSES, b'{"status":"completed","usage":{"output_tokens": 10}}', False),
        (GENERATE, b'{"choices":[{"finish_reason":"abort","token_ids":[]}]}', True),
        (SGLANG, b'{"text":"","meta_info":{"finish_reason":{"type":"abort"}}}', True),
        (SGLANG, b'[{"text":"","meta_info":{"finish_reason":{"type":"abort"}}}]', True),
        (SGLANG, b'[{"text":"\\"abort\\"","meta_info":{"finish_reason":{"type":"stop"}}}]', False),
        (CHAT, b'"abort"', False),
    ],
)
def test_whole_answers_that_the_engine_gave_up(path: str, body: bytes, expected: bool) -> None:
    assert aborted(path, body) is expected


def test_an_opening_cut_within_its_last_line_end_comes_out_as_it_came() -> None:
    relay = SseRelay("/generate", replaceable=True)
    opening, token = b"data:\r\n\r\n", event_of(STREAMS["/generate"].token, b"\r\n")
    assert relay.feed(opening[:-1]) == b""
    assert relay.feed(opening[-1:] + token) == opening + token


@given(st.data())
def test_openings_wait_for_the_first_token_and_comments_do_not(data: st.DataObject) -> None:
    """However the stream is framed and split: nothing but comments comes out before the whole token is there;
    then every byte does, comments perhaps earlier than the openings around them."""
    path = data.draw(st.sampled_from(PATHS))
    end = data.draw(st.sampled_from(sorted(LINE_ENDS.values())))
    lines, space = data.draw(st.booleans()), data.draw(st.sampled_from(["", " "]))
    comment = b": keep-alive" + end + end
    openings = [event_of(one, end, lines=lines, space=space) for one in STREAMS[path].openings]
    empty = [b"data:" + end + end, b"data" + end + end, b"event: x" + end + end, b"retry: 5" + end + end]
    before = data.draw(st.lists(st.sampled_from([comment, *openings, *empty]), max_size=6))
    token = event_of(STREAMS[path].token, end, lines=lines, space=space)
    after = event_of(STREAMS[path].end[-1], end)
    body = b"".join(before) + token + after
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=12)))
    relay = SseRelay(path, replaceable=True)
    out, fed = b"", 0
    # The last line end may be one more byte of CR LF, or be no part of it.
    begins = len(b"".join(before)) + len(token)
    for start, stop in zip([0, *cuts], [*cuts, len(body)], strict=True):
        if start == stop:
            continue
        out += relay.feed(body[start:stop])
        fed = stop
        if fed < begins - 1:
            assert not relay.begun
            assert set(out.splitlines()) <= {b": keep-alive", b""}
        elif fed >= begins:
            assert relay.begun
    out += relay.end()
    assert sorted(out.splitlines()) == sorted(body.splitlines())
    assert len(out) == len(body)
    if comment not in before:
        assert out == body
    assert not relay.aborted
    assert not relay.failed
    assert not relay.exposed


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_byte_by_byte_begins_with_its_token(path: str) -> None:
    for end in LINE_ENDS.values():
        body = stream_of(path, end=end)
        secret = body.index(b"SECRET")
        relay = SseRelay(path, replaceable=True)
        for at in range(len(body)):
            relay.feed(body[at : at + 1])
            if at <= secret:
                assert not relay.begun
        assert relay.begun


@pytest.mark.parametrize("size", [300_000, 3_000_000])
@pytest.mark.parametrize("piece", [1400, 65_536])
def test_an_opening_of_any_size_is_an_opening(size: int, piece: int) -> None:
    opening = b'data: {"prompt_token_ids":[%b5],"choices":[{"delta":{"role":"assistant"}}]}\n\n' % (
        b"5," * (size // 2)
    )
    relay = SseRelay(CHAT, replaceable=True)
    for at in range(0, len(opening), piece):
        assert relay.feed(opening[at : at + piece]) == b""
    assert (relay.begun, relay.exposed) == (False, False)
    token = event_of(STREAMS[CHAT].token)
    assert relay.feed(token) == opening + token


def in_pieces(relay: SseRelay, body: bytes) -> bytes:
    return b"".join(relay.feed(body[at : at + 65_536]) for at in range(0, len(body), 65_536))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (RESPONSES, b"event: response.created\n"),
        (RESPONSES, b"id: 1\r\nevent:response.in_progress\r\n"),
        (MESSAGES, b"event: message_start\n"),
    ],
)
def test_openings_beyond_the_bound_pass_and_are_no_tokens(path: str, name: bytes) -> None:
    opening = name + b'data: {"response":{"instructions":"%b"}}\n\n' % (b"5," * 2_500_000)
    relay, held = SseRelay(path, replaceable=True), event_of(STREAMS[path].openings[0])
    assert in_pieces(relay, held + opening) == held + opening
    assert (relay.begun, relay.exposed) == (False, True)
    relay.feed(event_of(STREAMS[path].token))
    assert relay.begun


@pytest.mark.parametrize(
    ("path", "name"),
    [(CHAT, b""), (RESPONSES, b"event: response.output_text.delta\n"), (MESSAGES, b"event: odd\n")],
)
def test_any_other_event_beyond_the_bound_is_the_first_token_before_a_part_of_it_passes(
    path: str, name: bytes
) -> None:
    event = name + b'data: {"choices":[{"delta":{"content":"%b"}}],"delta":"x"}\n\n' % (b"5," * 2_500_000)
    relay = SseRelay(path, replaceable=True)
    for at in range(0, len(event), 65_536):
        assert bool(relay.feed(event[at : at + 65_536])) <= relay.begun
    assert (relay.begun, relay.said.kind) == (True, Kind.TOKEN)
    relay = SseRelay(path, replaceable=True)
    token = event_of(STREAMS[path].token)
    assert in_pieces(relay, event + token) + relay.end() == event + token


def test_the_name_of_a_background_response_does_not_wait() -> None:
    created = {"type": "response.created", "response": {"id": "resp_x", "background": True}}
    relay = SseRelay(RESPONSES, replaceable=True)
    opening = event_of(("response.created", created))
    assert relay.feed(opening) == opening
    assert (relay.begun, relay.exposed) == (False, True)


@pytest.mark.parametrize("path", PATHS)
def test_a_comment_passes_while_openings_wait(path: str) -> None:
    relay = SseRelay(path, replaceable=True)
    opening = event_of(STREAMS[path].openings[0])
    assert relay.feed(opening + b": keep-alive\n\n") == b": keep-alive\n\n"
    assert relay.feed(b":\r\n\r\n") == b":\r\n\r\n"
    assert relay.waits
    token = event_of(STREAMS[path].token)
    assert relay.feed(token) == opening + token
    assert not relay.waits
    assert relay.feed(b": keep-alive\n\n") == b": keep-alive\n\n"
    assert relay.waits


@pytest.mark.parametrize("path", PATHS)
def test_an_irreplaceable_answer_is_passed_on_and_counted_as_failed(path: str) -> None:
    """A gateway's answer: openings, an abort, an error."""
    for kind in ("abort", "error"):
        relay = SseRelay(path)
        named = STREAMS[path]
        parts = [*named.openings, named.token, getattr(named, kind)]
        for one in parts:
            assert relay.feed(event_of(one)) == event_of(one)
        assert (relay.given_up, bool(relay.failed)) == (kind == "abort", kind == "error")
        assert not relay.aborted


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("end", LINE_ENDS.values(), ids=LINE_ENDS)
@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize("kind", ["error", "abort"])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_missing_end_is_seen_behind_tokens(
    path: str, end: bytes, lines: bool, kind: str, size: int
) -> None:
    """An error is passed on as it is; an abort, and what follows it, is not."""
    parts = STREAMS[path]
    good = event_of(parts.token, end, lines=lines) * 3
    bad = event_of(getattr(parts, kind), end, lines=lines)
    body = good + bad + (event_of(("", None), end) if kind == "error" else b"")
    relay = SseRelay(path, replaceable=True)
    out = b""
    for at in range(0, len(body), size):
        out += relay.feed(body[at : at + size])
        if relay.aborted:
            break
    if not relay.aborted:
        out += relay.end()
    assert relay.aborted == (kind == "abort")
    assert bool(relay.failed) == (kind == "error")
    assert out == (good if kind == "abort" else body)


@pytest.mark.parametrize("path", PATHS)
def test_text_that_speaks_of_errors_is_text(path: str) -> None:
    """A token that is a mark itself, or quotes one."""
    for word in ("error", "abort", '"error"', '{"error":{"code":500}}', 'finish_reason":"abort"'):
        data = json.loads(json.dumps(STREAMS[path].token[1]).replace("SECRET", json.dumps(word)[1:-1]))
        relay = SseRelay(path, replaceable=True)
        body = event_of(STREAMS[path].token) + event_of((STREAMS[path].token[0], data))
        assert relay.feed(body) == body
        assert (relay.aborted, relay.failed) == (False, 0)


@pytest.mark.parametrize("path", PATHS)
def test_a_chunk_like_the_one_before_costs_no_call(path: str) -> None:
    """Neither decoded nor split: there are hundreds of them in an answer."""
    if path == SGLANG:
        pytest.skip("its events grow")
    relay = SseRelay(path, replaceable=True)
    token = event_of(STREAMS[path].token)
    for _ in range(3):
        relay.feed(token)
    calls: list[str] = []
    sys.setprofile(lambda frame, what, _: calls.append(frame.f_code.co_name) if what == "call" else None)
    try:
        for _ in range(10):
            assert relay.passes(token)
    finally:
        sys.setprofile(None)
    assert calls == ["passes"] * 10


@given(st.lists(st.binary(max_size=40), max_size=8), st.sampled_from(PATHS), st.booleans())
def test_no_bytes_of_an_engine_raise_or_are_lost(pieces: list[bytes], path: str, replaceable: bool) -> None:
    relay = SseRelay(path, replaceable=replaceable)
    out = b"".join(relay.feed(piece) for piece in pieces if piece) + relay.end()
    if not relay.aborted:
        assert sorted(out) == sorted(b"".join(pieces))


@pytest.mark.parametrize("replaceable", [True, False])
@pytest.mark.parametrize("reason", ["abort", "error"])
@pytest.mark.parametrize("path", [CHAT, COMPLETION, GENERATE, BATCH])
def test_of_several_answers_in_one_event_each_is_looked_at(path: str, reason: str, replaceable: bool) -> None:
    """The last one of an event goes on, as the ones before did; another one is over."""

    def event(*reasons: str | None) -> bytes:
        choices = [
            {"index": at, "text": "x", "token_ids": [1], "finish_reason": one}
            for at, one in enumerate(reasons)
        ]
        return b"data: " + msgspec.json.encode({"choices": choices}) + b"\n\n"

    relay = SseRelay(path, replaceable=replaceable)
    for data in (event(None), event(None), event(None, None)):
        assert relay.feed(data) == data
    relay.feed(event(reason, None))
    if reason == "error":
        assert relay.failed == 500
    else:
        assert (relay.aborted, relay.given_up) == (replaceable, not replaceable)
