"""Chats that a parser reads go on from another engine as if they had not been cut, or are refused."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvatlas.router.http.upstream import UpstreamError
from kvatlas.router.openai.apis import CHAT, COMPLETION
from kvatlas.router.proxy import parsed_stream
from kvatlas.router.proxy.continuation import completion_of
from kvatlas.router.proxy.continuation_plan import ContinuationPlan, plan_of
from kvatlas.router.proxy.kept_stream import KeptStream
from kvatlas.router.proxy.parsed_stream import DERENDER, RENDER, ParsedStream
from kvatlas.router.proxy.settings import ProxySettings
from tests.router.proxy.test_continuation import examples_of
from tests.router.proxy.test_continued_streams import answered
from tests.support.parser_engine import ParserEngine
from tests.support.proxy_rig import END, SSE_HEAD, Call, Engine, FakePlacement, Script, chunk, says
from tests.support.text_engine import PROMPT, token
from tests.vllm.told_streams import ToldStream, told

TOOLS = [{"type": "function", "function": {"name": "weather"}}]
BODY: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "messages": [{"role": "user", "content": "hi"}],
    "tools": TOOLS,
    "stream_options": {"include_usage": True},
}
PIECES = (
    "<t>",
    "</t>",
    "<c>weather:",
    "<c>time:{",
    '{"a": "🙂"}',
    "}",
    "</c>",
    "<",
    "< b",
    "text ",
    "語",
    "<c",
)


def result(steps: Coroutine[Any, Any, Any]) -> Any:
    """Its result; nothing in it waits."""
    try:
        steps.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("it waits")


def broken(engine: ParserEngine, events: int, body: dict[str, Any] = BODY) -> tuple[bytes, KeptStream]:
    plan = plan_of(CHAT, json.dumps(body).encode(), parses=True)
    assert isinstance(plan, ContinuationPlan), plan
    kept = KeptStream(plan, PROMPT)
    came = b"".join(itertools.islice(engine.chat({**body, "return_token_ids": True}), events))
    return kept.feed(came), kept


def asking(engine: ParserEngine) -> parsed_stream.Ask:
    async def ask(path: str, body: bytes) -> bytes:
        return engine.answers(path, json.loads(body))

    return ask


def goes_on(engine: ParserEngine, kept: KeptStream, cuts: list[int]) -> bytes:
    """The rest, cut again behind each of these numbers of events."""
    if kept.complete:
        return kept.closing()
    assert not kept.check()
    stream = ParsedStream(kept)
    assert result(stream.differs(asking(engine))) == ""
    body = completion_of(kept, len(kept.ids), 100_000)
    assert isinstance(body, bytes)
    out = b""
    for number, event in enumerate(engine.events(COMPLETION, json.loads(body), "another")):
        if cuts and number == cuts[0]:
            return out + goes_on(engine, kept, cuts[1:])
        stream.taken()
        out += stream.feed(event)
        while stream.due:
            out += result(stream.parsed())
            assert not kept.failed
    assert kept.complete
    return out


def uncut(engine: ParserEngine, body: dict[str, Any] = BODY) -> ToldStream:
    return told(b"".join(engine.chat(body)))


def test_a_chat_with_tools_goes_on_as_if_it_had_not_been_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    @examples_of
    @given(
        st.lists(st.sampled_from(PIECES), min_size=1, max_size=12),
        st.lists(st.integers(1, 4), min_size=1, max_size=9),
        st.integers(2, 60),
        st.integers(1, 4),
        st.integers(1, 4),
        st.lists(st.integers(0, 9), max_size=3),
        st.sampled_from([1, 4, 256]),
    )
    def check(
        pieces: list[str], sizes: list[int], cut: int, first: int, second: int, cuts: list[int], each: int
    ) -> None:
        data, ids, turns = "".join(pieces).encode(), [], itertools.cycle(sizes)
        while data:
            size = next(turns)
            ids.append(token(data[:size]))
            data = data[size:]
        out, kept = broken(ParserEngine(ids, first), cut)
        assume(kept.complete or not kept.check())
        assume(kept.complete or kept.read.events)
        other = ParserEngine(ids, second)
        with monkeypatch.context() as patch:
            patch.setattr(parsed_stream, "_EACH_LEN", each)
            patch.setattr(parsed_stream, "_STEP_PARTS", 2)
            whole = told(out + goes_on(other, kept, cuts))
        assert whole.same(uncut(other), forms=False), (whole, uncut(other))

    check()


TEXT = "<t>hm</t>So: <c>weather:{1}</c>"
ANSWER = [token(one.encode()) for one in TEXT]


def test_calls_keep_their_ids() -> None:
    out, kept = broken(ParserEngine(ANSWER), len(TEXT) - 3)
    assert kept.read.calls == ["call-0-0"]
    stream = told(out + goes_on(ParserEngine(ANSWER), kept, []))
    assert stream.call_ids == ["call-0-0"]
    assert stream.ended == ("tool_calls", None)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"rendered": {"structured_outputs": {"structural_tag": "{}"}}}, "format"),
        ({"rendered": {"stop_token_ids": [5]}}, "parser"),
        ({"parses": False}, "parser"),
        ({"answer": [token(b"<t>"), *ANSWER]}, "parser"),
    ],
    ids=["grammar", "stop tokens", "no parser", "another text"],
)
def test_an_engine_that_reads_another_answer_does_not_go_on(wrong: dict[str, Any], reason: str) -> None:
    _, kept = broken(ParserEngine(ANSWER), 16)
    engine = ParserEngine(ANSWER)
    for name, value in wrong.items():
        setattr(engine, name, value)
    if "answer" in wrong:
        kept.ids[:] = kept.ids[1:]
        kept.lens[:] = kept.lens[1:]
    assert result(ParsedStream(kept).differs(asking(engine))) == reason


def test_a_prompt_that_the_engine_renders_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, kept = broken(ParserEngine(ANSWER), 16)
    kept.prompt = b"7,300,11"
    monkeypatch.setattr("tests.support.parser_engine.PROMPT", [7, 300, 11, 12])
    engine = ParserEngine(ANSWER)

    async def ask(path: str, body: bytes) -> bytes:
        told_body = json.loads(body)
        if path == DERENDER:
            told_body["prompt_token_ids"] = PROMPT
        return engine.answers(path, told_body)

    assert result(ParsedStream(kept).differs(ask)) == "parser"


@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b'{"token_ids":[],"sampling_params":{}}', b"\xff"])
def test_an_answer_that_is_none_is_refused(answer: bytes) -> None:
    _, kept = broken(ParserEngine(ANSWER), 16)

    async def ask(path: str, body: bytes) -> bytes:
        return answer

    assert result(ParsedStream(kept).differs(ask)) == "parser"


@pytest.mark.parametrize(
    "answer",
    [b"", b'{"chunk":{"choices":[]},"stream_state":{}}', None],
    ids=["nothing", "no choice", "an error"],
)
def test_an_event_that_cannot_be_read_ends_the_stream(answer: bytes | None) -> None:
    _, kept = broken(ParserEngine(ANSWER), 16)
    engine = ParserEngine(ANSWER)
    stream = ParsedStream(kept)
    assert result(stream.differs(asking(engine))) == ""
    before = [*kept.ids]
    stream.taken()
    body = completion_of(kept, len(kept.ids), 1000)
    assert isinstance(body, bytes)
    assert stream.feed(next(iter(engine.events(COMPLETION, json.loads(body))))) == b""

    async def ask(path: str, body: bytes) -> bytes:
        if answer is None:
            raise UpstreamError("timeout")
        return answer

    stream.ask = ask
    assert result(stream.parsed()) == b""
    assert kept.failed
    assert [*kept.ids] == before


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, ""),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, ""),
        ({"tool_choice": "none"}, ""),
        ({"tool_choice": "required"}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tools"),
        ({"stop": "x"}, "tools"),
        ({"logprobs": True}, "tools"),
        ({"functions": [{}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "format"),
    ],
)
def test_the_body_decides_whether_a_chat_with_tools_may_go_on(body: dict[str, Any], reason: str) -> None:
    whole = json.dumps({**BODY, **body}).encode()
    found = plan_of(CHAT, whole, parses=True)
    assert ("" if isinstance(found, ContinuationPlan) else found) == reason
    assert plan_of(CHAT, whole) == "tools"
    assert plan_of(COMPLETION, json.dumps({"prompt": "a", "tools": TOOLS}).encode(), parses=True) == "tools"


@pytest.mark.parametrize("more", [{"stop": ["x"]}, {"logprobs": True}])
def test_reasoning_with_what_derendered_text_has_not_is_refused(more: dict[str, Any]) -> None:
    body = {name: one for name, one in BODY.items() if name != "tools"} | more
    assert broken(ParserEngine(ANSWER), 6, body)[1].check() == "reasoning"
    del body[next(iter(more))]
    assert broken(ParserEngine(ANSWER), 6, body)[1].check() == ""


def serving(engine: ParserEngine, events: int | None, refused: int = 0) -> Script:
    """The engine; its first chat breaks behind this number of events."""

    async def script(rig: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        path, body = call.head.first[1], json.loads(call.body)
        if path in {RENDER, DERENDER}:
            await says(refused or 200, b"{}" if refused else engine.answers(path, body))(rig, call, writer)
            return
        writer.write(SSE_HEAD)
        made = engine.chat(body) if path == CHAT else engine.events(path, body)
        for event in itertools.islice(made, events if path == CHAT else None):
            writer.write(chunk(event))
        await writer.drain()
        await asyncio.sleep(0.1)
        if path == CHAT and events is not None:
            writer.close()
        else:
            writer.write(END)

    return script


ON = ProxySettings(continue_tools=True)


@pytest.mark.parametrize("events", [5, 10, 18, 22, 26])
@pytest.mark.parametrize("chunk_len", [1, 3])
async def test_the_client_sees_one_chat_with_tools(events: int, chunk_len: int) -> None:
    first, second = ParserEngine(ANSWER), ParserEngine(ANSWER, chunk_len)
    got, rig, engines = await answered(
        serving(first, events), serving(second, None), data=json.dumps(BODY).encode(), settings=ON
    )
    assert rig.stats.continuations_refused == {}
    assert told(got.body).same(uncut(first), forms=False)
    assert rig.stats.continuations == {"completed": 1}
    assert [call.head.first[1] for call in engines[1].calls[:3]] == [RENDER, DERENDER, COMPLETION]
    assert rig.app.requests.ended[-1].outcome == "200"


async def test_without_the_setting_they_end_with_an_error() -> None:
    engine = ParserEngine(ANSWER)
    got, rig, engines = await answered(
        serving(engine, 10), serving(engine, None), data=json.dumps(BODY).encode()
    )
    assert not engines[1].calls
    assert told(got.body).error == "engine_stream_broken"
    assert rig.stats.continuations_refused == {"tools": 1}


async def test_an_engine_without_the_endpoints_is_remembered_and_another_one_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lacking: list[str] = []
    monkeypatch.setattr(FakePlacement, "parses_not", lambda self: lacking.append(self.engine_id))
    engine = ParserEngine(ANSWER)
    got, rig, engines = await answered(
        serving(engine, 10),
        serving(engine, None, 403),
        serving(engine, None),
        data=json.dumps(BODY).encode(),
        settings=ON,
    )
    assert lacking == [engines[1].url]
    assert told(got.body).same(uncut(engine), forms=False)
    assert rig.stats.continuations == {"completed": 1}


async def test_an_engine_that_stops_reading_ends_the_stream() -> None:
    engine = ParserEngine(ANSWER)
    calls = itertools.count()

    async def script(rig: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        fails = call.head.first[1] == DERENDER and next(calls) > 2
        await serving(engine, None, 500 if fails else 0)(rig, call, writer)

    got, rig, _ = await answered(serving(engine, 10), script, data=json.dumps(BODY).encode(), settings=ON)
    stream = told(got.body)
    assert stream.error == "engine_stream_broken"
    assert not stream.done
    assert uncut(engine).text.startswith(stream.text)
    assert rig.stats.streams_broken == 1
    assert rig.stats.continuations == {"failed": 1}
