"""Output of an engine's model for a prompt: the same code that simulated engines answer by, without an
engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import msgspec

from kvatlas.publisher.simulator.api_agents import MessagesRequest, ResponsesRequest
from kvatlas.publisher.simulator.api_protocol import ChatRequest, CompletionRequest, decode
from kvatlas.publisher.simulator.model import EngineModel, Prepared
from kvatlas.publisher.simulator.settings import EngineSettings

TRUTH_LENGTH_MAX = 32_768


class Expected(msgspec.Struct, frozen=True):
    """The first prompt of a request in tokens, and the whole answer to it up to its limit."""

    prompt: list[int]
    text: str
    answer: list[int]
    sequences: list[list[int]]
    """Each prompt with its answer: what an engine may cache of the request."""
    decode: Callable[[list[int]], str]

    def beginning(self, tokens: int) -> str:
        """The text of its first tokens."""
        return self.decode(self.answer[:tokens])


class Truth:
    """One model; every engine of a world has the same, with these ``characters``."""

    def __init__(self, characters: Literal["words", "mixed"] = "words") -> None:
        self._models: dict[str, EngineModel] = {}
        self._settings = EngineSettings(characters=characters)

    async def expected(self, path: str, body: bytes) -> Expected:
        """The answer to a request. Raises ``EngineError`` for one that no engine takes."""
        ready = await self._prepared(path, body)
        answers, texts = zip(*(self._model("").expected(one) for one in ready), strict=True)
        sequences = [[*one.token_ids, *answer] for one, answer in zip(ready, answers, strict=True)]
        prompt = ready[0].token_ids
        decode = partial(self._model("").text, prompt)
        return Expected(prompt, texts[0], answers[0], sequences, decode)

    async def _prepared(self, path: str, body: bytes) -> list[Prepared]:
        if path == "/v1/completions":
            request = decode(body, CompletionRequest)
            return await self._model(request.model or "").prepare_completion(request)
        if path == "/v1/messages":
            chat = decode(body, MessagesRequest).chat()
        elif path == "/v1/responses":
            chat = decode(body, ResponsesRequest).chat([])
        else:
            chat = decode(body, ChatRequest)
        return [await self._model(chat.model or "").prepare_chat(chat)]

    def _model(self, name: str) -> EngineModel:
        found = self._models.get(name)
        if found is None:
            settings = msgspec.structs.replace(self._settings, model=name or self._settings.model)
            found = self._models[name] = EngineModel(settings, TRUTH_LENGTH_MAX)
        return found
