"""Hits that an engine would load from outside the GPU, by the blocks that its connectors hold there.

The GPU hit ``L`` is determined first. A connector is then asked for the rest: from ``L`` on it
looks in its own places only, by the rules of ``hit_rules.py``, where everything before ``L`` counts as
present. Hence for a boundary ``x > L``: full attention needs every block from ``L`` to ``x``, a window its
last blocks before ``x`` as far as they lie after ``L``, Mamba the state at ``x``. A boundary that needs
blocks of two connectors is not valid. Places without an owner in events belong to one connector (vLLM's
offloading looks in all its tiers), and each owner is a separate connector. One connector loads everything:
the one that reaches furthest (the first that holds anything with ``ModelFacts.first_connector_loads``); host
memory comes before storage, then by name.

vLLM's own offloading keeps chunks of ``CacheLayout.blocks_per_chunk`` blocks, each under the hash at its end
(``_lookup_complete_chunks``, distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py, 0.33): it loads
whole chunks, from the one around ``L`` on, and nothing that is less than a chunk.

If hits may end inside a block, a connector is asked from the last whole block on; the block in which a load
ends must be held under the hash at that end, and with EAGLE loads end on whole blocks. Blocks that any engine
wrote to a shared store are available to every engine that uses it. vLLM's MooncakeStoreConnector and LMCache
look a prompt up in their store from its first token on, whatever is on the GPU, and load what goes beyond
``L`` (``Reach.alone``; ``lookup``, mooncake/store/worker.py, 0.33). Sources: vLLM 0.32
(``Scheduler.schedule``, the offloading connectors' lookup, MultiConnector); checked against a direct
implementation in tests/router/index/rules/test_offload.py.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from kvatlas.publisher.events import MEDIA
from kvatlas.publisher.groups import scheduler_block_size
from kvatlas.router.index.base import Plane, Rows, Words
from kvatlas.router.index.hit_rules import WordHits, end_of, evaluate
from kvatlas.router.index.learn.layout import CacheLayout
from kvatlas.router.index.places import (
    CPU,
    GPU,
    connector_of,
    is_shared,
    medium_of,
    owner_of,
    reach_of,
)
from kvatlas.router.index.run_ends import Ends

# Word numbers from here down are of other replicas' rows; -1 is unused (``NOWHERE``).
_ELSEWHERE = -2


class Tier(NamedTuple):
    """All places in which one connector looks.

    ``layers``: media from the nearest on, each with all places up to and including it, so that the last layer
    is complete.
    """

    stores: frozenset[str]
    """Shared stores in it, by owner; it applies to engines that use one of them."""
    layers: tuple[tuple[str, tuple[str, ...]], ...]


class Extent(NamedTuple):
    """Per layer of a tier: its medium, and the hits with this layer and the nearer ones, by bit of a word."""

    tier: Tier
    layers: tuple[tuple[str, WordHits], ...]
    tokens_min: int
    """Fewest tokens that it loads."""


def tiers(rows: Rows) -> tuple[Tier, ...]:
    """Return the connectors that hold anything, in the order in which they are asked."""
    return _tiers(frozenset(plane.medium for plane, _ in rows.places if plane.medium != GPU))


@lru_cache(maxsize=256)
def _tiers(places: frozenset[str]) -> tuple[Tier, ...]:
    of_connector: dict[str, list[str]] = {}
    for place in sorted(places):
        of_connector.setdefault(connector_of(place), []).append(place)
    found: list[tuple[int, str, Tier]] = []
    for connector, held in of_connector.items():
        layers: list[tuple[str, tuple[str, ...]]] = []
        up_to: tuple[str, ...] = ()
        for medium in MEDIA[1:]:
            here = tuple(place for place in held if medium_of(place) == medium)
            if here:
                up_to += here
                layers.append((medium, up_to))
        stores = frozenset(owner_of(place) for place in held if is_shared(place))
        if layers:
            found.append((MEDIA.index(layers[0][0]), connector, Tier(stores, tuple(layers))))
    return tuple(tier for _, _, tier in sorted(found, key=lambda each: each[:2]))


def tier_extents(
    rows: Rows, layout: CacheLayout, num_tokens: int, word: int, on_gpu: WordHits, *, detail: bool = False
) -> tuple[Extent, ...]:
    """Return the extent of the hits of the 64 engines of ``word`` with each tier."""
    below = _below(on_gpu.hit_ends, layout, rows.num_hashes)
    found: list[Extent] = []
    for tier in tiers(rows):
        first = tier.layers[0][1]
        chunk, alone = _chunk(layout, first), reach_of(first[0]).alone
        if not chunk:
            continue
        ends = _ends(layout, chunk)
        before = np.zeros(rows.num_hashes, np.uint64) if alone else below
        layers = tuple(
            (
                medium,
                evaluate(
                    _joined(rows, layout, word, places, before, chunk),
                    ends,
                    num_tokens,
                    word=word,
                    loading=True,
                    detail=detail,
                ),
            )
            for medium, places in tier.layers
        )
        tokens_min = 0
        if chunk > 1 and not alone:
            tokens_min = chunk * max([group.block_size for group in layout.groups], default=0)
        found.append(Extent(tier, layers, tokens_min))
    return tuple(found)


def usable(extents: tuple[Extent, ...], stores: frozenset[str]) -> tuple[Extent, ...]:
    """Return the tiers that an engine has; ``stores`` are the shared stores it uses."""
    return tuple(r for r in extents if not r.tier.stores or not r.tier.stores.isdisjoint(stores))


def loaded(extents: tuple[Extent, ...], bit: int, hit: int, *, first: bool = False) -> dict[str, int]:
    """Return the tokens that one engine would load beyond its GPU hit, by medium; ``extents`` are of its
    tiers.

    ``first``: the first connector that has any loads, however little it has.
    """
    most: dict[str, int] = {}
    furthest = hit
    for _, layers, tokens_min in extents:
        by_medium: dict[str, int] = {}
        at = hit
        for medium, hits in layers:
            end = end_of(hits.hit_ends, bit)
            if end > at:
                by_medium[medium] = end - at
                at = end
        if at > furthest and at - hit >= tokens_min:
            most, furthest = by_medium, at
            if first:
                break
    return most


def held_alone(rows: Rows, layout: CacheLayout, num_tokens: int, word: int) -> list[int]:
    """Return the tokens of the prompt that the host memory of vLLM's own offloading holds by itself in every
    group, for the 64 engines of ``word``, by bit. Its ``p2p`` tier serves others from there
    (vllm/v1/kv_offload/tiering, 0.32)."""
    for tier in tiers(rows):
        medium, places = tier.layers[0]
        if medium == CPU and not connector_of(places[0]):
            nothing, chunk = np.zeros(rows.num_hashes, np.uint64), layout.blocks_per_chunk
            own = _joined(rows, layout, word, places, nothing, chunk)
            return evaluate(own, _ends(layout, chunk), num_tokens, word=word, loading=True).hit
    return []


def shared_part(rows: Rows) -> Rows:
    """Return the rows of shared stores in the shared index, in a form that can be merged with local rows."""
    columns = {
        (plane, _ELSEWHERE - word): column
        for (plane, word), column in rows.columns.items()
        if is_shared(plane.medium)
    }
    return Rows(rows.num_hashes, columns)


def _chunk(layout: CacheLayout, places: tuple[str, ...]) -> int:
    """Return the blocks of a chunk of the connector that has these places; 0 if blocks do not divide it."""
    if not connector_of(places[0]):
        return layout.blocks_per_chunk
    tokens = reach_of(places[0]).chunk_tokens
    size = max([group.block_size for group in layout.groups], default=1)
    return 1 if not tokens else 0 if tokens % size else tokens // size


@lru_cache(maxsize=256)
def _ends(layout: CacheLayout, chunk: int) -> CacheLayout:
    """Return the layout with the boundaries at which a load in chunks of this many blocks may end."""
    whole = layout.alignment
    if not layout.lookahead and any(c.spec.is_eagle for c in layout.classes):
        whole = max(whole, scheduler_block_size(layout.groups))
    if chunk > 1:
        whole = math.lcm(whole, *[chunk * group.block_size for group in layout.groups])
    return layout if layout.alignment == whole else replace(layout, alignment=whole)


def _joined(
    rows: Rows, layout: CacheLayout, word: int, places: tuple[str, ...], below: Words, chunk: int
) -> Rows:
    """Return one tier's rows as GPU rows, with everything before the GPU hits present."""
    columns: dict[tuple[Plane, int], Words] = {}
    for group in layout.groups:
        held = np.zeros(rows.num_hashes, np.uint64)
        for place in places:
            plane = Plane(place, group.group_idx)
            held = held | (_held_by_any(rows, plane) if is_shared(place) else rows.plane(plane, word))
        if chunk > 1:
            held = _whole_chunks(held, chunk * group.block_size // layout.hash_block_size)
        columns[Plane(GPU, group.group_idx), word] = held | below
    return Rows(rows.num_hashes, columns)


def _whole_chunks(held: Words, size: int) -> Words:
    """Return all hash blocks of the chunks of this size whose last one is held."""
    found = np.zeros_like(held)
    ends = held[size - 1 :: size]
    found[: len(ends) * size] = np.repeat(ends, size)
    return found


def _held_by_any(rows: Rows, plane: Plane) -> Words:
    """Return all bits set for blocks that any engine published."""
    told = np.zeros(rows.num_hashes, bool)
    for (at, _), column in rows.columns.items():
        if at == plane:
            told |= column != 0
    return np.where(told, ~np.uint64(0), np.uint64(0))


def _below(hits: Ends, layout: CacheLayout, num_hashes: int) -> Words:
    """Return per hash block the engines whose GPU hit, rounded down to a whole block, covers it."""
    whole = scheduler_block_size(layout.groups)
    ends = np.zeros(num_hashes, np.uint64)
    for tokens, bits in hits:
        blocks = tokens // whole * whole // layout.hash_block_size
        if blocks:
            ends[blocks - 1] |= np.uint64(bits)
    covered: Words = np.bitwise_or.accumulate(ends[::-1])[::-1]
    return covered
