"""Render servers (``vllm launch render``): asked for tokens before any engine.

They answer like an engine's render endpoint, without a GPU. The one with the fewest open calls is asked,
then, if it gives nothing, one other. A server that fails rests for ``FAILED_S``; one whose ``GET
/health`` does not answer 200 is skipped until it does.

Invariants: at most ``ASKED_MAX`` servers per prompt, each within ``engine_timeout_s``; no sockets here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from kvatlas.router.prompts.remote import RENDER_PATHS, EngineSide, EngineTokens
from kvatlas.router.prompts.request import (
    ChatBody,
    CompletionBody,
)

# Interval between checks of a render server's ``/health``.
HEALTH_CHECK_S = 5.0


ASKED_MAX: Final = 2
Healthy = Callable[[str], Awaitable[bool]]
"""``healthy(url)``: whether ``GET url/health`` answers 200 in time; raises nothing."""


class Renderers:
    """The configured servers, each ``http://host:port``; event-loop thread only."""

    def __init__(self, urls: tuple[str, ...], side: EngineSide) -> None:
        self._side = side
        self._calls = dict.fromkeys((url.rstrip("/") for url in urls), 0)
        self._up = dict.fromkeys(self._calls, True)

    @property
    def up(self) -> dict[str, bool]:
        """By server, whether it answered its last health check; True before the first one."""
        return dict(self._up)

    async def tokens(
        self,
        path: str,
        body: bytes,
        parsed: ChatBody | CompletionBody | None,
        *,
        authorization: bytes | None = None,
    ) -> tuple[EngineTokens, str] | None:
        """Return the request's tokens and the server that made them, or None."""
        if path not in RENDER_PATHS:
            return None
        usable = sorted((url for url in self._calls if self._up[url]), key=self._calls.__getitem__)
        for url in usable[:ASKED_MAX]:
            self._calls[url] = self._calls.pop(url) + 1  # last among equals from now on
            try:
                found = await self._side.tokens(url, path, body, parsed, authorization=authorization)
            finally:
                self._calls[url] -= 1
            if found is not None:
                return found, url
        return None

    async def watch(self, healthy: Healthy) -> None:
        """Check all servers periodically, until cancelled."""
        while True:
            found = await asyncio.gather(*(healthy(url) for url in self._up))
            self._up = dict(zip(self._up, found, strict=True))
            await asyncio.sleep(HEALTH_CHECK_S)
