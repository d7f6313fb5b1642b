"""Engines whose API processes are too busy to be polled go on being asked."""

from __future__ import annotations

import asyncio

import msgspec
import openai
import pytest

from router.config.schema import Config, ModelConfig
from router.fleet.engines import EngineAddress
from router.fleet.settings import FleetSettings
from router.prompts.settings import ANY_MODEL
from tests.support.proxy_rig import Call, Engine, answer
from tests.support.waiting import run, until
from tests.support.whole_router import Rig, configure, routing

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
        assert silent is not None
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
