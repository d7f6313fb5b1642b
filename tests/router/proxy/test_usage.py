"""Values read from relayed answers: usage for receipts and the first token, whole or split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.openai.request import Usage
from kvatlas.router.proxy.answers import SseRelay
from tests.support.proxy_rig import (
    DONE,
    END,
    SSE_HEAD,
    STREAM,
    Engine,
    ask,
    chunk,
    event,
    request,
    routing,
    says,
    served,
    writes,
)
from tests.support.waiting import until

LAST = (
    b'data: {"choices":[],"usage":{"prompt_tokens":30,"total_tokens":32,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":16}}}\n\n'
)
WHOLE = Usage(30, 2, 16)


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        (
            b'{"usage":{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}',
            Usage(5, 2, 4),
        ),
        (
            b'{"usage":{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":null}}',
            Usage(5, 2, None),
        ),
        (b'{"usage":{"prompt_tokens":5,"completion_tokens":2}}', Usage(5, 2, None)),
        (b'{"usage":{"prompt_tokens":5}}', Usage(5, 0, None)),
        (b'{"usage":null}', None),
        (b"{}", None),
        (b'{"choices":[{"text":"say \\"usage\\": {}"}]}', None),
    ],
)
async def test_plain_answer(body: bytes, usage: Usage | None) -> None:
    async with served(says(200, body, "content-type: application/json")) as (_, rig):
        await ask(rig)
        placement = rig.planner.placements[0]
        await until(lambda: placement.over, "told")
        assert placement.usage == usage
        assert placement.told == ["first_byte", "finished"]
        assert rig.stats.usage_unreadable == 0


@pytest.mark.parametrize("body", [b"not json", b'{"usage": 5}', b'{"usage": {"prompt_tokens": "x"}}', b"[1]"])
async def test_unreadable_usage_is_counted_and_passed(body: bytes) -> None:
    async with Engine(says(200, body)) as engine, routing(engine.url) as rig:
        assert (await ask(rig)).body == body
        await until(lambda: rig.stats.usage_unreadable == 1, "counted")
        assert rig.planner.placements[0].usage is None


async def test_too_long_an_answer_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.router.proxy.forward.USAGE_BYTES_MAX", 1000)

    body = b'{"usage":{"prompt_tokens":5}, "x":"%b"}' % (b"x" * 5000)
    async with Engine(says(200, body)) as engine, routing(engine.url) as rig:
        assert (await ask(rig)).body == body
        await until(lambda: rig.planner.placements[0].over, "told")
        assert rig.planner.placements[0].usage is None


@pytest.mark.parametrize("over_bytes", [0, 1])
async def test_an_answer_up_to_the_bound_is_searched(
    monkeypatch: pytest.MonkeyPatch, over_bytes: int
) -> None:
    body = b'{"usage":{"prompt_tokens":5},"x":"%b"}' % (b"x" * 500)
    monkeypatch.setattr("kvatlas.router.proxy.forward.USAGE_BYTES_MAX", len(body) - over_bytes)
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with served(writes(head + body[:50], body[50:])) as (_, rig):
        assert (await ask(rig)).body == body
        await until(lambda: rig.planner.placements[0].over, "told")
        assert rig.planner.placements[0].usage == (None if over_bytes else Usage(5, 0, None))


@pytest.mark.parametrize("status", [200, 400])
async def test_stream(status: int) -> None:
    head = SSE_HEAD.replace(b"200 OK", b"%d X" % status)
    body = [event("a"), b'data: {"choices":[],"usage":null}\n\n', LAST, DONE]
    async with served(writes(head, *[chunk(part) for part in body], END)) as (_, rig):
        assert (await ask(rig, request(STREAM))).body == b"".join(body)
        placement = rig.planner.placements[0]
        await until(lambda: placement.over, "told")
        assert placement.usage == WHOLE
        assert placement.told == (["first_byte", "finished"] if status == 200 else ["finished"])


async def test_first_byte_is_the_first_event_not_a_comment() -> None:
    relay = SseRelay()
    assert relay.feed(b": ping\n\n") == b": ping\n\n"
    assert not relay.begun
    relay.feed(event("a"))
    assert relay.begun


@given(st.data())
def test_relay_keeps_bytes_and_finds_usage_however_split(data: st.DataObject) -> None:
    end = data.draw(st.sampled_from([b"\n", b"\r\n"]))
    parts = data.draw(
        st.lists(st.sampled_from([event("a"), b": ping\n\n", b"event: x\ndata: 1\n\n"]), max_size=5)
    )
    body = (b"".join(parts) + LAST + DONE).replace(b"\n", end)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=20)))
    relay = SseRelay()
    out = b""
    for start, stop in zip([0, *cuts], [*cuts, len(body)], strict=True):
        if start < stop:
            out += relay.feed(body[start:stop])
            assert body.startswith(out)
            assert out.endswith((b"\n", b"\r")) or not out
    assert out + relay.end() == body
    assert relay.usage == WHOLE
    assert relay.done


@given(st.integers(0, len(LAST) * 2), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_broken_stream_always_ends_in_an_event_of_its_own(cut: int, end: bytes) -> None:
    relay = SseRelay()
    out = relay.feed((event("a") + LAST)[:cut].replace(b"\n", end)) if cut else b""
    out += relay.broken(b'{"error":1}')
    lines = out.splitlines()
    assert lines[-2:] == [b'data: {"error":1}', b""]
    assert len(lines) == 2 or lines[-3] == b""


def test_endless_line_is_passed_on_in_parts() -> None:
    relay = SseRelay()
    sent = sum(len(relay.feed(b"x" * 50_000)) for _ in range(20))
    assert sent >= 700_000
