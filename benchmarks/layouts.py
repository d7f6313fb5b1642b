"""Cache layouts of the usual kinds of models: an axis of every benchmark and gate, not one default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvatlas.publisher.block_pool import HybridBlockPool
from kvatlas.publisher.events import Event
from kvatlas.publisher.groups import GroupSpec
from kvatlas.publisher.simulator.settings import EngineSettings, hash_scheme
from kvatlas.router.simulation.cache_layouts import groups_of


class Layout(NamedTuple):
    """Groups of a model, and the facts of it that no event carries (keys of ``[models.NAME]``)."""

    groups: tuple[GroupSpec, ...]
    facts: Mapping[str, Any] = {}


LAYOUTS: dict[str, Layout] = {
    "full": Layout(groups_of("full", 16)),
    "mla": Layout((GroupSpec(0, "mla_attention", 64),)),
    "gemma3-like": Layout(groups_of("gemma3-like", 16)),
    "gpt-oss-like": Layout(groups_of("gpt-oss-like", 16)),
    "chunked": Layout(
        (
            GroupSpec(0, "full_attention", 16),
            *(GroupSpec(n, "chunked_local_attention", 16, attention_chunk_size=8192) for n in (1, 2, 3)),
        ),
        {"attention_chunk_size": 8192},
    ),
    "mamba-align": Layout(groups_of("mamba-hybrid", 16), {"mamba_cache_mode": "align"}),
    "eagle": Layout((GroupSpec(0, "full_attention", 16, is_eagle=True),), {"eagle_groups": "all"}),
}
"""Full attention alone, latent attention in blocks of 64, mostly windows, half windows, Llama 4's chunks,
states where chunks end, and a drafter's look-up that drops a block."""


def events_of(layout: Layout, tokens: list[int]) -> list[list[Event]]:
    """Events of an engine that has computed these tokens, by its steps of 8,192 tokens."""
    groups = layout.groups
    blocks = 64 + sum(-(-len(tokens) // group.block_size) + 8 for group in groups)
    pool = HybridBlockPool(groups, num_blocks=blocks, scheme=hash_scheme(EngineSettings(), groups))
    one = pool.request(tokens)
    pool.start(one)
    steps = []
    while (chunk := pool.next_chunk(one)) > 0:
        pool.compute(one, chunk)
        steps.append(pool.take_events())
    pool.finish(one)
    steps.append(pool.take_events())
    return [events for events in steps if events]
