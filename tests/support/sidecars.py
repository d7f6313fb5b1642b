"""A stand-in for llm-d's routing sidecar before an engine: what a picker and an engine see of it.

From the source of llm-d's router (``pkg/sidecar/proxy``, connectors ``nixlv2`` and ``offloading``): it asks
the first engine that ``x-prefiller-host-port`` names for one token, and its own engine with the transfer
parameters of that answer. A named engine that is not on its list is refused with 403. An error of the prefill
engine is the client's answer, 502 if there is none. ``x-kv-cache-source-host-port`` becomes
``remote_kv_source``. Both replace the body's ``kv_transfer_params``. All other requests are passed on
unchanged. Left out: retries, and ``cached_tokens`` of the prefill engine, which simulated engines report
themselves.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from kvatlas.publisher.simulator.server import SimulatedEngine
from tests.support.front import Front
from tests.support.whole_router import MODEL

_NOT_PASSED_ON = frozenset(("host", "content-length", "transfer-encoding", "connection"))
_COMPLETIONS = frozenset(("/v1/completions", "/v1/chat/completions"))
_PREFILLER, _KV_SOURCE = "x-prefiller-host-port", "x-kv-cache-source-host-port"


class Sidecar:
    """``splits`` and ``pulls``: requests whose prompt another engine computed, or held a part of. ``bodies``:
    of completions for its own engine."""

    def __init__(
        self, engine: str, allowed: tuple[str, ...], p2p_port: int, session: aiohttp.ClientSession
    ) -> None:
        self.base_url = ""
        self.splits = self.pulls = 0
        self.bodies: list[dict[str, Any]] = []
        self._engine, self._allowed, self._p2p_port, self._session = engine, allowed, p2p_port, session

    async def handle(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        headers = {
            name: value for name, value in request.headers.items() if name.lower() not in _NOT_PASSED_ON
        }
        named, source = headers.pop(_PREFILLER, ""), headers.pop(_KV_SOURCE, "")
        if request.method == "POST" and (named or source):
            body = msgspec.json.decode(data)
            if named:
                prefiller = named.split(",")[0].strip()
                if prefiller not in self._allowed:
                    return web.Response(status=403)
                params = {"do_remote_decode": True, "do_remote_prefill": False}
                first = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": params}
                first.pop("stream_options", None)
                try:
                    status, answer = await self._ask(f"http://{prefiller}{request.path}", first, headers)
                except aiohttp.ClientError:
                    return web.Response(status=502)
                if status != 200:
                    return web.Response(status=status, body=answer)
                body["kv_transfer_params"] = msgspec.json.decode(answer).get("kv_transfer_params")
                self.splits += 1
            else:
                host = source.rpartition(":")[0]
                told = {"kv_request_id": f"{self.pulls}", "remote_host": host, "remote_port": self._p2p_port}
                body["kv_transfer_params"] = {"remote_kv_source": told}
                self.pulls += 1
            data = msgspec.json.encode(body)
        if request.method == "POST" and request.path in _COMPLETIONS:
            self.bodies.append(msgspec.json.decode(data))
        return await self._pass_on(request, data, headers)

    async def _ask(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, bytes]:
        async with self._session.post(url, data=msgspec.json.encode(body), headers=headers) as answer:
            return answer.status, await answer.read()

    async def _pass_on(
        self, request: web.Request, data: bytes, headers: dict[str, str]
    ) -> web.StreamResponse:
        url = self._engine + request.path_qs
        try:
            async with self._session.request(
                request.method, url, data=data or None, headers=headers
            ) as answer:
                passed = web.StreamResponse(status=answer.status)
                passed.content_type = answer.content_type
                await passed.prepare(request)
                async for piece in answer.content.iter_any():
                    await passed.write(piece)
                await passed.write_eof()
                return passed
        except aiohttp.ClientConnectorError:
            return web.Response(status=502)


def endpoint(engine: SimulatedEngine | Front | Sidecar) -> str:
    """``host:port``."""
    return engine.base_url.partition("//")[2]


def completion(number: int, tokens: int = 700, **fields: Any) -> dict[str, Any]:
    """A completion of a prompt of its own."""
    rng = random.Random(number)
    prompt = [rng.randrange(3, 250) for _ in range(tokens)]
    return {"model": MODEL, "prompt": prompt, "max_tokens": 6, "ignore_eos": True, **fields}


@asynccontextmanager
async def sidecar(
    engine: SimulatedEngine | Front, *prefills: SimulatedEngine | Front, p2p_port: int = 7777
) -> AsyncIterator[Sidecar]:
    """The sidecar of this engine, which may ask ``prefills``."""
    async with aiohttp.ClientSession() as session:
        made = Sidecar(engine.base_url, tuple(map(endpoint, prefills)), p2p_port, session)
        runner = web.ServerRunner(web.Server(made.handle), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        made.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield made
        finally:
            await runner.cleanup()
