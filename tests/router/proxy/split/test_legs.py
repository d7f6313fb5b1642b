"""One request on two engines, over HTTP, whatever fails: one answer or one error, and no place
kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kvatlas.router.openai.errors import no_ready_engine
from kvatlas.router.openai.members import at_once
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.pd.bodies import split_body
from kvatlas.router.pd.handoff import DisaggState
from tests.support.examples import examples
from tests.support.ports import free_port
from tests.support.proxy_rig import (
    CHAT,
    DONE,
    END,
    SSE_HEAD,
    STREAM,
    Call,
    Engine,
    FakePlacement,
    FakePlanner,
    Rig,
    Script,
    answer,
    ask,
    chunk,
    event,
    request,
    routing,
    says,
    writes,
)
from tests.support.waiting import run, until

GOOD = says(200, b'{"good": 1}')


class PairPlanner(FakePlanner):
    """Pairs the first prefill engine and the first decode engine that are left, as a disagg allows."""

    def __init__(self, prefill: list[str], decode: list[str]) -> None:
        super().__init__(*decode)
        self.prefill = prefill
        self.resting: list[str] = []
        """Prefill engines that turned out to hold nothing."""

    async def place(
        self, request: InboundRequest, *, exclude: frozenset[str], disagg: DisaggState | None = None
    ) -> FakePlacement:
        left = [url for url in self.urls if url not in exclude]
        if not left:
            raise no_ready_engine("no engine")
        mates = [url for url in self.prefill if url not in exclude]
        held = None if disagg is None else disagg.handoff(self.now())
        splits = mates and (disagg is None or disagg.may_split)
        placement = self._made(left[0], request, later=bool(held or splits))
        if held or splits:
            placement.body = at_once(split_body(request.path, request.body))
        if splits and not held:
            placement.prefill = self._made(mates[0], request, later=False)
        return placement

    def _made(self, url: str, request: InboundRequest, *, later: bool) -> FakePlacement:
        made = FakePlacement(url, request=request, now=self.now, later=later)
        self.placements.append(made)
        return made


class Numbered:
    """Hands over parameters of its own."""

    def __init__(self) -> None:
        self.given = 0

    def script(self, then: Callable[[], None] = lambda: None) -> Script:
        async def answers(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
            self.given += 1
            params = {
                "do_remote_prefill": True,
                "remote_block_ids": [[self.given]],
                "remote_engine_id": "p",
                "remote_request_id": "r",
                "remote_host": "h",
                "remote_port": 1,
                "tp_size": 1,
            }
            then()
            body = json.dumps({"choices": [], "kv_transfer_params": params}).encode()
            writer.write(answer(200, body, "content-type: application/json"))

        return answers


def told(engine: Engine) -> list[Any]:
    """The block ids that each request to a decode engine named; None: it named none."""
    found = [json.loads(call.body).get("kv_transfer_params") for call in engine.calls]
    return [None if params is None else params["remote_block_ids"][0][0] for params in found]


def in_turn(*scripts: Script) -> Script:
    """The next one for each request, the last one for all that follow."""
    left = list(scripts)

    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(engine, call, writer)

    return script


async def apart(
    stack: AsyncExitStack, prefill: list[Script], decode: list[Script], now: Callable[[], float] | None = None
) -> tuple[Rig, list[Engine], list[Engine]]:
    """A router before engines with these scripts."""
    first = [await stack.enter_async_context(Engine(script)) for script in prefill]
    second = [await stack.enter_async_context(Engine(script)) for script in decode]
    planner = PairPlanner([engine.url for engine in first], [engine.url for engine in second])
    if now is not None:
        planner.now = now
    rig = await stack.enter_async_context(
        routing(planner=planner, **({} if now is None else {"clock": now}))  # type: ignore[arg-type]
    )
    return rig, first, second


def all_over(rig: Rig) -> bool:
    return all(placement.over for placement in rig.planner.placements)


async def test_the_decode_engine_answers_with_what_the_prefill_engine_holds() -> None:
    async with AsyncExitStack() as stack:
        rig, (p,), (d,) = await apart(stack, [Numbered().script()], [GOOD])
        got = await ask(rig)
        assert (got.status, got.body) == (200, b'{"good": 1}')
        assert json.loads(p.calls[0].body)["max_tokens"] == 1
        assert told(d) == [1]
        assert d.calls[0].body.endswith(CHAT[1:])
        first, second = (call.head["x-request-id"] for call in (p.calls[0], d.calls[0]))
        assert first == second
        assert all_over(rig)
        stats = rig.app.pd_stats
        assert (stats.split, stats.handoffs, stats.prefill_failures) == (1, 1, {})


async def test_a_stream_is_the_decode_engines() -> None:
    async with AsyncExitStack() as stack:
        stream = writes(SSE_HEAD, chunk(event("a")), chunk(event("b") + DONE), END)
        rig, (p,), (d,) = await apart(stack, [Numbered().script()], [stream])
        got = await ask(rig, request(STREAM))
        assert got.body == event("a") + event("b") + DONE
        assert json.loads(p.calls[0].body)["stream"] is False
        assert json.loads(d.calls[0].body)["stream"] is True
        assert all_over(rig)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (writes(then="reset"), "reset"),
        (says(500, b"oops"), "status"),
        (says(503, b"full"), "status"),
        (says(429, b"busy"), "status"),
        (writes(b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n{", then="reset"), "broken_stream"),
    ],
)
async def test_after_a_failed_prefill_another_engine_is_asked(script: Script, reason: str) -> None:
    async with AsyncExitStack() as stack:
        rig, (bad, _), (d,) = await apart(stack, [script, Numbered().script()], [GOOD])
        got = await ask(rig)
        assert (got.status, len(bad.calls), told(d)) == (200, 1, [1])
        assert rig.app.pd_stats.prefill_failures == {reason: 1}
        assert rig.stats.engine_failures == {reason: 1}
        assert all_over(rig)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (says(400, b"{}"), "refused"),
        (says(200, b'{"choices":[],"kv_transfer_params":null}'), "no_connector"),
        (says(200, b'{"kv_transfer_params":{"do_remote_prefill":true}}'), "unreadable"),
        (says(200, b"<html>"), "unreadable"),
    ],
)
async def test_where_nothing_is_held_the_decode_engine_gets_the_clients_body(
    script: Script, reason: str
) -> None:
    async with AsyncExitStack() as stack:
        rig, (p, unasked), (d,) = await apart(stack, [script, Numbered().script()], [GOOD])
        got = await ask(rig)
        assert (got.status, len(p.calls), len(unasked.calls)) == (200, 1, 0)
        assert [call.body for call in d.calls] == [CHAT]
        assert rig.app.pd_stats.prefill_failures == {reason: 1}
        assert all_over(rig)


async def test_without_a_prefill_engine_that_works_the_decode_engine_computes_the_prompt() -> None:
    async with AsyncExitStack() as stack:
        rig, _, (d,) = await apart(stack, [says(503, b""), says(503, b"")], [GOOD])
        got = await ask(rig)
        assert (got.status, told(d)) == (200, [None])
        assert all_over(rig)


async def test_a_request_that_breaks_two_prefill_engines_breaks_no_third() -> None:
    async with AsyncExitStack() as stack:
        breaks = writes(then="reset")
        rig, _, (d,) = await apart(stack, [breaks, breaks], [GOOD])
        got = await ask(rig)
        assert (got.status, d.calls) == (502, [])
        assert rig.stats.requests_quarantined == 1
        assert all_over(rig)


async def test_a_decode_engine_that_cannot_be_reached_leaves_the_blocks_to_another() -> None:
    async with AsyncExitStack() as stack:
        rig, (p,), (d,) = await apart(stack, [Numbered().script()], [GOOD])
        rig.planner.urls.insert(0, f"http://127.0.0.1:{free_port()}")
        got = await ask(rig)
        assert (got.status, len(p.calls), told(d)) == (200, 1, [1])
        assert rig.app.pd_stats.handoffs_redirected == 1
        assert all_over(rig)


@pytest.mark.parametrize("script", [says(503, b"paused"), says(429, b"busy"), writes(then="reset")])
async def test_a_decode_engine_that_was_told_and_failed_spoils_the_parameters(script: Script) -> None:
    """It may have read the blocks, so that their engine has freed them."""

    async with AsyncExitStack() as stack:
        rig, (p,), (bad, good) = await apart(stack, [Numbered().script()], [script, GOOD])
        got = await ask(rig)
        assert (got.status, len(p.calls)) == (200, 2)
        assert (told(bad), told(good)) == ([1], [2])
        assert rig.app.pd_stats.handoffs_lost == 1
        assert all_over(rig)


async def test_a_kept_connection_that_the_engine_closed_is_not_written_to_again() -> None:
    """The engine may have read the request before, so the parameters are gone; it is asked with others."""

    async with AsyncExitStack() as stack:
        script = in_turn(GOOD, writes(then="close"), GOOD)
        rig, (p,), (d,) = await apart(stack, [Numbered().script()], [script])
        assert [(await ask(rig)).status for _ in range(2)] == [200, 200]
        assert (len(p.calls), told(d), d.connections) == (3, [1, 2, 3], 2)
        assert rig.app.pd_stats.handoffs_lost == 1
        assert rig.stats.engine_failures == {}
        assert all_over(rig)


async def test_a_decode_engine_that_could_not_fetch_computes_the_prompt_itself() -> None:
    """vLLM's default for a fetch that failed is a 500; the engine is well."""

    async with AsyncExitStack() as stack:
        script = in_turn(says(500, b"fetch failed"), GOOD)
        rig, (p,), (d,) = await apart(stack, [Numbered().script()], [script])
        with capture_logs() as lines:
            got = await ask(rig)
        assert (got.status, len(p.calls), told(d)) == (200, 1, [1, None])
        said = [line["problem"] for line in lines if line["event"] == "prefill not fetched"]
        assert said == ["fetch failed"]
        assert all_over(rig)


