"""Proof that an engine keeps prompts with different ``cache_salt`` apart, API by API.

Releases, frontends and proxies in front of an engine drop the field without an error: vLLM 0.20 and 0.26 in
``/v1/messages``, 0.20 in the batch of chats, SGLang 0.5.23 outside three APIs. So no release is trusted. For
each API short requests with one new prompt are sent: one salt, another, the first again, a third, and so on.
Each repetition must hit and no foreign salt may, by the ``cached_tokens`` of the answers, or by the engine's
own counters where nothing else was computed meanwhile. What is not proven is refused for tenants with
isolated caches. Only a hit of a foreign salt is final; everything else is tried again, after growing pauses.

Invariant: no answer and no error of an engine raises, or makes a proof. Bounds: prompts of ``TOKENS_MAX``
words, and ``PROOF_S_MAX`` seconds in all. Several caches behind one URL: where the salt is dropped, a foreign
prompt that misses has stored the prompt in one cache more. So up to ``FOREIGN`` caches prove nothing wrong,
whatever balances them. Of more that are taken by chance, 1 try in 2,000 at most: all foreign prompts must
miss and all repetitions hit (9 caches: 0.038 x 0.012).
"""

from __future__ import annotations

import asyncio
import random
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, Literal, NamedTuple

import msgspec

from kvatlas.router.fleet.engines import EngineKind
from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.openai.apis import (
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
"""After how many seconds what an engine did not show is tried again; twice as many each time."""
AGAIN_S_MAX: Final = 480.0
FOREIGN: Final = 6
"""Salts that must not hit what another one stored."""
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
# The second one in the Messages and Responses APIs.
_PROMPT: Final = frozenset({"prompt_tokens", "input_tokens"})

Ask = Callable[[str, str, bytes | None], Awaitable[tuple[int, bytes]]]
"""Method, path and body of a request to one engine: status and body of its answer. Raises ``OSError``."""
Outcome = Literal["proven", "refused", "absent", "unshown", "later"]


class SaltProof(msgspec.Struct):
    """Paths of one server that are proven; the others with the reason. ``refused``: they drop the salt, which
    is final. All others are tried again: ``absent``: nothing is served there (or no test is known);
    ``unshown``: the answers show neither; ``later``: the engine was too busy."""

    proven: set[str] = set()
    refused: dict[str, str] = {}
    absent: dict[str, str] = {}
    unshown: dict[str, str] = {}
    later: dict[str, str] = {}
    again: bool = False
    """Whether something is to be tried again."""
    tries: int = 0
    started: float | None = None
    """When the process that was tried started, by its own metrics."""

    @property
    def pause_s(self) -> float:
        """Seconds until the next try."""
        return min(AGAIN_S_MAX, AGAIN_S * 2.0 ** min(max(0, self.tries - 1), 10))

    @property
    def doubts(self) -> dict[str, str]:
        """APIs that are served and not proven, with the reason."""
        return {**self.refused, **self.unshown, **self.later}

    def why_not(self, path: str) -> str:
        """Why prompts of this path are not kept apart, to be read behind the path; "": they are."""
        if path in self.proven:
            return ""
        known = {**self.absent, **self.doubts}
        return known.get(path) or "is not tried yet"

    def may_change(self, path: str) -> bool:
        """Whether it may be proven soon."""
        return not any(path in known for known in (self.proven, self.refused, self.absent, self.unshown))

    def note(self, path: str, outcome: Outcome, why: str) -> None:
        """Take in how a try of this path ended."""
        for table in (self.absent, self.unshown, self.later):
            table.pop(path, None)
        if outcome == "proven":
            self.proven.add(path)
        else:
            found: dict[str, str] = getattr(self, outcome)
            found[path] = why


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
        tried = [path for path in _BODIES if path in guess]
        todo = [path for path in tried if path not in proof.proven and path not in proof.refused]
        # What was not answered goes first: the others have their reason already.
        todo.sort(key=lambda path: not proof.may_change(path))
        for path in filter(proof.may_change, todo):
            proof.later[path] = "was not answered in time when its cache_salt was tried"
        try:
            async with asyncio.timeout(PROOF_S_MAX):
                for path in todo:
                    proof.note(path, *await self._prove(path))
        except TimeoutError:
            pass
        proof.tries += 1
        proof.again = any(path not in proof.proven and path not in proof.refused for path in tried)

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
        """The requests, until one shows enough."""
        body, one = _BODIES[path](words), secrets.token_hex(16)
        again: list[_Hit] = []
        others: list[_Hit] = []
        for at in range(2 * FOREIGN):
            own = at % 2 == 0
            salt = one if own else secrets.token_hex(16)
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
            hit = await self._hit(answer, before)
            if at > 0:
                (again if own else others).append(hit)
            if at > 1 and (judged := _judge(again, others))[0] != "proven":
                return judged
        return judged

    async def _hit(self, answer: bytes, before: tuple[float, float] | None) -> _Hit:
        try:
            told = msgspec.json.decode(answer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return _Hit()
        cached = [value for name, value in _numbers(told) if name in _CACHED]
        reported = max(cached) if cached else None
        if reported:
            return _Hit(reported)
        prompt = max((value for name, value in _numbers(told) if name in _PROMPT), default=0)
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


def _judge(again: list[_Hit], others: list[_Hit]) -> tuple[Outcome, str]:
    """``again``: of the repetitions; ``others``: of the requests with other salts."""
    foreign = max([hit.reported or hit.counted or 0 for hit in others])
    if foreign:
        return "refused", f"drops cache_salt: a prompt with another salt took {foreign} tokens from the cache"
    if all(hit.reported for hit in again):
        # It reports hits. vLLM leaves one of 0 out.
        return "proven", ""
    sizes = [hit.reported or hit.counted for hit in again]
    if None not in sizes and all(hit.counted is not None for hit in others):
        return ("proven", "") if all(sizes) else ("unshown", _NO_HIT)
    if any(hit.noisy for hit in (*again, *others)):
        return "later", _NOISY
    return "unshown", _NO_REPORT if any(hit.reported is None for hit in again) else _NO_HIT


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
