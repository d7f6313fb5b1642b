"""Proof that an engine keeps prompts with different ``cache_salt`` apart, API by API.

Releases, frontends and proxies in front of an engine drop the field without an error: vLLM 0.20 and 0.26 in
``/v1/messages``, 0.20 in the batch of chats, SGLang 0.5.23 outside three APIs. So no release is trusted. For
each API three short requests with one new prompt are sent: a salt, the same salt, another salt. The second
must hit and the third must not, by the ``cached_tokens`` of the answers, or by the engine's own counters
where nothing else was computed meanwhile. What is not proven is refused for tenants with isolated caches.

Invariant: no answer and no error of an engine raises, or makes a proof. Bounds: prompts of ``TOKENS_MAX``
words, and ``PROOF_S_MAX`` seconds in all.
"""

from __future__ import annotations

import asyncio
import random
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, Literal, NamedTuple

import msgspec

from router.fleet.engines import EngineKind
from router.http.sockets import describe_error
from router.openai.request import (
    BATCH,
    CHAT,
    COMPLETION,
    GENERATE,
    MESSAGES,
    RESPONSES,
    SALTED,
    SALTED_BY_SGLANG,
)

PROOF_S_MAX: Final = 10.0
REQUEST_S_MAX: Final = 5.0
AGAIN_S: Final = 30.0
"""After how many seconds what an engine did not answer is asked again."""
TOKENS_MAX: Final = 4096
# Factor by which a prompt grows whose repetition does not hit.
_LONGER: Final = 8
_ABSENT: Final = frozenset({403, 404, 405, 501})
_BUSY_FROM: Final = 500
_SETTLE_S: Final = 0.02
_SETTLES_MAX: Final = 10
_COUNTERS: Final = re.compile(
    rb"^vllm:prefix_cache_(queries|hits)(?:_total)?(?:\{[^}\n]*\})? ([0-9.e+]+)$", re.MULTILINE
)
_CACHED: Final = frozenset({"cached_tokens", "cache_read_input_tokens"})

Ask = Callable[[str, str, bytes | None], Awaitable[tuple[int, bytes]]]
"""Method, path and body of a request to one engine: status and body of its answer. Raises ``OSError``."""
Outcome = Literal["proven", "refused", "absent", "later"]


class SaltProof(msgspec.Struct):
    """Paths of one server that are proven; the others with the reason. ``absent``: nothing is
    served there, or no test is known; ``later``: may be proven the next time."""

    proven: set[str] = set()
    refused: dict[str, str] = {}
    absent: dict[str, str] = {}
    later: dict[str, str] = {}

    def why_not(self, path: str) -> str:
        """Why prompts of this path are not kept apart, to be read behind the path; "": they are."""
        if path in self.proven:
            return ""
        known = self.refused.get(path) or self.absent.get(path) or self.later.get(path)
        return known or "is not tried yet"

    def may_change(self, path: str) -> bool:
        """Whether it may be proven soon."""
        return path not in self.proven and path not in self.refused and path not in self.absent


def first_guess(kind: EngineKind) -> frozenset[str]:
    """Paths of which it is not known that this software drops the field."""
    return SALTED_BY_SGLANG if kind == "sglang" else SALTED


