"""A usual request takes few steps: Python calls, whose number on virtual time no machine changes."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import FrameType

import pytest

import kvatlas.router.app
from kvatlas.router.config.schema import ServerConfig
from kvatlas.router.fleet.settings import FleetSettings
from tests.support.whole_router import MODEL, TEXT, Rig, routed
from tests.world.net import Transport

CALLS_MAX = {"gemma3-like": 275, "full": 287}
"""By cache layout, Python calls within ``router/`` of one repeated chat before four engines that hold it,
from its first byte to its receipt and its end in the request log; 33 fewer on uvloop, whose own are not
Python's. A new ability that needs more takes it from elsewhere (benchmarks/results/request.md). Full
attention keeps every block in flight, also what a prompt hits."""
ROUTER = str(Path(kvatlas.router.app.__file__).parent)
CHAT = "/v1/chat/completions"


async def calls(rig: Rig, body: dict[str, object]) -> int:
    """Calls of one request, and of what the router meanwhile does besides."""
    found = 0

    def enter(frame: FrameType, event: str, _: object) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(ROUTER)

    sys.setprofile(enter)
    try:
        await rig.ok("POST", CHAT, body)
        while not rig.idle:
            await asyncio.sleep(0)
        rig.router.accounts.books.settle()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("groups", list(CALLS_MAX))
async def test_a_repeated_chat_takes_a_bounded_number_of_calls(
    groups: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Transport, "_segment", lambda _self, size: size)  # each more takes calls
    body = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": TEXT * 20}]}
    seldom = FleetSettings(poll_interval_s=600.0, gauge_interval_s=600.0)
    async with routed(*[{"groups": groups}] * 4, server=ServerConfig(port=0), fleet=seldom) as (rig, engines):
        for engine in engines:
            async with rig.session.post(engine.base_url + CHAT, json=body) as answer:
                assert answer.status == 200
        await rig.caught_up(*engines)
        for _ in range(8):
            await rig.ok("POST", CHAT, body)
            await rig.over()
        # The least of some: feeds and timers have their turn in others.
        counts = [await calls(rig, body) for _ in range(16)]
        assert min(counts) <= CALLS_MAX[groups], sorted(counts)
        assert rig.outcomes("exact") > 8
