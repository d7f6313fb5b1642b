"""Render servers: asked before engines, balanced, left alone while they are down."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from kvatlas.router.prompts.reader import ModelPrompts, PromptReader, PromptSettings
from tests.support.prompts.readers import chat, read_prompt, reader, request, say

SERVERS = ("http://a:1", "http://b:1", "http://c:1")
HELLO = chat(say("user", "Hello"))


class Servers:
    """Fake render servers and one engine; ``down`` refuse connections, ``refuse`` answer 400, ``hang`` never
    answer."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.down: set[str] = set()
        self.refuse: set[str] = set()
        self.hang: set[str] = set()
        self.gate: asyncio.Event | None = None

    async def post(self, url: str, _body: bytes, _headers: Any, _timeout_s: float) -> tuple[int, bytes]:
        server = url.removesuffix("/v1/chat/completions/render")
        self.asked.append(server)
        if self.gate is not None:
            await self.gate.wait()
        if server in self.hang:
            await asyncio.Event().wait()
        if server in self.down:
            raise OSError(url)
        return (400, b"{}") if server in self.refuse else (200, json.dumps({"token_ids": [1, 2, 3]}).encode())

    async def healthy(self, url: str) -> bool:
        return url not in self.down


def make(servers: Servers, renderers: tuple[str, ...] = SERVERS) -> PromptReader:
    settings = PromptSettings(renderers=renderers, engine_timeout_s=0.05 if servers.hang else 60.0)
    return reader(
        {"m": ModelPrompts()},
        settings,
        post=servers.post,
        engine_url=lambda _model, _frontend: "http://engine",
    )


def test_a_render_server_is_asked_before_any_engine() -> None:
    servers = Servers()
    side = make(servers, ("http://a:1/",))
    prompt = read_prompt(side, HELLO)
    assert (prompt.source, prompt.by, list(prompt.token_ids)) == ("renderer", "http://a:1", [1, 2, 3])
    assert servers.asked == ["http://a:1"]
    assert (side.stats.renderer, side.stats.engine) == (1, 0)
    assert (side.stats.renderer_calls, side.stats.engine_calls) == (1, 0)


async def test_calls_are_spread_over_the_servers() -> None:
    servers = Servers()
    side = make(servers)
    for _ in range(9):
        await side.read(request(HELLO))
    assert set(Counter(servers.asked).values()) == {3}
    servers.gate = asyncio.Event()
    waiting = [asyncio.ensure_future(side.read(request(HELLO))) for _ in range(6)]
    while len(servers.asked) < 15:
        await asyncio.sleep(0)
    servers.gate.set()
    await asyncio.gather(*waiting)
    assert set(Counter(servers.asked[9:]).values()) == {2}


@pytest.mark.parametrize("how", ["down", "refuse", "hang"])
def test_where_two_servers_give_nothing_the_engine_is_asked(how: str) -> None:
    servers = Servers()
    getattr(servers, how).update(SERVERS)
    side = make(servers)
    prompt = read_prompt(side, HELLO)
    assert (prompt.source, prompt.by) == ("engine", "http://engine")
    assert servers.asked == [*SERVERS[:2], "http://engine"]
    assert (side.stats.renderer, side.stats.engine, side.stats.renderer_failures) == (0, 1, 2)


async def test_a_server_that_fails_its_health_check_is_left_alone_until_it_passes() -> None:
    servers = Servers()
    side = make(servers)

    async def checked() -> None:
        watch = asyncio.ensure_future(side.renderers.watch(servers.healthy))
        up = side.renderers.up
        for _ in range(20):
            await asyncio.sleep(0)
        watch.cancel()
        assert up.keys() == side.renderers.up.keys()

    servers.down = {"http://a:1", "http://c:1"}
    await checked()
    assert side.renderers.up == {"http://a:1": False, "http://b:1": True, "http://c:1": False}
    for _ in range(4):
        await side.read(request(HELLO))
    assert set(servers.asked) == {"http://b:1"}
    servers.down = set()
    await checked()
    for _ in range(3):
        await side.read(request(HELLO))
    assert set(servers.asked[4:]) == set(SERVERS)
