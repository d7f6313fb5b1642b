"""Requests to one engine: tokenized and predicted by the serving code, sent, their events awaited.

They are sent one at a time, so that prediction, report and events refer to the same state. All prompts are
random words, so none is cached beforehand.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec

from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.status import Frontend
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.index.query_plan import EngineHit
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.prompts.parity import probe_path
from kvatlas.router.prompts.prompt import Prompt
from kvatlas.router.prompts.reader import PromptReader
from kvatlas.router.tools.doctor.evidence import ProbeEvidence, ProbeRequest
from kvatlas.router.tools.doctor.http import Http, HttpAnswer
from kvatlas.router.tools.doctor.listener import EventListener
from kvatlas.router.tools.doctor.tokenizer_parity import inbound

_TOKENS_MAX = 8192
MARGIN_TOKENS = 16
_POLL_S = 0.02
_SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Completion(msgspec.Struct):
    usage: _Usage | None = None


class EngineProber:
    """Client of one engine that predicts each request before sending it.

    Args:

      model: Served name to request.

      max_tokens: Longest prompt the engine accepts, in tokens.

      quiet_s: Seconds without events after a response, after which all events are assumed to have
          arrived.
    """

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
        quiet_s: float,
        frontend: Frontend = "python",
    ) -> None:
        self._engine = engine
        self._model = model
        self._scope = scope
        self._reader = reader
        self._http = http
        self._listener = listener
        self.max_tokens = min(_TOKENS_MAX, (max_tokens or _TOKENS_MAX) - 4 * MARGIN_TOKENS)
        self._timeout_s = request_timeout_s
        self._quiet_s = quiet_s
        self._frontend = frontend
        self.rng = random.Random(secrets.randbits(64))

    @property
    def alignment(self) -> int | None:
        """Unit in tokens of which hits are multiples; None before the groups are known."""
        layout = self._scope.engine(self._engine.engine_id).layout
        return None if layout is None else layout.alignment

    async def text(self, num_tokens: int, begin: str = "") -> str:
        """Return ``begin`` and random words, about ``num_tokens`` tokens (estimated if untokenizable)."""
        text = begin
        while True:
            prompt = await self.read({"prompt": text}) if text else None
            have = len(text) // 3 if prompt is None else prompt.num_tokens
            missing = num_tokens - have
            if missing <= 0 and text:
                return text
            words = ("".join(self.rng.choices(_SYLLABLES, k=3)) for _ in range(max(1, missing // 8)))
            text = " ".join((text, *words)).lstrip()

    async def read(self, body: dict[str, Any]) -> Prompt | None:
        """Read a prompt as the router does; None if its tokens cannot be determined."""
        try:
            read = await self._reader.read(inbound(self._model, body), (self._frontend,))
        except ApiError:
            return None
        return read if isinstance(read, Prompt) else None

    async def detect(self) -> None:
        """Run a pending search for the hash seed to its end (a few seconds at most)."""
        residency = self._scope.engine(self._engine.engine_id)
        while residency.searching:
            residency.advance_detection()
            await asyncio.sleep(0)

    async def send(self, body: dict[str, Any], *, await_events: bool = True) -> ProbeRequest:
        """Predict, request one token, and wait for the events."""
        prompt = await self.read(body)
        hit = EngineHit("unknown", why_unknown="its tokens could not be determined")
        if prompt is not None:
            hit = self._scope.predict(prompt, [self._engine.engine_id])[self._engine.engine_id]
        before = self._events_received()
        whole = {"model": self._model, "max_tokens": 1, "temperature": 0, **body}
        rank = self._engine.dp_rank
        headers = {} if rank is None else {"x-data-parallel-rank": str(rank)}
        url = self._engine.base_url + probe_path(body)
        answer = await self._http.post(url, whole, headers=headers, timeout_s=self._timeout_s)
        came = await_events and answer.ok and await self._await_events(before, self._http.timeout_s)
        return _request(answer, prompt, hit, events_came=came)

    def _events_received(self) -> int:
        """Return the number of events so far; batches without events are a publisher's heartbeat."""
        return 0 if self._listener is None else self._listener.event_counts.events

    async def _await_events(self, before: int, wait_s: float) -> bool:
        """Wait for an event beyond ``before``, then for a short silence; False if none arrives."""
        if self._listener is None:
            return False
        deadline = time.monotonic() + wait_s
        if not await _until(lambda: self._events_received() > before, deadline):
            return False
        last, quiet_since = self._events_received(), time.monotonic()
        while time.monotonic() < min(deadline, quiet_since + self._quiet_s):
            await asyncio.sleep(_POLL_S)
            if self._events_received() != last:
                last, quiet_since = self._events_received(), time.monotonic()
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
    status = "" if answer.ok else answer.description
    if answer.ok and completion is None:
        status = "a response that is not a completion"
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


# Length used before the layout is known: four of the largest common blocks (128 tokens) and a margin.
_FIRST_TOKENS = 600
_BLOCKS = 3


async def probe(prober: EngineProber) -> ProbeEvidence:
    """Send the requests; the first is repeated with a longer prompt if the blocks turn out to be large.

    The probe: three small requests to one engine, to see whether it publishes what it computes, whether the
    predicted hit is the real one, and whether a salt prevents it. The first prompt is new (random words); the
    second begins with it, the third is the second with a salt. All are read and predicted by the serving
    code. Costs the engine the prefill of the prompts and three tokens.
    """
    seen = ProbeEvidence(requests=[])
    length = _wanted_tokens(prober)
    first = await prober.text(length)
    seen.requests.append(await prober.send({"prompt": first}))
    if seen.requests[-1].status:
        return seen
    await prober.detect()
    if _wanted_tokens(prober) > length:
        first = await prober.text(_wanted_tokens(prober))
        seen.requests.append(await prober.send({"prompt": first}))
        await prober.detect()
    if not seen.requests[-1].status:
        second = await prober.text(_wanted_tokens(prober) + MARGIN_TOKENS, first)
        seen.requests.append(await prober.send({"prompt": second}, await_events=False))
        if seen.requests[-1].cached:
            body = {"prompt": second, "cache_salt": secrets.token_hex(16)}
            seen.salted = await prober.send(body)
    return seen


def _wanted_tokens(prober: EngineProber) -> int:
    alignment = prober.alignment
    wanted = _FIRST_TOKENS if alignment is None else _BLOCKS * alignment + MARGIN_TOKENS
    return max(2, min(wanted, prober.max_tokens))
