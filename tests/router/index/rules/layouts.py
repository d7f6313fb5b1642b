"""Shared by the hit tests: groups, residency by block number, and random models of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st
from msgspec.structs import replace

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.events import BlockHash
from kvatlas.publisher.groups import Family, GroupSpec, hash_unit, scheduler_block_size
from kvatlas.publisher.pool.layout import pool_layout
from kvatlas.router.index.base import Plane, Rows
from kvatlas.router.index.hit_rules import WordHits, evaluate
from kvatlas.router.index.learn.layout import CacheLayout, ModelFacts, make_layout
from kvatlas.router.index.memory import MemoryIndex

ENGINE = "engine"


def full(idx: int = 0, size: int = 16, **extra: Any) -> GroupSpec:
    return GroupSpec(idx, "full_attention", size, **extra)


def window(idx: int, tokens: int, size: int = 16, **extra: Any) -> GroupSpec:
    return GroupSpec(idx, "sliding_window", size, sliding_window=tokens, **extra)


def chunked(idx: int, chunk: int, size: int = 16) -> GroupSpec:
    return GroupSpec(idx, "chunked_local_attention", size, attention_chunk_size=chunk)


def mamba(idx: int, mode: str = "all", size: int = 16, **extra: Any) -> GroupSpec:
    return GroupSpec(idx, "mamba", size, mamba_cache_mode=mode, **extra)


def layout_of(
    *groups: GroupSpec, unit: int | None = None, lookahead: int = 0, facts: ModelFacts | None = None
) -> CacheLayout:
    return make_layout(groups, facts or ModelFacts(), unit, lookahead)


def hashes_of(num_tokens: int, layout: CacheLayout) -> list[BlockHash]:
    """A prompt's hashes: 1000, 1001, ... one per hash block."""
    count = max(0, (num_tokens - layout.lookahead) // layout.hash_block_size)
    return [BlockHash(1000 + number) for number in range(count)]


def rows_of(
    units: Mapping[int, Iterable[int]],
    num_tokens: int,
    layout: CacheLayout,
    *,
    medium: str = "GPU",
) -> Rows:
    """Rows for one engine (bit 0 of word 0) that holds these hash blocks, by group."""
    index = MemoryIndex()
    for group, numbers in units.items():
        index.store(ENGINE, Plane(medium, group), [BlockHash(1000 + number) for number in numbers])
    return index.lookup(hashes_of(num_tokens, layout))


def whole_blocks(layout: CacheLayout, group: int, numbers: Iterable[int]) -> list[int]:
    """The hash blocks that end the given blocks of a group."""
    size = next(spec.block_size for spec in layout.groups if spec.group_idx == group)
    per_block = size // layout.hash_block_size
    return [(number + 1) * per_block - 1 for number in numbers]


def evaluate_one(
    layout: CacheLayout, num_tokens: int, units: Mapping[int, Iterable[int]], **options: Any
) -> WordHits:
    return evaluate(rows_of(units, num_tokens, layout), layout, num_tokens, **options)


def hit(layout: CacheLayout, num_tokens: int, held: Mapping[int, Iterable[int]]) -> int:
    """The hit for blocks held, by group, in numbers of that group's own blocks."""
    units = {group: whole_blocks(layout, group, numbers) for group, numbers in held.items()}
    return evaluate_one(layout, num_tokens, units).hit[0]


_SIZES = st.sampled_from([16, 16, 16, 32, 48, 64])


@st.composite
def group_mixes(draw: st.DrawFn) -> tuple[GroupSpec, ...]:
    """One to four groups of any kind vLLM would run together."""
    count = draw(st.integers(1, 4))
    mode = draw(st.sampled_from(["align", "all"]))
    base = draw(st.sampled_from([16, 16, 32]))
    groups: list[GroupSpec] = []
    for idx in range(count):
        size = base if draw(st.booleans()) else draw(_SIZES)
        eagle = draw(st.integers(0, 3)) == 0
        match draw(st.sampled_from(["full", "full", "window", "window", "window", "chunked", "mamba"])):
            case "full":
                groups.append(full(idx, size, is_eagle=eagle))
            case "window":
                groups.append(window(idx, draw(st.integers(2, 150)), size, is_eagle=eagle))
            case "chunked":
                groups.append(chunked(idx, size * draw(st.integers(1, 5)), size))
            case _:
                groups.append(mamba(idx, mode, size, is_eagle=eagle))
    return tuple(groups)


@st.composite
def models(draw: st.DrawFn) -> CacheLayout:
    """The layout of a random mix, as the pool and the index both accept it."""
    groups = draw(group_mixes().filter(_runs))
    return make_layout(groups, ModelFacts(), _unit(groups))


def _unit(groups: Sequence[GroupSpec]) -> int:
    return make_layout(tuple(groups), ModelFacts(), None).hash_block_size


def _runs(groups: tuple[GroupSpec, ...]) -> bool:
    try:
        pool_layout(groups, HashScheme(hash_block_size=_unit(groups)), None)
    except ValueError:
        return False
    return True


class Engine(NamedTuple):
    """An engine's groups as events show them, hidden ones too; the rest as the pool takes it."""

    groups: tuple[GroupSpec, ...]
    scheme: HashScheme
    retention: int | None
    dcp: int

    @property
    def facts(self) -> ModelFacts:
        """The facts that an operator would configure for it."""
        groups = self.groups
        eagle = tuple(g.group_idx for g in groups if g.is_eagle)
        states = any(g.mamba_cache_mode == "align" for g in groups)
        return ModelFacts(
            attention_chunk_sizes={
                g.group_idx: g.attention_chunk_size for g in groups if g.attention_chunk_size
            },
            mamba_cache_mode=next((g.mamba_cache_mode for g in groups if g.mamba_cache_mode), None),
            eagle_groups=eagle,
            eagle_groups_apart=any(g.apart for g in groups),
            partial_hash_hits=True if self.dcp > 1 and states and eagle else None,
            hidden_groups=any(g.is_hidden for g in groups),
            replay_tokens=max((g.sliding_window or 0 for g in groups if not g.cacheable), default=0),
        )


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    """A random engine that vLLM would run: with hidden groups, a drafter's groups apart, or several ranks."""
    groups = draw(group_mixes())
    dcp = draw(st.sampled_from([1, 1, 2, 4]))
    if dcp > 1:
        groups = tuple(g for g in groups if g.family in {Family.FULL, Family.MAMBA}) or (full(),)
        groups = tuple(
            replace(g, block_size=g.block_size * dcp) if g.family is Family.FULL else g for g in groups
        )
    else:
        size = draw(st.sampled_from([group.block_size for group in groups]))
        replayed = GroupSpec(0, "sliding_window_mla", size, sliding_window=80, cacheable=False)
        hidden = draw(
            st.lists(st.sampled_from([replayed, GroupSpec(0, "circular_buffer", size)]), max_size=2)
        )
        groups = tuple(draw(st.permutations([*groups, *hidden])))
    apart = draw(st.booleans())
    groups = tuple(
        replace(group, group_idx=idx, apart=apart and group.is_eagle) for idx, group in enumerate(groups)
    )
    whole = len(groups) == 1 or any(group.mamba_cache_mode == "all" for group in groups)
    unit = scheduler_block_size(groups) if whole else hash_unit(groups)
    sparse = any(group.family in {Family.WINDOW, Family.MAMBA} for group in groups)
    retention = draw(st.sampled_from([0, None, scheduler_block_size(groups)])) if sparse else 0
    return Engine(groups, HashScheme(hash_block_size=unit), retention, dcp)


def runs(engine: Engine) -> bool:
    """Whether vLLM would run it."""
    try:
        pool_layout(engine.groups, engine.scheme, engine.retention, engine.dcp)
    except ValueError:
        return False
    return True


@st.composite
def residencies(draw: st.DrawFn, layout: CacheLayout, num_tokens: int) -> dict[int, set[int]]:
    """Hash blocks held per group: mostly long runs with holes, as engines that evict have."""
    count = num_tokens // layout.hash_block_size
    units: dict[int, set[int]] = {}
    for group in layout.groups:
        limit = draw(st.integers(0, count))
        holes = draw(st.sets(st.integers(0, max(count - 1, 0)), max_size=draw(st.sampled_from([0, 2, 8]))))
        strays = draw(st.sets(st.integers(0, max(count - 1, 0)), max_size=6))
        units[group.group_idx] = {n for n in (set(range(limit)) - holes) | strays if n < count}
    return units
