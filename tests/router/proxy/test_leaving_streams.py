"""Streams leave an engine that ends for one that has computed their tokens, and none is lost by that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from kvatlas.router.openai.apis import CHAT, COMPLETION
from kvatlas.router.openai.members import at_once
from kvatlas.router.openai.request import InboundRequest, Usage
from kvatlas.router.pd.bodies import split_body
from kvatlas.router.pd.handoff import DisaggState
from kvatlas.router.pd.settings import PdSettings
from kvatlas.router.proxy.attempt import Leaving
from tests.router.proxy.split.test_legs import Numbered
from tests.router.proxy.test_breaker_at_work import Counted
from tests.router.proxy.test_continued_streams import (
    ANSWER,
    MODEL,
    ON,
    DecodingPlanner,
    body,
    breaks,
    paths,
    told,
    whole,
)
from tests.support.proxy_rig import (
    END,
    SSE_HEAD,
    Answer,
    Call,
    Engine,
    FakePlacement,
    Rig,
    Script,
    answer,
    ask,
    chunk,
    request,
    routing,
    says,
)
from tests.support.text_engine import PROMPT

EVERY_S = 0.5
_WARMED = msgspec.json.encode({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}})


async def model(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
    """The model, a token in each ``EVERY_S``; what is not streamed is a warming."""
    asked = told(call)
    if not asked.get("stream"):
        await asyncio.sleep(0.1)
        writer.write(answer(200, _WARMED, "content-type: application/json"))
        return
    writer.write(SSE_HEAD)
    for event in MODEL.events(call.head.first[1], asked):
        writer.write(chunk(event))
        await writer.drain()
        await asyncio.sleep(EVERY_S)
    writer.write(END)


def unless(part: str, other: Script) -> Script:
    """The model, but for requests whose body has this."""

    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        await (other if part.encode() in call.body else model)(engine, call, writer)

    return script


async def cut(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
    writer.close()


WARMING, STREAM = '"max_tokens":1,', '"prompt":[7,'


class Rollout(DecodingPlanner):
    """Engines that had the stream do not come back."""

    async def place(
        self, request: InboundRequest, *, exclude: frozenset[str], disagg: DisaggState | None = None
    ) -> FakePlacement:
        before = {one.engine_id for one in self.placements if one.kept is not None}
        return await super().place(request, exclude=exclude | before, disagg=disagg)


class Pairs(Rollout):
    """The prompts of warmings are computed on this engine for the others."""

    def __init__(self, prefill: str, *urls: str) -> None:
        super().__init__(*urls)
        self.prefill = prefill

    async def place(
        self, request: InboundRequest, *, exclude: frozenset[str], disagg: DisaggState | None = None
    ) -> FakePlacement:
        made = await super().place(request, exclude=exclude, disagg=disagg)
        if not request.stream:
            made.body = at_once(split_body(request.path, request.body))
            made.prefill = FakePlacement(self.prefill, request=request, now=self.now)
            self.placements.append(made.prefill)
        return made


def leaving(attempt: FakePlacement) -> Leaving:
    """How its stream leaves, as its engine would have it."""
    assert attempt.leave is not None
    attempt.leaving = attempt.leaving or attempt.leave()
    return attempt.leaving


class Leaver:
    """One stream of the first of some engines."""

    def __init__(self, rig: Rig, engines: list[Engine], answered: asyncio.Task[Answer]) -> None:
        self.rig, self.engines, self.answered = rig, engines, answered

    @property
    def leave(self) -> Leaving:
        return leaving(self.rig.planner.placements[0])

    def calls(self) -> list[list[tuple[str, bool]]]:
        """Path of each request that each engine got, and whether it is streamed."""
        return [
            [(call.head.first[1], bool(told(call).get("stream"))) for call in engine.calls]
            for engine in self.engines
        ]

    @property
    def records(self) -> list[tuple[str, str, str]]:
        return [(one.continued_from, one.engine, one.outcome) for one in self.rig.app.requests.ended]


@asynccontextmanager
async def streaming(
    *scripts: Script,
    path: str = CHAT,
    after_s: float = 2.2,
    prefill: Script | None = None,
    planner_of: Any = None,
    **more: Any,
) -> AsyncIterator[Leaver]:
    """``prefill``: what the last engine does, which computes prompts for the others."""
    engines = [Engine(script) for script in (*scripts, *([] if prefill is None else [prefill]))]
    for engine in engines:
        await engine.__aenter__()
    urls = [engine.url for engine in engines]
    planner = Rollout(*urls) if prefill is None else (planner_of or Pairs)(urls[-1], *urls[:-1])
    async with routing(planner=planner, settings=ON) as rig:
        data = body(path, stream_options={"include_usage": True}, **more)
        answered = asyncio.ensure_future(ask(rig, request(data, target=path)))
        await asyncio.sleep(after_s)
        yield Leaver(rig, engines, answered)
        got = await answered
        assert got.whole
        assert got.body.replace(b": waiting\n\n", b"") == whole(path, data)
        assert rig.stats.streams_broken == 0
        record = rig.app.requests.ended[-1]
        assert (record.broken, record.usage) == (False, Usage(len(PROMPT), len(ANSWER) + 1))
        assert all(one.over for one in rig.planner.placements)
    for engine in engines:
        await engine.stop()


@paths
@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"stop": ["zz", "no"]}])
async def test_a_stream_is_taken_over_by_an_engine_that_has_its_tokens(
    path: str, more: dict[str, Any]
) -> None:
    if path == CHAT and "logprobs" in more:
        more = {"logprobs": True, "top_logprobs": 1}
    async with streaming(model, model, path=path, cache_salt="salt", **more) as one:
        first, second = one.engines
        one.leave.warm()
        one.leave.warm()
        await first.calls[0].closed.wait()
        warming, stream = (told(call) for call in second.calls)
        assert one.calls()[1] == [(COMPLETION, False), (COMPLETION, True)]
        assert {**warming, "prompt": None} == {
            "prompt": None,
            "model": "m",
            "cache_salt": "salt",
            "max_tokens": 1,
        }
        # It has gone on since.
        assert stream["prompt"][: len(warming["prompt"])] == warming["prompt"]
        assert len(PROMPT) < len(warming["prompt"]) < len(PROMPT) + len(ANSWER)
        await one.answered
        assert one.rig.stats.moves == {"warmed": 1}
        assert one.rig.stats.warmings == {"completed": 1}
        assert one.rig.stats.warmed_tokens == 9
        assert one.rig.stats.continuations == {"completed": 1}
        old, warmed, new = one.rig.planner.placements
        assert [old.told, warmed.told, new.told] == [["first_byte", "finished"]] * 3
        assert one.records == [(first.url, second.url, "200")]


@pytest.mark.parametrize(
    ("how", "outcomes"),
    [
        (says(503, b"{}"), [False]),
        (says(400, b"{}"), [True]),
        (cut, [False]),
        (says(200, b"no JSON"), [True]),
    ],
)
async def test_a_stream_that_no_engine_is_warmed_for_stays_until_the_end(
    how: Script, outcomes: list[bool]
) -> None:
    async with streaming(model, unless(WARMING, how), after_s=1.2) as one:
        breaker = one.rig.planner.breakers[one.engines[1].url] = Counted()
        one.leave.warm()
        await asyncio.sleep(1.0)
        assert not one.leave.warms
        assert breaker.told == outcomes
        assert one.rig.stats.warmings == {"failed": 1}
        assert not one.rig.stats.moves
        one.leave.now()
        await one.answered
        assert one.rig.stats.moves == {"cold": 1}
        assert one.records == [(one.engines[0].url, one.engines[1].url, "200")]


@pytest.mark.parametrize(
    "how", [says(503, b"{}"), says(400, b"{}"), cut, breaks(0, times=9), breaks(0, "error", times=9)]
)
async def test_a_stream_that_no_engine_takes_stays(how: Script) -> None:
    async with streaming(model, unless(STREAM, how)) as one:
        for _ in range(2):
            one.leave.now()
            await asyncio.sleep(1.0)
        await one.answered
        assert one.rig.stats.moves == {"stayed": 2}
        assert not one.rig.stats.continuations
        assert one.rig.planner.placements[0].told == ["first_byte", "finished"]
        assert one.rig.planner.placements[0].usage == Usage(len(PROMPT), len(ANSWER) + 1)
        assert one.records == [("", one.engines[0].url, "200")]


async def test_another_engine_takes_it_where_one_refuses() -> None:
    async with streaming(model, unless(STREAM, says(503, b"{}")), model) as one:
        one.leave.now()
        await one.answered
        assert one.rig.stats.moves == {"cold": 1}
        assert one.records == [(one.engines[0].url, one.engines[2].url, "200")]


async def test_a_stream_whose_engine_dies_while_none_takes_it_goes_on_as_a_broken_one() -> None:
    async def slow_refusal(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        if len(engine.calls) == 1:
            await asyncio.sleep(1.0)
            writer.write(answer(503, b"{}"))
        else:
            await model(engine, call, writer)

    async with streaming(breaks_in(2.6), slow_refusal) as one:
        one.leave.now()
        await one.answered
        assert one.rig.stats.moves == {"stayed": 1}
        assert one.rig.stats.continuations == {"completed": 1}
        assert one.records == [(one.engines[0].url, one.engines[1].url, "200")]


def breaks_in(after_s: float) -> Script:
    """The model, whose connection breaks after this time."""

    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(model(engine, call, writer))
        await asyncio.sleep(after_s)
        task.cancel()
        writer.close()

    return script


def aborts(events: int) -> Script:
    """An engine that is stopped behind this number of events of each stream."""

    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        await breaks(events, "abort", times=99)(engine, call, writer)

    return script


async def test_engines_that_are_stopped_one_after_another_lose_no_stream() -> None:
    async with streaming(aborts(3), aborts(1), aborts(2), model, after_s=0.0) as one:
        await one.answered
        assert one.rig.stats.continuations == {"broke": 2, "completed": 1}
        assert one.records == [(one.engines[2].url, one.engines[3].url, "200")]
        # Each is charged to none.
        assert one.rig.app.requests.ended[-1].recomputed_tokens > len(PROMPT)


@pytest.mark.parametrize("how", ["close", "reset", "error", "abort"])
async def test_a_stream_that_was_moved_may_still_break_once(how: str) -> None:
    async with streaming(model, unless('"stream":true', breaks(2, how, times=99)), model) as one:
        one.leave.now()
        await one.answered
        assert one.rig.stats.moves == {"cold": 1}
        assert one.rig.stats.continuations == {"broke": 1, "completed": 1}
        assert one.records == [(one.engines[1].url, one.engines[2].url, "200")]


async def test_a_stream_moves_on_and_on() -> None:
    async with streaming(model, model, model, after_s=1.2) as one:
        one.leave.warm()
        await one.engines[0].calls[0].closed.wait()
        await asyncio.sleep(0.7)
        attempt = one.rig.planner.placements[2]
        assert (attempt.engine_id, attempt.tokens_before > 0) == (one.engines[1].url, True)
        leaving(attempt).now()
        await one.answered
        assert one.rig.stats.moves == {"warmed": 1, "cold": 1}
        assert one.records == [(one.engines[1].url, one.engines[2].url, "200")]


@pytest.mark.parametrize("events", range(1, len(ANSWER) + 4))
async def test_a_stream_may_leave_at_any_event(events: int) -> None:
    async with streaming(model, model, after_s=events * EVERY_S - 0.2) as one:
        if one.rig.planner.placements[0].leave is not None:
            one.leave.now()


@pytest.mark.parametrize("warms", [True, False])
async def test_a_client_that_leaves_meanwhile_ends_all_of_it(warms: bool) -> None:
    async def never(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        engine.go.set()
        await asyncio.Event().wait()

    async with Engine(model) as one, Engine(never) as two:
        planner = DecodingPlanner(one.url, two.url)
        async with routing(planner=planner, settings=ON) as rig:
            _, writer = await rig.connect()
            writer.write(request(body(CHAT)))
            await asyncio.sleep(1.2)
            leave = leaving(planner.placements[0])
            act: Callable[[], None] = leave.warm if warms else leave.now
            act()
            await two.go.wait()
            writer.close()
            for engine in (one, two):
                await engine.calls[0].closed.wait()
            await asyncio.sleep(1)
            assert [placement.over for placement in planner.placements] == [True, True]
            assert not rig.stats.moves
            assert planner.placements[0].leave is None


async def test_a_stream_that_ends_meanwhile_ends_the_warming() -> None:
    async def slow(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with streaming(model, slow) as one:
        one.leave.warm()
        await one.answered
        await one.engines[1].calls[0].closed.wait()
        assert not one.rig.stats.moves


async def test_where_prompts_are_computed_elsewhere_so_are_those_of_warmings() -> None:
    async with streaming(model, model, prefill=Numbered().script()) as one:
        first, second, prefill = one.engines
        one.leave.warm()
        await first.calls[0].closed.wait()
        warming, stream = (told(call) for call in second.calls)
        assert told(prefill.calls[0])["prompt"] == warming["prompt"]
        assert warming["kv_transfer_params"]["remote_block_ids"] == [[1]]
        assert "kv_transfer_params" not in stream
        await one.answered
        assert one.rig.stats.moves == {"warmed": 1}
        assert one.records == [(first.url, second.url, "200")]
        stats = one.rig.app.pd_stats
        assert (stats.split, stats.handoffs, stats.handoffs_lost) == (1, 1, 0)


@pytest.mark.parametrize(
    ("prefill", "decode", "asked", "blamed"),
    [
        (says(503, b"{}"), model, 0, ["finished", "status"]),
        (says(200, b"{}"), model, 0, ["finished", "first_byte", "finished"]),
        (cut, model, 0, ["finished", "reset"]),
        (None, unless(WARMING, says(500, b"{}")), 1, ["status", "first_byte", "finished"]),
        (None, unless(WARMING, says(503, b"{}")), 1, ["status", "first_byte", "finished"]),
        (None, unless(WARMING, cut), 1, ["reset", "first_byte", "finished"]),
    ],
)
async def test_a_warming_by_two_engines_that_fails_is_none(
    prefill: Script | None, decode: Script, asked: int, blamed: list[str]
) -> None:
    async with streaming(model, decode, prefill=prefill or Numbered().script(), after_s=1.2) as one:
        one.leave.warm()
        await asyncio.sleep(1.0)
        assert one.rig.stats.warmings == {"failed": 1}
        assert len(one.engines[1].calls) == asked
        assert [word for placed in one.rig.planner.placements[1:] for word in placed.told] == blamed
        assert one.rig.app.pd_stats.handoffs_lost == asked
        one.leave.now()
        await one.answered
        assert one.rig.stats.moves == {"cold": 1}


async def test_a_prefill_engine_that_goes_down_ends_the_warming_alone() -> None:
    async def hangs(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    class Down(FakePlacement):
        def awaited(self, cancel: Callable[[], object]) -> None:
            def goes_down() -> None:
                self.abandoned = True
                cancel()

            asyncio.get_running_loop().call_later(0.5, goes_down)

    class PairsDown(Pairs):
        async def place(self, request: InboundRequest, **options: Any) -> FakePlacement:
            made = await super().place(request, **options)
            if made.prefill is not None:
                made.prefill = self.placements[-1] = Down(self.prefill, request=request)
            return made

    async with streaming(model, model, prefill=hangs, planner_of=PairsDown) as one:
        one.leave.warm()
        await asyncio.sleep(1.0)
        assert not one.answered.done()
        assert one.rig.stats.warmings == {"failed": 1}


async def test_a_stream_whose_tokens_were_fetched_too_late_stays() -> None:
    """The engine may have stored other blocks under their hashes."""

    async def late(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3.0)
        await model(engine, call, writer)

    async with streaming(model, unless(WARMING, late), prefill=Numbered().script(), after_s=0.7) as one:
        one.rig.app._forwarder.configure(ON, PdSettings(lease_s=2.0))
        one.leave.warm()
        await asyncio.sleep(3.3)
        assert one.rig.stats.warmings == {"failed": 1}
        assert one.rig.app.pd_stats.answers_late == 1
        one.leave.now()
        await one.answered
        assert not one.rig.stats.moves
        assert len(one.engines[1].calls) == 1