class SaltProver:
    """Proves one server's APIs with requests for ``model``. ``block_tokens``: of its cache; ``tokens_max``:
    its context; ``caches`` False: it caches no prefix, so nothing is to be kept apart."""

    def __init__(
        self,
        ask: Ask,
        model: str,
        kind: EngineKind,
        *,
        block_tokens: int | None,
        tokens_max: int | None,
        caches: bool = True,
    ) -> None:
        self._caches = caches
        self._ask = ask
        self._model = model
        self._kind = kind
        # Words are tokens at least, and three of them at most.
        self._words_max = max(8, min(TOKENS_MAX, (tokens_max or TOKENS_MAX) // 4))
        self._words = min(2 * (block_tokens or 16) + 16, self._words_max)

    async def prove(self, proof: SaltProof) -> None:
        """Fill in what is not decided yet."""
        if not self._caches:
            proof.proven |= SALTED
            return
        guess = first_guess(self._kind)
        proof.absent |= dict.fromkeys(sorted(SALTED - guess), DROPPED_BY_SGLANG)
        proof.absent |= dict.fromkeys(sorted(guess - _BODIES.keys()), "cannot be tried by this router")
        todo = [path for path in _BODIES if path in guess and proof.may_change(path)]
        proof.later = dict.fromkeys(todo, "was not answered in time when its cache_salt was tried")
        try:
            async with asyncio.timeout(PROOF_S_MAX):
                for path in todo:
                    outcome, why = await self._prove(path)
                    proof.later.pop(path, None)
                    if outcome == "proven":
                        proof.proven.add(path)
                    else:
                        found: dict[str, str] = getattr(proof, outcome)
                        found[path] = why
        except TimeoutError:
            pass

    async def _prove(self, path: str) -> tuple[Outcome, str]:
        words = self._words
        tried = await self._try(path, words)
        while tried[1] in (_NO_HIT, _NO_REPORT, _NOISY) and words < self._words_max:
            # Its blocks may be larger, and some engines report no hit of 0.
            words = min(words * _LONGER, self._words_max)
            tried = await self._try(path, words)
        if tried[0] == "proven":
            self._words = words
        return tried

    async def _try(self, path: str, words: int) -> tuple[Outcome, str]:
        """The three requests."""
        body, one, other = _BODIES[path](words), secrets.token_hex(16), secrets.token_hex(16)
        hits: list[_Hit] = []
        for salt in (one, one, other):
            before = await self._counters()
            try:
                sent = msgspec.json.encode({"model": self._model, **body, "cache_salt": salt})
                status, answer = await self._ask("POST", path, sent)
            except TimeoutError:
                return "later", "was not answered in time when its cache_salt was tried"
            except OSError as error:
                return "later", f"could not be tried: {describe_error(error)}"
            if status in _ABSENT:
                return "absent", f"is not served ({status})"
            if status == 429 or status >= _BUSY_FROM:
                return "later", f"could not be tried: status {status}"
            if status != 200:
                return "absent", f"refuses the request that tries its cache_salt (status {status})"
            hits.append(await self._hit(answer, before))
        return _judge(hits)

    async def _hit(self, answer: bytes, before: tuple[float, float] | None) -> _Hit:
        try:
            told = msgspec.json.decode(answer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return _Hit()
        cached = [value for name, value in _numbers(told) if name in _CACHED]
        reported = max(cached) if cached else None
        if reported:
            return _Hit(reported)
        prompt = max((value for name, value in _numbers(told) if name == "prompt_tokens"), default=0)
        if before is None or not prompt:
            return _Hit(reported)
        counted = await self._counted(before, prompt)
        return _Hit(reported, counted, noisy=counted is None)

    async def _counted(self, before: tuple[float, float], prompt: int) -> int | None:
        """Hit of a request by the counters; None: something else was computed too."""
        for _ in range(_SETTLES_MAX):
            now = await self._counters()
            if now is None or now[0] - before[0] > prompt:
                return None
            if now[0] - before[0] == prompt:
                return int(now[1] - before[1])
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
        return (found[b"queries"], found[b"hits"]) if len(found) == 2 else None


DROPPED_BY_SGLANG: Final = "takes no cache_salt at SGLang engines"
_NO_HIT: Final = "does not show that it caches prompts"
_NOISY: Final = "could not be tried beside other requests, since it reports no cached tokens"
_NO_REPORT: Final = (
    "reports no cached tokens, so that its cache_salt cannot be tried; start the engine with "
    "--enable-prompt-tokens-details (SGLang: --enable-cache-report)"
)


class _Hit(NamedTuple):
    """Prompt tokens of one request that were in the cache; None: not known."""

    reported: int | None = None
    """By its answer."""
    counted: int | None = None
    """By the engine's counters."""
    noisy: bool = False
    """Other requests were counted with it."""


def _judge(hits: list[_Hit]) -> tuple[Outcome, str]:
    """``hits``: of the first request, of its repetition, and of the one with another salt."""
    _, again, other = hits
    foreign = other.reported or other.counted
    if foreign:
        return "refused", f"drops cache_salt: a prompt with another salt took {foreign} tokens from the cache"
    if again.reported:
        # It reports hits. vLLM leaves one of 0 out.
        return "proven", ""
    if again.counted is not None and other.counted is not None:
        return ("proven", "") if again.counted else ("refused", _NO_HIT)
    if again.noisy or other.noisy:
        return "later", _NOISY
    return "refused", _NO_REPORT if again.reported is None else _NO_HIT


def _numbers(told: Any, depth: int = 0) -> Iterator[tuple[str, int]]:
    """All whole numbers of an answer with their names; deeper ones than any usage are left out."""
    if depth > 6:
        return
    if isinstance(told, dict):
        for name, value in told.items():
            if type(value) is int:
                yield name, value
            elif isinstance(value, dict | list):
                yield from _numbers(value, depth + 1)
    elif isinstance(told, list):
        for value in told[:8]:
            yield from _numbers(value, depth + 1)


_SYLLABLES: Final = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]


def _text(words: int) -> str:
    """New words: in no cache."""
    parts = random.Random(secrets.randbits(128)).choices(_SYLLABLES, k=2 * words)
    return " ".join(map("".join, zip(parts[::2], parts[1::2], strict=True)))


def _chat(words: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": _text(words)}]


def _pair(words: int) -> dict[str, Any]:
    return {"text_1": _text(words), "text_2": "ba"}


def _ranking(words: int) -> dict[str, Any]:
    return {"query": _text(words), "documents": ["ba"]}


def _input(words: int) -> dict[str, Any]:
    return {"input": _text(words)}


def _tokens(words: int) -> dict[str, Any]:
    # Ids that every vocabulary has.
    ids = random.Random(secrets.randbits(128)).choices(range(100, 1000), k=words)
    return {"token_ids": ids, "sampling_params": {"max_tokens": 1}}


# Body by path for a prompt of some words: the APIs that can be tried.
_BODIES: Final[dict[str, Callable[[int], dict[str, Any]]]] = {
    CHAT: lambda words: {"messages": _chat(words), "max_tokens": 1},
    COMPLETION: lambda words: {"prompt": _text(words), "max_tokens": 1},
    MESSAGES: lambda words: {"messages": _chat(words), "max_tokens": 1},
    RESPONSES: lambda words: {"input": _text(words), "max_output_tokens": 1, "store": False},
    BATCH: lambda words: {"messages": [_chat(words)], "max_tokens": 1},
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
