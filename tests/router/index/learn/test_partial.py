"""Stores inside a block: what their events prove of block sizes and hits, and what they do not."""

from __future__ import annotations

import pytest

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.groups import GroupSpec
from kvatlas.router.fleet.statement import EngineStatement
from kvatlas.router.index.learn.facts import SetupEvidence
from kvatlas.router.index.learn.layout import CacheLayout, ModelFacts, make_layout
from kvatlas.router.index.model import FleetResidency
from tests.router.index.rules.layouts import full, hit, layout_of, mamba
from tests.support.event_writer import Prompt, Writer, batch, tokens

SCHEME = HashScheme(hash_block_size=16)
PROMPT = tokens(300)
ALIGN = ModelFacts(mamba_cache_mode="align")


def writer(group: int, kind: str, size: int = 16) -> Writer:
    return Writer(SCHEME, group=group, kind=kind, size=size)


STATES, FULL = writer(0, "mamba"), writer(1, "full_attention")
WHOLE = writer(1, "full_attention", 32)


def groups_of(fleet: FleetResidency) -> tuple[GroupSpec, ...]:
    return layout_seen(fleet).groups


def layout_seen(fleet: FleetResidency) -> CacheLayout:
    layout = fleet.engine("a").layout
    assert layout is not None
    return layout


def predicted(fleet: FleetResidency, prompt: list[int]) -> int:
    return fleet.predict(Prompt(prompt), ["a"])["a"].hit_tokens


def test_a_block_without_its_parent_is_a_part_of_a_longer_one() -> None:
    fleet = FleetResidency(ALIGN)
    fleet.apply("a", batch(STATES.stored(PROMPT, start=9, stop=10), FULL.stored(PROMPT, start=9, stop=10)))
    assert [group.partial_only for group in groups_of(fleet)] == [False, True]
    assert predicted(fleet, PROMPT[:170]) == 160
    assert predicted(fleet, PROMPT[:160]) == 0


def test_several_blocks_in_one_event_show_their_size() -> None:
    """An engine joined late: its first block came without the parent, and is still whole."""
    fleet = FleetResidency(ALIGN)
    fleet.apply("a", batch(STATES.stored(PROMPT, start=9, stop=10), FULL.stored(PROMPT, start=9, stop=10)))
    fleet.apply("a", batch(FULL.stored(tokens(64, seed=1))))
    assert not any(group.partial_only for group in groups_of(fleet))
    assert predicted(fleet, PROMPT[:170]) == 0


def test_a_longer_block_shows_its_size() -> None:
    fleet = FleetResidency(ALIGN)
    fleet.apply("a", batch(STATES.stored(PROMPT, start=9, stop=10), FULL.stored(PROMPT, start=9, stop=10)))
    fleet.apply("a", batch(WHOLE.stored(tokens(32, seed=1))))
    assert [(group.block_size, group.partial_only) for group in groups_of(fleet)] == [
        (16, False),
        (32, False),
    ]


def test_without_states_every_block_is_whole() -> None:
    fleet = FleetResidency(ModelFacts())
    fleet.apply("a", batch(FULL.stored(PROMPT, start=9, stop=10)))
    assert not any(group.partial_only for group in groups_of(fleet))


def test_a_block_behind_its_parent_is_whole() -> None:
    fleet = FleetResidency(ALIGN)
    fleet.apply("a", batch(STATES.stored(PROMPT, start=0, stop=1), FULL.stored(PROMPT, start=0, stop=1)))
    fleet.apply("a", batch(FULL.stored(PROMPT, start=1, stop=2)))
    assert not any(group.partial_only for group in groups_of(fleet))


def test_a_part_right_behind_whole_blocks_proves_hits_inside_one() -> None:
    fleet = FleetResidency(ALIGN)
    fleet.apply("a", batch(STATES.stored(PROMPT[:96], keep=[5]), WHOLE.stored(PROMPT[:96])))
    assert layout_seen(fleet).alignment == 32
    fleet.apply("a", batch(FULL.stored(PROMPT, start=6, stop=7)))
    assert (layout_seen(fleet).alignment, layout_seen(fleet).inside_seen) == (16, True)


def test_a_part_of_a_block_that_is_stored_whole_proves_nothing() -> None:
    """vLLM stores it also where no hit ends inside a block, once the block around it is full."""
    fleet = FleetResidency(ALIGN)
    fleet.apply("a", batch(STATES.stored(PROMPT[:128], keep=[7]), WHOLE.stored(PROMPT[:128])))
    fleet.apply("a", batch(FULL.stored(PROMPT, start=6, stop=7)))
    assert layout_seen(fleet).alignment == 32


