"""A whole router, and prompts that end the engines that compute them: one engine each, whatever the APIs,
streams, legs and clients' attempts."""

from __future__ import annotations

from typing import Any

import pytest

from kvatlas.publisher.simulator.server import SimulatedEngine
from tests.router.app.test_prefill_decode import BODIES, CONNECTORS, D, P, apart, busy
from tests.support.whole_router import Rig, routed

DIES: dict[str, Any] = {"dies_at": "before_answer"}


async def alive(rig: Rig, engines: list[SimulatedEngine]) -> int:
    """How many engines answer."""
    found = 0
    for engine in engines:
        try:
            async with rig.session.get(engine.base_url + "/health") as answer:
                found += answer.status == 200
        except OSError:
            pass
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
async def test_a_prompt_that_ends_engines_ends_one(path: str, stream: bool) -> None:
    async with routed(DIES, DIES, DIES) as (rig, engines):
        for _ in range(4):
            status, answer = await rig.ask("POST", path, {**BODIES[path], "stream": stream})
            assert (status, answer["error"]["code"]) == (503, "engine_died")
        assert await alive(rig, engines) == 2
        await rig.over()


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
async def test_a_prompt_that_ends_prefill_engines_ends_one(connector: str) -> None:
    assert connector in CONNECTORS
    async with apart({**P, **DIES}, {**P, **DIES}, D, connector=connector) as (rig, engines):
        for _ in range(3):
            with busy(rig):
                status, answer = await rig.ask("POST", "/v1/completions", BODIES["/v1/completions"])
            assert (status, answer["error"]["code"]) == (503, "engine_died")
        assert await alive(rig, engines) == 2
