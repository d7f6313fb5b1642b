"""When engines have enough to do, and which prompts go there all the same.

An engine is saturated with more than ``hold_s`` seconds of prompts queued, or as many requests as it may
have. A prompt goes at once, whatever is queued, if it shares enough with one in flight: where that one is the
prefix will be, and most of the work is done once. That is bounded too: not behind ``PILE`` times ``hold_s``.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.placement.candidate import Candidate

PILE = 4.0
_FULL_S = 0.05
"""An engine with all the requests that it may have is looked at again so soon, if nothing ends before."""


def gap_s(queue_s: float, requests: int, *, hold_s: float, requests_max: int | None) -> float:
    """Seconds of work in the way of the next request to an engine; 0 or less: it is not saturated."""
    gap = queue_s - hold_s
    return max(gap, _FULL_S) if requests_max is not None and requests >= requests_max else gap


def any_room(candidates: Iterable[Candidate], *, hold_s: float, requests_max: int | None) -> bool:
    """Whether one of them is not saturated."""
    for one in candidates:
        if one.queue_s <= hold_s and (requests_max is None or one.running + one.waiting < requests_max):
            return True
    return False


def joins_sibling(candidates: Iterable[Candidate], tokens: int, *, share: float, hold_s: float) -> bool:
    """Whether so much of a prompt is in flight on an engine without too much before it."""
    least = max(1.0, share * tokens)
    return any(one.hit.common_tokens >= least and one.queue_s <= PILE * hold_s for one in candidates)
