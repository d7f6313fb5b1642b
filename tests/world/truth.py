"""What an engine's model computes for a prompt: the same code that simulated engines answer by, without an
engine."""

from __future__ import annotations

import msgspec

from publisher.simulator.api_agents import MessagesRequest, ResponsesRequest
from publisher.simulator.api_protocol import ChatRequest, CompletionRequest, decode
from publisher.simulator.model import EngineModel, Prepared
from publisher.simulator.settings import EngineSettings

TRUTH_LENGTH_MAX = 32_768


class Expected(msgspec.Struct, frozen=True):
    """The prompt of a request in tokens, and the whole answer up to its limit."""

    prompt: list[int]
    text: str
    answer: list[int]
    stops: bool
    """The answer ends by itself, before its limit."""


class Truth:
    """One model; every engine of a world has the same."""

    def __init__(self) -> None:
        self._models: dict[str, EngineModel] = {}

    async def expected(self, path: str, body: bytes) -> Expected:
        """The answer to a request. Raises ``EngineError`` for one that no engine takes."""
        ready = await self._prepared(path, body)
        words = self._model("")._source.continuation(ready.token_ids)
        answer: list[int] = []
        stops = False
        for index in range(ready.max_tokens):
            token = words.token(index, ignore_eos=ready.ignore_eos)
            if token == words.source.eos_id:
                stops = True
                break
            answer.append(token)
        return Expected(ready.token_ids, self._model("").text(answer), answer, stops)

    async def _prepared(self, path: str, body: bytes) -> Prepared:
        if path == "/v1/completions":
            request = decode(body, CompletionRequest)
            return (await self._model(request.model or "").prepare_completion(request))[0]
        if path == "/v1/messages":
            chat = decode(body, MessagesRequest).chat()
        elif path == "/v1/responses":
            chat = decode(body, ResponsesRequest).chat([])
        else:
            chat = decode(body, ChatRequest)
        return await self._model(chat.model or "").prepare_chat(chat)

    def _model(self, name: str) -> EngineModel:
        found = self._models.get(name)
        if found is None:
            settings = EngineSettings(model=name) if name else EngineSettings()
            found = self._models[name] = EngineModel(settings, TRUTH_LENGTH_MAX)
        return found
