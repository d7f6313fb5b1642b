"""Counters of requests on two engines; the metrics exporter reads them."""

from __future__ import annotations

import msgspec


class PdStats(msgspec.Struct):
    """Plain counters, monotone."""

    split: int = 0
    """Requests sent to a prefill and a decode engine, retries included."""
    whole: dict[str, int] = msgspec.field(default_factory=dict)
    """Requests of fleets with roles that one engine got whole, by reason."""
    handoffs: int = 0
    """Prefills whose blocks a decode engine was told to fetch."""
    prefill_failures: dict[str, int] = msgspec.field(default_factory=dict)
    """Prefills that gave nothing to hand over, by reason."""
    leases_late: int = 0
    """Prefills thrown away because too little was left of their lease."""
    answers_late: int = 0
    """Answers thrown away because they began after the end of the lease on the blocks they were made of: the
    decode engine stood still, or had too much to do."""
    handoffs_spent: int = 0
    """Decode engines that failed after they had been told of the blocks, which are not given to another."""
    handoffs_kept: int = 0
    """Decode engines that could not be reached, so that another one was told of the same blocks."""
    ahead: int = 0
    """Handoffs of which the decode engine was told before the prefill engine had answered."""
    waits_stuck: int = 0
    """Of these, prefills that came to nothing: a decode engine waits for them until its own time-out."""
    gap_s: float = 0.0
    """Seconds between the two requests, summed over all handoffs."""
    prefill_s: float = 0.0
    """Seconds that prefill engines took to answer, summed over all handoffs."""

    prefillers_refused: int = 0
    """Requests to a sidecar that named none but engines it may not ask (`sidecar.prefills`)."""

    def count(self, counts: dict[str, int], reason: str) -> None:
        """One more of these."""
        counts[reason] = counts.get(reason, 0) + 1
