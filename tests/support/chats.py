"""Token ids of clients whose chats go on from each other, and shares of right predictions of their hits."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

_SYSTEM_TOKENS = (120, 200, 320)
_CHAT_TOKENS_MAX = 640
_TURN_TOKENS = (5, 120)


class Chats:
    """The chat of each client. ``scale`` multiplies all lengths; ``vocabulary`` bounds the token ids."""

    def __init__(self, rng: random.Random, clients: int, *, vocabulary: int, scale: int = 1) -> None:
        self._rng, self._vocabulary, self._scale = rng, vocabulary, scale
        self._systems = [self._tokens(scale * length) for length in _SYSTEM_TOKENS]
        self._chats: list[list[int]] = [[] for _ in range(clients)]

    def prompt(self, client: int) -> list[int]:
        """Return the next turn of the client's chat, a new chat, or a turn after another client's chat."""
        rng, chat = self._rng, self._chats[client]
        kind = rng.random()
        if not chat or kind < 0.2 or len(chat) > self._scale * _CHAT_TOKENS_MAX:
            chat = list(rng.choice(self._systems))
        elif kind < 0.3:
            chat = list(rng.choice([other for other in self._chats if other]))
        shortest, longest = _TURN_TOKENS
        # A new list: the previous one is the prompt of an earlier request.
        self._chats[client] = chat = chat + self._tokens(
            rng.randint(self._scale * shortest, self._scale * longest)
        )
        return chat

    def answered(self, client: int, tokens: list[int]) -> None:
        """Let the client's next turn follow these tokens, a prompt and its answer."""
        self._chats[client] = tokens

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(10, self._vocabulary) for _ in range(count)]


def shares(pairs: Iterable[tuple[int, int]]) -> dict[str, float]:
    """Return the shares of (predicted, actual) that are exact, over and under."""
    found = Counter("exact" if p == a else "over" if p > a else "under" for p, a in pairs)
    return {name: found[name] / found.total() for name in ("exact", "over", "under")}
