"""Tokens of a prompt that is not computed here: from a render server, else from an engine.

Both receive the client's own body, within a time budget. Their tokens of images are cached, so that a next
turn with the same images needs no call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from kvatlas.router.fleet.status import Frontend
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.prompts.bodies import Parsed
from kvatlas.router.prompts.chat.anthropic import MessagesBody
from kvatlas.router.prompts.remote import EngineSide, EngineTokens
from kvatlas.router.prompts.render_servers import Renderers
from kvatlas.router.prompts.request import (
    ChatBody,
    CompletionBody,
)

EngineUrl = Callable[[str | None, Frontend], str | None]


class Told(NamedTuple):
    """The tokens of a prompt, their source, and its address."""

    tokens: EngineTokens
    source: Literal["renderer", "engine"]
    by: str


class Asking:
    """Asks render servers first, then one engine. ``engine_url`` names an engine that serves a model behind a
    frontend (None: there is none)."""

    def __init__(self, renderers: Renderers, engine_side: EngineSide, engine_url: EngineUrl) -> None:
        self._renderers = renderers
        self._engine_side = engine_side
        self._engine_url = engine_url

    async def tokens(
        self, request: InboundRequest, path: str, parsed: Parsed | None, frontend: Frontend = "python"
    ) -> Told | None:
        """Return the request's tokens; None if they are unknown. Render servers have the Python frontend."""
        if isinstance(parsed, MessagesBody) and parsed.disables_thinking:
            return None
        authorization = next((value for name, value in request.headers if name == b"authorization"), None)
        known = parsed if isinstance(parsed, ChatBody | CompletionBody) else None
        rendered = None
        if frontend == "python":
            rendered = await self._renderers.tokens(path, request.body, known, authorization=authorization)
        if rendered is not None:
            return Told(rendered[0], "renderer", rendered[1])
        url = self._engine_url(request.model, frontend)
        if not url:
            return None
        found = await self._engine_side.tokens(
            url, path, request.body, known, authorization=authorization, frontend=frontend
        )
        return None if found is None else Told(found, "engine", url)
