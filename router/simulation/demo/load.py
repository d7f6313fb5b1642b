"""The demo's load, and the sums of its results: tokens, hits, time to first token, requests on two engines.

Each user picks a system prompt (some are popular), asks, reads the answer, and asks again with the whole
conversation; one turn in four is sent twice (a regenerated answer), so that prompts branch. Seeded; the
order of requests depends on the times of answers, as with real users.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import cycle
from typing import Any

import msgspec

from kvatlas.router.http.client import HttpClient, HttpResponse
from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.openai.apis import CHAT
from kvatlas.router.openai.request import Usage
from kvatlas.router.proxy.usage_reports import read_usage

Message = dict[str, Any]

_TOPICS = (
    "gardens",
    "bread",
    "bicycles",
    "tides",
    "maps",
    "lanterns",
    "bridges",
    "clocks",
    "rivers",
    "kites",
)
_WORDS = tuple(
    "the a of and to in that it is was for on are with as they be at one have this from or had by word "  # noqa: SIM905
    "but what some we can out other were all there when up use your how said an each she which do their "
    "time if will way about many then them write would like so these her long make thing see him look".split()
)
_SYSTEM_PROMPTS = 10
_THINK_S = (0.2, 1.5)
# Longest time until an answer is complete.
_ANSWER_S_MAX = 300.0
_JSON = {"content-type": "application/json"}
_TURNS = (2, 6)
ANSWER_TOKENS = (12, 40)
_REGENERATE_SHARE = 0.25


class ChatOutcome(msgspec.Struct, frozen=True):
    """One finished request as seen by its client. ``at_s``: when it was sent, on the load's clock."""

    messages: list[Message]
    max_tokens: int
    at_s: float
    answer: str = ""
    ttft_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""


class ChatLoad:
    """Runs users against routers, round robin; ``on_done`` is called for every finished request. Answers have
    at least and at most ``answer_tokens``."""

    def __init__(
        self,
        base_urls: Sequence[str],
        model: str,
        *,
        users: int,
        seed: int,
        on_done: Callable[[ChatOutcome], None],
        answer_tokens: tuple[int, int] = ANSWER_TOKENS,
    ) -> None:
        self._answer_tokens = answer_tokens
        self._urls = cycle([base_url + CHAT for base_url in base_urls])
        self._model = model
        self._users = users
        self._rng = random.Random(seed)
        self._on_done = on_done
        self._systems = [
            self._text(self._rng.randint(500, 1600), topic) for topic in _TOPICS[:_SYSTEM_PROMPTS]
        ]
        self._started_s = time.monotonic()

    async def run(self, seconds: float) -> None:
        """Keep all users busy for ``seconds``; then finish requests in progress without starting new ones."""
        self._started_s = time.monotonic()
        async with HttpClient(requests_max=2 * self._users) as client, asyncio.TaskGroup() as users:
            for number in range(self._users):
                users.create_task(self._user(client, random.Random(self._rng.random()), seconds, number))

    async def _user(self, client: HttpClient, rng: random.Random, seconds: float, number: int) -> None:
        await asyncio.sleep(number * 0.02)
        while self._now() < seconds:
            weights = [1 / (rank + 1) for rank in range(len(self._systems))]
            system = rng.choices(self._systems, weights)[0]
            messages: list[Message] = [{"role": "system", "content": system}]
            for _ in range(rng.randint(*_TURNS)):
                if self._now() >= seconds:
                    return
                messages = [*messages, {"role": "user", "content": self._text(rng.randint(20, 150), "?")}]
                asks = 2 if rng.random() < _REGENERATE_SHARE else 1
                # Successive turns go to different routers.
                url = next(self._urls)
                answers = await asyncio.gather(*[self._ask(client, url, messages, rng) for _ in range(asks)])
                if answers[0].error:
                    break
                messages = [*messages, {"role": "assistant", "content": answers[0].answer}]
                await asyncio.sleep(rng.uniform(*_THINK_S))

    async def _ask(
        self, client: HttpClient, url: str, messages: list[Message], rng: random.Random
    ) -> ChatOutcome:
        max_tokens, at_s = rng.randint(*self._answer_tokens), self._now()
        asked = {"model": self._model, "messages": messages, "max_tokens": max_tokens}
        body = msgspec.json.encode({**asked, "stream": True, "stream_options": {"include_usage": True}})
        outcome = ChatOutcome(messages, max_tokens, at_s)
        try:
            async with client.exchange("POST", url, _ANSWER_S_MAX, body, _JSON) as answer:
                if answer.status == 200:
                    outcome = await self._read(answer, outcome)
                else:
                    outcome = msgspec.structs.replace(outcome, error=f"status {answer.status}")
        except OSError as error:
            outcome = msgspec.structs.replace(outcome, error=describe_error(error))
        self._on_done(outcome)
        return outcome

    async def _read(self, answer: HttpResponse, outcome: ChatOutcome) -> ChatOutcome:
        text: list[str] = []
        ttft_s: float | None = None
        usage = Usage(0)
        async for line in _lines(answer):
            if not line.startswith(b"data: {"):
                continue
            event = msgspec.json.decode(line[6:])
            if "error" in event:
                return msgspec.structs.replace(outcome, error=str(event["error"].get("message")))
            piece = "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
            if ttft_s is None:
                ttft_s = self._now() - outcome.at_s
            text.append(piece)
            usage = read_usage(line[6:]) or usage if b'"usage"' in line else usage
        return msgspec.structs.replace(
            outcome,
            answer="".join(text),
            ttft_s=ttft_s,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens or 0,
        )

    def _text(self, words: int, topic: str) -> str:
        return " ".join([topic, *self._rng.choices(_WORDS, k=words)])

    def _now(self) -> float:
        return time.monotonic() - self._started_s


async def _lines(answer: HttpResponse) -> AsyncIterator[bytes]:
    """Yield the complete lines of a stream, without their ends."""
    rest = b""
    async for piece in answer.pieces():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
