"""What others say of a prompt that is not computed here: a render server, else an engine.

Both are told the client's own body, within a time budget. What they say of images is remembered
(``media.py``), so that a next turn with the same images needs no call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from router.openai.request import InboundRequest
from router.prompts.bodies import Parsed
from router.prompts.chat.anthropic import MessagesBody
from router.prompts.remote.engine_side import EngineSide, EngineTokens
from router.prompts.remote.renderers import Renderers
from router.prompts.request import ChatBody, CompletionBody

EngineUrl = Callable[[str | None], str | None]


class Told(NamedTuple):
    """The tokens of a prompt, who told them, and at which address."""

    tokens: EngineTokens
    source: Literal["renderer", "engine"]
    by: str


class Asking:
    """Render servers first, then one engine. ``engine_url`` names an engine that serves a model (None: there
    is none)."""

    def __init__(self, renderers: Renderers, engine_side: EngineSide, engine_url: EngineUrl) -> None:
        self._renderers = renderers
        self._engine_side = engine_side
        self._engine_url = engine_url

    async def tokens(self, request: InboundRequest, path: str, parsed: Parsed | None) -> Told | None:
        """The request's tokens; None where nobody told them."""
        if isinstance(parsed, MessagesBody) and parsed.disables_thinking:
            return None
        authorization = next((value for name, value in request.headers if name == b"authorization"), None)
        known = parsed if isinstance(parsed, ChatBody | CompletionBody) else None
        rendered = await self._renderers.tokens(path, request.body, known, authorization=authorization)
        if rendered is not None:
            return Told(rendered[0], "renderer", rendered[1])
        url = self._engine_url(request.model)
        if not url:
            return None
        found = await self._engine_side.tokens(url, path, request.body, known, authorization=authorization)
        return None if found is None else Told(found, "engine", url)
