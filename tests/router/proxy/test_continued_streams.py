"""Streams that break go on from another engine: the client sees one answer, and the accounts two engines."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kvatlas.router.engine_lifecycle import EngineLifecycle
from kvatlas.router.fleet.engines import NOT_READY, EngineAddress
from kvatlas.router.openai.apis import CHAT, COMPLETION, MESSAGES, RESPONSES
from kvatlas.router.openai.request import InboundRequest, Usage
from kvatlas.router.pd.handoff import DisaggState
from kvatlas.router.placement.engine import Accounts
from kvatlas.router.placement.engine import Engine as FleetEngine
from kvatlas.router.proxy import turns
from kvatlas.router.proxy.deaths import digest_of
from kvatlas.router.proxy.settings import ProxySettings
from kvatlas.router.proxy.turns import ContinuationTurns
from tests.router.proxy.test_deaths import Fleet
from tests.support.api_streams import STREAMS, event_of
from tests.support.proxy_rig import (
    END,
    NO_REQUEST,
    SSE_HEAD,
    Answer,
    Call,
    Engine,
    FakePlacement,
    FakePlanner,
    Rig,
    Script,
    ask,
    chunk,
    read_answer,
    request,
    reset,
    routing,
    says,
    served,
)
from tests.support.text_engine import DONE, PROMPT, TextEngine, decode, token

ANSWER = [token(piece) for piece in (b"He", b"llo", b" ", b"\xf0\x9f", b"\x99\x82", b" w", b"orld", b"!")]
MODEL = TextEngine(ANSWER)
ERROR = (
    b'data: {"error":{"message":"EngineCore died","type":"InternalServerError","param":null,"code":500}}\n\n'
)
ON = ProxySettings(continue_streams=True)
paths = pytest.mark.parametrize("path", [CHAT, COMPLETION])


class DecodingPlanner(FakePlanner):
    context_tokens = 100.0

    def decode(self, model: str, ids: Sequence[int], *, skips_special: bool) -> str | None:
        return decode(ids)

    async def place(
        self, request: InboundRequest, *, exclude: frozenset[str], disagg: DisaggState | None = None
    ) -> FakePlacement:
        request.context_tokens = self.context_tokens
        return await super().place(request, exclude=exclude, disagg=disagg)


def body(path: str, **more: Any) -> bytes:
    own = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    return json.dumps({"model": "m", "stream": True, **own, **more}).encode()


def told(call: Call) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call.body)
    return found


def breaks(events: int, how: str = "close", *, times: int = 1) -> Script:
    """The model, whose first streams break behind this number of events."""

    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        path = call.head.first[1]
        broken = len(engine.calls) <= times
        writer.write(SSE_HEAD)
        for event in itertools.islice(MODEL.events(path, told(call)), events if broken else None):
            writer.write(chunk(event))
        await writer.drain()
        await asyncio.sleep(0.1)  # what broke with its first token would be asked again whole
        if not broken:
            writer.write(END)
        elif how == "close":
            writer.close()
        elif how == "reset":
            reset(writer)
        elif how == "error":
            writer.write(chunk(ERROR) + chunk(DONE) + END)
        elif how == "abort":
            one = next(itertools.islice(MODEL.events(path, told(call)), events, None))
            last = one.replace(b'"finish_reason":null', b'"finish_reason":"abort"')
            writer.write(chunk(last) + chunk(DONE) + END)
        else:
            await asyncio.Event().wait()

    return script


async def answered(
    *scripts: Script,
    data: bytes,
    settings: ProxySettings = ON,
    path: str = CHAT,
    field: str = "",
    **options: Any,
) -> tuple[Answer, Rig, list[Engine]]:
    engines = [Engine(script) for script in scripts]
    for engine in engines:
        await engine.__aenter__()
    planner = DecodingPlanner(*[engine.url for engine in engines])
    async with routing(planner=planner, settings=settings, **options) as rig:
        got = await ask(rig, request(data, *([field] if field else []), target=path))
    assert not len(rig.app.requests.books), "the end enters what waits"
    for engine in engines:
        await engine.stop()
    return got, rig, engines


def whole(path: str, data: bytes) -> bytes:
    return b"".join(MODEL.events(path, json.loads(data)))


@paths
@pytest.mark.parametrize("how", ["close", "reset", "error", "abort"])
@pytest.mark.parametrize("events", [2, 4, 5, 6, 7])
async def test_the_client_sees_one_stream(path: str, how: str, events: int) -> None:
    data = body(path, stream_options={"include_usage": True})
    got, rig, engines = await answered(breaks(events, how), breaks(99, times=0), data=data, path=path)
    assert got.whole
    assert rig.stats.continuations_refused == {}, events
    assert got.body == whole(path, data)
    asked = told(engines[1].calls[0])
    kept = asked["prompt"][len(PROMPT) :]
    assert engines[1].calls[0].head.first[1] == COMPLETION
    assert kept == ANSWER[: len(kept)]
    assert rig.stats.continuations == {"completed": 1}
    assert rig.stats.streams_broken == 0
    first, second = rig.planner.placements
    assert first.told == ["first_byte", {"error": "status", "abort": "aborted"}.get(how, "broken_stream")]
    assert second.told == ["first_byte", "finished"]
    # Each is compared with its own prediction.
    assert second.usage == Usage(len(asked["prompt"]), len(ANSWER) + 1 - len(kept))
    record = rig.app.requests.ended[-1]
    assert (record.continued_from, record.engine, record.outcome) == (
        first.engine_id,
        second.engine_id,
        "200",
    )
    assert record.usage == Usage(len(PROMPT), len(ANSWER) + 1)
    assert rig.stats.recomputed_tokens == record.recomputed_tokens == len(asked["prompt"])


async def test_a_client_that_reads_later_has_what_came_before_the_break() -> None:
    async def aborts(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        """Its last tokens come with the abort, while all buffers of the client are full."""
        events = list(itertools.islice(MODEL.events(CHAT, told(call)), 5))
        events[-1] = events[-1].replace(b'"finish_reason":null', b'"finish_reason":"abort"')
        writer.write(SSE_HEAD + chunk(b"".join(events[:-2])) + chunk(b": %b\n\n" % (b"x" * 2**20)))
        await asyncio.sleep(1)
        writer.write(chunk(b"".join(events[-2:]) + DONE) + END)

    planner = DecodingPlanner()
    async with served(aborts, breaks(99, times=0), planner=planner, settings=ON) as (one, two, rig):
        planner.urls = [one.url, two.url]
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port, limit=1000)
        writer.write(request(body(CHAT)))
        await asyncio.sleep(3)
        got = await read_answer(reader)
        writer.close()
    assert got.body.replace(b": %b\n\n" % (b"x" * 2**20), b"") == whole(CHAT, body(CHAT))


@paths
async def test_a_stream_that_does_not_break_is_the_engines(path: str) -> None:
    got, rig, engines = await answered(breaks(99, times=0), data=body(path), path=path)
    assert got.body == whole(path, body(path))
    assert told(engines[0].calls[0])["return_token_ids"] is True
    assert not rig.stats.continuations


@pytest.mark.parametrize(
    ("more", "field", "settings", "reason"),
    [
        ({}, "", ProxySettings(continue_streams=False), ""),
        ({}, "x-kvatlas-continue: off", ON, "client"),
        ({"tools": [{"type": "function"}]}, "", ON, "tools"),
        ({"n": 2}, "", ON, "answers"),
        ({"presence_penalty": 1}, "", ON, "penalty"),
    ],
)
async def test_other_requests_break_as_before(
    more: dict[str, Any], field: str, settings: ProxySettings, reason: str
) -> None:
    data = body(CHAT, **more)
    got, rig, engines = await answered(
        breaks(4), breaks(99, times=0), data=data, settings=settings, field=field
    )
    assert engines[0].calls[0].body == data
    assert "x-kvatlas-continue" not in engines[0].calls[0].head
    assert not engines[1].calls
    assert got.body.startswith(b"".join(itertools.islice(MODEL.events(CHAT, json.loads(data)), 4)))
    assert b"engine_stream_broken" in got.body
    assert not got.body.endswith(DONE)
    assert rig.stats.continuations_refused == ({reason: 1} if reason else {})
    assert rig.stats.streams_broken == 1
    assert rig.app.requests.ended[-1].outcome == "broken_stream"


@paths
async def test_an_engine_that_is_not_known_to_say_ids_is_not_asked(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakePlacement, "says_ids", False)
    got, rig, engines = await answered(breaks(4), breaks(99, times=0), data=body(path), path=path)
    assert engines[0].calls[0].body == body(path)
    assert not engines[1].calls
    assert got.body.startswith(b"".join(itertools.islice(MODEL.events(path, json.loads(body(path))), 4)))
    assert b"engine_stream_broken" in got.body
    assert rig.stats.continuations_refused == {"ids": 1}


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_streams_of_other_apis_end_with_their_error(path: str) -> None:
    stream = STREAMS[path]
    begun = b"".join(event_of(event) for event in (*stream.openings, stream.token))

    async def broken(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunk(begun))
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()

    data = json.dumps({**stream.body, "stream": True}).encode()
    got, rig, engines = await answered(broken, breaks(99, times=0), data=data, path=path)
    assert b"return_token_ids" not in engines[0].calls[0].body
    assert not engines[1].calls
    assert got.body.startswith(begun)
    assert b"error" in got.body[len(begun) :]
    assert rig.stats.continuations_refused == {"api": 1}


async def test_the_engines_own_error_is_shown_where_it_may_not_go_on() -> None:
    got, _, _ = await answered(breaks(4, "error"), data=body(CHAT, n=2))
    assert got.body.endswith(ERROR + DONE)


async def test_nothing_is_asked_behind_the_end_of_an_answer() -> None:
    data = body(CHAT, stream_options={"include_usage": True})
    events = len(ANSWER) + 2
    got, rig, engines = await answered(breaks(events), breaks(99, times=0), data=data)
    assert got.whole
    assert got.body == whole(CHAT, data)
    assert not engines[1].calls
    assert rig.stats.continuations == {"closed": 1}
    assert rig.stats.streams_broken == 0
    assert rig.app.requests.ended[-1].usage == Usage(len(PROMPT), len(ANSWER) + 1)


@paths
async def test_where_all_tokens_came_only_the_end_is_added(path: str) -> None:
    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD)
        for event in MODEL.events(path, told(call)):
            if event != DONE:
                writer.write(chunk(event.replace(b'"finish_reason":"length"', b'"finish_reason":null')))
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()

    data = body(path, max_tokens=3)
    got, rig, engines = await answered(script, breaks(99, times=0), data=data, path=path)
    assert got.whole
    assert got.body.count(b'"finish_reason":"length"') == 1
    assert got.body.endswith(b"\n\n" + DONE)
    assert not engines[1].calls
    assert rig.stats.continuations == {"completed": 1}
    assert rig.app.requests.ended[-1].usage == Usage(len(PROMPT), 3)


@paths
async def test_a_stop_string_over_the_cut_ends_the_answer(path: str) -> None:
    data = body(path, stop=["o w"])
    for events in range(2, 6):
        got, rig, engines = await answered(breaks(events), breaks(99, times=0), data=data, path=path)
        if rig.stats.continuations_refused:
            assert events == 2
            continue
        assert got.body == whole(path, data)
        # What broke before its first text was asked again whole.
        assert ("stop" in told(engines[1].calls[0])) == (not rig.stats.continuations)


async def test_a_stop_string_found_here_ends_the_engines_work() -> None:
    data = body(CHAT, stop=["wor"])
    got, rig, _ = await answered(breaks(5), breaks(99, times=0), data=data)
    assert got.whole
    assert got.body == whole(CHAT, data)
    assert b'"stop_reason":"wor"' in got.body
    assert rig.planner.placements[1].told == ["first_byte", "finished"]


@pytest.mark.parametrize("how", ["close", "error"])
async def test_a_second_break_ends_with_an_error(how: str) -> None:
    got, rig, engines = await answered(breaks(4), breaks(2, how), breaks(99, times=0), data=body(CHAT))
    assert got.whole
    assert b'"error"' in got.body
    assert b'"text"' not in got.body
    assert not engines[2].calls
    assert rig.stats.continuations == {"failed": 1}
    assert rig.stats.streams_broken == 1
    assert rig.app.requests.ended[-1].outcome == "broken_stream"


async def test_another_engine_is_asked_where_one_refuses() -> None:
    got, rig, engines = await answered(breaks(4), says(503, b"{}"), breaks(99, times=0), data=body(CHAT))
    assert got.body == whole(CHAT, body(CHAT))
    assert len(engines[1].calls) == 1
    assert rig.stats.continuations == {"completed": 1}


async def test_without_an_engine_the_stream_ends_with_an_error() -> None:
    got, rig, _ = await answered(breaks(4), data=body(CHAT))
    assert got.whole
    assert b'"code":"engine_stream_broken"' in got.body
    assert b"No other engine went on: " in got.body
    assert rig.stats.continuations == {"failed": 1}
    assert rig.app.requests.ended[-1].broken


async def test_a_refusal_of_the_second_engine_is_passed_on() -> None:
    got, rig, _ = await answered(breaks(4), says(400, b'{"error":{"message":"too long"}}'), data=body(CHAT))
    assert got.whole
    assert b"too long" in got.body
    assert rig.stats.continuations == {"failed": 1}


async def test_the_rest_of_an_answer_without_a_limit_needs_the_context() -> None:
    class Unknown(DecodingPlanner):
        context_tokens = 0.0

    async with (
        Engine(breaks(4, times=2)) as one,
        Engine(breaks(99, times=0)) as two,
        routing(planner=Unknown(one.url, two.url), settings=ON) as rig,
    ):
        got = await ask(rig, request(body(CHAT)))
        assert b"engine_stream_broken" in got.body
        assert rig.stats.continuations_refused == {"context": 1}
        got = await ask(rig, request(body(CHAT, max_tokens=6)))
        assert got.body == whole(CHAT, body(CHAT, max_tokens=6))


async def test_without_the_models_tokenizer_it_does_not_go_on() -> None:
    async with (
        Engine(breaks(4)) as one,
        Engine(breaks(99, times=0)) as two,
        routing(one.url, two.url, settings=ON) as rig,
    ):
        got = await ask(rig, request(body(CHAT)))
        assert b"engine_stream_broken" in got.body
        assert rig.stats.continuations_refused == {"tokenizer": 1}
        assert not two.calls


async def test_comments_keep_the_client_while_it_waits() -> None:
    async def slowly(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(25)
        await breaks(99, times=0)(engine, call, writer)

    got, _, _ = await answered(breaks(4), slowly, data=body(CHAT))
    assert got.body.count(b": waiting\n\n") == 2
    assert got.body.replace(b": waiting\n\n", b"") == whole(CHAT, body(CHAT))


async def test_a_client_that_sees_decisions_sees_that_it_goes_on() -> None:
    planner = DecodingPlanner()
    planner.client_headers = ((b"x-kvatlas-reason", b"cost"),)
    async with Engine(breaks(4)) as one, Engine(breaks(99, times=0)) as two:
        planner.urls = [one.url, two.url]
        async with routing(planner=planner, settings=ON) as rig:
            got = await ask(rig, request(body(CHAT)))
    assert got.body.count(b": continued\n\n") == 1
    assert got.body.replace(b": continued\n\n", b"") == whole(CHAT, body(CHAT))


async def test_a_client_that_leaves_in_the_gap_ends_the_second_request() -> None:
    async def never(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        engine.go.set()
        await asyncio.Event().wait()

    async with Engine(breaks(4)) as one, Engine(never) as two:
        planner = DecodingPlanner(one.url, two.url)
        async with routing(planner=planner, settings=ON) as rig:
            _, writer = await rig.connect()
            writer.write(request(body(CHAT)))
            await two.go.wait()
            writer.close()
            await two.calls[0].closed.wait()
            await asyncio.sleep(1)
            assert rig.stats.continuations == {"client_gone": 1}
            assert [placement.over for placement in planner.placements] == [True, True]


async def test_many_streams_of_one_engine_wait_for_their_turns() -> None:
    """The smallest first, and at most eight on an engine before their first token."""
    turns_ = ContinuationTurns()
    planner = DecodingPlanner("a", "b")
    order: list[int] = []
    placed: list[Any] = []
    on: dict[str, int] = {"a": 0, "b": 0}

    async def one(tokens: int) -> None:
        attempt, ended = await turns_.place(tokens, lambda full: planner.place(NO_REQUEST, exclude=full))
        order.append(tokens)
        placed.append(ended)
        on[attempt.engine_id] += 1
        assert max(on.values()) <= turns.ON_ENGINE_MAX
        await asyncio.sleep(1)
        on[attempt.engine_id] -= 1
        ended()
        ended()

    await asyncio.gather(*[one(tokens) for tokens in range(199, -1, -1)])
    assert len(order) == 200
    # Those that came first found room; of the others some are placed at one time.
    assert all(abs(place - tokens) <= 8 for place, tokens in enumerate(order[16:]))


async def test_streams_of_a_dead_engine_all_go_on_without_burying_the_others() -> None:
    """Each engine computes at most eight prompts of them at one time."""
    streams, open_, most = 40, [0, 0], [0, 0]
    gone = asyncio.Event()

    async def dying(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD)
        for event in itertools.islice(MODEL.events(CHAT, told(call)), 4):
            writer.write(chunk(event))
        await writer.drain()
        if len(engine.calls) == streams:
            gone.set()
        await gone.wait()
        await asyncio.sleep(0.1)
        writer.close()

    def computing(number: int) -> Script:
        async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
            open_[number] += 1
            most[number] = max(most[number], open_[number])
            await asyncio.sleep(1)
            open_[number] -= 1
            await breaks(99, times=0)(engine, call, writer)

        return script

    async with Engine(dying) as one, Engine(computing(0)) as two, Engine(computing(1)) as three:
        planner = DecodingPlanner(one.url, two.url, three.url)
        async with routing(planner=planner, settings=ON) as rig:
            got = await asyncio.gather(*[ask(rig, request(body(CHAT))) for _ in range(streams)])
            assert {answer.body for answer in got} == {whole(CHAT, body(CHAT))}
            assert rig.stats.continuations == {"completed": streams}
    assert most == [turns.ON_ENGINE_MAX, turns.ON_ENGINE_MAX]


async def test_a_stream_that_would_wait_too_long_does_not_go_on() -> None:
    turns_ = ContinuationTurns()
    planner = DecodingPlanner("a", "b")

    async def one() -> None:
        await turns_.place(1, lambda full: planner.place(NO_REQUEST, exclude=full))
        await asyncio.sleep(100)

    tasks = [asyncio.ensure_future(one()) for _ in range(20)]
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [getattr(error, "code", "") for error in found if error] == ["no_ready_engine"] * 4


async def test_a_request_that_was_on_two_dying_engines_ends_with_an_error() -> None:
    data = body(CHAT)

    async def dies(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        await breaks(4, "reset")(engine, call, writer)
        engine.server.close()

    for again in (False, True):
        async with Engine(dies) as one, Engine(dies) as two, Engine(breaks(99, times=0)) as three:
            planner = DecodingPlanner(one.url, two.url)
            async with routing(planner=planner, settings=ON, watched=Fleet()) as rig:
                first = await ask(rig, request(data))
                assert b"engine_stream_broken" in first.body
                assert rig.stats.continuations == {"failed": 1}
                await asyncio.sleep(1)
                planner.urls.append(three.url)
                if again:
                    got = await ask(rig, request(data))
                    assert (got.status, got.json()["error"]["code"]) == (503, "request_ends_engines")
                    assert not three.calls


async def test_a_request_that_an_engine_died_of_before_does_not_go_on() -> None:
    data = body(CHAT)
    async with Engine(breaks(4)) as one, Engine(breaks(99, times=0)) as two:
        planner, fleet = DecodingPlanner(one.url, two.url), Fleet()
        async with routing(planner=planner, settings=ON, watched=fleet) as rig:
            assert rig.app.deaths is not None
            fleet.gone.add("elsewhere")
            rig.app.deaths.learn("elsewhere", digest_of("", CHAT, data))
            got = await ask(rig, request(data))
            assert b"engine_stream_broken" in got.body
            assert rig.stats.continuations_refused == {"engines_died": 1}
            assert not two.calls


def test_an_engine_stalls_where_all_its_streams_are_silent() -> None:
    class Silent:
        def __init__(self, heard_s: float) -> None:
            self.heard_s = heard_s
            self.lost = 0

        def lose(self, since_s: float) -> bool:
            self.lost += 1
            return True

    one, two = Silent(10.0), Silent(20.0)
    attempts = [FakePlacement("a"), FakePlacement("a")]
    attempts[0].kept = SimpleNamespace(check=lambda: "")  # type: ignore[assignment]
    engine = SimpleNamespace(answering=dict(zip(attempts, (one, two), strict=True)))
    for now_s, lost in ((15.0, 0), (20.0, 0), (20.5, 1)):
        FleetEngine.end_stalled(engine, now_s)  # type: ignore[arg-type]
        assert (one.lost, two.lost) == (lost, 0)


@pytest.mark.parametrize(
    ("check", "elsewhere", "moved"), [("", True, 8), ("reasoning", True, 0), ("", False, 0)]
)
def test_a_drained_engine_gives_up_what_others_go_on_with(check: str, elsewhere: bool, moved: int) -> None:
    left: list[tuple[int, str]] = []

    class Leaves:
        warms = False

        def __init__(self, size: int) -> None:
            self.size = size

        def warm(self) -> None:
            self.warms = True
            left.append((self.size, "warm"))

        def now(self) -> None:
            left.append((self.size, "now"))

        def end(self) -> None:
            raise AssertionError

    attempts = [FakePlacement("a") for _ in range(12)]
    engine = FleetEngine(EngineAddress("http://a:1"), Accounts(lambda: 0.0))
    for size, attempt in enumerate(attempts):
        engine.answering[attempt] = SimpleNamespace()  # type: ignore[assignment]
        attempt.leave = partial(Leaves, size)
        if size:
            attempt.kept = SimpleNamespace(  # type: ignore[assignment]
                movable=not check, prompt_tokens=100 - size, ids=[]
            )

    def look(left_s: float) -> list[tuple[int, str]]:
        left.clear()
        engine.move_streams(lambda attempt: elsewhere, left_s)
        return left

    smallest = range(11, 11 - moved, -1)
    assert look(60.0) == [(size, "warm") for size in smallest]
    # No more at one time, and each once.
    assert look(59.0) == []
    for attempt in attempts[6:]:
        if attempt.leaving is not None:
            attempt.leaving.warms = False  # type: ignore[misc]
    assert look(58.0) == [(size, "warm") for size in (3, 2, 1) if moved]
    # What still is there in the last seconds.
    assert look(3.0) == [(size, "now") for size in smallest]


@pytest.mark.parametrize(
    ("held", "ends_s", "default_s", "left_s"),
    [
        ("drained by ops", 1030.0, 0.0, 30.0),
        ("terminating", 1030.0, 5.0, 5.0),
        ("terminating", 1003.0, 5.0, 3.0),
        ("terminating", None, 5.0, 5.0),
        ("terminating", None, 0.0, math.inf),
        ("", 1030.0, 5.0, math.inf),
        (NOT_READY, 1030.0, 5.0, math.inf),
    ],
)
def test_streams_are_moved_by_the_end_of_a_drain(
    held: str, ends_s: float | None, default_s: float, left_s: float
) -> None:
    now_s = 100.0
    moved: list[float] = []
    engine = SimpleNamespace(
        held=held,
        ends_s=ends_s,
        drained_s=None,
        answering=True,
        waiting=True,
        end_stalled=lambda since_s: moved.append(-since_s),
        move_streams=lambda elsewhere, left_s: moved.append(left_s),
        streams_leaving=lambda left_s: [1, 2],
    )
    abandoned: list[Any] = []
    engine.abandon = lambda elsewhere, drained: abandoned.append(drained)
    accounts = SimpleNamespace(wall=lambda: now_s + 900.0)
    proxy = ProxySettings(continue_streams=True, stall_s=0, move_drained_s=default_s)
    lifecycle = SimpleNamespace(
        _clock=lambda: now_s,
        _accounts=accounts,
        _elsewhere=lambda engine, continues=False: lambda attempt: continues and attempt == 1,
        _config=SimpleNamespace(proxy=proxy),
    )
    lifecycle._left_s = partial(EngineLifecycle._left_s, lifecycle)

    def look(proxy: ProxySettings = proxy) -> list[float]:
        moved.clear()
        EngineLifecycle._watch_streams(lifecycle, engine, proxy)  # type: ignore[arg-type]
        return moved

    moves = left_s < math.inf
    assert look() == [left_s] * moves
    assert EngineLifecycle.moves(lifecycle, engine) == moves  # type: ignore[arg-type]
    now_s += 2.0
    assert look() == [left_s - 2.0] * moves
    assert not abandoned or left_s <= 4.0
    now_s = 100.0 + left_s - 1.0 if moves else 200.0
    look()
    # What waits for a first byte leaves in the last seconds.
    assert len(abandoned) == (moves and 1 + (left_s <= 4.0))
    assert look(ProxySettings(continue_streams=True, stall_s=9.0))[0] == 9.0 - now_s
    assert not look(ProxySettings(continue_streams=False))
    # Ended and begun again.
    engine.held = ""
    look()
    assert engine.drained_s is None
