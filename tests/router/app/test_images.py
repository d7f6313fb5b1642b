"""Images through a whole router: a render server is asked once, then their tokens are known here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvatlas.router.config.schema import ModelConfig
from kvatlas.router.openai.apis import CHAT, MESSAGES
from kvatlas.router.prompts.settings import ANY_MODEL, PromptSettings
from tests.support.prompts.images import TEMPLATE, Engine, shows
from tests.support.prompts.readers import model_dir, say
from tests.support.waiting import until
from tests.support.whole_router import MODEL, configure, routing, running


class RenderServer:
    """A real server that renders as this engine does, while it is well."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.well = True
        self.url = ""

    async def _render(self, request: web.Request) -> web.Response:
        _, answer = await self.engine.post(str(request.url), await request.read(), {}, 0.0)
        return web.Response(body=answer, content_type="application/json")

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self.well else 503)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        app = web.Application()
        app.add_routes([web.post(f"{path}/render", self._render) for path in (CHAT, MESSAGES)])
        app.add_routes([web.get("/health", self._health)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield
        finally:
            await runner.cleanup()


async def test_images_are_asked_for_once_by_turns_at_servers_that_are_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.router.prompts.render_servers.HEALTH_CHECK_S", 0.05)
    model = ModelConfig(tokenizer=str(model_dir(tmp_path, None)), chat_template=TEMPLATE)
    asked = [shows("What is this? " * 20, "AAAA")]
    later = [*asked, say("assistant", "A cat."), say("user", "Sure?")]
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    by_agent = [say("user", [{"type": "image", "source": source}])]
    servers = [RenderServer(), RenderServer()]

    def calls() -> list[int]:
        return sorted(server.engine.calls for server in servers)

    async with running({}) as engines, servers[0].running(), servers[1].running():
        prompts = PromptSettings(renderers=tuple(s.url for s in servers))
        config = configure(*engines, models={ANY_MODEL: model}, prompts=prompts)
        async with routing(config) as rig:

            async def read(messages: list[Any], path: str = CHAT) -> dict[str, Any]:
                body = {"model": MODEL, "messages": messages, "max_tokens": 3}
                told = await rig.ok("POST", f"/kvatlas/explain?path={path}", body)
                found: dict[str, Any] = told["prompt"]
                return found

            assert (await read(asked))["read"] == "renderer"
            assert calls() == [0, 1]
            known = await read(later)
            expected = servers[0].engine.render({"messages": later}, is_messages=False)
            assert (known["read"], known["tokens"]) == ("local", len(expected["token_ids"]))
            assert (await read(by_agent, MESSAGES))["read"] == "local"
            assert calls() == [0, 1]
            assert (await read([shows("Another", "BBBB")]))["read"] == "renderer"
            assert calls() == [1, 1]
            servers[0].well = False
            await until(lambda: not rig.router.reader.renderers.up[servers[0].url], "it is left alone")
            for data in ("CCCC", "DDDD"):
                assert (await read([shows("More", data)]))["by"] == servers[1].url
            # A request of a client takes the same way; this engine then says that it reads text only.
            status, _ = await rig.ask("POST", CHAT, {"model": MODEL, "messages": later})
            assert status == 400
            assert rig.router.reader.stats.reads["chat", "local"] == 2
            assert rig.router.reader.stats.engine_calls == 0
