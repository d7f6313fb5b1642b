"""Mooncake's transfers over HTTP: whatever fails, one answer or one error, and no transfer told twice
or after its prefill has failed."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.pd.settings import PdSettings
from kvatlas.router.proxy.idle_tracker import IdleTracker
from kvatlas.router.proxy.settings import ProxySettings
from tests.router.proxy.split.test_legs import GOOD, PairPlanner, all_over, in_turn
from tests.support.ports import free_port
from tests.support.proxy_rig import (
    CHAT,
    Call,
    Engine,
    Rig,
    Script,
    ask,
    request,
    routing,
    says,
    writes,
)
from tests.support.waiting import run, until

LENGTH = b'{"choices": [{"finish_reason": "length"}], "usage": {"prompt_tokens": 9}}'
STOP = b'{"choices": [{"finish_reason": "stop"}]}'
ENTRIES = {"0": {"engine_id": "eng-p", "worker_addr": {"0": {"0": "tcp://127.0.0.1:1"}}}}
HANGS = writes(then="hang")
RESET = writes(then="reset")


class Fleet(NamedTuple):
    rig: Rig
    prefill: list[Engine]
    decode: list[Engine]
    bootstrap: Engine

    @property
    def stats(self) -> Any:
        return self.rig.app.pd_stats

    async def over(self) -> None:
        await until(lambda: all_over(self.rig), "nothing is kept")


def after(wait: Callable[[Engine], Any], script: Script) -> Script:
    """The answer of ``script``, once ``wait`` returns."""

    async def waits(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        await wait(engine)
        await script(engine, call, writer)

    return waits


@asynccontextmanager
async def mooncake(prefill: list[Script], decode: list[Script], **proxy: Any) -> AsyncIterator[Fleet]:
    """A router before engines with these scripts."""
    async with AsyncExitStack() as stack:
        first = [await stack.enter_async_context(Engine(script)) for script in prefill]
        second = [await stack.enter_async_context(Engine(script)) for script in decode]
        bootstrap = await stack.enter_async_context(Engine(says(200, json.dumps(ENTRIES).encode())))
        planner = PairPlanner([engine.url for engine in first], [engine.url for engine in second])
        rig = await stack.enter_async_context(routing(planner=planner))
        pd = PdSettings(connector="mooncake", mooncake_bootstrap_port=bootstrap.port)
        rig.app.configure(ProxySettings(**proxy), pd, None, claims=False)
        yield Fleet(rig, first, second, bootstrap)


def transfer(call: Call) -> str | None:
    """The transfer that a request names; None: it names none."""
    params = json.loads(call.body).get("kv_transfer_params")
    return None if params is None else str(params["transfer_id"])


def told(*engines: Engine) -> list[str]:
    return [name for engine in engines for call in engine.calls if (name := transfer(call)) is not None]


async def test_the_decode_engine_gets_the_address_of_the_blocks() -> None:
    async with mooncake([says(200, LENGTH)], [GOOD]) as fleet:
        got = await ask(fleet.rig)
        assert (got.status, got.body) == (200, b'{"good": 1}')
        (p,), (d,) = fleet.prefill, fleet.decode
        params = json.loads(d.calls[0].body)["kv_transfer_params"]
        assert params == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer(p.calls[0]),
            "remote_engine_id": "eng-p",
            "remote_bootstrap_addr": f"http://127.0.0.1:{fleet.bootstrap.port}",
        }
        assert d.calls[0].body.endswith(CHAT[1:])
        assert (fleet.stats.split, fleet.stats.handoffs) == (1, 1)
        await fleet.over()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (RESET, "reset"),
        (says(500, b"oops"), "status"),
        (says(503, b"full"), "status"),
        (writes(b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n{", then="reset"), "broken_stream"),
    ],
)
async def test_after_a_failed_prefill_another_engine_is_asked(script: Script, reason: str) -> None:
    async with mooncake([script, says(200, LENGTH)], [GOOD]) as fleet:
        assert (await ask(fleet.rig)).status == 200
        (bad, other), (d,) = fleet.prefill, fleet.decode
        assert told(d) == [transfer(other.calls[0])] != [transfer(bad.calls[0])]
        assert fleet.stats.prefill_failures == {reason: 1}
        await fleet.over()


@pytest.mark.parametrize(
    ("script", "reason"),
    [(says(400, b"{}"), "refused"), (says(200, STOP), "stopped"), (says(200, b"?"), "unreadable")],
)
async def test_a_prefill_that_keeps_nothing_leaves_the_prompt_to_the_decode_engine(
    script: Script, reason: str
) -> None:
    async with mooncake([script], [GOOD]) as fleet:
        assert (await ask(fleet.rig)).status == 200
        assert [call.body for call in fleet.decode[0].calls] == [CHAT]
        assert fleet.stats.prefill_failures == {reason: 1}
        await fleet.over()


async def test_a_prefill_engine_that_never_answers_is_given_up_in_time() -> None:
    async with mooncake([HANGS], [GOOD], first_byte_timeout_s=0.2) as fleet:
        assert (await ask(fleet.rig)).status == 200
        assert fleet.stats.prefill_failures == {"timeout": 1}
        await fleet.over()


async def test_a_decode_engine_that_could_not_fetch_computes_the_prompt_itself() -> None:
    script = in_turn(says(500, b"fetch failed"), GOOD)
    async with mooncake([says(200, LENGTH)], [script]) as fleet:
        assert (await ask(fleet.rig)).status == 200
        (p,), (d,) = fleet.prefill, fleet.decode
        assert (len(p.calls), len(d.calls), len(told(d))) == (1, 2, 1)
        await fleet.over()


async def test_a_decode_engine_that_cannot_be_reached_leaves_what_is_computed_to_another() -> None:
    async with mooncake([says(200, LENGTH)], [GOOD]) as fleet:
        fleet.rig.planner.urls.insert(0, f"http://127.0.0.1:{free_port()}")
        assert (await ask(fleet.rig)).status == 200
        (p,), (d,) = fleet.prefill, fleet.decode
        assert told(d) == [transfer(p.calls[0])]
        assert fleet.stats.handoffs_redirected == 1
        await fleet.over()


async def test_a_client_that_leaves_closes_the_prefill() -> None:
    async with mooncake([HANGS], [GOOD]) as fleet:
        (p,), (d,) = fleet.prefill, fleet.decode
        _, writer = await fleet.rig.connect()
        writer.write(request())
        await until(lambda: p.calls, "it is asked")
        writer.close()
        await until(p.calls[0].closed.is_set, "its connection is closed")
        await fleet.over()
        assert d.calls == []


@pytest.mark.parametrize("page", [says(503, b""), says(200, b"{}"), RESET])
async def test_without_its_name_nothing_is_fetched_from_a_prefill_engine(
    page: Script,
) -> None:
    async with mooncake([says(200, LENGTH)], [GOOD]) as fleet:
        fleet.bootstrap.script = page
        assert (await ask(fleet.rig)).status == 200
        assert [call.body for call in fleet.decode[0].calls] == [CHAT]
        await fleet.over()


_PREFILLS = st.sampled_from(["held", "slow", "stopped", "503", "500", "reset", "400"])
_DECODES = st.sampled_from(["good", "hangs", "503", "500", "reset", "400", "broken", "head"])


@given(st.lists(_PREFILLS, min_size=1, max_size=4), st.lists(_DECODES, min_size=1, max_size=4))
def test_a_failed_transfer_is_reported_once_and_never_after_its_prefill_failed(
    prefills: list[str], decodes: list[str]
) -> None:
    async def main() -> None:
        kept: dict[str | None, bool] = {}  # asked twice where a kept connection turned out to be closed

        def ends(script: Script, *, held: bool) -> Script:
            async def noting(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
                kept[transfer(call)] = held
                await script(engine, call, writer)

            return noting

        held = says(200, LENGTH)
        first: dict[str, Script] = {
            "held": ends(held, held=True),
            "slow": ends(after(lambda engine: asyncio.sleep(0.02), held), held=True),
            "stopped": ends(says(200, STOP), held=False),
            "503": ends(says(503, b""), held=False),
            "500": ends(says(500, b""), held=False),
            "reset": ends(RESET, held=False),
            "400": ends(says(400, b"{}"), held=False),
        }
        second: dict[str, Script] = {
            "good": GOOD,
            "hangs": HANGS,
            "head": writes(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", then="hang"),
            "503": says(503, b""),
            "500": says(500, b""),
            "reset": RESET,
            "400": says(400, b"{}"),
            "broken": writes(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n1234", then="reset"),
        }
        async with mooncake(
            [in_turn(*(first[word] for word in prefills))] * 2,
            [in_turn(*(second[word] for word in decodes))] * 3,
            first_byte_timeout_s=0.1,
        ) as fleet:
            got = await ask(fleet.rig)
            assert got.status in {200, 400, 429, 500, 502, 503, 504}
            await fleet.over()
            names = told(*fleet.decode)
            assert len(names) == len(set(names))
            assert set(names) <= set(told(*fleet.prefill))
            assert all(kept[name] for name in names), "no decode engine gets the handoff of a failed prefill"

    run(main())


async def test_a_moment_counts_only_once_those_have_been_woken_whose_answers_were_there() -> None:
    """A loop that stood still finds an answer that has lain there for long, and the timer that was due
    meanwhile, in one turn: whose answer it is must be woken first."""

    now = 100.0
    quiet = IdleTracker(lambda: now)
    came = asyncio.get_running_loop().create_future()
    seen: list[float] = []

    async def waits() -> None:
        await came
        seen.append(quiet.at_s)

    assert quiet.begin() == 100.0
    waiting = asyncio.create_task(waits())
    await asyncio.sleep(0)
    came.set_result(None)  # the sockets are polled: it came at 90, which is not recorded
    quiet._looked(100.0)  # and then the timer
    await waiting
    assert seen == [-math.inf]
    await until(lambda: quiet.at_s == 100.0, "it counts for those that come later")
    quiet.end()
