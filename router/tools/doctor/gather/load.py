"""A small generated load on one engine: growing chats, shared prefixes, lengths at block boundaries,
concurrent requests, and enough prompts to fill a small pool, so that blocks are evicted.

Requests whose hit is compared are sent one at a time, so that prediction, report and events refer to the same
state. All prompts are random words, so none is cached beforehand.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from publisher.events import BlockHash
from router.index.engine import EngineResidency
from router.tools.doctor.evidence import LoadEvidence, LoadRequest
from router.tools.doctor.gather.listener import EventCounts, StoreComparison, compare_stores
from router.tools.doctor.gather.prober import EngineProber, ProbeAnswer

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
    """Runs one load and fills in ``seen``. ``pool_tokens``: capacity of the engine's pool, None if
    unknown.
    """

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