def test_a_state_between_the_boundaries_proves_hits_inside_a_block() -> None:
    fleet = FleetResidency(ALIGN)
    fleet.apply("a", batch(WHOLE.stored(PROMPT[:96]), STATES.stored(PROMPT[:112], keep=[6])))
    assert layout_seen(fleet).alignment == 16


def test_a_state_seen_before_the_size_of_a_block_proves_hits_inside_it() -> None:
    """With decode context parallelism: the first prompts are shorter than a block, whose parts look whole."""
    fleet = FleetResidency(ALIGN)
    for seed in (1, 2):
        fleet.apply("a", batch(STATES.stored(tokens(16, seed=seed)), FULL.stored(tokens(16, seed=seed))))
    fleet.apply("a", batch(WHOLE.stored(tokens(32, seed=3))))
    assert (layout_seen(fleet).alignment, layout_seen(fleet).inside_seen) == (16, True)


OTHER_STATES = writer(2, "mamba")


def test_a_state_of_a_class_with_a_flagged_group_proves_nothing() -> None:
    """vLLM flags the whole class: it stores one block more in each of its groups."""
    fleet = FleetResidency(ModelFacts(mamba_cache_mode="align", eagle_groups=(1, 2)))
    states = [w.stored(PROMPT[:48], keep=[2]) for w in (STATES, OTHER_STATES)]
    fleet.apply("a", batch(states[0], WHOLE.stored(PROMPT[:48]), states[1]))
    fleet.apply("a", batch(states[0]))
    assert (layout_seen(fleet).alignment, layout_seen(fleet).inside_seen) == (32, False)


def test_flags_found_later_withdraw_what_states_proved() -> None:
    fleet = FleetResidency(ModelFacts(mamba_cache_mode="align"))
    fleet.apply("a", batch(WHOLE.stored(PROMPT[:96]), STATES.stored(PROMPT[:112], keep=[6])))
    assert layout_seen(fleet).alignment == 16
    drafter = EngineStatement(source="server_info", drafts=True, method="eagle")
    fleet.engine("a").learn_setup(SetupEvidence(statements=(drafter,)))
    assert (layout_seen(fleet).alignment, layout_seen(fleet).inside_seen) == (32, False)


@pytest.mark.parametrize("part_first", [False, True])
def test_a_state_at_the_end_of_a_part_proves_hits_inside_a_block(*, part_first: bool) -> None:
    """Prompts shorter than a Mamba block: its parts look like blocks, at a position that no event shows."""
    fleet = FleetResidency(ALIGN)
    whole, other = writer(1, "full_attention", 64), tokens(64, seed=1)
    fleet.apply("a", batch(STATES.stored(other, start=3, stop=4), whole.stored(other)))
    fleet.apply("a", batch(STATES.stored(other, start=1, stop=2)))
    assert (layout_seen(fleet).alignment, layout_seen(fleet).inside_seen) == (64, False)
    inside = STATES.stored(PROMPT, start=1, stop=2), FULL.stored(PROMPT, start=1, stop=2)
    fleet.apply("a", batch(*inside[:: -1 if part_first else 1]))
    assert (layout_seen(fleet).alignment, layout_seen(fleet).inside_seen) == (16, True)
    assert predicted(fleet, PROMPT[:33]) == 32


def test_a_state_before_the_end_of_what_was_stored_proves_nothing() -> None:
    """Without retention vLLM keeps the state of every step, also where no hit may end."""
    fleet = FleetResidency(ALIGN)
    fleet.apply("a", batch(STATES.stored(PROMPT[:32], keep=[1]), WHOLE.stored(PROMPT[:32])))
    fleet.apply("a", batch(STATES.stored(PROMPT, start=2, stop=4, keep=[2])))
    fleet.apply("a", batch(WHOLE.stored(PROMPT[:64], start=1), FULL.stored(PROMPT, start=2, stop=3)))
    assert (layout_seen(fleet).alignment, layout_seen(fleet).inside_seen) == (32, False)


AHEAD = HashScheme(hash_block_size=16, lookahead=1)
AHEAD_STATES = Writer(AHEAD, group=0, kind="mamba")
AHEAD_FULL = Writer(AHEAD, group=1, kind="full_attention")
AHEAD_WHOLE = Writer(AHEAD, group=1, kind="full_attention", size=32)