async def test_a_refusal_of_the_request_itself_is_the_clients() -> None:
    async with AsyncExitStack() as stack:
        rig, _, (d,) = await apart(stack, [Numbered().script()], [says(400, b'{"error": "too long"}')])
        got = await ask(rig)
        assert (got.status, got.body, len(d.calls)) == (400, b'{"error": "too long"}', 1)
        assert all_over(rig)


async def test_blocks_that_grew_old_are_computed_again_and_never_fetched() -> None:
    """The router, or its way to the engine, stood still for 25 s of the 30 s."""

    now = [1000.0]

    def stands_still() -> None:
        now[0] += 25.0 if now[0] < 1001.0 else 0.0

    async with AsyncExitStack() as stack:
        script = Numbered().script(stands_still)
        rig, (p,), (d,) = await apart(stack, [script], [GOOD], now=lambda: now[0])
        with capture_logs() as lines:
            got = await ask(rig)
        assert (got.status, len(p.calls), told(d)) == (200, 2, [2])
        assert rig.app.pd_stats.leases_late == 1
        assert [line["problem"] for line in lines if line["event"] == "prefill not fetched"] == ["late"]
        assert all_over(rig)


async def test_blocks_that_are_always_old_are_given_up() -> None:
    now = [1000.0]

    def stands_still() -> None:
        now[0] += 25.0

    async with AsyncExitStack() as stack:
        script = Numbered().script(stands_still)
        rig, (p,), (d,) = await apart(stack, [script], [GOOD], now=lambda: now[0])
        got = await ask(rig)
        assert (got.status, len(p.calls), told(d)) == (200, 2, [None])
        assert all_over(rig)


