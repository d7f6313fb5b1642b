"""A request that waited is placed by the state of the engines at that time, not by that before the wait.

Each wait of the request path is held open here while an engine changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from kvatlas.router.fleet.engines import DesiredFleet
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.placement.engine import NO_PEER_SNAPSHOT, Engine
from tests.router.app.test_prefill_decode import SPLITS, D, P, apart, completion, prompt
from tests.support.pairs import busy
from tests.support.whole_router import MODEL, Rig, routed

SELDOM = FleetSettings(poll_interval_s=600.0, gauge_interval_s=600.0)
Change = Callable[[Rig, Engine], None]


def down(rig: Rig, engine: Engine) -> None:
    engine.up = False


def held(rig: Rig, engine: Engine) -> None:
    engine.held = "drained"


def asleep(rig: Rig, engine: Engine) -> None:
    engine.asleep = True


def other_model(rig: Rig, engine: Engine) -> None:
    engine.models = tuple(msgspec.structs.replace(card, id="another") for card in engine.models)


def shorter(rig: Rig, engine: Engine) -> None:
    engine.models = tuple(msgspec.structs.replace(card, max_model_len=20) for card in engine.models)


def gone(rig: Rig, engine: Engine) -> None:
    others = [other.engine for other in rig.router.fleet if other is not engine]
    rig.router.fleet.assign(DesiredFleet(tuple(others)))


def broken(rig: Rig, engine: Engine) -> None:
    while engine.breaker.allows(rig.router.accounts.now()):
        engine.breaker.record(False, rig.router.accounts.now())


CHANGES: list[Change] = [down, held, asleep, other_model, shorter, gone, broken]


@asynccontextmanager
async def waiting_in(holder: Any, name: str, meanwhile: Callable[[], None]) -> AsyncIterator[list[int]]:
    """``meanwhile`` is called within the next wait of ``holder.name``."""
    whole, entered = getattr(holder, name), list[int]()

    async def wait(*args: Any, **named: Any) -> Any:
        found = await whole(*args, **named)
        if not entered:
            entered.append(1)
            asyncio.get_running_loop().call_soon(meanwhile)
            await asyncio.sleep(0)
        return found

    setattr(holder, name, wait)
    try:
        yield entered
    finally:
        setattr(holder, name, whole)


class Shared:
    """An index of other replicas that knows nothing."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    async def look(self, prompt: Any, engines: Any, *, detail: bool = False) -> Any:
        self.asked.append(list(engines))
        return NO_PEER_SNAPSHOT


def served(rig: Rig, engine: Engine) -> int:
    """Requests that it answered."""
    return sum(one.engine_id == engine.engine_id for one in rig.router.accounts.receipts.latest)


async def favourite(rig: Rig, body: dict[str, Any]) -> Engine:
    """The engine that the next such request would get: it holds the prompt."""
    await rig.ok("POST", "/v1/completions", body)
    await rig.over()
    (one,) = [engine for engine in rig.router.fleet if served(rig, engine)]
    return one


@pytest.mark.parametrize("wait", ["read", "hashes", "look"])
@pytest.mark.parametrize("change", CHANGES)
async def test_a_prompt_goes_to_no_engine_that_changed_while_it_was_read(
    monkeypatch: pytest.MonkeyPatch, wait: str, change: Change
) -> None:
    # Hashes of longer prompts are waited for.
    monkeypatch.setattr("kvatlas.router.placement.decide.INLINE_BLOCKS_MAX", 4)
    body = {"model": MODEL, "prompt": prompt(1, 300), "max_tokens": 2}
    async with routed({}, {}, fleet=SELDOM) as (rig, _):
        planner = rig.router.planner
        chosen = await favourite(rig, body)
        holder: Any = planner._reader
        if wait == "look":
            holder = planner._shared = Shared()  # type: ignore[assignment]
        async with waiting_in(holder, wait, lambda: change(rig, chosen)) as entered:
            status, answer = await rig.ask("POST", "/v1/completions", body)
        assert entered
        assert status == 200, answer
        await rig.over()
        assert served(rig, chosen) == 1, "the one that changed has not got it"


@pytest.mark.parametrize("change", CHANGES)
async def test_where_no_other_engine_is_left_the_client_may_come_back(change: Change) -> None:
    body = completion(1)
    async with routed({}, fleet=SELDOM) as (rig, _engines):
        (engine,) = rig.router.fleet
        async with waiting_in(rig.router.planner._reader, "read", lambda: change(rig, engine)):
            status, answer = await rig.ask("POST", "/v1/completions", body)
        # A breaker never excludes the only engine; that engine itself refuses a prompt that is too long.
        expected = {other_model: 404, gone: 503, broken: 200, shorter: 200}.get(change, 503)
        assert status == expected, answer
        assert rig.router.accounts.load_stats.admitted == (expected == 200)


