"""Hits, load masks and store masks against the engine's own coordinator over the same blocks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

WHY = "needs torch and vLLM; make test-connectors runs it"
pytest.importorskip("torch", reason=WHY)
pytest.importorskip("vllm.v1.core.kv_cache_coordinator", reason=WHY)

from kvatlas.connectors.group_shapes import GroupKind  # noqa: E402
from kvatlas.connectors.tier.base import split_key  # noqa: E402
from tests.connectors.hits.engine_groups import (  # noqa: E402
    MIXES,
    Mix,
    fill,
    full,
    hashes,
    keys_of,
    mamba,
    window,
    with_retained,
)

BY_NAME = {mix.name: mix for mix in MIXES}
UNSHARED = "a ring that is never shared"
EXAMPLES = 40
DIFFERENTIAL_EXAMPLES = 100


def all_mixes(test: Any) -> Any:
    return pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)(test)


def nameable(mix: Mix, count: int) -> list[tuple[int, bytes]]:
    """Every (group, hash) the engine could hold for a prompt of ``count`` hash blocks."""
    names = hashes(count)
    fine = mix.name.startswith("Mamba with finer")
    held: list[tuple[int, bytes]] = []
    for group_idx, spec in enumerate(mix.specs):
        if not spec.prefix_cacheable:
            continue
        step = 1 if fine else spec.block_size // mix.hash_block
        held += [(group_idx, name) for name in names[step - 1 :: step]]
    return held


@st.composite
def residency(draw: st.DrawFn, mix: Mix, count: int) -> set[tuple[int, bytes]]:
    """Mostly held with few holes, mostly absent, or anything between."""
    every = nameable(mix, count)
    share = draw(st.sampled_from([0.5, 0.8, 0.95, 1.0]))
    random = draw(st.randoms(use_true_random=False))
    return {name for name in every if random.random() < share}


@st.composite
def prompt(draw: st.DrawFn, mix: Mix) -> tuple[int, list[bytes], set[tuple[int, bytes]]]:
    num_tokens = draw(st.integers(1, 80))
    names = hashes(num_tokens // mix.hash_block)
    return num_tokens, names, draw(residency(mix, len(names)))


@all_mixes
@settings(max_examples=DIFFERENTIAL_EXAMPLES)
@given(data=st.data())
def test_hits_are_those_of_the_engine(mix: Mix, data: st.DataObject) -> None:
    num_tokens, names, held = data.draw(prompt(mix))
    coordinator = mix.coordinator()
    fill(coordinator, held)
    _, expected, _ = coordinator.find_longest_cache_hit(names, num_tokens - 1)
    resolver = mix.resolver(coordinator)
    hit = resolver.find_hit(names, num_tokens, keys_of(held))
    if coordinator.enable_partial_hash_hits:  # a hit inside a block needs that block under its own hash
        assert hit <= expected
        assert hit == expected or mix.eagle or not ends_held(mix, names, expected, held)
    else:
        assert hit == expected
    assert hit <= num_tokens - 1
    assert hit % resolver.alignment_tokens == 0
    assert resolver.find_hit(names, num_tokens, keys_of(held)) == hit


def ends_held(mix: Mix, names: list[bytes], hit: int, held: set[tuple[int, bytes]]) -> bool:
    inside = [group for group, spec in enumerate(mix.specs) if hit % spec.block_size]
    return all((group, names[hit // mix.hash_block - 1]) in held for group in inside)


@all_mixes
def test_whole_prompts_held_hit_to_the_last_boundary(mix: Mix) -> None:
    names = hashes(80 // mix.hash_block)
    held = keys_of(set(nameable(mix, len(names))))
    resolver = mix.resolver(mix.coordinator())
    hit = resolver.find_hit(names, 80, held)
    assert 79 - 2 * mix.scheduler_block <= hit < 80
    assert resolver.find_hit(names, 80, frozenset()) == 0


@all_mixes
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_more_held_never_means_a_shorter_hit(mix: Mix, data: st.DataObject) -> None:
    num_tokens, names, held = data.draw(prompt(mix))
    more = held | data.draw(residency(mix, len(names)))
    resolver = mix.resolver(mix.coordinator())
    if len(set(mix.eagle_groups)) > 1 or (mix.eagle and not mix.eagle_groups):
        return  # the engine itself proves several EAGLE groups in an order that can cost a block
    fewer = resolver.find_hit(names, num_tokens, keys_of(held))
    assert resolver.find_hit(names, num_tokens, keys_of(more)) >= fewer


@all_mixes
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_the_lookup_keys_decide_the_hit(mix: Mix, data: st.DataObject) -> None:
    num_tokens, names, held = data.draw(prompt(mix))
    resolver = mix.resolver(mix.coordinator())
    every = keys_of(held)
    expected = resolver.find_hit(names, num_tokens, every)
    asked = resolver.lookup_keys(names, num_tokens)
    assert len(asked) == len(set(asked))
    assert resolver.find_hit(names, num_tokens, every & set(asked)) == expected
    known: dict[bytes, bool] = {}
    rounds = 0
    while ask := resolver.lookup_keys(names, num_tokens, known=known):
        assert not known.keys() & set(ask)
        assert rounds == 0 or set(ask) <= set(asked)
        known |= {key: key in every for key in ask}
        rounds += 1
    assert rounds <= 2
    assert resolver.find_hit(names, num_tokens, {key for key, there in known.items() if there}) == expected


@all_mixes
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_a_load_is_what_the_engine_allocates_and_is_held(mix: Mix, data: st.DataObject) -> None:
    num_tokens, names, held = data.draw(prompt(mix))
    local = data.draw(residency(mix, len(names)))
    coordinator = mix.coordinator()
    fill(coordinator, local)
    local_blocks, num_local, _ = coordinator.find_longest_cache_hit(names, num_tokens - 1)
    if num_local % mix.scheduler_block:
        return  # the engine itself shows a connector aligned local hits only
    resolver = mix.resolver(coordinator)
    hit = resolver.find_hit(names, num_tokens, keys_of(held), num_local_tokens=num_local)
    if not hit:
        return
    assert hit > num_local
    real = allocated(mix, coordinator, local_blocks, num_local, hit)
    mask = resolver.load_mask(num_local, hit)
    assert set(mask) == set(resolver.group_ids)
    local_ids = {block.block_id for blocks in local_blocks for block in blocks}
    for group_idx, indices in mask.items():
        assert indices == [i for i, block in real[group_idx].items() if block not in local_ids]
        for index in indices:
            key = resolver.key_at(names, group_idx, index, hit)
            there = (group_idx, split_key(key)[0]) in held
            assert there


def allocated(
    mix: Mix, coordinator: Any, local_blocks: Any, num_local: int, hit: int
) -> list[dict[int, int]]:
    """Per group: index in the request's table -> block id, without null blocks."""
    coordinator.allocate_new_computed_blocks("r", local_blocks, num_local, hit - num_local)
    return [
        {i: block.block_id for i, block in enumerate(blocks) if not block.is_null}
        for blocks in coordinator.get_blocks("r")
    ]