def test_with_look_ahead_hashes_a_part_before_its_whole_block_proves_nothing() -> None:
    """vLLM 0.33: at 32 tokens the hash of the first 16 is known, that of the whole block is not."""
    fleet = FleetResidency(ALIGN)
    empty = AHEAD_STATES.stored(PROMPT[:17], keep=[])
    fleet.apply("a", batch(empty, AHEAD_FULL.stored(PROMPT[:64], start=2, stop=3)))
    fleet.apply("a", batch(AHEAD_STATES.stored(PROMPT[:97], keep=[5])))
    assert not layout_seen(fleet).inside_seen
    assert predicted(fleet, PROMPT[:100]) == 0
    fleet.apply("a", batch(AHEAD_WHOLE.stored(PROMPT[:97])))
    assert (layout_seen(fleet).alignment, layout_seen(fleet).inside_seen) == (32, False)
    assert predicted(fleet, PROMPT[:100]) == 96


def test_with_look_ahead_hashes_a_part_right_behind_whole_blocks_proves_nothing() -> None:
    fleet = FleetResidency(ALIGN)
    fleet.apply("a", batch(AHEAD_STATES.stored(PROMPT[:97], keep=[5]), AHEAD_WHOLE.stored(PROMPT[:97])))
    fleet.apply("a", batch(AHEAD_FULL.stored(PROMPT, start=6, stop=7)))
    assert layout_seen(fleet).alignment == 32


def test_with_look_ahead_hashes_a_state_a_block_before_a_boundary_proves_nothing() -> None:
    fleet = FleetResidency(ALIGN)
    whole = Writer(AHEAD, group=1, kind="full_attention", size=64)
    fleet.apply("a", batch(whole.stored(PROMPT[:65]), AHEAD_STATES.stored(PROMPT[:113], keep=[6])))
    assert layout_seen(fleet).alignment == 64
    fleet.apply("a", batch(AHEAD_STATES.stored(PROMPT[:97], keep=[5])))
    assert layout_seen(fleet).alignment == 16


def test_an_event_without_states_proves_nothing() -> None:
    fleet = FleetResidency(ALIGN)
    fleet.apply("a", batch(WHOLE.stored(PROMPT[:96]), STATES.stored(PROMPT[:112], keep=[])))
    assert layout_seen(fleet).alignment == 32


def test_a_restart_forgets_nothing_that_was_proven() -> None:
    fleet = FleetResidency(ALIGN)
    fleet.apply("a", batch(WHOLE.stored(PROMPT[:96]), STATES.stored(PROMPT[:112], keep=[6])))
    fleet.forget("a")
    fleet.apply("a", batch(WHOLE.stored(PROMPT[:96])))
    assert layout_seen(fleet).alignment == 16


def test_a_group_that_publishes_nothing_makes_the_look_up_a_joint_one() -> None:
    """With EAGLE the block to drop may then lie behind the prompt's last token but one."""
    drops = ModelFacts(eagle_groups="all")
    alone = layout_of(full(0, is_eagle=True), facts=drops)
    assert hit(alone, 96, {0: range(6)}) == 64
    assert hit(layout_of(full(1, is_eagle=True), facts=drops), 96, {1: range(6)}) == 80
    said = layout_of(full(0, is_eagle=True), facts=ModelFacts(hidden_groups=True))
    assert hit(said, 96, {0: range(6)}) == 80


def test_all_groups_may_drop_their_last_block() -> None:
    fleet = FleetResidency(ModelFacts(mamba_cache_mode="align", eagle_groups="all"))
    fleet.apply("a", batch(WHOLE.stored(PROMPT[:96]), STATES.stored(PROMPT[:96], keep=[5])))
    assert all(group.is_eagle for group in groups_of(fleet))


def test_a_hit_that_would_be_computed_again_is_none() -> None:
    fleet = FleetResidency(ModelFacts(replay_tokens=64))
    dense = writer(0, "full_attention")
    fleet.apply("a", batch(dense.stored(PROMPT[:96])))
    assert [predicted(fleet, PROMPT[:length]) for length in (65, 80, 81, 97)] == [0, 0, 80, 96]
    detail = fleet.predict(Prompt(PROMPT[:80]), ["a"], detail=True)["a"]
    assert (detail.hit_tokens, detail.by_class[0].hit_tokens, detail.replay_tokens) == (0, 64, 64)


def test_blocks_of_an_unseen_size_are_shown_as_longer() -> None:
    part = full(1, partial_only=True)
    layout = layout_of(mamba(0, "align"), part, unit=16)
    assert [spec_class.label for spec_class in layout.classes] == ["full_attention/>16", "mamba/16"]
    assert layout.alignment == 16


def test_states_beside_groups_that_publish_nothing_end_hits_inside_a_block() -> None:
    """vLLM looks several groups up jointly, those without events too; a group alone by whole blocks."""
    states = (GroupSpec(0, "mamba", 32, mamba_cache_mode="align"),)
    assert make_layout(states, ModelFacts(), 16).alignment == 32
    assert make_layout(states, ModelFacts(hidden_groups=True), 16).alignment == 16
