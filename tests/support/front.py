"""A server in front of simulated engines that says other things than they do: ranks, adapters, faults."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from kvatlas.publisher.simulator.server import SimulatedEngine

Override = Callable[[], tuple[int, Any]]
"""Status and body of one path, JSON or bytes; status 0 breaks the connection."""


class Front:
    """Passes on to its engines, by data-parallel rank; ``overrides`` answers a path itself."""

    def __init__(self, engines: tuple[SimulatedEngine, ...], session: aiohttp.ClientSession) -> None:
        self.engines = engines
        self.overrides: dict[str, Override] = {}
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.bodies: list[tuple[str, bytes]] = []
        self.base_url = ""
        self._session = session

    def asked(self, path: str) -> int:
        """How often a path was asked for."""
        return sum(seen == path for seen, _ in self.seen)

    def ranks(self, path: str) -> list[str | None]:
        """The rank that each request of a path was for."""
        return [headers.get("x-data-parallel-rank") for seen, headers in self.seen if seen == path]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append((request.path, headers))
        data = await request.read()
        if data:
            self.bodies.append((request.path, data))
        if request.path in self.overrides:
            status, body = self.overrides[request.path]()
            if not status and request.transport is not None:
                request.transport.abort()
            if isinstance(body, bytes):
                return web.Response(body=body, status=status or 500)
            return web.json_response(body, status=status or 500)
        engine = self.engines[int(headers.get("x-data-parallel-rank", "0"))]
        kept = {"content-type": headers["content-type"]} if data else {}
        url = engine.base_url + request.path_qs
        async with self._session.request(request.method, url, data=data, headers=kept) as answer:
            body = await answer.read()
            return web.Response(body=body, status=answer.status, content_type=answer.content_type)


@asynccontextmanager
async def fronting(*engines: SimulatedEngine, port: int = 0) -> AsyncIterator[Front]:
    """A front before these engines, on a port of its own."""
    async with aiohttp.ClientSession() as session:
        front = Front(engines, session)
        runner = web.ServerRunner(web.Server(front.handle), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        front.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield front
        finally:
            await runner.cleanup()
