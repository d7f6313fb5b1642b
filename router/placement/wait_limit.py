"""Admission by predicted wait: a pure rule over candidates, for the router and its simulator.

The wait is the time until an engine begins with the prompt: for the prompts ahead of it there, or for the
pages that it needs, whichever takes longer. The prompt's own prefill does not count: a target for the whole
time to the first token would refuse every long prompt, also on idle engines, and its prefix would never be
cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Protocol

import msgspec

from kvatlas.router.placement.candidate import Candidate
from kvatlas.router.placement.fleet_values import columns


class PredictsWait(Protocol):
    """An engine that predicts the wait of a prompt for which it is a candidate; ``rank_s``: the prompt's
    place in the engine's own order, 0 without one."""

    def wait_s(self, candidate: Candidate, rank_s: float) -> float: ...


class LongWait(msgspec.Struct, frozen=True, gc=False):
    """Predicted wait of a refused request, and the exceeded target."""

    wait_s: float
    target_s: float
    level_s: float | None = None
    """The request's own target for its first token, if that is why it is refused."""


class AdmissionStats(msgspec.Struct):
    """Counters for metrics."""

    refused: Annotated[dict[str, int], "kvatlas_admission_refused_total{priority}"] = msgspec.field(
        default_factory=dict
    )
    """Requests refused by their predicted wait (429 `predicted_wait`), by class."""


def shortest_wait(candidates: Sequence[Candidate]) -> int:
    """Position of the candidate with the shortest wait."""
    found = columns(candidates)
    waits_s = found.queue_s
    if found.rooms:
        waits_s = waits_s.copy()
        for at, room_s in found.rooms.items():
            # At an engine without requests no prompt waits for pages: none would be released.
            if found.values.requests[at]:
                waits_s[at] = max(waits_s.item(at), room_s)
    return int(waits_s.argmin())


def predicted_wait_s(
    candidates: Sequence[Candidate], engines: Sequence[PredictsWait], rank_s: float = 0.0
) -> float:
    """Return the wait that the engine with the shortest one predicts."""
    at = shortest_wait(candidates)
    return engines[at].wait_s(candidates[at], rank_s)


# Part of the margin that a first token is expected to be late by: prompts that come later may join its step,
# and nothing makes it early by as much. With it 95 % of those accepted at overload make their target, and
# four of five refused ones would not have (decision 046).
_EXPECTED_SHARE: Final = 0.2


def late_first_token(
    first_token_s: float, wait_s: float, left_s: float, margin_s: float | None = None
) -> LongWait | None:
    """Return the refusal of a request whose first token is predicted after the ``left_s`` until its target.

    ``wait_s`` is the part of ``first_token_s`` before the engine begins with the prompt; ``margin_s``: within
    which most of the engine's first tokens came, None: not known.
    """
    first_token_s += _EXPECTED_SHARE * (margin_s or 0.0)
    # Without a wait a request is never refused: a prompt too long for its target would be refused for ever.
    if first_token_s <= left_s or wait_s <= 0:
        return None
    return LongWait(wait_s, max(0.0, left_s - (first_token_s - wait_s)))


def long_wait(wait_s: float, target_s: float | None) -> LongWait | None:
    """Return the refusal of a request with this wait; None: it is admitted."""
    return LongWait(wait_s, target_s) if target_s is not None and wait_s > target_s else None
