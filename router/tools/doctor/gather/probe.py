"""Two small requests to one engine: does it publish what it computes, and is the predicted hit the real one?

The first prompt is new (random words); the second begins with it. Both are read and predicted by the parts
that serve traffic. Costs the engine the prefill of both prompts and two tokens.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec

from router.fleet.identity import EngineAddress
from router.index.learn.hash_scheme import Detection
from router.index.model import FleetResidency
from router.index.seats import EngineHit
from router.openai.apis import COMPLETION
from router.openai.errors import ApiError
from router.prompts.prompt import Prompt
from router.prompts.reader import PromptReader
from router.tools.doctor.evidence import ProbeEvidence, ProbeRequest
from router.tools.doctor.gather.http import Http, HttpAnswer
from router.tools.doctor.gather.listener import EventListener
from router.tools.doctor.gather.parity import inbound

_FIRST_TOKENS = 600
"""Where the layout is not known yet: four of the largest common blocks (128) and a little."""
_BLOCKS = 3
_TOKENS_MAX = 8192
_MARGIN_TOKENS = 16
_QUIET_S = 0.3
_POLL_S = 0.02
_SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Completion(msgspec.Struct):
    usage: _Usage | None = None


class Prober:
    """Probes one engine. ``model`` is the name to ask for, ``max_tokens`` the longest prompt it takes."""

    def __init__(
        self,
        engine: EngineAddress,
        *,
        model: str,
        scope: FleetResidency,
        reader: PromptReader,
        http: Http,
        listener: EventListener | None,
        max_tokens: int | None,
        request_timeout_s: float,
    ) -> None:
        self._engine = engine
        self._model = model
        self._scope = scope
        self._reader = reader
        self._http = http
        self._listener = listener
        self._max_tokens = min(_TOKENS_MAX, (max_tokens or _TOKENS_MAX) - 4 * _MARGIN_TOKENS)
        self._timeout_s = request_timeout_s
        self._rng = random.Random(secrets.randbits(64))

    async def run(self) -> ProbeEvidence:
        """Both requests; the first once more with a longer prompt where the blocks turn out to be large."""
        seen = ProbeEvidence(requests=[])
        length = self._wanted_tokens()
        first = await self._prompt_text(length, "")
        seen.requests.append(await self._send(first))
        if seen.requests[-1].status:
            return seen
        await self._detect()
        if self._wanted_tokens() > length:
            first = await self._prompt_text(self._wanted_tokens(), "")
            seen.requests.append(await self._send(first))
            await self._detect()
        if not seen.requests[-1].status:
            second = await self._prompt_text(self._wanted_tokens() + _MARGIN_TOKENS, first)
            seen.requests.append(await self._send(second, await_events=False))
        return seen

    def _wanted_tokens(self) -> int:
        layout = self._scope.engine(self._engine.engine_id).layout
        wanted = _FIRST_TOKENS if layout is None else _BLOCKS * layout.alignment + _MARGIN_TOKENS
        return max(2, min(wanted, self._max_tokens))

    async def _prompt_text(self, num_tokens: int, text: str) -> str:
        """``text`` with words added until it has about so many tokens (by its letters where unreadable)."""
        while True:
            prompt = await self._read(text) if text else None
            have = len(text) // 3 if prompt is None else prompt.num_tokens
            missing = num_tokens - have
            if missing <= 0 and text:
                return text
            words = ("".join(self._rng.choices(_SYLLABLES, k=3)) for _ in range(max(1, missing // 8)))
            text = " ".join((text, *words)).lstrip()

    async def _read(self, text: str) -> Prompt | None:
        try:
            read = await self._reader.read(inbound(self._model, {"prompt": text}))
        except ApiError:
            return None
        return read if isinstance(read, Prompt) else None

    async def _detect(self) -> None:
        """Let a running search for the hash seed come to its end (a few seconds at most)."""
        residency = self._scope.engine(self._engine.engine_id)
        while residency.detection is Detection.SEARCHING:
            residency.advance_detection()
            await asyncio.sleep(0)

    async def _send(self, text: str, *, await_events: bool = True) -> ProbeRequest:
        prompt = await self._read(text)
        hit = EngineHit("unknown", why_unknown="its tokens could not be had")
        if prompt is not None:
            hit = self._scope.predict(prompt, [self._engine.engine_id])[self._engine.engine_id]
        batches = self._heard()
        body: dict[str, Any] = {"model": self._model, "prompt": text, "max_tokens": 1, "temperature": 0}
        rank = self._engine.dp_rank
        headers = {} if rank is None else {"x-data-parallel-rank": str(rank)}
        answer = await self._http.post(
            self._engine.base_url + COMPLETION, body, headers=headers, timeout_s=self._timeout_s
        )
        came = await_events and answer.ok and await self._await_events(batches)
        return _request(answer, prompt, hit, events_came=came)

    def _heard(self) -> int:
        return 0 if self._listener is None else self._listener.seen.live_batches

    async def _await_events(self, before: int) -> bool:
        """Wait for a batch beyond ``before``, and then for a short silence; False where none comes."""
        if self._listener is None:
            return False
        deadline = time.monotonic() + self._http.timeout_s
        if not await _until(lambda: self._heard() > before, deadline):
            return False
        last, quiet_since = self._heard(), time.monotonic()
        while time.monotonic() < min(deadline, quiet_since + _QUIET_S):
            await asyncio.sleep(_POLL_S)
            if self._heard() != last:
                last, quiet_since = self._heard(), time.monotonic()
        return True


async def _until(condition: Callable[[], bool], deadline: float) -> bool:
    while not condition():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True


def _request(answer: HttpAnswer, prompt: Prompt | None, hit: EngineHit, *, events_came: bool) -> ProbeRequest:
    completion = answer.json(_Completion) if answer.ok else None
    usage = None if completion is None else completion.usage
    details = None if usage is None else usage.prompt_tokens_details
    status = "" if answer.ok else answer.what
    if answer.ok and completion is None:
        status = "an answer that is no completion"
    return ProbeRequest(
        status=status,
        predicted=None if hit.mode == "unknown" else hit.hit_tokens,
        mode=hit.mode,
        why_unknown=hit.why_unknown,
        cached=None if details is None else details.cached_tokens,
        prompt_tokens=None if prompt is None else prompt.num_tokens,
        reported_prompt_tokens=None if usage is None else usage.prompt_tokens,
        events_came=events_came,
    )
