"""Many requests, clients that leave, engines that die or are too busy to be polled: no book stays open."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import Any

import msgspec
import openai
import pytest

from kvatlas.router.app import Router
from kvatlas.router.config.schema import Config, ModelConfig, ServerConfig
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.openai.apis import COMPLETION
from kvatlas.router.openai.request import InboundRequest, Usage
from kvatlas.router.placement.placement import Placement
from kvatlas.router.prompts.settings import ANY_MODEL
from tests.support.front import fronting
from tests.support.proxy_rig import Call, Engine, answer
from tests.support.waiting import run, until
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routing, running

# A prompt costs more than ``TIE_S``: among engines of equal cost the longest prefix decides alone.


async def stream(rig: Rig, text: str, **fields: Any) -> int:
    """The completion tokens of a streamed chat."""
    _, chunks = await rig.streamed(text, **{"max_tokens": 8, **fields})
    return int(chunks[-1].usage.completion_tokens)


async def test_errors_of_the_engine_leave_nothing_open_and_count_as_no_prediction() -> None:
    async with running({}) as engines, routing(configure(*engines)) as rig:
        for body in ({"messages": []}, {"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}):
            status, told = await rig.ask("POST", "/v1/chat/completions", {"model": MODEL, **body})
            assert status == 400
            assert told["error"]["message"]
        assert not any(engine.receipts.outcomes for engine in rig.router.fleet)
        rig.check_books()
        inflight = rig.router.accounts.inflight.stats
        assert (inflight.prompts, inflight.blocks) == (0, 0)  # nothing was computed, nothing is shared


async def test_a_placement_closes_once_whatever_is_called() -> None:
    async with running({}) as engines, routing(configure(*engines)) as rig:
        body = msgspec.json.encode({"model": MODEL, "prompt": TEXT * 10})
        request = InboundRequest("POST", "/v1/completions", b"", [], body, MODEL, stream=True)
        planner, accounts = rig.router.planner, rig.router.accounts
        stats = accounts.load_stats
        for calls in (("finished", "failed"), ("failed", "finished"), ("finished", "finished")):
            before = (stats.finished, stats.failed)
            placed = await planner.place(request, exclude=frozenset())
            assert isinstance(placed, Placement)
            placed.first_byte(200)
            placed.first_byte(200)
            for call in calls:
                placed.broke("reset") if call == "failed" else placed.finished(None)
            placed.first_byte(200)
            after = (stats.finished, stats.failed)
            assert sum(after) - sum(before) == 1
            assert after[0 if calls[0] == "finished" else 1] == before[0 if calls[0] == "finished" else 1] + 1
        assert rig.outcomes("unreported") + rig.outcomes("unpredicted") == 3
        assert accounts.inflight.check_integrity() == []
        assert all(engine.load.check_integrity() == [] for engine in rig.router.fleet)


async def test_an_engines_report_is_a_sign_of_life() -> None:
    async with running({}) as engines, routing(configure(*engines)) as rig:
        body = msgspec.json.encode({"model": MODEL, "prompt": TEXT * 10})
        request = InboundRequest("POST", "/v1/completions", b"", [], body, MODEL)
        (engine,) = rig.router.fleet
        for usage, sign in ((Usage(10, 1, 0), 1), (None, 0)):
            placed = await rig.router.planner.place(request, exclude=frozenset())
            assert isinstance(placed, Placement)
            before = engine.answers
            placed.finished(usage)
            assert engine.answers - before == sign


@pytest.mark.parametrize(
    ("method", "path", "prompt", "tokens"),
    [
        ("POST", COMPLETION, [[1, 2, 3]], 3),
        ("POST", COMPLETION, [[1, 2, 3], [4, 5, 6]], 0),
        ("POST", "/v1/score", [[1, 2, 3]], 0),
        ("GET", COMPLETION, [[1, 2, 3]], 0),
    ],
)
async def test_the_usage_record_knows_the_tokens_of_what_has_one_prompt(
    method: str, path: str, prompt: list[list[int]], tokens: int
) -> None:
    """Of several prompts it cannot say which one's tokens were cached; nothing else is read as a prompt."""
    async with running({}) as engines, routing(configure(*engines)) as rig:
        body = msgspec.json.encode({"model": MODEL, "prompt": prompt})
        request = InboundRequest(method, path, b"", [], body, MODEL)
        placed = await rig.router.planner.place(request, exclude=frozenset())
        assert isinstance(placed, Placement)
        assert len(placed.usage_facts().tokens or ()) == tokens
        assert (placed.decision.read is None) == ((method, path) != ("POST", COMPLETION))
        placed.finished(None)


async def test_a_late_first_token_counts_in_the_next_decision() -> None:
    async with running({}) as engines, routing(configure(*engines)) as rig:
        body = msgspec.json.encode({"model": MODEL, "prompt": TEXT * 10})
        request = InboundRequest("POST", "/v1/completions", b"", [], body, MODEL, stream=True)
        planner, accounts, on_time = rig.router.planner, rig.router.accounts, rig.router.accounts.now
        assert (await planner.explain(request)).candidates[0].late_s == 0
        placed = await planner.place(request, exclude=frozenset())
        assert isinstance(placed, Placement)
        accounts.now = lambda: on_time() + 100
        placed.now = accounts.now
        placed.first_byte(200)
        assert (await planner.explain(request)).candidates[0].late_s == pytest.approx(10, rel=0.1)
        placed.finished(None)


