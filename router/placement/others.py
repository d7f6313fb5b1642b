"""Requests at one engine that this router did not send: those of other routers and of direct clients.

State exchanged by replicas and by workers of one machine (``OthersLoad``) is better and earlier than the
requests that the engine's own gauges show beyond the router's account (``ForeignLoad``), which are used while
they are fresh.

Invariants: counts are >= 0; gauges that are too old add nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import msgspec

# Weight of the newest value in a running mean.
NEWS = 0.1


# Bounds of one router's statement about one engine: larger values are malformed, and could keep all
# routers off an engine.
REQUESTS_MAX = 1_000_000
TOKENS_MAX = 10_000_000_000
MS_MAX = 100_000_000


class OthersLoad(msgspec.Struct, frozen=True, array_like=True):
    """Totals of other routers at one engine.

    ``running`` and ``waiting`` requests in flight, of which ``tokens`` are yet to be computed (or loaded,
    converted to tokens by time); ``recent_ms``: milliseconds of work recently sent there, decayed
    (``LoadSettings.recent_s``); ``link_ms``: milliseconds until its link is free of pulls, by the
    router that predicts the latest end.
    """

    running: Annotated[int, msgspec.Meta(ge=0, le=REQUESTS_MAX)] = 0
    waiting: Annotated[int, msgspec.Meta(ge=0, le=REQUESTS_MAX)] = 0
    tokens: Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)] = 0
    recent_ms: Annotated[int, msgspec.Meta(ge=0, le=MS_MAX)] = 0
    link_ms: Annotated[int, msgspec.Meta(ge=0, le=MS_MAX)] = 0

    @classmethod
    def bounded(cls, running: int, waiting: int, tokens: int, recent_ms: int, link_ms: int = 0) -> OthersLoad:
        """Return the statement of one router."""
        tokens = min(max(0, tokens), TOKENS_MAX)
        return cls(
            min(running, REQUESTS_MAX), waiting, tokens, min(recent_ms, MS_MAX), min(max(0, link_ms), MS_MAX)
        )

    def plus(self, other: OthersLoad) -> OthersLoad:
        """Return the sum of both."""
        # A router that knows of others' pulls begins its own behind them: the latest end includes all.
        return OthersLoad(
            self.running + other.running,
            self.waiting + other.waiting,
            self.tokens + other.tokens,
            self.recent_ms + other.recent_ms,
            max(self.link_ms, other.link_ms),
        )

    def aged(self, age_s: float) -> OthersLoad:
        """Return the statement ``age_s`` seconds after it was made: transfers went on meanwhile."""
        if not self.link_ms:
            return self
        return msgspec.structs.replace(self, link_ms=max(0, self.link_ms - int(1000 * age_s)))

    @property
    def in_flight(self) -> tuple[int, int, int]:
        """All but recent work and transfers, which end by themselves."""
        return self.running, self.waiting, self.tokens


NO_OTHERS = OthersLoad()


def others_at(engine_id: str, others: Mapping[str, OthersLoad] | None) -> OthersLoad | None:
    """Return the part at one engine, for ``LoadAccount``; None: unknown."""
    return None if others is None else others.get(engine_id, NO_OTHERS)


class ForeignLoad:
    """Requests that one engine's gauges show beyond the router's account and the others' state.

    ``fresh_s``: older gauges are ignored; ``tokens``: assumed size of a foreign prompt until this router has
    sent some of its own there.
    """

    __slots__ = (
        "_beyond",
        "_beyond_waiting",
        "_fresh_s",
        "_gauges_s",
        "_mean_tokens",
        "running",
        "unsettled",
        "waiting",
    )

    def __init__(self, *, fresh_s: float, tokens: int) -> None:
        self._fresh_s = fresh_s
        self._mean_tokens = float(tokens)
        self._gauges_s = -math.inf
        # Requests that gauges showed and the account did not have.
        self._beyond = self._beyond_waiting = 0
        self.running = 0
        self.waiting = 0
        self.unsettled = False
        """Whether it is unknown how many of them are in the others' state."""

    @property
    def fresh_until_s(self) -> float:
        """Time until which the last gauges count."""
        return self._gauges_s + self._fresh_s

    def sent(self, tokens: int) -> None:
        """Note a prompt sent by this router with this many tokens to compute."""
        # Gauges show no sizes: foreign prompts are assumed to be like this router's own there.
        self._mean_tokens += NEWS * (tokens - self._mean_tokens)

    def report(self, *, beyond: int, beyond_waiting: int, now: float) -> None:
        """Set by how many requests gauges polled at ``now`` exceed the account, and how many of them wait;
        negative if the account has more."""
        self._beyond, self._beyond_waiting = beyond, beyond_waiting
        self._gauges_s, self.unsettled = now, True

    def settle(self, others: OthersLoad) -> None:
        """Subtract the others' state from the excess; the rest is foreign until the next poll."""
        # Once, at the first decision after the poll. Otherwise others' requests would count twice, and stay
        # counted until the next poll after they have ended: four workers found up to 12 % fewer cached
        # tokens.
        self.running, self.waiting = self._shown_beyond(others)
        self.unsettled = False

    def totals(self, others: OthersLoad | None, now: float) -> tuple[int, int, float]:
        """Running, waiting and tokens to compute of all requests that are not ours. None: the others' state
        is unknown, and the whole excess is foreign."""
        known = NO_OTHERS if others is None else others
        if now - self._gauges_s > self._fresh_s:
            return known.running, known.waiting, known.tokens
        running, waiting = self.running, self.waiting
        if others is None:
            running, waiting = self._shown_beyond(known)
        tokens = known.tokens + waiting * self._mean_tokens
        return known.running + running, known.waiting + waiting, tokens

    def num_waiting(self, now: float) -> int:
        """Foreign prompts that wait there, by the gauges."""
        return self.totals(None if self.unsettled else NO_OTHERS, now)[1]

    def _shown_beyond(self, others: OthersLoad) -> tuple[int, int]:
        """Running and waiting of the excess beyond the others' state."""
        # The others' messages may be newer than the gauges, so the difference can be negative.
        foreign = max(0, self._beyond - others.running - others.waiting)
        waiting = min(foreign, max(0, self._beyond_waiting - others.waiting))
        return foreign - waiting, waiting
