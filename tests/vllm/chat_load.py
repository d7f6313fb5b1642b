"""A reproducible load of chats and completions: many turns, branches, shared system prompts, repeats."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.vllm.tiny_model import random_words

_SYSTEM_PROMPTS = 3
_CONVERSATIONS_MAX = 14
_TURNS_MAX = 7
_MODEL = "tiny"


@dataclass
class Request:
    """One call of the OpenAI client: chat or completion, its arguments, streamed or not."""

    arguments: dict[str, Any]
    chat: bool
    conversation: list[dict[str, str]] = field(default_factory=list)

    @property
    def stream(self) -> bool:
        return bool(self.arguments.get("stream"))

    def answered(self, text: str) -> None:
        """The answer becomes part of the conversation, so that a later turn goes on from it."""
        if self.chat:
            self.conversation.append({"role": "assistant", "content": text})


class ChatLoad:
    """Yields requests one at a time; tell each its answer (``answered``) before taking the next."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._systems = [random_words(self._rng, self._rng.randint(50, 140)) for _ in range(_SYSTEM_PROMPTS)]
        self._conversations: list[list[dict[str, str]]] = []
        self._texts: list[str] = []

    def requests(self, count: int) -> Iterator[Request]:
        """``count`` requests, about a quarter of them completions."""
        for _ in range(count):
            request = self._completion() if self._rng.random() < 0.25 else self._chat()
            self._options(request.arguments)
            yield request

    def _options(self, arguments: dict[str, Any]) -> None:
        rng = self._rng
        # Greedy, to be reproducible: a sampling seed kills vLLM 0.32's CPU worker in a chunked prefill.
        arguments |= {"model": _MODEL, "max_tokens": rng.randint(1, 24), "temperature": 0}
        arguments["extra_body"] = {"ignore_eos": True}
        if rng.random() < 0.1:
            arguments["extra_body"]["cache_salt"] = rng.choice(("tenant-a", "tenant-b"))
        if rng.random() < 0.5:
            arguments["stream"] = True
            if rng.random() < 0.9:
                arguments["stream_options"] = {"include_usage": True}

    def _chat(self) -> Request:
        conversation = self._next_conversation()
        conversation.append({"role": "user", "content": random_words(self._rng, self._rng.randint(3, 50))})
        return Request({"messages": list(conversation)}, chat=True, conversation=conversation)

    def _next_conversation(self) -> list[dict[str, str]]:
        """A new one, the next turn of one, a branch in the middle of one, or one said again."""
        rng = self._rng
        kind = rng.random()
        if not self._conversations or kind < 0.25:
            return self._keep([{"role": "system", "content": rng.choice(self._systems)}])
        conversation = rng.choice(self._conversations)
        if kind < 0.75 and len(conversation) < 2 * _TURNS_MAX:
            return conversation
        turns = len(conversation) // 2
        return self._keep(conversation[: 1 + 2 * rng.randint(0, max(0, turns - 1))])

    def _keep(self, conversation: list[dict[str, str]]) -> list[dict[str, str]]:
        """Remember a conversation, forgetting a random one where there are enough."""
        conversation = list(conversation)
        if len(self._conversations) >= _CONVERSATIONS_MAX:
            self._conversations.pop(self._rng.randrange(len(self._conversations)))
        self._conversations.append(conversation)
        return conversation

    def _completion(self) -> Request:
        rng = self._rng
        if rng.random() < 0.2:
            tokens = [rng.randrange(10, 1000) for _ in range(rng.randint(1, 200))]
            return Request({"prompt": tokens}, chat=False)
        kind = rng.random()
        base = rng.choice(self._texts) if self._texts and kind < 0.8 else rng.choice(self._systems)
        words = base.split(" ")
        if kind < 0.3:
            words = words[: rng.randint(1, len(words))]
        text = " ".join(words) + " " + random_words(rng, rng.randint(0, 30))
        self._texts = [*self._texts[-7:], text] if len(text) < 2500 else self._texts
        return Request({"prompt": text if kind < 0.7 else base}, chat=False)
