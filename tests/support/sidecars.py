"""A running sidecar before a decode engine, in this loop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.config.schema import Config, ServerConfig
from kvatlas.router.pd.settings import SidecarSettings
from kvatlas.router.server_lifecycle import RouterServer
from kvatlas.router.sidecar import Sidecar, make_server
from tests.support.front import Front
from tests.support.waiting import until
from tests.support.whole_router import MODEL


class SidecarRig:
    """A running sidecar, and a client of it."""

    def __init__(self, sidecar: Sidecar, server: RouterServer, session: aiohttp.ClientSession) -> None:
        self.sidecar = sidecar
        self.server = server
        self.url = server.base_url
        self.session = session

    @property
    def endpoint(self) -> str:
        return self.url.partition("//")[2]

    async def ask(
        self, body: Any, *prefillers: str, path: str = "/v1/completions", **headers: str
    ) -> tuple[int, Any, str | None]:
        """Status, answer, and what it says of the prefill."""
        named = {"content-type": "application/json"}
        if prefillers:
            named["x-prefiller-host-port"] = ",".join(prefillers)
        async with self.session.post(
            self.url + path, data=msgspec.json.encode(body), headers={**named, **headers}
        ) as answer:
            raw = await answer.read()
            is_json = answer.content_type == "application/json"
            told = answer.headers.get("x-kvatlas-prefilled")
            return answer.status, msgspec.json.decode(raw) if is_json else raw.decode(), told

    async def get(self, path: str, *, ops: bool = False) -> tuple[int, str]:
        """Status and text of a page, on its own port or on the one for operators."""
        base = (self.sidecar.ops.base_url or "") if ops else self.url
        async with self.session.get(base + path) as answer:
            return answer.status, await answer.text()


def endpoint(engine: SimulatedEngine | Front) -> str:
    """``host:port``."""
    return engine.base_url.partition("//")[2]


def completion(number: int, tokens: int = 700, **fields: Any) -> dict[str, Any]:
    """A completion of a prompt of its own."""
    rng = random.Random(number)
    prompt = [rng.randrange(3, 250) for _ in range(tokens)]
    return {"model": MODEL, "prompt": prompt, "max_tokens": 6, "ignore_eos": True, **fields}


@asynccontextmanager
async def sidecar(
    engine: SimulatedEngine | Front,
    *prefills: SimulatedEngine | Front | str,
    secret_file: str | None = None,
    **changes: Any,
) -> AsyncIterator[SidecarRig]:
    """The sidecar of this engine, which may ask ``prefills``."""
    names = tuple(one if isinstance(one, str) else endpoint(one) for one in prefills)
    own = SidecarSettings(engine=engine.base_url, prefills=names, secret_file=secret_file)
    app = Sidecar(Config(**{"server": ServerConfig(port=0), "sidecar": own, **changes}))
    server = make_server(app)
    serving = asyncio.create_task(server.serve())
    async with aiohttp.ClientSession() as session:
        try:
            await until(lambda: server.started or serving.done(), "the sidecar listens")
            if serving.done():
                serving.result()
            yield SidecarRig(app, server, session)
            await until(lambda: app.proxy.stats.requests_active == 0, "every request has ended")
        finally:
            server.drain()
            await serving