@all_mixes
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_stored_blocks_serve_every_boundary(mix: Mix, data: st.DataObject) -> None:
    """Masks of steps add up to the mask of the whole, and with the states suffice for each boundary's hit."""
    resolver = mix.resolver(mix.coordinator())
    num_prompt = data.draw(st.integers(1, 80))
    cuts = sorted({*data.draw(st.lists(st.integers(0, num_prompt), max_size=4)), num_prompt})
    steps: dict[int, list[int]] = {group: [] for group in resolver.group_ids}
    first = 0
    for computed in cuts:
        for group, blocks in resolver.store_mask(computed, num_prompt, first_token=first).items():
            steps[group] += blocks
        first = computed
    assert steps == resolver.store_mask(num_prompt, num_prompt)
    names = hashes(num_prompt // mix.hash_block)
    held = {resolver.key_at(names, g, i) for g, blocks in steps.items() for i in blocks}
    states = [shape.group_idx for shape in resolver.group_shapes if shape.kind is GroupKind.STATE]
    held |= {
        resolver.state_key(names, g, (i + 1) * mix.hash_block) for g in states for i in range(len(names))
    }
    for group, (_, end) in resolver.partial_tail(num_prompt, num_prompt).items():
        held.add(resolver.state_key(names, group, end))
    every = keys_of(set(nameable(mix, len(names))))
    for num_tokens in range(1, num_prompt + 1):
        part = names[: num_tokens // mix.hash_block]
        best = resolver.find_hit(part, num_tokens, every)
        if not resolver.partial_hits:
            assert resolver.find_hit(part, num_tokens, held) == best
    again = resolver.find_hit(names, num_prompt, held)
    assert again == resolver.find_hit(names, num_prompt, every)


def test_only_window_tails_are_stored_under_a_large_alignment() -> None:
    mix = BY_NAME["short window under a large alignment"]
    mask = mix.resolver(mix.coordinator()).store_mask(64, 64)
    assert mask == {0: [3, 7, 11, 15], 1: [0, 1, 2, 3]}


def test_blocks_beyond_the_last_boundary_are_not_stored_yet() -> None:
    mix = BY_NAME["different block sizes"]
    resolver = mix.resolver(mix.coordinator())
    assert resolver.store_mask(15, 40) == {0: [0, 1], 1: [0], 2: [0]}
    assert resolver.store_mask(16, 40, first_token=15) == {0: [2, 3], 1: [1], 2: [1]}


def test_retention_keeps_the_boundary_where_the_prompt_is_asked_again() -> None:
    mix = Mix("retention", (window(4, 5), full(4)), 4, 4, retention=0)
    resolver = mix.resolver(mix.coordinator())
    assert resolver.store_mask(40, 40) == {0: [8], 1: list(range(10))}
    assert resolver.store_mask(40, 40, shared_prefix_tokens=12)[0] == [2, 8]


def test_states_are_never_stored_by_position() -> None:
    mix = BY_NAME["Mamba and full"]
    mask = mix.resolver(mix.coordinator()).store_mask(64, 64)
    assert mask[0] == []
    assert mask[1] == list(range(8))


def test_groups_that_the_engine_does_not_share_are_left_out() -> None:
    resolver = BY_NAME[UNSHARED].resolver(BY_NAME[UNSHARED].coordinator())
    assert resolver.group_ids == (1, 2)
    assert set(resolver.load_mask(0, 16)) == {1, 2}


def test_a_state_is_loaded_at_the_boundary_only() -> None:
    mix = Mix("states", (mamba(8), full(8)), 8, 8)
    assert mix.resolver(mix.coordinator()).load_mask(8, 32) == {0: [3], 1: [1, 2, 3]}


def test_a_full_prefix_in_the_gpu_need_not_be_held_outside() -> None:
    mix = BY_NAME["window and full"]
    resolver = mix.resolver(mix.coordinator())
    names = hashes(10)
    held = {resolver.key_at(names, g, i) for g in (0, 1) for i in range(5, 10)}
    assert resolver.find_hit(names, 41, held) == 0
    assert resolver.find_hit(names, 41, held, num_local_tokens=20) == 40
    assert resolver.find_hit(names, 41, held, num_local_tokens=40) == 0


def test_blocks_kept_below_a_window_are_loaded_too() -> None:
    mix = with_retained(Mix("retained", (window(4, 9), full(4)), 4, 4), 6)
    coordinator = mix.coordinator()
    resolver = mix.resolver(coordinator)
    names = hashes(10)
    every = keys_of(set(nameable(mix, 10)))
    assert resolver.find_hit(names, 41, every) == 40
    real = allocated(mix, coordinator, ([], []), 0, 40)
    assert resolver.load_mask(0, 40) == {group: list(blocks) for group, blocks in enumerate(real)}
    below = resolver.key_at(names, 0, min(real[0]))
    assert resolver.find_hit(names, 41, every - {below}) < 40


def test_the_end_of_a_partial_hit_has_the_key_of_its_last_hash() -> None:
    mix = BY_NAME["Mamba with finer hashes"]
    resolver = mix.resolver(mix.coordinator())
    names = hashes(10)
    assert resolver.key_at(names, 0, 1, 20) == resolver.state_key(names, 0, 20)
    assert resolver.key_at(names, 0, 0, 20) == resolver.state_key(names, 0, 16)
    assert resolver.partial_tail(22, 23) == {1: (2, 20)}
    assert resolver.partial_tail(19, 23) == {}


def test_a_block_that_hashes_cannot_name_is_refused() -> None:
    with pytest.raises(ValueError, match="group 0: its block of 4 tokens"):
        Mix("bad", (window(4, 9), full(8)), 8, 4).resolver(hash_block=8)
    names = hashes(2)
    mix = BY_NAME["full"]
    resolver = mix.resolver(mix.coordinator())
    with pytest.raises(IndexError):
        resolver.state_key(names, 0, 6)
    with pytest.raises(IndexError):
        resolver.key_at(names, 0, 2)