@pytest.mark.parametrize("during", ["prefill", "decode"])
async def test_a_client_that_leaves_closes_the_open_request(during: str) -> None:
    async with AsyncExitStack() as stack:
        hangs = writes(then="hang")
        first = hangs if during == "prefill" else Numbered().script()
        rig, (p,), (d,) = await apart(stack, [first], [hangs])
        _, writer = await rig.connect()
        writer.write(request())
        open_one = p if during == "prefill" else d
        await until(lambda: open_one.calls, "the engine is asked")
        writer.close()
        await until(open_one.calls[0].closed.is_set, "its connection is closed")
        await until(lambda: all_over(rig), "nothing is kept")
        assert len(d.calls) == (during == "decode")
        assert rig.stats.clients_gone == 1


_PREFILLS = st.sampled_from(["held", "late", "503", "500", "reset", "null", "400"])
_DECODES = st.sampled_from(["good", "503", "500", "reset", "400", "broken"])


@settings(max_examples=examples(40))
@given(st.lists(_PREFILLS, min_size=1, max_size=4), st.lists(_DECODES, min_size=1, max_size=4))
def test_whatever_fails_parameters_are_sent_once_and_young_and_the_client_is_answered_once(
    prefills: list[str], decodes: list[str]
) -> None:
    async def main() -> None:
        now = [1000.0]
        numbered = Numbered()
        old: set[int] = set()

        def stands_still() -> None:
            now[0] += 25.0
            old.add(numbered.given)

        first: dict[str, Script] = {
            "held": numbered.script(),
            "late": numbered.script(stands_still),
            "503": says(503, b""),
            "500": says(500, b""),
            "reset": writes(then="reset"),
            "null": says(200, b"{}"),
            "400": says(400, b"{}"),
        }
        second: dict[str, Script] = {
            "good": GOOD,
            "503": says(503, b""),
            "500": says(500, b""),
            "reset": writes(then="reset"),
            "400": says(400, b"{}"),
            "broken": writes(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n1234", then="reset"),
        }
        async with AsyncExitStack() as stack:
            rig, _, engines = await apart(
                stack,
                [in_turn(*(first[word] for word in prefills))] * 2,
                [in_turn(*(second[word] for word in decodes))] * 3,
                now=lambda: now[0],
            )
            got = await ask(rig)
            assert got.status in {200, 400, 429, 500, 502, 503}
            await until(lambda: all_over(rig), "nothing is kept")
            fetched = [ids for engine in engines for ids in told(engine) if ids is not None]
            assert len(fetched) == len(set(fetched))
            assert old.isdisjoint(fetched)

    run(main())
