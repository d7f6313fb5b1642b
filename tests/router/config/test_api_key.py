"""The key that engines want of the router's own questions comes from a file, and is checked at start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvatlas.router.app import Router
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.config.load import load
from kvatlas.router.config.schema import Config, ServerConfig
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.openai.request import InboundRequest
from tests.support.waiting import until


def test_an_unusable_key_file_is_refused_naming_the_key(tmp_path: Path) -> None:
    for content in (None, "", "two\nlines"):
        path = tmp_path / "key"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content)
        with pytest.raises(ConfigError, match=r"fleet\.api_key_file"):
            load(flags={"fleet.api_key_file": str(path)}, environ={})


@asynccontextmanager
async def routing_to(answer: Callable[..., Awaitable[None]], key: Path) -> AsyncIterator[Router]:
    """A router with this key, once an engine that answers so is ready."""
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        engines = (EngineAddress(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"),)
        fleet = FleetSettings(api_key_file=str(key), poll_down_interval_s=0.05)
        router = Router(Config(server=ServerConfig(port=0), engines=engines, fleet=fleet))
        async with router.running():
            await until(lambda: router.fleet.ready("m"), "ready")
            yield router


async def test_the_router_asks_engines_with_the_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret-word\n")
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        body = b'{"data":[{"id":"m"}]}' if b"bearer secret-word" in asked[-1].lower() else b"{}"
        status = b"200 OK" if len(body) > 2 else b"401 Unauthorized"
        writer.write(
            b"HTTP/1.1 %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (status, len(body), body)
        )
        await writer.drain()
        writer.close()

    async with routing_to(answer, tmp_path / "key"):
        pass
    assert b"secret-word" in asked[0]


async def test_an_engine_renders_with_the_clients_authorization(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret-word\n")
    rendered: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/render" in head:
            rendered.append(head.lower())
        body = b'{"data":[{"id":"m"}]}' if head.startswith(b"GET /v1/models") else b'{"token_ids":[1,2,3]}'
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
        )
        await writer.drain()
        writer.close()

    body = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'
    own = [(b"authorization", b"Bearer clients-own")]
    async with routing_to(answer, tmp_path / "key") as router:
        for headers in ([], own):
            path = "/v1/chat/completions"
            await router.reader.read(InboundRequest("POST", path, b"", headers, body, "m"))
    without, given = rendered
    assert b"authorization" not in without
    assert b"authorization: bearer clients-own" in given
    assert b"secret-word" not in given
