"""What one run of a simulated fleet gives: what became of each request, and what the engines did."""

from __future__ import annotations

import msgspec


class Row(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What became of one request. Tokens and seconds; ``ttft_s`` is -1 for one that no engine could hold."""

    index: int
    arrived_s: float
    engine: int
    prompt_tokens: int
    predicted: int
    """What the arm believed at the decision."""
    hit: int
    ttft_s: float
    queue_s: float
    preempted: int
    cpu: int = 0
    """Of the hit, loaded from host memory; ``storage``: from the store."""
    storage: int = 0
    answer_s: float = -1.0
    """To the last token; ``per_token_s``: between two of them, -1 for an answer of one."""
    per_token_s: float = -1.0
    fetched: int = 0
    """Tokens that came from the engine that computed the prompt for this one."""


class FleetRun(msgspec.Struct):
    """Rows in the workload's order, and what the engines did."""

    rows: list[Row]
    busy_s: list[float]
    computed_tokens: list[int]
    preemptions: int
    ended_s: float
    moved_bytes: int = 0
    """Loaded from outside the GPUs."""
    left_out_blocks: int = 0
    """Not written into the store, for too many waited."""
