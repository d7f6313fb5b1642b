"""Requests that an engine is tried with, and what it says of its cache about each.

The hit of a request is taken from the ``cached_tokens`` of its answer, or from the engine's own counters
where nothing else was computed meanwhile. Prompts are of new random words, so nothing of them is cached
beforehand; a word is one token at least and three at most.

Invariant: no answer raises, whatever an engine sends.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, Literal, NamedTuple

import msgspec

from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.openai.apis import BATCH, CHAT, COMPLETION, GENERATE, MESSAGES, RESPONSES

REQUEST_S_MAX: Final = 5.0
TOKENS_MAX: Final = 4096
_ABSENT: Final = frozenset({403, 404, 405, 501})
_BUSY_FROM: Final = 500
_SETTLE_S: Final = 0.02
_SETTLES_MAX: Final = 10
_COUNTERS: Final = re.compile(
    rb"^vllm:prefix_cache_(queries|hits)(?:_total)?(?:\{[^}\n]*\})? ([0-9.e+]+)$", re.MULTILINE
)
_CACHED: Final = frozenset({"cached_tokens", "cache_read_input_tokens"})
# The second one in the Messages and Responses APIs.
_PROMPT: Final = frozenset({"prompt_tokens", "input_tokens"})
# Not in the ``input_tokens`` of the Messages API.
_BESIDE: Final = frozenset({"cache_read_input_tokens", "cache_creation_input_tokens"})

Ask = Callable[[str, str, bytes | None], Awaitable[tuple[int, bytes]]]
"""Method, path and body of a request to one engine: status and body of its answer. Raises ``OSError``."""
Verdict = Literal["proven", "refuted", "absent", "unshown", "later"]
"""``refuted``: the engine shows the contrary; ``absent``: it has nothing of this kind; ``unshown``: its
answers show neither; ``later``: it was too busy, or did not answer."""


class Shown(NamedTuple):
    """Outcome of a try, and why it is no proof, to be read behind the name of what was tried."""

    verdict: Verdict
    why: str = ""

    @property
    def text(self) -> str:
        """The verdict, with the reason where it is no proof."""
        return f"{self.verdict}: {self.why}" if self.why else self.verdict


NO_DOUBT: Final = frozenset({"proven", "absent"})
"""Verdicts on what is shown, or is not there."""


class CacheReport(NamedTuple):
    """Prompt tokens of one request, and those that were in the cache; None: not known."""

    reported: int | None = None
    """Cached, by its answer."""
    counted: int | None = None
    """Cached, by the engine's counters."""
    noisy: bool = False
    """Other requests were counted with it."""
    prompt_tokens: int | None = None

    @property
    def cached(self) -> int | None:
        """By its answer, else by the counters."""
        return self.counted if self.reported is None else self.reported


class EngineClient:
    """Sends requests of a few tokens to one engine, one at a time."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def send(self, path: str, body: bytes) -> CacheReport | Shown:
        """Return what the answer says, or why there is none."""
        before = await self._counters()
        try:
            status, answer = await self._ask("POST", path, body)
        except TimeoutError:
            return Shown("later", "was not answered in time")
        except OSError as error:
            return Shown("later", f"could not be asked: {describe_error(error)}")
        if status in _ABSENT:
            return Shown("absent", f"is not served ({status})")
        if status == 429 or status >= _BUSY_FROM:
            return Shown("later", f"could not be tried: status {status}")
        if status != 200:
            return Shown("absent", f"refuses the request that tries it (status {status})")
        return await self._report(answer, before)

    async def _report(self, answer: bytes, before: tuple[float, float] | None) -> CacheReport:
        try:
            told = msgspec.json.decode(answer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return CacheReport()
        cached = [value for name, value in numbers(told) if name in _CACHED]
        reported = max(cached) if cached else None
        prompt = max((value for name, value in numbers(told) if name in _PROMPT), default=0)
        prompt += sum(value for name, value in numbers(told) if name in _BESIDE)
        if reported or before is None or not prompt:
            return CacheReport(reported, prompt_tokens=prompt or None)
        counted = await self._counted(before, prompt)
        return CacheReport(reported, counted, counted is None, prompt)

    async def _counted(self, before: tuple[float, float], prompt: int) -> int | None:
        """Hit of a request by the counters; None: something else was computed too."""
        for _ in range(_SETTLES_MAX):
            now = await self._counters()
            if now is None or now[0] - before[0] > prompt:
                return None
            if now[0] - before[0] == prompt:
                return max(0, int(now[1] - before[1]))
            await asyncio.sleep(_SETTLE_S)
        return None

    async def _counters(self) -> tuple[float, float] | None:
        """Prompt tokens looked up, and found, since the server started."""
        try:
            status, page = await self._ask("GET", "/metrics", None)
        except OSError:
            return None
        found: dict[bytes, float] = {}
        for name, value in _COUNTERS.findall(page) if status == 200 else ():
            try:
                found[name] = found.get(name, 0.0) + float(value)
            except ValueError:
                return None
        if not all(map(math.isfinite, found.values())):
            return None
        return (found[b"queries"], found[b"hits"]) if len(found) == 2 else None


def numbers(told: Any, depth: int = 0) -> Iterator[tuple[str, int]]:
    """All whole numbers of an answer with their names; deeper ones than any usage are left out."""
    if depth > 6:
        return
    if isinstance(told, dict):
        for name, value in told.items():
            if type(value) is int:
                yield name, value
            elif isinstance(value, dict | list):
                yield from numbers(value, depth + 1)
    elif isinstance(told, list):
        for value in told[:8]:
            yield from numbers(value, depth + 1)


_SYLLABLES: Final = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]


def text_of(words: int) -> str:
    """New words: in no cache."""
    parts = random.Random(secrets.randbits(128)).choices(_SYLLABLES, k=2 * words)
    return " ".join(map("".join, zip(parts[::2], parts[1::2], strict=True)))


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _pair(text: str) -> dict[str, Any]:
    return {"text_1": text, "text_2": "ba"}


def _ranking(text: str) -> dict[str, Any]:
    return {"query": text, "documents": ["ba"]}


def _input(text: str) -> dict[str, Any]:
    return {"input": text}


def _tokens(text: str) -> dict[str, Any]:
    # Ids that every vocabulary has, as many as words.
    rng = random.Random(text)
    return {
        "token_ids": rng.choices(range(100, 1000), k=text.count(" ") + 1),
        "sampling_params": {"max_tokens": 1},
    }


BODIES: Final[dict[str, Callable[[str], dict[str, Any]]]] = {
    CHAT: lambda text: {"messages": _chat(text), "max_tokens": 1},
    COMPLETION: lambda text: {"prompt": text, "max_tokens": 1},
    MESSAGES: lambda text: {"messages": _chat(text), "max_tokens": 1},
    RESPONSES: lambda text: {"input": text, "max_output_tokens": 1, "store": False},
    BATCH: lambda text: {"messages": [_chat(text)], "max_tokens": 1},
    GENERATE: _tokens,
    "/v1/embeddings": _input,
    "/pooling": _input,
    "/classify": _input,
    "/score": _pair,
    "/v1/score": _pair,
    "/rerank": _ranking,
    "/v1/rerank": _ranking,
    "/v2/rerank": _ranking,
}
"""Body by path for a text: the APIs that can be tried."""
