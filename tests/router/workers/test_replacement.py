"""A worker that replaces another one accepts connections once it knows engines."""

from __future__ import annotations

import asyncio
from contextlib import closing

import msgspec
import pytest

from router.app import Router
from router.fleet.engines import EngineAddress
from router.workers.context import WorkerSockets
from tests.support.proxy_rig import Call, Engine, answer
from tests.support.waiting import until
from tests.support.whole_router import configure

_CARDS = msgspec.json.encode({"object": "list", "data": [{"id": "m"}]})


async def _slow_to_say(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
    await engine.go.wait()
    known = call.head.first[1] == "/v1/models"
    writer.write(answer(200, _CARDS) if known else answer(404, b""))


@pytest.mark.parametrize("life", [0, 1])
async def test_only_a_replacement_waits_for_its_first_poll(life: int) -> None:
    async with Engine(_slow_to_say) as engine:
        with closing(WorkerSockets(1, ("127.0.0.1", 0))) as sockets:
            worker = sockets.open_worker(0, life, lambda: None, -1)
            router = Router(configure(EngineAddress(engine.url)), worker=worker)
            begun, leave = asyncio.Event(), asyncio.Event()

            async def works() -> None:
                async with router.running():
                    begun.set()
                    await leave.wait()

            working = asyncio.create_task(works())
            await until(lambda: engine.calls, "the engine is polled")
            if life:
                for _ in range(20):
                    await asyncio.sleep(0)
                assert not begun.is_set()
                engine.go.set()
            await until(begun.is_set, "it may accept")
            assert bool(router.fleet.ready("m")) == bool(life)
            engine.go.set()
            leave.set()
            await working


async def test_a_replacement_begins_though_no_engine_answers() -> None:
    async with Engine(_slow_to_say) as engine:
        with closing(WorkerSockets(1, ("127.0.0.1", 0))) as sockets:
            config = configure(EngineAddress(engine.url))
            fleet = msgspec.structs.replace(config.fleet, poll_timeout_s=0.1)
            config = msgspec.structs.replace(config, fleet=fleet)
            router = Router(config, worker=sockets.open_worker(0, 1, lambda: None, -1))
            async with router.running():
                assert not router.fleet.ready(None)
