"""A whole router before simulated engines, in one event loop (on virtual time unless the test is real)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR, EngineSettings
from kvatlas.router.admission.key_file import KeySettings, digest_of
from kvatlas.router.app import Router
from kvatlas.router.config.schema import Config, ModelConfig, ServerConfig
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.http.settings import ListenSettings
from kvatlas.router.prompts.settings import ANY_MODEL
from kvatlas.router.server_lifecycle import RouterServer, make_server
from tests.support.clients import openai_client
from tests.support.waiting import until

MODEL = "kvatlas-demo"
QUICK: dict[str, Any] = {"prefill_s_per_token": 1e-7, "decode_s_per_token": 1e-5, "num_blocks": 2048}
"""Engines that take next to no time."""
LOCAL = ModelConfig(tokenizer=str(DEMO_TOKENIZER_DIR))
OFTEN = FleetSettings(
    poll_interval_s=0.1, poll_down_interval_s=0.05, gauge_interval_s=0.1, poll_timeout_s=10.0
)
TEXT = "The quick router reads a long story about a small engine and its famous garden. "


class Rig:
    """A running router, and clients of it."""

    def __init__(self, router: Router, server: RouterServer, session: aiohttp.ClientSession) -> None:
        self.router = router
        self.server = server
        self.url = server.base_url
        self.ops_url = router.ops.base_url or self.url
        self.session = session
        self.api = openai_client(self.url)

    async def ask(
        self, method: str, path: str, body: Any = None, fields: dict[str, str] | None = None, **options: Any
    ) -> tuple[int, Any]:
        """One exchange: status, and the body decoded if it is JSON."""
        data = body if isinstance(body, bytes | None) else msgspec.json.encode(body)
        headers = {**({} if data is None else {"content-type": "application/json"}), **(fields or {})}
        ops = path.startswith(("/kvatlas/", "/metrics"))
        url = self.ops_url if ops else self.url
        async with self.session.request(method, url + path, data=data, headers=headers, **options) as answer:
            raw = await answer.read()
            is_json = answer.content_type == "application/json"
            return answer.status, msgspec.json.decode(raw) if is_json and raw else raw.decode()

    async def ok(self, method: str, path: str, body: Any = None, fields: dict[str, str] | None = None) -> Any:
        """Return the body of an answer with status 200."""
        status, answer = await self.ask(method, path, body, fields)
        assert status == 200, answer
        return answer

    async def page(self) -> str:
        """The metrics page."""
        return str(await self.ok("GET", "/metrics"))

    async def chat(self, text: str, **fields: Any) -> Any:
        """A chat completion by the ``openai`` client: headers by ``.headers``, the answer by ``.parse()``."""
        body: dict[str, Any] = {"model": MODEL, "max_tokens": 3, "extra_body": {"ignore_eos": True}, **fields}
        messages = [{"role": "user", "content": text}]
        return await self.api.chat.completions.with_raw_response.create(**{"messages": messages, **body})

    async def streamed(self, text: str, **fields: Any) -> tuple[Any, list[Any]]:
        """A streamed chat read to its end: its headers, and its chunks with the usage in the last."""
        raw = await self.chat(text, stream=True, stream_options={"include_usage": True}, **fields)
        return raw.headers, [chunk async for chunk in raw.parse()]

    async def ready(self) -> None:
        """Every engine up, every feed caught up."""
        router = self.router

        def whole() -> bool:
            events = [engine for engine in router.fleet if engine.publishes_events]
            up = all(status.up for status in router.fleet)
            return up and all(engine.feed_state == "ready" for engine in events)

        await until(lambda: whole() and router.readiness().ready, "every engine up and known")

    async def caught_up(self, *engines: SimulatedEngine) -> None:
        """The router has applied every batch that these engines have published."""
        stats = self.router.lifecycle.feeds.stats

        def applied() -> bool:
            for engine in engines:
                if engine.publisher is not None and engine.publisher.next_seq:
                    feed = stats.get(engine.base_url)
                    if feed is None or feed.last_seq != engine.publisher.next_seq - 1:
                        return False
            return True

        await until(applied, "every batch applied")

    def check_books(self) -> None:
        """No request is open anywhere, and every book adds up."""
        accounts, now = self.router.accounts, time.monotonic()
        assert accounts.inflight.check_integrity() == []
        for engine in self.router.fleet:
            assert engine.load.check_integrity() == []
            load = engine.load.current(now)
            assert (load.running + load.waiting - load.foreign, load.awaited_tokens) == (0, 0), load
        stats = accounts.load_stats
        assert stats.admitted == stats.finished + stats.failed
        assert self.router.proxy.stats.requests_active == 0

    async def over(self) -> None:
        """Every request has ended, and left nothing behind."""
        room = self.router.accounts.room
        await until(lambda: self.idle and not (room and len(room)), "every request has ended")
        self.check_books()

    def outcomes(self, outcome: str) -> int:
        """Receipts with this outcome, over all engines."""
        return sum(engine.receipts.outcomes.get(outcome, 0) for engine in self.router.fleet)

    @property
    def idle(self) -> bool:
        return self.router.proxy.stats.requests_active == 0


class _QuickRouter(Router):
    """Loads the application of the ops port at its first request: that takes as long as most tests."""

    def load_ops(self) -> None:
        """Not yet."""


def configure(*engines: SimulatedEngine | EngineAddress, **changes: Any) -> Config:
    """A configuration for tests: free port, local tokenizer, decisions shown, frequent polls."""
    listed = tuple(e if isinstance(e, EngineAddress) else EngineAddress(e.base_url) for e in engines)
    defaults: dict[str, Any] = {
        "server": ServerConfig(port=0, expose_decision=True, check_every=1),
        "engines": listed,
        "models": {ANY_MODEL: LOCAL},
        "fleet": OFTEN,
        "listen": ListenSettings(drain_s_max=5.0),
    }
    return Config(**{**defaults, **changes})


@asynccontextmanager
async def running(*settings: dict[str, Any]) -> AsyncIterator[list[SimulatedEngine]]:
    """Simulated engines, one per dict of settings (over ``QUICK``)."""
    async with AsyncExitStack() as stack:
        engines = []
        for changes in settings:
            engine = SimulatedEngine(EngineSettings(**{**QUICK, **changes}))
            await engine.start()
            stack.push_async_callback(engine.stop)
            engines.append(engine)
        yield engines


@asynccontextmanager
async def routing(config: Config, *, wait: bool = True) -> AsyncIterator[Rig]:
    """The router of this configuration, serving; ``wait``: until every engine is known."""
    router = _QuickRouter(config)
    server = make_server(router)
    serving = asyncio.create_task(server.serve())
    async with aiohttp.ClientSession() as session:
        try:
            await until(lambda: server.started or serving.done(), "the router listens")
            if serving.done():
                serving.result()
            rig = Rig(router, server, session)
            async with rig.api:
                if wait:
                    await rig.ready()
                yield rig
        finally:
            server.drain()
            await serving
    assert router.accounts.integrity_problems == 0


@asynccontextmanager
async def routed(
    *settings: dict[str, Any], wait: bool = True, **changes: Any
) -> AsyncIterator[tuple[Rig, list[SimulatedEngine]]]:
    """Simulated engines, and the router that has them and these changes in its configuration."""
    async with running(*settings) as engines, routing(configure(*engines, **changes), wait=wait) as rig:
        yield rig, engines


def tenants(folder: Path, rules: Mapping[str, str], **settings: Any) -> KeySettings:
    """Rules per tenant in a file, and a key for each: ``key-of-NAME``."""
    path = folder / "keys.toml"
    path.write_text(
        "".join(
            f"[tenants.{name}]\n{text}\n"
            f'[[keys]]\ntenant = "{name}"\nsha256 = "{digest_of(f"key-of-{name}")}"\n'
            for name, text in rules.items()
        )
    )
    return KeySettings(file=str(path), **settings)


def number(port_of: str) -> int:
    """The port in a URL or endpoint."""
    return int(port_of.rpartition(":")[2])
