"""Common parts of the engine tests: a running engine, a client, and polling with a deadline."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.publisher.simulator.settings import EngineSettings
from tests.support.clients import openai_client

QUICK: dict[str, Any] = {"prefill_s_per_token": 1e-7, "decode_s_per_token": 1e-5, "num_blocks": 2048}
LONG_TEXT = "The quick engine reads a long story about a small router and its famous garden. " * 12


@asynccontextmanager
async def engine(**changes: Any) -> AsyncIterator[SimulatedEngine]:
    """A started engine with tiny timings, stopped at the end."""
    running = SimulatedEngine(EngineSettings(**{**QUICK, **changes}))
    await running.start()
    try:
        yield running
    finally:
        await running.stop()


@asynccontextmanager
async def client(running: SimulatedEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    """The real ``openai`` client on that engine, without retries."""
    async with openai_client(running.base_url) as api:
        yield api


async def request(
    running: SimulatedEngine, method: str, path: str, body: Any = None, **options: Any
) -> tuple[int, Any]:
    """One HTTP exchange: status and decoded body."""
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, running.base_url + path, json=body, **options) as answer,
    ):
        if answer.content_type == "application/json":
            return answer.status, await answer.json()
        return answer.status, await answer.text()


def all_blocks_free(running: SimulatedEngine) -> bool:
    """No request holds a block (block 0, the null block, is never free)."""
    return running.pool.num_free_blocks == running.settings.num_blocks - 1
