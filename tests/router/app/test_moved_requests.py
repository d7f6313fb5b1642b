"""Requests without a first byte are given to another engine when theirs goes down, and only then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import pytest

from kvatlas.router.config.schema import Config, ModelConfig
from kvatlas.router.fleet.engines import DesiredFleet, EngineAddress, endpoint_of
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.openai.work import Work
from kvatlas.router.placement.engine import Engine as FleetEngine
from kvatlas.router.prompts.settings import ANY_MODEL
from tests.support.proxy_rig import DONE, END, SSE_HEAD, Call, Engine, answer, chunk, event
from tests.support.waiting import until
from tests.support.whole_router import Rig, configure, routing

FLEET = FleetSettings(
    poll_interval_s=1000.0, poll_down_interval_s=1000.0, gauge_interval_s=0.05, poll_timeout_s=0.2
)
"""Polls come by themselves once only: what follows is for the requests that wait."""
_CARDS = msgspec.json.encode({"object": "list", "data": [{"id": "m"}]})
BODY = {"model": "m", "prompt": "x", "max_tokens": 1}


class Stoppable:
    """A script: hangs in everything while ``stopped``, in completions alone while ``slow``."""

    def __init__(self) -> None:
        self.stopped = self.slow = False
        self.completions = 0

    async def __call__(self, engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        path = call.head.first[1]
        if path == "/v1/completions":
            self.completions += 1
        if self.stopped or (self.slow and path == "/v1/completions"):
            await engine.go.wait()
        if path == "/v1/models":
            writer.write(answer(200, _CARDS))
        elif path == "/v1/completions" and b'"stream"' in call.body:
            writer.write(SSE_HEAD + chunk(event("x") + DONE) + END)
        elif path == "/v1/completions":
            writer.write(answer(200, b'{"choices": []}', "content-type: application/json"))
        else:
            writer.write(answer(404, b""))


@asynccontextmanager
async def two(*, slow: bool = True) -> AsyncIterator[tuple[Rig, list[Stoppable], list[Engine], FleetEngine]]:
    """A router and two scripted engines, of which the first is to be lost."""
    scripts = [Stoppable(), Stoppable()]
    async with Engine(scripts[0]) as one, Engine(scripts[1]) as other, routing(_config(one, other)) as rig:
        for script in scripts:
            script.slow = slow
        yield rig, scripts, [one, other], rig.router.fleet.get(one.url)  # type: ignore[misc]


def _config(*engines: Engine) -> Config:
    addresses = [EngineAddress(engine.url) for engine in engines]
    return configure(*addresses, fleet=FLEET, models={ANY_MODEL: ModelConfig()})


async def _answered(tasks: list[asyncio.Task[tuple[int, object]]]) -> None:
    assert {(await task)[0] for task in tasks} == {200}


async def _spread(rig: Rig, scripts: list[Stoppable], **more: bool) -> list[asyncio.Task[tuple[int, object]]]:
    """Requests under way until each engine has one; the tasks."""
    tasks = []
    while not all(script.completions for script in scripts):
        seen = sum(script.completions for script in scripts)
        tasks.append(asyncio.create_task(rig.ask("POST", "/v1/completions", BODY | more)))
        await until(partial(_more_than, seen, scripts), "it is at an engine")
    return tasks


def _more_than(seen: int, scripts: list[Stoppable]) -> bool:
    return sum(script.completions for script in scripts) > seen


@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["whole", "stream"])
@pytest.mark.parametrize("how", ["polled", "unreachable", "removed", "breaker"])
async def test_when_the_engine_goes_down_another_one_answers(how: str, more: dict[str, bool]) -> None:
    async with two() as (rig, scripts, (_, other), lost):
        fleet = rig.router.fleet
        tasks = await _spread(rig, scripts, **more)
        scripts[1].slow = False
        other.go.set()
        await until(lambda: len(lost.waiting) == sum(not task.done() for task in tasks))
        waited = len(lost.waiting)
        assert waited > 0
        if how in ("polled", "unreachable"):
            lost.up, lost.unreachable = False, how == "unreachable"
            rig.router.lifecycle.engine_down(lost)
        elif how == "removed":
            rig.router.poller.assign(DesiredFleet((EngineAddress(other.url),)))
            assert [engine.engine_id for engine in fleet] == [other.url]
        else:
            for _ in range(3):
                lost.breaker.record(False, rig.router.clock())
        await _answered(tasks)
        stats = rig.router.proxy.stats
        assert (stats.requests_moved, stats.retries) == (waited, waited)
        assert stats.engines_broken == stats.requests_quarantined == 0  # no request is blamed
        assert stats.suspects_noted == (how == "unreachable")  # they have one body
        assert stats.suspects_current == 0, "it has been answered since"
        assert not lost.waiting
        rig.check_books()


async def test_an_engine_that_hangs_is_found_by_the_requests_that_wait_and_not_by_slow_ones() -> None:
    async with two() as (rig, scripts, (one, other), lost):
        tasks = await _spread(rig, scripts, stream=True)
        polls = sum(call.head.first[1] == "/v1/models" for call in one.calls)
        await until(
            lambda: sum(call.head.first[1] == "/v1/models" for call in one.calls) > polls + 2,
            "requests that wait longer than expected have it polled",
        )
        assert lost.up  # a long prefill: polls are answered
        assert rig.router.proxy.stats.requests_moved == 0
        scripts[1].slow = False
        other.go.set()
        scripts[0].stopped = True
        await _answered(tasks)
        assert not lost.up
        assert lost.silent
        assert rig.router.proxy.stats.requests_moved >= 1


async def test_a_probe_of_an_engine_that_was_left_out_is_given_its_time() -> None:
    async with two(slow=False) as (rig, scripts, (one, _), left_out):
        clock = rig.router.clock
        for _ in range(3):
            left_out.breaker.record(False, clock())
        await until(lambda: left_out.breaker.allows(clock()), "half open")
        scripts[0].slow = True
        tasks = await _spread(rig, scripts)
        await until(lambda: len(left_out.waiting) == 1, "the probe waits for its first byte")
        left_out.abandon(lambda attempt: True, lost=True)
        assert len(left_out.waiting) == 1
        one.go.set()
        await _answered(tasks)
        assert left_out.breaker.closed
        assert rig.router.proxy.stats.requests_moved == 0


async def test_a_request_that_has_been_moved_from_every_engine_comes_back_to_one_that_is_up() -> None:
    async with two() as (rig, scripts, _, _):
        task = asyncio.create_task(rig.ask("POST", "/v1/completions", BODY))
        await until(lambda: any(engine.waiting for engine in rig.router.fleet), "it is at an engine")
        first = next(engine for engine in rig.router.fleet if engine.waiting)
        second = next(engine for engine in rig.router.fleet if engine is not first)
        rig.router.lifecycle.engine_down(first)
        await until(lambda: bool(second.waiting), "it is at the other one")
        for script in scripts:
            script.slow = False
        rig.router.lifecycle.engine_down(second)
        status, _ = await task
        assert status == 200
        assert rig.router.proxy.stats.requests_moved == 2
        rig.check_books()


async def test_where_no_other_engine_is_up_the_request_waits_on() -> None:
    script = Stoppable()
    async with Engine(script) as one, routing(_config(one)) as rig:
        (engine,) = rig.router.fleet
        script.slow = True
        (task,) = await _spread(rig, [script])
        engine.up, engine.silent = False, True
        rig.router.lifecycle.engine_down(engine)
        assert len(engine.waiting) == 1
        one.go.set()
        assert (await task)[0] == 200
        assert rig.router.proxy.stats.requests_moved == 0


async def test_a_client_that_leaves_at_that_moment_is_a_client_that_left() -> None:
    async with two() as (rig, scripts, _, lost):
        tasks = await _spread(rig, scripts)
        for task in tasks:
            task.cancel()
        await until(lambda: rig.router.proxy.stats.clients_gone == len(tasks), "seen to have left")
        lost.up = False
        rig.router.lifecycle.engine_down(lost)
        await until(lambda: rig.idle)
        assert rig.router.proxy.stats.requests_moved == 0
        rig.check_books()


@pytest.mark.parametrize("skew_s", [-1000.0, 0.0, 1000.0], ids=["clock behind", "same clock", "clock ahead"])
@pytest.mark.parametrize("count", [1, 2], ids=["alone", "beside another"])
@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["whole", "stream"])
async def test_requests_sent_before_a_restart_are_sent_again(
    more: dict[str, bool], count: int, skew_s: float
) -> None:
    """Its process is gone, and perhaps its connections do not show that."""
    async with two() as (rig, scripts, (one, other), lost):
        if count == 1:
            rig.router.poller.assign(DesiredFleet((EngineAddress(one.url),)))
        lifecycle, accounts = rig.router.lifecycle, rig.router.accounts
        tasks = await _spread(rig, scripts[:count], **more)
        await until(lambda: len(lost.waiting) > 0, "they wait")
        waited, now = len(lost.waiting), rig.router.clock()
        for attempt in lost.waiting:
            attempt.asked_s = now - 30
        # The old process answered a poll 20 s ago; the new one began 10 s ago by its own clock.
        lost.polled_s, lost.started = now - 20, accounts.wall() + skew_s - 10
        younger = asyncio.create_task(rig.ask("POST", "/v1/completions", BODY | more))
        await until(lambda: sum(len(engine.waiting) for engine in rig.router.fleet) > len(tasks), "it waits")
        for script in scripts:
            script.slow = False
        asked = {attempt for attempt in lost.waiting if attempt.asked_s > now - 1}
        lifecycle.engine_restarted(lost)
        ended = waited + (len(asked) if skew_s > 0 else 0)
        assert len(lost.waiting) == waited + len(asked) - ended
        assert lost.breaker.allows(rig.router.clock()), "the new process has done nothing"
        other.go.set()
        one.go.set()
        await _answered([*tasks, younger])
        assert rig.router.proxy.stats.requests_moved == ended
        assert rig.router.proxy.stats.engines_broken == 0
        # It may have been any of them; each has been answered since.
        assert rig.router.proxy.stats.suspects_noted == 1  # they have one body
        assert rig.router.proxy.stats.suspects_current == 0
        rig.check_books()


@pytest.mark.parametrize("how", ["restarted", "unreachable"])
async def test_a_request_that_waits_at_two_deaths_is_given_to_no_third_engine(how: str) -> None:
    async with two() as (rig, _, _, _):
        task = asyncio.create_task(rig.ask("POST", "/v1/completions", BODY))
        stats = rig.router.proxy.stats
        for restarts in (1, 2):
            await until(lambda: any(engine.waiting for engine in rig.router.fleet), "it waits")
            at = next(engine for engine in rig.router.fleet if engine.waiting)
            if how == "restarted":
                at.end_older(rig.router.clock() + 1)
            else:
                at.unreachable = True
                at.abandon(lambda attempt: True)
            await until(lambda: stats.requests_moved == restarts, "it is moved")  # noqa: B023  # awaited here
        status, told = await task
        assert (status, stats.suspects_refused) == (503, {"twice": 1})
        assert told["error"]["code"] == "request_ends_engines"
        rig.check_books()


@pytest.mark.parametrize("started", [None, 1.0], ids=["by events alone", "metrics decide"])
async def test_a_feed_of_a_new_process_ends_older_requests_once_a_minute(started: float | None) -> None:
    async with two() as (rig, scripts, (one, other), lost):
        lifecycle, clock = rig.router.lifecycle, rig.router.clock
        tasks = await _spread(rig, scripts)
        await until(lambda: len(lost.waiting) > 0, "they wait")
        waited = len(lost.waiting)
        lost.started = started
        lifecycle._feed_restarted(lost, 1, clock() - 1000)
        assert len(lost.waiting) == waited, "they are younger than the last look"
        lost.restart_s = clock() - 1000
        for script in scripts:
            script.slow = False
        lifecycle._feed_restarted(lost, 2, clock())
        assert len(lost.waiting) == (0 if started is None else waited)
        lost.waiting.clear()
        lifecycle._feed_restarted(lost, 3, clock() + 1000)
        assert lost.seen_restarts == 3
        one.go.set()
        other.go.set()
        await _answered(tasks)


@pytest.mark.parametrize("field", ["pinned", "earlier_response"])
async def test_requests_bound_to_one_engine_are_sent_there_again_after_its_restart(field: str) -> None:
    async with two() as (rig, scripts, (one, other), lost):
        tasks = await _spread(rig, scripts)
        await until(lambda: len(lost.waiting) > 0, "they wait")
        for attempt in lost.waiting:
            setattr(attempt.request, field, lost.engine_id if field == "pinned" else "resp_1")
        waited = len(lost.waiting)
        rig.router.lifecycle._abandon(lost)
        assert len(lost.waiting) == waited, "no other engine can answer them"
        scripts[0].slow = scripts[1].slow = False
        lost.end_older(rig.router.clock() + 1)
        assert not lost.waiting
        one.go.set()
        other.go.set()
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("why", ["salt not proven", "too short", "among", "breaker"])
async def test_a_request_stays_at_an_engine_that_is_removed_where_no_other_may_answer_it(why: str) -> None:
    async with two() as (rig, scripts, (one, other), lost):
        tasks = await _spread(rig, scripts)
        await until(lambda: len(lost.waiting) > 0, "they wait")
        (spared,) = [engine for engine in rig.router.fleet if engine is not lost]
        for attempt in lost.waiting:
            if why == "salt not proven":
                attempt.request.isolated = rig.router.fleet.needs_salt_proofs = True
            elif why == "among":
                attempt.request.among = frozenset({endpoint_of(one.url)})
            elif why == "too short":
                attempt.work = Work(100, 100)
        if why == "too short":
            spared._lengths = {None: 100}  # and none for an answer
        elif why == "breaker":
            for _ in range(3):
                spared.breaker.record(False, rig.router.clock())
        waited = len(lost.waiting)
        rig.router.poller.assign(DesiredFleet((EngineAddress(other.url),)))
        assert len(lost.waiting) == waited
        scripts[1].slow = False
        one.go.set()
        other.go.set()
        await _answered(tasks)
        assert rig.router.proxy.stats.requests_moved == 0
