"""Proof that an engine keeps prompts with different ``cache_salt`` apart, API by API.

Releases, frontends and proxies in front of an engine drop the field without an error: vLLM 0.20 and 0.26 in
``/v1/messages``, 0.20 in the batch of chats, SGLang 0.5.23 outside three APIs. So no release is trusted. For
each API short requests with one new prompt are sent: one salt, another, the first again, a third, and so on.
Each repetition must hit and no foreign salt may, by the ``cached_tokens`` of the answers, or by the engine's
own counters where nothing else was computed meanwhile. What is not proven is refused for tenants with
isolated caches. Only a hit of a foreign salt is final; everything else is tried again, after growing pauses.

Routers share what they find (``shared_proofs``): one that meets a server asks the others, and takes over a
proof of the same process (by the start that its metrics state), else it tries the server itself.

Invariant: no answer and no error of an engine raises, or makes a proof. Bounds: prompts of ``TOKENS_MAX``
words, and ``PROOF_S_MAX`` seconds in all. Several caches behind one URL: where the salt is dropped, a foreign
prompt that misses has stored the prompt in one cache more. So up to ``FOREIGN`` caches prove nothing wrong,
whatever balances them. Of more that are taken by chance, 1 try in 2,000 at most: all foreign prompts must
miss and all repetitions hit (9 caches: 0.038 x 0.012).
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Final

import msgspec

from kvatlas.router.fleet.engine_client import (
    BODIES,
    NO_DOUBT,
    TOKENS_MAX,
    Ask,
    CacheReport,
    EngineClient,
    Shown,
    text_of,
)
from kvatlas.router.fleet.engines import EngineKind
from kvatlas.router.openai.apis import SALTED, SALTED_BY_SGLANG

PROOF_S_MAX: Final = 10.0
AGAIN_S: Final = 30.0
"""After how many seconds what an engine did not show is tried again; twice as many each time."""
AGAIN_S_MAX: Final = 480.0
FOREIGN: Final = 6
"""Salts that must not hit what another one stored."""
# Factor by which a prompt grows whose repetition does not hit.
_LONGER: Final = 8


TOLD: Final = b"salts "
"""How a proof begins that one router tells another."""
_TOLD_BYTES_MAX: Final = 16_384


class SaltProof(msgspec.Struct):
    """Outcome of the proof of one server. ``refuted`` is final: the salt is dropped there. All else that is
    not proven is tried again; ``absent``: nothing is served there, or no test is known."""

    apis: dict[str, Shown] = {}
    """By path; what is not tried yet is missing."""
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
    def proven(self) -> set[str]:
        """Paths that are proven."""
        return {path for path, one in self.apis.items() if one.verdict == "proven"}

    @property
    def doubts(self) -> dict[str, Shown]:
        """APIs that are served and not proven."""
        return {path: one for path, one in self.apis.items() if one.verdict not in NO_DOUBT}

    def told(self) -> bytes:
        """Return it as it is sent to other routers; one that is not tried yet asks them for theirs."""
        return TOLD + msgspec.msgpack.encode(self)

    def hear(self, other: SaltProof) -> bool:
        """Take over what another router has found, if it tried this process and knows more; returns whether
        it did."""
        same = self.started is not None and self.started == other.started
        more = other.tries > (self.tries if other.again else 0)
        if not same or not more or not (self.again or not self.tries):
            return False
        self.apis, self.again, self.tries = dict(other.apis), other.again, other.tries
        return True

    def why_not(self, path: str) -> str:
        """Why prompts of this path are not kept apart, to be read behind the path; "": they are."""
        return self.apis.get(path, NOT_TRIED).why

    def may_change(self, path: str) -> bool:
        """Whether it may be proven soon."""
        return self.apis.get(path, NOT_TRIED).verdict == "later"


def read_told(told: bytes) -> SaltProof:
    """Read what another router told. Raises ``ValueError`` for anything else."""
    if not told.startswith(TOLD) or len(told) > _TOLD_BYTES_MAX:
        raise ValueError("no proof of salts, or one that is too long")
    try:
        return msgspec.msgpack.decode(memoryview(told)[len(TOLD) :], type=SaltProof)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None


NOT_TRIED: Final = Shown("later", "is not tried yet")


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
        self._client = EngineClient(ask)
        self._model = model
        self._kind = kind
        # Words are tokens at least, and three of them at most.
        self._words_max = max(8, min(TOKENS_MAX, (tokens_max or TOKENS_MAX) // 4))
        self._words = min(2 * (block_tokens or 16) + 16, self._words_max)

    async def prove(self, proof: SaltProof) -> None:
        """Fill in what is not decided yet."""
        if not self._caches:
            proof.apis = dict.fromkeys(SALTED, Shown("proven"))
            return
        guess = first_guess(self._kind)
        proof.apis |= dict.fromkeys(sorted(SALTED - guess), Shown("absent", DROPPED_BY_SGLANG))
        proof.apis |= dict.fromkeys(sorted(guess - BODIES.keys()), _UNTRIABLE)
        todo = [path for path in BODIES if path in guess and not _is_final(proof, path)]
        # What was not answered goes first: the others have their reason already.
        todo.sort(key=lambda path: not proof.may_change(path))
        for path in filter(proof.may_change, todo):
            proof.apis[path] = Shown("later", "was not answered in time when its cache_salt was tried")
        try:
            async with asyncio.timeout(PROOF_S_MAX):
                for path in todo:
                    proof.apis[path] = await self._prove(path)
        except TimeoutError:
            pass
        proof.tries += 1
        proof.again = not all(_is_final(proof, path) for path in todo)

    async def _prove(self, path: str) -> Shown:
        words = self._words
        tried = await self._try(path, words)
        while tried[1] in (_NO_HIT, _NO_REPORT, _NOISY) and words < self._words_max:
            # Its blocks may be larger, and some engines report no hit of 0.
            words = min(words * _LONGER, self._words_max)
            tried = await self._try(path, words)
        if tried[0] == "proven":
            self._words = words
        return tried

    async def _try(self, path: str, words: int) -> Shown:
        """The requests, until one shows enough."""
        text, one = text_of(words), secrets.token_hex(16)
        body = {"model": self._model, **BODIES[path](text)}
        again: list[CacheReport] = []
        others: list[CacheReport] = []
        for at in range(2 * FOREIGN):
            own = at % 2 == 0
            salt = one if own else secrets.token_hex(16)
            hit = await self._client.send(path, msgspec.json.encode({**body, "cache_salt": salt}))
            if isinstance(hit, Shown):
                return hit
            if at > 0:
                (again if own else others).append(hit)
            if at > 1 and (judged := _judge(again, others))[0] != "proven":
                return judged
        return judged


def _is_final(proof: SaltProof, path: str) -> bool:
    return proof.apis.get(path, NOT_TRIED).verdict in {"proven", "refuted"}


DROPPED_BY_SGLANG: Final = "takes no cache_salt at SGLang engines"
_UNTRIABLE: Final = Shown("absent", "cannot be tried by this router")
_NO_HIT: Final = "does not show that it caches prompts"
_NOISY: Final = "could not be tried beside other requests, since it reports no cached tokens"
_NO_REPORT: Final = (
    "reports no cached tokens, so that its cache_salt cannot be tried; start the engine with "
    "--enable-prompt-tokens-details (SGLang: --enable-cache-report)"
)


def _judge(again: list[CacheReport], others: list[CacheReport]) -> Shown:
    """``again``: of the repetitions; ``others``: of the requests with other salts."""
    foreign = max([hit.reported or hit.counted or 0 for hit in others])
    if foreign:
        return Shown(
            "refuted", f"drops cache_salt: a prompt with another salt took {foreign} tokens from the cache"
        )
    if all(hit.reported for hit in again):
        # It reports hits. vLLM leaves one of 0 out.
        return Shown("proven")
    sizes = [hit.reported or hit.counted for hit in again]
    if None not in sizes and all(hit.counted is not None for hit in others):
        return Shown("proven") if all(sizes) else Shown("unshown", _NO_HIT)
    if any(hit.noisy for hit in (*again, *others)):
        return Shown("later", _NOISY)
    return Shown("unshown", _NO_REPORT if any(hit.reported is None for hit in again) else _NO_HIT)
