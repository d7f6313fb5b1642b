"""When, and how likely, a prompt's blocks are used again: the statistics behind retention hints.

A session of ``n`` turns goes on with the share of all sessions with ``n`` turns that went on within
``GAP_S_MAX``; its next turn is expected within twice its own longest recent gap, and not before nine of ten
turns of all sessions would have come. Gaps are those between arrivals. Invariants: at most
``SESSIONS_MAX`` sessions are known, the least recent one is evicted first; a gap longer than ``GAP_S_MAX``
ends a session.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from hashlib import blake2b
from typing import Annotated, Literal, NamedTuple, get_args

import msgspec

from kvatlas.router.openai.request import InboundRequest

SESSIONS_MAX = 8192
GAP_S_MAX = 900.0
TURNS_MAX = 16
"""Later turns are counted as this one."""
# Sub-agents and parallel tool calls share a session's name: requests closer than this are one turn.
_GAP_S_MIN = 0.5
_GAP_BINS = 11
"""Gaps of up to 1, 2, 4, ... 1024 s."""
_GAP_S_UNKNOWN = 128.0
_COUNTED_MAX = 4096.0
_PRIOR = 4.0
"""Weight of all turns in the estimate of one of them, in sessions."""


class Reuse(NamedTuple):
    """A prediction: the first ``tokens`` tokens of a prompt (None: all) are used again within ``ttl_s`` with
    the probability ``value``."""

    ttl_s: float
    value: float
    tokens: int | None = None


class _Pace(msgspec.Struct, gc=False):
    turns: int
    seen_s: float
    longest_s: float = 0.0
    """Longest gap; earlier ones count for less."""


class SessionPaces:
    """Turns and gaps of the sessions at one router; ``now`` is monotonic seconds."""

    def __init__(self) -> None:
        self.evicted = 0
        """Sessions that were forgotten because there were too many."""
        self._open: OrderedDict[Hashable, _Pace] = OrderedDict()
        # By number of turns: sessions that went on, and that ended.
        self._went_on = [0.0] * (TURNS_MAX + 1)
        self._ended = [0.0] * (TURNS_MAX + 1)
        self._gaps = [0.0] * _GAP_BINS

    def __len__(self) -> int:
        return len(self._open)

    def turn(self, session: Hashable, now: float) -> Reuse:
        """Count a request of a session; predicts the next one."""
        self._end_silent(now)
        pace = self._open.get(session)
        if pace is None:
            pace = self._open[session] = _Pace(1, now)
            if len(self._open) > SESSIONS_MAX:
                self._open.popitem(last=False)
                self.evicted += 1
        elif now - pace.seen_s >= _GAP_S_MIN:
            gap_s = now - pace.seen_s
            self._went_on[min(pace.turns, TURNS_MAX)] += 1
            self._gaps[min(_GAP_BINS - 1, math.ceil(math.log2(max(1.0, gap_s))))] += 1
            pace.turns, pace.seen_s, pace.longest_s = pace.turns + 1, now, max(gap_s, 0.9 * pace.longest_s)
            self._open.move_to_end(session)
            self._forget_old()
        return Reuse(min(GAP_S_MAX, max(2 * pace.longest_s, self._usual_gap_s())), self._goes_on(pace.turns))

    def _goes_on(self, turns: int) -> float:
        """Probability of another turn after this number of turns."""
        at = min(turns, TURNS_MAX)
        went_on, ended = sum(self._went_on), sum(self._ended)
        prior = (went_on + 1) / (went_on + ended + 2)
        return (self._went_on[at] + _PRIOR * prior) / (self._went_on[at] + self._ended[at] + _PRIOR)

    def _usual_gap_s(self) -> float:
        """Gap that nine of ten turns do not exceed."""
        total, below = sum(self._gaps), 0.0
        for at, number in enumerate(self._gaps):
            below += number
            if below >= 0.9 * total > 0:
                return float(1 << at)
        return _GAP_S_UNKNOWN

    def _end_silent(self, now: float) -> None:
        while self._open:
            pace = next(iter(self._open.values()))
            if now - pace.seen_s <= GAP_S_MAX:
                return
            self._open.popitem(last=False)
            self._ended[min(pace.turns, TURNS_MAX)] += 1

    def _forget_old(self) -> None:
        """Halve counts that have grown, so that they follow the traffic."""
        if sum(self._gaps) > _COUNTED_MAX:
            for counts in (self._went_on, self._ended, self._gaps):
                counts[:] = [number / 2 for number in counts]


HintSource = Literal["session", "prefix", "cache_control"]
VALUE_MIN = 0.25
"""No hint is sent below this. Connectors compare values by quarters, and even the lowest one keeps blocks
longer than none."""
_VALUE_UNKNOWN = 0.5
"""Of a prompt that only its client expects to use again."""


class RetentionStats(msgspec.Struct):
    """Counters for metrics."""

    sent: Annotated[dict[str, int], "kvatlas_retention_hints_total{source}"] = msgspec.field(
        default_factory=lambda: dict.fromkeys(get_args(HintSource), 0)
    )
    """Requests sent to an engine with a retention hint, by what it rests on: the pace of its `session`, a
    `prefix` of many prompts, or `cache_control` alone."""
    sessions_evicted: Annotated[int, "kvatlas_retention_sessions_evicted_total"] = 0
    """Sessions whose pace was forgotten, because more than 8,192 were active within 15 minutes."""


class RetentionHints:
    """Predictions of one router, from the arrivals that it sees."""

    def __init__(self) -> None:
        self.stats = RetentionStats()
        self._paces = SessionPaces()

    def predict(
        self, now: float, *, session: Hashable | None, prefix: Reuse | None = None, cache_s: float = 0.0
    ) -> tuple[HintSource, Reuse] | None:
        """Return the expected reuse of a request, and what it rests on; None: none is expected.

        ``session``: counted as one more turn; ``prefix``: the predicted reuse of the prompt's start;
        ``cache_s``: seconds for which its client asks, 0 for none. A client can prolong its hint, but not
        raise its value.
        """
        source: HintSource = "cache_control"
        found = None
        if session is not None:
            source, found = "session", self._paces.turn(session, now)
            self.stats.sessions_evicted = self._paces.evicted
        if prefix is not None and (found is None or found.value < _VALUE_UNKNOWN):
            source, found = "prefix", prefix
        elif cache_s:
            found = Reuse(cache_s, _VALUE_UNKNOWN) if found is None else found
            found = found._replace(ttl_s=max(cache_s, found.ttl_s))
        return None if found is None or found.value < VALUE_MIN else (source, found)

    def expect(self, request: InboundRequest, now: float, *, prefix: Reuse | None, cache_s: float) -> None:
        """Set a request's hint from its predicted reuse, and count it as a turn of its session.

        ``prefix`` and ``cache_s``: as for ``predict``.
        """
        session = None if request.session is None else (request.tenant, request.model, request.session)
        found = self.predict(now, session=session, prefix=prefix, cache_s=cache_s)
        if found is not None:
            request.retention = found[0], hint_json(found[1], request.tenant)


def hint_json(reuse: Reuse, tenant: str) -> bytes:
    """Return the hint as engines get it. Connectors compare owners only, so a digest stands for the name."""
    fields: dict[str, float | str] = {"ttl_s": round(reuse.ttl_s, 3), "value": round(reuse.value, 3)}
    if tenant:
        fields["owner"] = blake2b(tenant.encode(), digest_size=8).hexdigest()
    if reuse.tokens is not None:
        fields["tokens"] = reuse.tokens
    return msgspec.json.encode(fields)
