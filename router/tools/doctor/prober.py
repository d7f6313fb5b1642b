"""Requests to one engine: tokenized and predicted by the serving code, sent, their events awaited.

Single probes, and a small generated load: growing chats, shared prefixes, lengths at block boundaries,
concurrent requests, and enough prompts to fill a small pool, so that blocks are evicted. Requests whose hit
is compared are sent one at a time, so that prediction, report and events refer to the same state. All prompts
are random words, so none is cached beforehand.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec

from kvatlas.publisher.events import BlockHash, BlockStored
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.status import Frontend
from kvatlas.router.index.engine import EngineResidency
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.index.query_plan import EngineHit
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.prompts.model_config import PROBES, first_difference, probe_path
from kvatlas.router.prompts.prompt import Prompt
from kvatlas.router.prompts.reader import PromptReader
from kvatlas.router.tools.doctor.findings import (
    LoadEvidence,
    LoadRequest,
    ProbeEvidence,
    ProbeRequest,
    PromptParity,
)
from kvatlas.router.tools.doctor.http import Http, HttpAnswer
from kvatlas.router.tools.doctor.listener import EventCounts, EventListener, StoreComparison, compare_stores

# Tokenizer parity: whether prompts become the same tokens here and at the engine, for a few chats and
# completions.


class _Tokenized(msgspec.Struct):
    tokens: list[int]


def inbound(model: str, body: dict[str, Any]) -> InboundRequest:
    """Build the request as the router would receive it."""
    encoded = msgspec.json.encode({"model": model, **body})
    return InboundRequest("POST", probe_path(body), b"", [], encoded, model)


async def compare(
    reader: PromptReader, http: Http, base_url: str, model: str, frontend: Frontend
) -> list[PromptParity]:
    """Compare every probe prompt on one engine; stops if the engine has no tokenize endpoint."""
    results: list[PromptParity] = []
    for name, body in PROBES.items():
        result = await _compare_one(reader, http, base_url, name, {"model": model, **body}, frontend)
        results.append(result)
        if result.engine_problem.startswith(_ABSENT):
            break
    return results


_ABSENT = "no endpoint"


async def _compare_one(
    reader: PromptReader, http: Http, base_url: str, name: str, body: dict[str, Any], frontend: Frontend
) -> PromptParity:
    local, local_problem = await _local(reader, body, frontend)
    answer = await http.post(f"{base_url}/tokenize", body)
    theirs, engine_problem = _theirs(answer)
    if local is None or theirs is None:
        return PromptParity(
            name,
            None if local is None else len(local),
            None if theirs is None else len(theirs),
            None,
            local_problem,
            engine_problem,
        )
    return PromptParity(name, len(local), len(theirs), first_difference(local, theirs))


async def _local(
    reader: PromptReader, body: dict[str, Any], frontend: Frontend
) -> tuple[list[int] | None, str]:
    try:
        read = await reader.read(inbound(str(body["model"]), body), (frontend,))
    except ApiError as problem:
        return None, f"refused: {problem}"
    if not isinstance(read, Prompt):
        return None, read.reason
    return list(read.token_ids), ""


def _theirs(answer: HttpAnswer) -> tuple[list[int] | None, str]:
    if answer.status in {404, 405, 501}:
        return None, f"{_ABSENT} ({answer.description})"
    if not answer.ok:
        return None, answer.description
    tokenized = answer.json(_Tokenized)
    return (None, "a response without tokens") if tokenized is None else (tokenized.tokens, "")


_TOKENS_MAX = 8192
MARGIN_TOKENS = 16
# Time to wait for events that are not expected, as a multiple of ``quiet_s``.
_SETTLED = 4
_POLL_S = 0.02
_SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Completion(msgspec.Struct):
    usage: _Usage | None = None


class ProbeAnswer(msgspec.Struct):
    """One request, its response, and the blocks that the engine stored from then on."""

    request: ProbeRequest
    prompt: Prompt | None
    stored: list[BlockStored]
    awaited_events: bool


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

    async def send(self, body: dict[str, Any], *, await_events: bool | None = True) -> ProbeAnswer:
        """Predict, request one token, and wait for the events.

        ``await_events`` None: wait for the full time only if the prompt fills new blocks.
        """
        prompt = await self.read(body)
        hit = EngineHit("unknown", why_unknown="its tokens could not be determined")
        if prompt is not None:
            hit = self._scope.predict(prompt, [self._engine.engine_id])[self._engine.engine_id]
        settle = (
            await_events is None and prompt is not None and self._fills(prompt.num_tokens) <= hit.hit_tokens
        )
        waits = await_events is not False
        before = self._events_received()
        if self._listener is not None:
            self._listener.recent.clear()
        whole = {"model": self._model, "max_tokens": 1, "temperature": 0, **body}
        rank = self._engine.dp_rank
        headers = {} if rank is None else {"x-data-parallel-rank": str(rank)}
        url = self._engine.base_url + probe_path(body)
        answer = await self._http.post(url, whole, headers=headers, timeout_s=self._timeout_s)
        wait_s = _SETTLED * self._quiet_s if settle else self._http.timeout_s
        came = waits and answer.ok and await self._await_events(before, wait_s)
        stored = [] if self._listener is None else list(self._listener.recent)
        awaited = waits and answer.ok and not settle
        return ProbeAnswer(_request(answer, prompt, hit, events_came=came), prompt, stored, awaited)

    def _fills(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % (self.alignment or 1)

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


# The probe: three small requests to one engine, to see whether it publishes what it computes, whether the
# predicted hit is the real one, and whether a salt prevents it. The first prompt is new (random words); the
# second begins with it, the third is the second with a salt. All are read and predicted by the serving code.
# Costs the engine the prefill of the prompts and three tokens.


# Length used before the layout is known: four of the largest common blocks (128 tokens) and a margin.
_FIRST_TOKENS = 600
_BLOCKS = 3


async def probe(prober: EngineProber, *, salted: bool = True) -> ProbeEvidence:
    """Send the requests; the first is repeated with a longer prompt if the blocks turn out to be large.
    ``salted``: also the one with a salt."""
    seen = ProbeEvidence(requests=[])
    length = _wanted_tokens(prober)
    first = await prober.text(length)
    seen.requests.append((await prober.send({"prompt": first})).request)
    if seen.requests[-1].status:
        return seen
    await prober.detect()
    if _wanted_tokens(prober) > length:
        first = await prober.text(_wanted_tokens(prober))
        seen.requests.append((await prober.send({"prompt": first})).request)
        await prober.detect()
    if not seen.requests[-1].status:
        second = await prober.text(_wanted_tokens(prober) + MARGIN_TOKENS, first)
        seen.requests.append((await prober.send({"prompt": second}, await_events=False)).request)
        if salted and seen.requests[-1].cached:
            body = {"prompt": second, "cache_salt": secrets.token_hex(16)}
            seen.salted = (await prober.send(body)).request
    return seen


def _wanted_tokens(prober: EngineProber) -> int:
    alignment = prober.alignment
    wanted = _FIRST_TOKENS if alignment is None else _BLOCKS * alignment + MARGIN_TOKENS
    return max(2, min(wanted, prober.max_tokens))


# Consecutive requests without an event, after which events are no longer awaited.
_SILENT_MAX = 3
_FILLER_TOKENS_MAX = 2048


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Amount of work of one load."""

    seconds_max: float = 40.0
    """No request is started later than this, in seconds."""
    conversations: int = 3
    turns: int = 3
    burst_requests: int = 4
    """Number of concurrent requests."""
    fill_tokens_max: int = 65_536
    """Prompt tokens spent on filling the pool; larger pools are not filled."""
    asked_again: int = 8
    """Number of earlier prompts whose hit is compared at the end."""
    quiet_s: float = 0.1
    """Seconds without events after which a request's events are complete."""


