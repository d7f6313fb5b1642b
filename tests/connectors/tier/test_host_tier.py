"""The host tier's account against a plain model, for every policy, under any order of begins and ends."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvatlas.connectors.group_shapes import GroupKind, GroupShape
from kvatlas.connectors.tier.base import block_key
from kvatlas.connectors.tier.eviction import POLICY_NAMES, LruPolicy, make_policy
from kvatlas.connectors.tier.host import HostTier
from tests.support.examples import examples

SHAPES = (GroupShape(0, GroupKind.FULL, 4), GroupShape(1, GroupKind.WINDOW, 4, 8))
PROMPTS = 4
LENGTH = 8


def lineage(prompt: int) -> list[bytes]:
    """Prompts 0 and 1, and 2 and 3, share their first half."""
    return [bytes([prompt // 2 if i < LENGTH // 2 else 10 + prompt, i]) * 8 for i in range(LENGTH)]


def policy(name: str, slots: int) -> object:
    return make_policy(name, slots=slots, shapes=SHAPES, hash_block_tokens=4, boundary_tokens=4)


class TierMachine(RuleBasedStateMachine):
    """The model: a state per key, slots in use, and the set that the changes tell."""

    @initialize(slots=st.integers(1, 12), name=st.sampled_from(POLICY_NAMES))
    def start(self, slots: int, name: str) -> None:
        self.slots = slots
        self.tier = HostTier(slots, policy(name, slots))  # type: ignore[arg-type]
        self.storing: dict[bytes, int] = {}
        self.held: dict[bytes, int] = {}
        self.stale: set[bytes] = set()
        self.loads: list[bytes] = []
        self.told: set[bytes] = set()

    @rule(prompt=st.integers(0, PROMPTS - 1), cut=st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)))
    def begin_store(self, prompt: int, cut: tuple[int, int]) -> None:
        names = lineage(prompt)
        chain = [block_key(h, g) for h in names[min(cut) : max(cut)] for g in (0, 1)]
        pinned = set(self.loads)
        before = dict(self.held)
        for key, slot in self.tier.begin_store(chain, names):
            assert key in chain
            assert key not in self.storing
            assert key not in before
            self.storing[key] = slot
        self.hear()
        for gone in before.keys() - self.told:
            assert gone not in pinned
            assert gone not in chain
            del self.held[gone]

    @precondition(lambda self: self.storing)
    @rule(data=st.data(), ok=st.booleans())
    def end_store(self, data: st.DataObject, ok: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.storing)))
        self.tier.end_store(key, ok=ok)
        slot = self.storing.pop(key)
        if ok and key not in self.stale:
            self.held[key] = slot
        self.stale.discard(key)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def begin_load(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True, min_size=1))
        assert self.tier.begin_load(keys) == [self.held[key] for key in keys]
        self.loads += keys

    @rule(prompt=st.integers(0, PROMPTS - 1))
    def begin_load_of_what_is_not_all_held(self, prompt: int) -> None:
        keys = [block_key(h, 0) for h in lineage(prompt)]
        if not set(keys) <= self.held.keys():
            assert self.tier.begin_load(keys) is None

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), ok=st.booleans())
    def end_load(self, data: st.DataObject, ok: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.loads)))
        self.loads.remove(key)
        self.tier.end_load(key, ok=ok)
        if not ok:
            self.held.pop(key, None)

    @rule()
    def reset(self) -> None:
        under_way = bool(self.storing or self.loads)
        assert self.tier.reset() is not under_way
        self.stale |= self.storing.keys()
        self.held.clear()

    def hear(self) -> None:
        for stored, key in self.tier.take_changes().changes:
            assert (key in self.told) is not stored
            (self.told.add if stored else self.told.discard)(key)

    @invariant()
    def account_is_right(self) -> None:
        self.tier.check_integrity()
        self.hear()
        assert self.told == self.held.keys()
        every = [block_key(h, g) for p in range(PROMPTS) for h in lineage(p) for g in (0, 1)]
        assert self.tier.held("r", every) == self.held.keys()
        assert self.tier.held_keys == len(self.held)
        assert self.tier.busy() is bool(self.storing or self.loads)
        in_use = [*self.storing.values(), *self.held.values()]
        assert not [slot for slot, times in Counter(in_use).items() if times > 1]


TierMachine.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40)
TestHostTier = TierMachine.TestCase


def filled(slots: int) -> tuple[HostTier, list[bytes]]:
    tier = HostTier(slots, LruPolicy())
    keys = [block_key(h, 0) for h in lineage(0)][:slots]
    for key, _ in tier.begin_store(keys):
        tier.end_store(key, ok=True)
    tier.take_changes()
    return tier, keys


def test_a_key_loaded_by_several_requests_stays_until_the_last_is_done() -> None:
    tier, (only,) = filled(1)
    other = block_key(b"other", 0)
    assert tier.begin_load([only]) == tier.begin_load([only]) == [0]
    tier.end_load(only, ok=True)
    assert tier.begin_store([other]) == []
    assert tier.counters.dropped_for_room == 1
    tier.end_load(only, ok=True)
    assert tier.begin_store([other]) == [(other, 0)]
    assert tier.counters.evictions == 1
    assert tier.take_changes().changes == ((False, only),)


def test_a_bad_value_is_not_held_and_its_slot_waits_for_the_other_readers() -> None:
    tier, (only,) = filled(1)
    tier.begin_load([only])
    tier.begin_load([only])
    tier.end_load(only, ok=False)
    assert tier.held("r", [only]) == frozenset()
    assert tier.begin_load([only]) is None
    assert tier.begin_store([only]) == []
    assert tier.free_slots == 0
    tier.end_load(only, ok=True)
    assert tier.free_slots == 1
    assert tier.begin_store([only]) == [(only, 0)]
    assert tier.counters.failed_loads == 1


def test_a_store_that_failed_is_counted_and_leaves_its_slot() -> None:
    tier, key = HostTier(1, LruPolicy()), block_key(b"new", 0)
    for _ in range(2):
        assert tier.begin_store([key]) == [(key, 0)]
        tier.end_store(key, ok=False)
    assert (tier.counters.failed_stores, tier.counters.stores) == (2, 0)
    assert tier.held("r", [key]) == frozenset()
    tier.begin_store([key])
    tier.end_store(key, ok=True)
    assert tier.begin_load([key]) == [0]
    assert (tier.counters.failed_stores, tier.counters.stores, tier.counters.loads) == (2, 1, 1)


def test_a_store_begun_before_a_reset_is_never_held() -> None:
    tier = HostTier(2, LruPolicy())
    key = block_key(b"old", 0)
    tier.begin_store([key])
    assert tier.reset() is False
    tier.end_store(key, ok=True)
    assert tier.held("r", [key]) == frozenset()
    assert tier.take_changes().changes == ()
    assert tier.reset() is True


def test_reset_tells_every_key_that_went() -> None:
    tier, keys = filled(3)
    assert tier.reset() is True
    assert sorted(tier.take_changes().changes) == sorted((False, key) for key in keys)


def test_a_chain_never_evicts_what_it_asks_for() -> None:
    tier, keys = filled(3)
    more = [block_key(b"more%d" % i, 0) for i in range(4)]
    assert [key for key, _ in tier.begin_store([keys[0], *more])] == more[:2]
    assert keys[0] in tier.held("r", keys)
    assert tier.counters.dropped_for_room == 2


def test_ends_without_begins_are_errors() -> None:
    tier, (only,) = filled(1)
    for key in (only, b"unknown0"):
        with pytest.raises(RuntimeError, match="a store that was not begun"):
            tier.end_store(key, ok=True)
        with pytest.raises(RuntimeError, match="a load that was not begun"):
            tier.end_load(key, ok=True)


def test_a_tier_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one slot"):
        HostTier(0, LruPolicy())