async def test_stopping_leaves_no_task_and_no_connection() -> None:
    before = asyncio.all_tasks()
    async with running({}, {"publish_events": False}) as engines:
        with_engines = asyncio.all_tasks()
        async with routing(configure(*engines)) as rig:
            await asyncio.gather(*[rig.chat(f"{n} {TEXT}") for n in range(8)])
            router: Router = rig.router
        await until(lambda: not (_named(asyncio.all_tasks()) - _named(with_engines)), "tasks ended")
        assert router.calls._in_clients_names is None
        assert router.lifecycle.feeds.stats == {}
    await until(lambda: asyncio.all_tasks() <= before, "everything ended")
    gc.collect()  # unclosed sockets and sessions would warn here, and warnings are errors


def _named(tasks: set[asyncio.Task[Any]]) -> set[str]:
    return {task.get_name() for task in tasks if task.get_name().startswith(("feed ", "poll "))}


async def test_stopping_does_not_wait_for_engines_that_hang() -> None:
    async def hang(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await stopped.wait()
        writer.close()

    stopped = asyncio.Event()
    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        async with routing(configure(EngineAddress(f"http://127.0.0.1:{port}")), wait=False) as rig:
            assert (await rig.ask("GET", "/ready"))[0] == 503
        stopped.set()
        server.close()


async def test_a_fault_of_one_part_does_not_stop_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        running({}, {}) as (a, b),
        fronting(a) as front,
        routing(configure(EngineAddress(front.base_url), b)) as rig,
    ):
        faults = 0

        def broken(*_: Any) -> bool:
            nonlocal faults
            faults += 1
            raise RuntimeError("a fault")

        monkeypatch.setattr(rig.router.scopes, "advance_detection", broken)
        monkeypatch.setattr(rig.router.lifecycle, "engine_load", lambda *_, **__: broken())
        await until(lambda: faults > 2, "faults happened")
        monkeypatch.undo()
        await rig.ready()
        for n in range(4):
            assert (await rig.chat(f"{n} {TEXT}")).parse().choices
        rig.check_books()


async def test_accounts_that_contradict_themselves_are_found_every_few_decisions() -> None:
    checking = ServerConfig(port=0, check_every=2)
    async with running({}) as (engine,), routing(configure(engine, server=checking)) as rig:
        accounts = rig.router.accounts
        accounts.inflight.stats.blocks += 7
        await rig.chat(TEXT)
        assert accounts.integrity_problems == 0
        await rig.chat(TEXT)
        assert accounts.integrity_problems == 1
        accounts.integrity_problems = 0


FLEET = FleetSettings(
    poll_interval_s=0.02, poll_down_interval_s=0.02, gauge_interval_s=0.02, poll_timeout_s=0.05
)
_CARDS = msgspec.json.encode({"object": "list", "data": [{"id": "m"}]})
_COMPLETION = msgspec.json.encode(
    {"id": "x", "object": "text_completion", "created": 1, "model": "m", "choices": []}
)


class Busy:
    """A script: polls hang once ``hangs`` is set, completions are answered."""

    hangs = False

    async def __call__(self, engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        path = call.head.first[1]
        if path == "/v1/models":
            if self.hangs:
                await asyncio.Event().wait()
            writer.write(answer(200, _CARDS))
        elif path == "/v1/completions":
            writer.write(answer(200, _COMPLETION, "content-type: application/json"))
        else:
            writer.write(answer(404, b""))


def _config(*engines: Engine) -> Config:
    addresses = [EngineAddress(engine.url) for engine in engines]
    return configure(*addresses, fleet=FLEET, models={ANY_MODEL: ModelConfig()})


async def _served(rig: Rig) -> str:
    raw = await rig.api.completions.with_raw_response.create(model="m", prompt="x")
    return raw.headers["x-kvatlas-engine"]


def test_requests_go_on_while_every_poll_times_out(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        busy = Busy()
        async with Engine(busy) as one, Engine(busy) as two, routing(_config(one, two)) as rig:
            busy.hangs = True
            fleet = rig.router.fleet
            await until(lambda: all(engine.silent for engine in fleet), "all polls time out")
            assert rig.router.readiness().ready
            assert [card.id for card in (await rig.api.models.list()).data] == ["m"]
            await _served(rig)
            assert rig.router.accounts.load_stats.admitted_silent >= 1
            await until(lambda: any(engine.up for engine in fleet), "its answer is a sign of life")
            for _ in range(20):
                await _served(rig)
            page = (await rig.ask("GET", "/metrics"))[1]
            assert "kvatlas_engine_silent{" in page
            assert "kvatlas_load_admitted_silent_total" in page

    run(main())
    assert capsys.readouterr().out.count("no engine of the model answers polls in time") >= 1


async def test_an_engine_that_is_up_goes_before_silent_ones() -> None:
    busy, idle = Busy(), Busy()
    async with Engine(busy) as one, Engine(idle) as two, routing(_config(one, two)) as rig:
        busy.hangs = True
        silent = rig.router.fleet.get(one.url)
        await until(lambda: silent.silent, "its polls time out")
        assert {await _served(rig) for _ in range(10)} == {two.url}
        assert rig.router.accounts.load_stats.admitted_silent == 0


async def test_an_engine_that_refuses_connections_is_down_for_good() -> None:
    async with Engine(Busy()) as one, routing(_config(one)) as rig:
        await one.stop()
        await until(lambda: not rig.router.fleet.ready("m"), "it is down")
        with pytest.raises(openai.InternalServerError, match="No engine can take this request"):
            await _served(rig)
        assert not rig.router.readiness().ready
