"""Where a prefill chunk has to end when Mamba states are saved at chunk ends (mode "align").

A state can only be stored where a chunk ends, so chunks end at block boundaries, at the last boundary of
the prompt and at a junction that other prompts were seen to share. Facts:
``Scheduler._mamba_block_aligned_split`` of vLLM 0.32.
"""

from __future__ import annotations

from publisher.pool.layout import PoolLayout, checkpoint_position
from publisher.pool.request import PoolRequest


def aligned_chunk(
    layout: PoolLayout, request: PoolRequest, start: int, num_tokens: int, chunk_tokens_max: int
) -> int:
    """At most ``num_tokens`` tokens from ``start`` on; 0 when the budget reaches no allowed end."""
    prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
    if start >= prefill_end:
        return num_tokens
    size = layout.chunk_align
    end = start + num_tokens
    if end < prefill_end:
        aligned = end // size * size
        if aligned > start or size <= chunk_tokens_max:
            end = aligned
    stops = _stops(layout, request, start, end)
    return max(min((stop for stop in stops if start < stop < end), default=end) - start, 0)


def _stops(layout: PoolLayout, request: PoolRequest, start: int, end: int) -> tuple[int, ...]:
    """Positions no chunk may run past; 0 for those that do not apply."""
    size, eagle = layout.chunk_align, layout.uses_eagle
    block_end = (start // size + 1) * size if start % size else 0
    last_state = checkpoint_position(request.num_tokens, size, eagle=eagle)
    tail = 0
    if layout.partial_hits and layout.hash_block_size < layout.scheduler_block_size:
        tail = checkpoint_position(request.num_prompt_tokens, layout.hash_block_size, eagle=eagle)
        if not last_state < tail < request.num_prompt_tokens:
            tail = 0
    junction = request.shared_prefix_boundary
    shared = start + (junction - start) // size * size if start < junction < end else 0
    return (block_end, last_state, tail, shared)
