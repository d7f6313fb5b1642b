"""How far a request can be loaded: asked of the tier, and remembered for as long as the answer stays good.

A request that waits for room is asked about in each step, and for a long prompt the answer takes tens of
milliseconds. What always holds: an answer is forgotten as soon as one of its blocks ceases to be held; one
that could have grown meanwhile is worked out again, but no sooner than after ``REST`` times what that takes.
A tier that does not know keeps a request waiting for the deadline, counted from the first time it was asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from connectors.messages.tally import Tally
from connectors.scheduler.requests import EngineRequest
from connectors.tier.base import Tier

if TYPE_CHECKING:
    from connectors.hits.resolver import HitResolver

REST = 20
"""Working it out again takes at most one part in this many of the engine core's time, for each request."""


@dataclass(frozen=True, slots=True)
class _Answer:
    num_local_tokens: int
    num_tokens: int
    hit_tokens: int
    good_until: float
    keys: frozenset[bytes] | None
    """What must stay held; None: not worked out, anything that is removed may be of it."""


class Lookups:
    """Answers for the waiting requests of one engine. ``clock`` and ``deadline_s`` in seconds."""

    def __init__(
        self,
        resolver: HitResolver,
        tier: Tier,
        tally: Tally,
        *,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._resolver = resolver
        self._tier = tier
        self._tally = tally
        self._deadline_s = deadline_s
        self._clock = clock
        self._answers: dict[str, _Answer] = {}
        self._asked_again: set[str] = set()
        self._waiting_since: dict[str, float] = {}

    def hit(self, request: EngineRequest, num_local_tokens: int) -> int | None:
        """Tokens of the longest loadable prefix, local ones included, or 0; None: ask again in a step."""
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
            if now - since < self._deadline_s:
                return None
            self._tally.add("lookups/late")
            return 0
        self._waiting_since.pop(request_id, None)
        self._answers[request_id] = _Answer(
            num_local_tokens,
            request.num_tokens,
            hit,
            good_until=now + (REST + 1) * (self._clock() - now),
            keys=self._needed(request, num_local_tokens, hit),
        )
        return hit

    def removed(self, keys: frozenset[bytes]) -> None:
        """These blocks are no longer held."""
        for request_id, answer in list(self._answers.items()):
            if answer.keys is None or not answer.keys.isdisjoint(keys):
                del self._answers[request_id]

    def forget(self, request_id: str) -> None:
        """The request was admitted, or is gone."""
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
        """The keys of the blocks to load; not worth its time for a request that is asked about only once."""
        if not hit_tokens:
            return frozenset()
        if request.request_id not in self._asked_again:
            self._asked_again.add(request.request_id)
            return None
        return frozenset(
            self._resolver.key_at(request.block_hashes, group_idx, index, hit_tokens)
            for group_idx, indices in self._resolver.load_mask(num_local_tokens, hit_tokens).items()
            for index in indices
        )
