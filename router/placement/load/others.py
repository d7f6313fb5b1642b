"""What is at one engine that this router did not send: other routers' requests, and direct clients'.

What replicas, and workers of one machine, tell each other (``OthersLoad``) is better and sooner known than
what the engine's own gauges show beyond the router's account (``ForeignLoad``), which is believed while it is
fresh; each such prompt counts as one of the size this router sends there. So only what gauges show beyond
what others told at the first decision after the poll is foreign, until the next one: else their requests
would count twice, and until the next poll, long after they have ended.

Always true: counts are >= 0; gauges that are too old add nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import msgspec

NEWS = 0.1
"""What the newest value counts in a running mean."""


REQUESTS_MAX = 1_000_000
TOKENS_MAX = 10_000_000_000
RECENT_MS_MAX = 100_000_000
"""Bounds of what one router may state of one engine."""


class OthersLoad(msgspec.Struct, frozen=True, array_like=True):
    """Totals of other routers at one engine.

    ``running`` and ``waiting`` requests in flight, of which ``tokens`` are yet to be computed, or loaded in
    the time that so many take to compute; ``recent_ms``: milliseconds of work sent there of late, decayed
    (``LoadSettings.recent_s``).
    """

    running: Annotated[int, msgspec.Meta(ge=0, le=REQUESTS_MAX)] = 0
    waiting: Annotated[int, msgspec.Meta(ge=0, le=REQUESTS_MAX)] = 0
    tokens: Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)] = 0
    recent_ms: Annotated[int, msgspec.Meta(ge=0, le=RECENT_MS_MAX)] = 0

    def plus(self, other: OthersLoad) -> OthersLoad:
        """Both together."""
        return OthersLoad(
            self.running + other.running,
            self.waiting + other.waiting,
            self.tokens + other.tokens,
            self.recent_ms + other.recent_ms,
        )

    @property
    def in_flight(self) -> tuple[int, int, int]:
        """All but the recent work, which changes by itself."""
        return self.running, self.waiting, self.tokens


NO_OTHERS = OthersLoad()


def others_at(engine_id: str, others: Mapping[str, OthersLoad] | None) -> OthersLoad | None:
    """Their part at one engine, as ``LoadAccount`` is asked with it; None: it is not known."""
    return None if others is None else others.get(engine_id, NO_OTHERS)


class ForeignLoad:
    """What one engine's gauges show beyond the router's account and what others told.

    ``fresh_s``: gauges older than this are not believed; ``tokens``: the size of a foreign prompt until this
    router has sent some of its own there.
    """

    __slots__ = (
        *("_beyond", "_beyond_waiting", "_fresh_s", "_gauges_s", "_mean_tokens"),
        *("running", "unsettled", "waiting"),
    )

    def __init__(self, *, fresh_s: float, tokens: int) -> None:
        self._fresh_s = fresh_s
        self._mean_tokens = float(tokens)
        self._gauges_s = -math.inf
        self._beyond = self._beyond_waiting = 0  # requests that gauges showed and the account did not have
        self.running = 0
        self.waiting = 0
        self.unsettled = False
        """Whether it is open how many of them others have told of."""

    def sent(self, tokens: int) -> None:
        """This router sent a prompt of so many tokens to compute."""
        self._mean_tokens += NEWS * (tokens - self._mean_tokens)

    def report(self, *, beyond: int, beyond_waiting: int, now: float) -> None:
        """Gauges polled at ``now`` show so many requests more than the account has, and so many of them
        waiting; less than none where it has more."""
        self._beyond, self._beyond_waiting = beyond, beyond_waiting
        self._gauges_s, self.unsettled = now, True

    def settle(self, told: OthersLoad) -> None:
        """Of what gauges showed others had told that much; the rest is foreign until the next poll."""
        self.running, self.waiting = self._shown_beyond(told)
        self.unsettled = False

    def with_told(self, told: OthersLoad | None, now: float) -> tuple[int, int, float]:
        """Running, waiting and tokens to compute of all requests that are not ours. None: what others have
        there is not known, and all that gauges show is foreign."""
        others = NO_OTHERS if told is None else told
        if now - self._gauges_s > self._fresh_s:
            return others.running, others.waiting, others.tokens
        running, waiting = self.running, self.waiting
        if told is None:
            running, waiting = self._shown_beyond(others)
        tokens = others.tokens + waiting * self._mean_tokens
        return others.running + running, others.waiting + waiting, tokens

    def num_waiting(self, now: float) -> int:
        """Foreign prompts that wait there, as far as gauges tell."""
        return self.with_told(None if self.unsettled else NO_OTHERS, now)[1]

    def _shown_beyond(self, told: OthersLoad) -> tuple[int, int]:
        """Running and waiting, of what the gauges showed beyond the account and these."""
        foreign = max(0, self._beyond - told.running - told.waiting)
        waiting = min(foreign, max(0, self._beyond_waiting - told.waiting))
        return foreign - waiting, waiting