async def test_an_engine_that_comes_meanwhile_may_be_chosen_and_is_looked_up() -> None:
    async with routed({}, {}, fleet=SELDOM) as (rig, _):
        one, other = rig.router.fleet
        shared = rig.router.planner._shared = Shared()  # type: ignore[assignment]
        one.held = "drained"

        def swap() -> None:
            one.held, other.held = "", "drained"

        async with waiting_in(rig.router.planner._reader, "read", swap):
            assert (await rig.ask("POST", "/v1/completions", completion(1)))[0] == 200
        await rig.over()
        assert (served(rig, one), served(rig, other)) == (1, 0)
        assert one.engine_id in shared.asked[-1]
        other.held, one.engine = "", msgspec.structs.replace(one.engine, events=None)
        assert (await rig.ask("POST", "/v1/completions", completion(2)))[0] == 200
        assert shared.asked[-1] == [other.engine_id], "without events there is nothing to look up"


async def test_engines_that_change_all_the_time_do_not_keep_a_request_from_being_placed() -> None:
    async with routed({}, {}, {}, fleet=SELDOM) as (rig, _):
        engines = list(rig.router.fleet)
        shared = rig.router.planner._shared = Shared()  # type: ignore[assignment]
        look, turns = shared.look, [0]

        async def change_and_look(*args: Any, **named: Any) -> Any:
            for at, engine in enumerate(engines):
                engine.held = "drained" if at == turns[0] % 3 else ""
            turns[0] += 1
            return await look(*args, **named)

        shared.look = change_and_look  # type: ignore[method-assign]
        assert (await rig.ask("POST", "/v1/completions", completion(1)))[0] == 200
        assert turns[0] <= 3
        await rig.over()
        assert [served(rig, engine) for engine in engines if engine.held] == [0]


GONE: list[Change] = [down, held, asleep, other_model, gone]


@pytest.mark.parametrize("keys", ["alone", "beside another"])
@pytest.mark.parametrize("change", GONE)
async def test_nothing_is_sent_to_an_engine_that_changed_while_a_connection_was_made(
    change: Change, keys: str
) -> None:
    body = completion(1)
    settings: list[dict[str, Any]] = [{}] if keys == "alone" else [{}, {}]
    async with routed(*settings, fleet=SELDOM) as (rig, _):
        chosen = await favourite(rig, body)
        client = rig.router.proxy.client
        for origin in client.origins.values():
            while origin.idle:
                origin.idle.pop().abort()
        async with waiting_in(client, "_connect", lambda: change(rig, chosen)) as entered:
            status, answer = await rig.ask("POST", "/v1/completions", body)
        assert entered
        expected = 200 if keys != "alone" else 404 if change is other_model else 503
        assert status == expected, answer
        await rig.over()
        assert served(rig, chosen) == 1, "the one that changed has not got it"
        assert rig.router.proxy.stats.engines_broken == 0
        assert chosen.breaker.closed


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("change", GONE)
async def test_a_decode_engine_that_changed_while_the_prompt_was_computed_is_not_asked(
    change: Change, stream: bool
) -> None:
    pd = msgspec.structs.replace(SPLITS, decode_delay_weight=100.0)
    async with apart(P, D, D, pd=pd, fleet=SELDOM) as (rig, _):
        legs = rig.router.proxy._forwarder._legs
        left: list[Engine] = []

        def meanwhile() -> None:
            now = rig.router.accounts.now()
            reserved = [
                one for one in rig.router.fleet if one.engine.decodes and one.load.current(now).running
            ]
            left.append(max(reserved, key=lambda one: one.load.last_admit_s))
            change(rig, left[0])

        with busy(rig):
            async with waiting_in(legs, "prefill", meanwhile) as entered:
                status, answer = await rig.ask("POST", "/v1/completions", completion(7, stream=stream))
        assert entered
        assert status == 200, answer
        await rig.over()
        latest = [one for one in rig.router.accounts.receipts.latest if one.leg != "prefill"]
        assert left[0].engine_id not in {one.engine_id for one in latest}
        assert rig.router.proxy.pd_stats.split == 1, "what was computed is fetched by the other one"
