"""Lookups of the loadable prefix of waiting requests, with cached results.

The engine asks for a request that waits for room in each step, and for a long prompt the lookup takes tens
of milliseconds. Invariants: a result is dropped as soon as one of its blocks is no longer held. A result
that could have grown is computed again, but only after ``REST`` times its own duration. If the tier does
not know, the request waits until the deadline, counted from its first lookup.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvatlas.connectors.scheduler.plans import EngineRequest
from kvatlas.connectors.tier.base import Tier
from kvatlas.connectors.transfer.base import Counts

if TYPE_CHECKING:
    from kvatlas.connectors.hits import HitResolver


# Repeated lookups of a request take at most 1/REST of the engine core's time.
REST = 20


@dataclass(frozen=True, slots=True)
class _Answer:
    num_local_tokens: int
    num_tokens: int
    hit_tokens: int
    good_until: float
    keys: frozenset[bytes] | None
    """Keys that must stay held; None if unknown: then any removal invalidates the result."""


class Lookups:
    """Lookup results of the waiting requests of one engine. ``clock`` and ``deadline_s`` in seconds."""

    def __init__(
        self,
        resolver: HitResolver,
        tier: Tier,
        counters: Counts,
        *,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._resolver = resolver
        self._tier = tier
        self._counters = counters
        self._deadline_s = deadline_s
        self._clock = clock
        self._answers: dict[str, _Answer] = {}
        self._asked_again: set[str] = set()
        self._waiting_since: dict[str, float] = {}

    def hit(self, request: EngineRequest, num_local_tokens: int) -> int | None:
        """Tokens of the longest loadable prefix including local ones, or 0; None: not known in this step."""
        now, request_id = self._clock(), request.request_id
        answer = self._answers.get(request_id)
        if (
            answer is not None
            and (answer.num_local_tokens, answer.num_tokens) == (num_local_tokens, request.num_tokens)
            and now < answer.good_until
        ):
            return answer.hit_tokens
        hit = self._work_out(request, num_local_tokens)
        if hit is None:
            since = self._waiting_since.setdefault(request_id, now)
            # A store that does not answer must not keep the request from computing.
            if now - since < self._deadline_s:
                return None
            self._counters.add("lookups/late")
            return 0
        self._waiting_since.pop(request_id, None)
        self._answers[request_id] = _Answer(
            num_local_tokens,
            request.num_tokens,
            hit,
            # The engine asks for a waiting request in each step, and a lookup of a long prompt takes tens of
            # milliseconds: a result that could have grown is used for REST times its own duration.
            good_until=now + (REST + 1) * (self._clock() - now),
            keys=self._needed(request, num_local_tokens, hit),
        )
        return hit

    def removed(self, keys: frozenset[bytes]) -> None:
        """Drop results that depend on these blocks, which are no longer held."""
        for request_id, answer in list(self._answers.items()):
            if answer.keys is None or not answer.keys.isdisjoint(keys):
                del self._answers[request_id]

    def forget(self, request_id: str) -> None:
        """Drop the results of a request that was admitted or has ended."""
        self._answers.pop(request_id, None)
        self._asked_again.discard(request_id)
        self._waiting_since.pop(request_id, None)

    def _work_out(self, request: EngineRequest, num_local_tokens: int) -> int | None:
        hashes = request.block_hashes
        known: dict[bytes, bool] = {}
        while keys := self._resolver.lookup_keys(
            hashes, request.num_tokens, num_local_tokens=num_local_tokens, known=known
        ):
            held = self._tier.held(request.request_id, keys)
            if held is None:
                return None
            known.update((key, key in held) for key in keys)

        def usable(key: bytes) -> bool:
            return known.get(key, False)

        return self._resolver.find_hit(hashes, request.num_tokens, usable, num_local_tokens=num_local_tokens)

    def _needed(
        self, request: EngineRequest, num_local_tokens: int, hit_tokens: int
    ) -> frozenset[bytes] | None:
        """Keys of the blocks to load; None at the first lookup, as most requests need only one."""
        if not hit_tokens:
            return frozenset()
        # Most requests are looked up once, and collecting keys costs as much as the lookup.
        if request.request_id not in self._asked_again:
            self._asked_again.add(request.request_id)
            return None
        return frozenset(
            self._resolver.key_at(request.block_hashes, group_idx, index, hit_tokens)
            for group_idx, indices in self._resolver.load_mask(num_local_tokens, hit_tokens).items()
            for index in indices
        )