class Load:
    """Runs one load and fills in ``seen``. ``pool_tokens``: capacity of the engine's pool; None: unknown."""

    def __init__(
        self,
        prober: EngineProber,
        residency: Callable[[], EngineResidency],
        event_counts: EventCounts,
        settings: LoadPlan,
        pool_tokens: int | None,
        seen: LoadEvidence,
    ) -> None:
        self._prober = prober
        self._residency = residency
        self._event_counts = event_counts
        self._settings = settings
        self._pool_tokens = pool_tokens
        self._deadline = time.monotonic() + settings.seconds_max
        self._silent = 0
        # Hashes of all prompts sent: events of their blocks may arrive while a later prompt is examined.
        self._known: set[BlockHash] = set()
        self._bodies: list[dict[str, Any]] = []
        self.seen = seen

    async def run(self) -> None:
        """Send all parts, until the time is over or the engine fails."""
        await self._prober.detect()
        unit = self._prober.alignment or 16
        length = max(2, min(2 * unit + 16, self._prober.max_tokens // 4))
        await self._chats(length)
        await self._edges(unit)
        await self._burst(length)
        await self._fill()
        step = max(1, len(self._bodies) // self._settings.asked_again)
        for body in self._bodies[::-step]:
            await self._one("asked again", body)

    @property
    def _over(self) -> bool:
        failed = bool(self.seen.requests) and bool(self.seen.requests[-1].request.status)
        self.seen.out_of_time = self.seen.out_of_time or time.monotonic() >= self._deadline
        return failed or self.seen.out_of_time

    async def _chats(self, length: int) -> None:
        """Send conversations turn by turn; every second one shares its system prompt with the one before."""
        system = ""
        for number in range(self._settings.conversations):
            if number % 2 == 0:
                system = await self._prober.text(length)
            messages = [{"role": "system", "content": system}]
            for _ in range(self._settings.turns):
                messages = [*messages, {"role": "user", "content": await self._prober.text(length // 2)}]
                await self._one("chat", {"messages": messages})
                messages = [*messages, {"role": "assistant", "content": await self._prober.text(8)}]

    async def _edges(self, unit: int) -> None:
        """Send prompts of token ids at block boundaries: below one unit, exactly some units, one token more;
        each twice.

        Skipped if the tokenizer differs from the model's: its ids could be invalid at the engine.
        """
        if any(one.request.lengths_differ for one in self.seen.requests):
            return
        text = await self._prober.text(min(3 * unit + 2, self._prober.max_tokens))
        prompt = await self._prober.read({"prompt": text})
        if prompt is None:
            return
        ids = list(prompt.token_ids)
        for name, count in (("short", unit - 1), ("whole units", 2 * unit), ("a token more", 2 * unit + 1)):
            if 0 < count <= len(ids):
                body = {"prompt": ids[-count:]}
                await self._one(name, body)
                await self._one(f"{name}, again", body)

    async def _burst(self, length: int) -> None:
        """Send requests with a common prefix concurrently, and then each alone."""
        begin = await self._prober.text(length)
        bodies = [
            {"prompt": await self._prober.text(length + 32 * n, begin)}
            for n in range(1, self._settings.burst_requests + 1)
        ]
        if self._over:
            return
        sent = await asyncio.gather(*(self._prober.send(body) for body in bodies))
        self.seen.uncompared += len(sent)
        self.seen.uncompared_cached_tokens += sum(each.request.cached or 0 for each in sent)
        for body in bodies:
            await self._one("after a burst", body)

    async def _fill(self) -> None:
        """Send random prompts until the pool has been filled 1.5 times, so that blocks are evicted."""
        limit = self._settings.fill_tokens_max
        if self._pool_tokens is None or self._pool_tokens * 3 // 2 > limit:
            return
        filled, removed = 0, self._event_counts.removed
        size = max(2, min(self._prober.max_tokens, _FILLER_TOKENS_MAX, self._pool_tokens // 4))
        while filled < self._pool_tokens * 3 // 2 and not self._over:
            await self._one("filling", {"prompt": await self._prober.text(size)})
            filled += size
        self.seen.filled_tokens = filled
        self.seen.evicted = self._event_counts.removed > removed

    async def _one(self, kind: str, body: dict[str, Any]) -> None:
        if self._over:
            return
        waits = self._silent < _SILENT_MAX
        exchange = await self._prober.send(body, await_events=None if waits else False)
        if exchange.awaited_events:
            self._silent = 0 if exchange.request.events_came else self._silent + 1
        await self._prober.detect()
        self.seen.requests.append(LoadRequest(kind, exchange.request, self._stores(exchange)))
        if kind != "asked again":
            self._bodies.append(body)

    def _stores(self, exchange: ProbeAnswer) -> StoreComparison | None:
        residency, prompt = self._residency(), exchange.prompt
        if prompt is None or residency.scheme is None or residency.layout is None:
            return None
        hashes = prompt.hashes(residency.scheme)
        late = self._known.difference(hashes)
        self._known.update(hashes)
        return compare_stores(prompt, residency.scheme, residency.layout.groups, exchange.stored, late)
