"""The order in which each policy evicts, and reachability in the tree of prefixes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.connectors.group_shapes import GroupKind, GroupShape
from kvatlas.connectors.tier.base import block_key
from kvatlas.connectors.tier.eviction import (
    POLICY_NAMES,
    BoundaryPolicy,
    HintedPolicy,
    LruPolicy,
    make_policy,
)
from kvatlas.connectors.tier.host import HostTier
from kvatlas.connectors.tier.prefix_tree import Node
from kvatlas.publisher.pool.retention_order import HINTED_SHARE_MAX, OWNERS_MAX, RetentionHint, RetentionOrder
from tests.connectors.tier import eviction_simulation
from tests.support.examples import examples

FULL, WINDOW, STATE = 0, 1, 2
SHAPES = (
    GroupShape(FULL, GroupKind.FULL, 4),
    GroupShape(WINDOW, GroupKind.WINDOW, 4, 8),
    GroupShape(STATE, GroupKind.STATE, 4, 4),
)


def names(word: str, count: int = 0) -> list[bytes]:
    """One block hash per letter; each stands for all letters up to it."""
    return [word[: i + 1].encode() for i in range(len(word))][count:]


def keys(word: str, *groups: int, first: int = 0) -> list[bytes]:
    return [block_key(h, g) for h in names(word)[first:] for g in groups]


def boundary_tier(slots: int, shapes: Sequence[GroupShape] = SHAPES[:2]) -> HostTier:
    return HostTier(slots, BoundaryPolicy(shapes, 4, 4, nodes_max=1000))


def store(tier: HostTier, word: str, *groups: int, first: int = 0) -> None:
    for key, _ in tier.begin_store(keys(word, *groups, first=first), names(word)):
        tier.end_store(key, ok=True)


def load(tier: HostTier, wanted: Sequence[bytes]) -> None:
    assert tier.begin_load(wanted) is not None
    for key in wanted:
        tier.end_load(key, ok=True)


def missing(tier: HostTier, every: Sequence[bytes]) -> list[bytes]:
    there = tier.held("r", every)
    return [key for key in every if key not in there]


def test_lru_lets_the_unused_go_and_of_those_the_last_of_the_prompt() -> None:
    tier = HostTier(6, LruPolicy())
    store(tier, "abc", FULL)
    store(tier, "xyz", FULL)
    load(tier, keys("abc", FULL))
    store(tier, "m", FULL)
    assert missing(tier, keys("abc", FULL) + keys("xyz", FULL)) == keys("xyz", FULL)[-1:]


def test_tails_that_the_prompt_went_past_go_first() -> None:
    tier = boundary_tier(12)
    store(tier, "abcdef", FULL, WINDOW)
    store(tier, "xy", FULL, WINDOW)
    assert missing(tier, keys("abcdef", FULL, WINDOW)) == keys("abcd", WINDOW)
    assert missing(tier, keys("xy", FULL, WINDOW)) == []


def test_the_end_of_the_older_prompt_goes_next_with_all_that_leads_only_to_it() -> None:
    tier = boundary_tier(12)
    store(tier, "abcdef", FULL, WINDOW)
    store(tier, "xy", FULL, WINDOW)  # takes the tails of "abcd"
    store(tier, "uvw", FULL, WINDOW)
    assert missing(tier, keys("xy", FULL, WINDOW) + keys("uvw", FULL, WINDOW)[2:]) == []
    kept = tier.held("r", keys("abcdef", WINDOW))
    assert not kept  # tails go before the blocks below them, which are useless without them


def test_a_boundary_where_prompts_part_keeps_its_tail_and_its_prefix() -> None:
    tier = boundary_tier(20)
    store(tier, "abcdU", FULL, WINDOW)
    store(tier, "abcdVW", FULL, WINDOW)
    store(tier, "0pqr", FULL, WINDOW)
    store(tier, "1pqr", FULL, WINDOW)
    assert missing(tier, keys("abcd", FULL) + keys("abcd", WINDOW, first=2)) == []
    assert not tier.held("r", keys("abcdU", FULL, first=4) + keys("abcdVW", FULL, first=4))


def test_blocks_below_a_missing_one_go_first() -> None:
    tier = boundary_tier(6, SHAPES[:1])
    store(tier, "xy", FULL)
    store(tier, "abcd", FULL)
    bad = keys("ab", FULL)[-1:]
    tier.begin_load(bad)
    tier.end_load(bad[0], ok=False)
    store(tier, "mn", FULL)
    assert missing(tier, keys("xy", FULL) + keys("a", FULL)) == []
    assert missing(tier, keys("abcd", FULL, first=2)) == keys("abc", FULL, first=2)
    store(tier, "ab", FULL)
    assert missing(tier, keys("xy", FULL) + keys("ab", FULL)) == []


def test_blocks_below_a_returned_block_are_kept_again() -> None:
    tier = boundary_tier(6, SHAPES[:1])
    store(tier, "xy", FULL)
    store(tier, "abc", FULL)
    bad = keys("a", FULL)
    tier.begin_load(bad)
    tier.end_load(bad[0], ok=False)
    store(tier, "a", FULL)
    load(tier, keys("abc", FULL))
    store(tier, "mn", FULL)
    assert missing(tier, keys("abc", FULL)) == []
    assert missing(tier, keys("xy", FULL)) == keys("xy", FULL)[1:]


def test_full_prefixes_shrink_from_their_ends() -> None:
    tier = boundary_tier(6, SHAPES[:1])
    store(tier, "abcd", FULL)
    store(tier, "xyzu", FULL)
    assert missing(tier, keys("abcd", FULL)) == keys("abcd", FULL)[2:]


def test_a_prompt_longer_than_the_tier_keeps_its_head() -> None:
    tier = boundary_tier(5, SHAPES[:1])
    store(tier, "abcdefgh", FULL)
    assert missing(tier, keys("abcdefgh", FULL)) == keys("abcdefgh", FULL)[5:]
    store(tier, "abcdefghij", FULL, first=8)
    assert missing(tier, keys("abcde", FULL)) == []


def test_states_past_which_the_prompt_went_are_spare() -> None:
    tier = boundary_tier(8, (SHAPES[0], SHAPES[2]))
    store(tier, "abcd", FULL, STATE)
    store(tier, "x", FULL, STATE)
    assert missing(tier, keys("abcd", FULL, STATE)) == keys("ab", STATE)


def test_of_an_end_the_tail_goes_before_its_full_block() -> None:
    tier = boundary_tier(4, (SHAPES[0], SHAPES[2]))
    store(tier, "ab", FULL, STATE)
    for other, gone in (("x", "a"), ("y", "ab")):
        store(tier, other, FULL)
        assert missing(tier, keys("ab", FULL, STATE)) == keys(gone, STATE)


def test_a_boundary_loaded_twice_keeps_its_tail() -> None:
    tier = boundary_tier(8, (SHAPES[0], SHAPES[2]))
    store(tier, "abcd", FULL, STATE)
    for _ in range(2):
        load(tier, [*keys("ab", FULL), *keys("ab", STATE, first=1)])
    store(tier, "x", FULL, STATE)
    assert missing(tier, keys("abcd", FULL, STATE)) == [*keys("a", STATE), *keys("abc", STATE, first=2)]


def test_a_boundary_loaded_once_lets_its_tail_go_after_older_ones() -> None:
    tier = boundary_tier(8, (SHAPES[0], SHAPES[2]))
    store(tier, "abcd", FULL, STATE)
    load(tier, [*keys("ab", FULL), *keys("ab", STATE, first=1)])
    store(tier, "x", FULL, STATE)
    assert missing(tier, keys("abcd", FULL, STATE)) == [*keys("a", STATE), *keys("abc", STATE, first=2)]
    store(tier, "y", FULL)
    assert missing(tier, keys("abcd", FULL, STATE)) == keys("abc", STATE)


def test_a_boundary_that_can_be_resumed_outlives_what_follows_it() -> None:
    tier = boundary_tier(12, (SHAPES[0], SHAPES[2]))
    store(tier, "abcd", FULL, STATE)
    resumed = [*keys("ab", FULL), *keys("ab", STATE, first=1)]
    load(tier, resumed)
    store(tier, "xy", FULL, STATE)
    load(tier, resumed)
    store(tier, "mn", FULL, STATE)
    store(tier, "op", FULL, STATE)
    assert missing(tier, resumed) == []
    assert not tier.held("r", keys("abcd", FULL, STATE, first=2))


def test_a_prefix_that_is_used_again_is_no_longer_given_up() -> None:
    tier = boundary_tier(12, (SHAPES[0], SHAPES[2]))
    for word in ("abcd", "xy", "m", "n", "o"):  # "o" begins to give up "abcd"
        store(tier, word, FULL, STATE)
    assert missing(tier, keys("abcd", FULL)) == keys("abcd", FULL, first=3)
    store(tier, "abcd", FULL, STATE, first=3)
    assert missing(tier, keys("abcd", FULL)) == []


def test_the_base_of_a_chain_is_not_evicted_for_it() -> None:
    tier = boundary_tier(2, SHAPES)
    store(tier, "ab", FULL)
    store(tier, "a", WINDOW, STATE)
    assert missing(tier, keys("a", FULL, WINDOW)) == []
    assert tier.counters.dropped_for_room == 1


def test_a_long_prompt_is_given_up_in_parts() -> None:
    policy = BoundaryPolicy(SHAPES[:1], 4, 4, nodes_max=10_000)
    tier = HostTier(2000, policy)
    hashes = [i.to_bytes(4, "big") for i in range(2000)]
    every = [block_key(h, FULL) for h in hashes]
    for key, _ in tier.begin_store(every, hashes):
        tier.end_store(key, ok=True)
    for count, word in enumerate(("x", "y", "z"), 1):
        store(tier, word, FULL)
        assert len(policy._doomed) < 300
        assert missing(tier, every) == every[-count:]
    for number in range(900):
        store(tier, chr(0x4E00 + number), FULL)
    assert missing(tier, every) == every[-903:]


def test_the_prompt_that_was_loaded_longest_ago_shrinks_however_often_others_are_loaded() -> None:
    policy = BoundaryPolicy(SHAPES[:1], 4, 4, nodes_max=1000)
    tier = HostTier(9, policy)
    for word in ("mno", "xyz", "abc"):
        store(tier, word, FULL)
    for word in ["xyz", "abc"] * 100 + ["xyz"]:
        load(tier, keys(word, FULL))
    assert len(policy._leaves) <= 4 * len(policy.tree) + 64
    for oldest, others in (("mno", "012"), ("abc", "345")):
        for word in others:
            store(tier, word, FULL)
        assert missing(tier, keys("xyz", FULL) + keys(oldest, FULL)) == keys(oldest, FULL)


def test_without_a_lineage_the_oldest_goes() -> None:
    tier = boundary_tier(4)
    for word in ("a", "b", "c"):
        for key, _ in tier.begin_store(keys(word, FULL, WINDOW)):
            tier.end_store(key, ok=True)
    assert missing(tier, keys("a", FULL, WINDOW)) == keys("a", FULL, WINDOW)
    assert missing(tier, keys("b", FULL, WINDOW) + keys("c", FULL, WINDOW)) == []


def test_the_tree_is_bounded_and_counts_what_it_did_not_place() -> None:
    policy = BoundaryPolicy(SHAPES[:1], 4, 4, nodes_max=6)
    tier = HostTier(100, policy)
    store(tier, "abcd", FULL)
    store(tier, "efgh", FULL)
    assert policy.tree.unplaced_chains == 1
    assert tier.held_keys == 8
    store(tier, "efgh", FULL)
    assert missing(tier, keys("abcd", FULL) + keys("efgh", FULL)) == []


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="no eviction policy 'fifo'; there are lru, boundary, hinted"):
        make_policy("fifo", slots=1, shapes=(), hash_block_tokens=4, boundary_tokens=4)
    with pytest.raises(ValueError, match="must be multiples of 3"):
        BoundaryPolicy(SHAPES, 3, 4, nodes_max=4)


class Hinted:
    """A tier with the policy ``hinted``, and its clock."""

    def __init__(self, slots: int, owner_share: float = 0.5) -> None:
        self.now = 0.0
        self.policy = HintedPolicy(slots, owner_share, lambda: self.now)
        self.tier = HostTier(slots, self.policy)

    def store(self, word: str, ttl_s: float = 0.0, value: float = 1.0, owner: str = "") -> None:
        store(self.tier, word, FULL)
        if ttl_s:
            self.tier.retain(keys(word, FULL), RetentionHint(ttl_s, value, owner))

    def held(self, word: str) -> int:
        return len(self.tier.held("r", keys(word, FULL)))


def test_hinted_blocks_outlive_a_flood_until_their_hint_ends() -> None:
    one = Hinted(8)
    one.store("abcd", ttl_s=60)
    for flood in ("ij", "kl", "mn"):
        one.store(flood)
    assert one.held("abcd") == 4
    load(one.tier, keys("abcd", FULL))
    assert one.policy.counters.saved == 4
    one.now = 60.0
    for flood in ("op", "qr", "st", "uv"):
        one.store(flood)
    assert one.held("abcd") == 0
    assert one.policy.counters.expired == 4


def test_without_hints_the_least_recently_used_go_as_with_lru() -> None:
    one = Hinted(6)
    one.store("abc")
    one.store("xyz")
    load(one.tier, keys("abc", FULL))
    one.store("m")
    assert missing(one.tier, keys("abc", FULL) + keys("xyz", FULL)) == keys("xyz", FULL)[-1:]


def test_a_use_moves_a_lapsed_hint_back_into_the_order_of_use() -> None:
    one = Hinted(4, owner_share=1.0)
    one.store("ab", ttl_s=5)
    one.now = 5.0
    one.store("x")
    one.store("y")
    load(one.tier, keys("ab", FULL))
    one.store("z")
    assert (one.held("ab"), one.held("x"), one.held("y")) == (2, 0, 1)


def test_hints_of_one_owner_take_no_more_than_its_share_and_keep_the_start_of_a_prompt() -> None:
    one = Hinted(8, owner_share=0.5)
    one.store("abcdef", ttl_s=60, owner="loud")
    for flood in ("ij", "kl", "mn", "op"):
        one.store(flood, owner="quiet")
    assert missing(one.tier, keys("abcdef", FULL)) == keys("abcdef", FULL, first=4)
    assert one.policy.counters.over_share == 2


def test_a_newer_prompt_of_the_owner_takes_the_share_unless_it_is_less_valuable() -> None:
    one = Hinted(8, owner_share=0.25)
    one.store("ab", ttl_s=60, value=0.9)
    one.store("cd", ttl_s=60, value=0.1)
    for flood in ("ij", "kl", "mn", "op"):
        one.store(flood)
    assert (one.held("ab"), one.held("cd")) == (2, 0)
    one.store("ef", ttl_s=60, value=0.9)
    for flood in ("IJ", "KL", "MN", "OP"):
        one.store(flood)
    assert (one.held("ab"), one.held("ef")) == (0, 2)


def test_an_owner_gets_its_part_although_others_had_all_hints() -> None:
    one = Hinted(8)
    one.store("abcd", ttl_s=60, owner="first")
    one.store("mn", ttl_s=60, owner="second")
    one.store("xy", ttl_s=60, owner="third")
    for flood in ("1", "2", "3", "4"):
        one.store(flood)
    assert (one.held("abcd"), one.held("mn"), one.held("xy")) == (2, 2, 2)


def test_an_owner_cannot_shorten_the_hint_of_another() -> None:
    one = Hinted(8)
    one.store("ab", ttl_s=60, owner="first")
    one.store("ab", ttl_s=1, owner="second")
    one.now = 2.0
    for flood in ("ij", "kl", "mn", "op"):
        one.store(flood)
    assert one.held("ab") == 2


def test_of_the_hinted_the_least_valuable_go_if_nothing_else_can() -> None:
    one = Hinted(4)
    one.store("a", ttl_s=60, value=0.9, owner="first")
    one.store("b", ttl_s=60, value=0.2, owner="second")
    one.store("wxyz")
    assert (one.held("a"), one.held("b")) == (0, 0)
    one.store("a", ttl_s=60, value=0.9, owner="first")
    one.store("b", ttl_s=60, value=0.2, owner="second")
    one.store("wxy")
    assert (one.held("a"), one.held("b")) == (1, 0)


def test_hints_of_too_many_owners_are_ignored() -> None:
    order: RetentionOrder[int] = RetentionOrder(4 * OWNERS_MAX)
    for number in range(OWNERS_MAX + 1):
        order.add([number])
        order.retain([number], RetentionHint(60.0, 1.0, str(number)), 0.0)
    assert (order.counters.retained, order.counters.over_share) == (OWNERS_MAX, 1)


def test_only_the_policy_hinted_obeys_hints() -> None:
    for name in POLICY_NAMES:
        policy = make_policy(name, slots=4, shapes=SHAPES[:1], hash_block_tokens=4, boundary_tokens=4)
        tier = HostTier(4, policy)
        store(tier, "ab", FULL)
        tier.retain(keys("ab", FULL), RetentionHint(60.0))
        for flood in ("ij", "kl", "mn"):
            store(tier, flood, FULL)
        assert (not missing(tier, keys("ab", FULL))) == (name == "hinted")


@settings(max_examples=examples(300))
@given(
    slots=st.integers(1, 12),
    share=st.sampled_from([0.2, 0.5, 1.0]),
    moves=st.lists(
        st.tuples(
            st.sampled_from(["add", "use", "retain", "remove", "take"]),
            st.lists(st.integers(0, 20), unique=True, max_size=8),
            st.sampled_from(["", "a", "b"]),
            st.integers(0, 4),
            st.integers(0, 3),
        ),
        max_size=40,
    ),
)
def test_hints_stay_within_the_shares_and_no_key_is_lost(
    slots: int,
    share: float,
    moves: list[tuple[str, list[int], str, int, int]],
) -> None:
    order: RetentionOrder[int] = RetentionOrder(slots, share)
    held: set[int] = set()
    now = 0.0
    for move, numbers, owner, level, later in moves:
        now += later
        there = [key for key in numbers if key in held]
        if move == "add":
            new = [key for key in numbers if key not in held][: slots - len(held)]
            order.add(new)
            held.update(new)
        elif move == "use":
            order.use(there, now)
        elif move == "retain":
            order.retain(there, RetentionHint(1.0 + level, level / 4, owner), now)
        elif move == "remove":
            for key in there:
                order.remove(key)
            held.difference_update(there)
        else:
            spared = set(numbers)
            wanted = min(level, len(held - spared))
            gone = order.take_oldest(level, spared.__contains__, now)
            assert len(gone) == wanted
            assert not spared & set(gone)
            held.difference_update(gone)
        queues = [order._plain, order._lapsed, *(q for each in order._owned.values() for q in each)]
        assert sorted(key for queue in queues for key in queue) == sorted(held)
        assert {owner: sum(map(len, each)) for owner, each in order._owned.items()} == dict(order._sizes)
        assert sum(order._sizes.values()) == len(order._live) <= HINTED_SHARE_MAX * slots
        assert all(size <= share * slots for size in order._sizes.values())
        assert {e[2] for e in order._deadlines if order._is_current(e)} == set(order._live)


words = st.text("ab", min_size=1, max_size=7)
steps = st.lists(
    st.tuples(
        st.sampled_from(["store", "fail", "load", "spoil", "reset"]),
        words,
        st.integers(0, 6),
        st.integers(0, 3),
    ),
    max_size=30,
)


@settings(max_examples=examples(300))
@given(slots=st.integers(1, 14), granularity=st.sampled_from([1, 2]), moves=steps)
def test_the_tree_knows_what_can_be_reached(slots: int, granularity: int, moves: list[tuple]) -> None:  # type: ignore[type-arg]
    policy = BoundaryPolicy(SHAPES, 4, 4 * granularity, nodes_max=64)
    tier = HostTier(slots, policy)
    for move, word, first, among in moves:
        every = keys(word, FULL, WINDOW, STATE, first=min(first, len(word) - 1))
        if move in ("store", "fail"):
            for at, (key, _) in enumerate(tier.begin_store(every, names(word))):
                tier.end_store(key, ok=move == "store" or at % 2 == 0)
        elif move == "reset":
            tier.reset()
        else:
            there = sorted(tier.held("r", every))[: among + 1]
            assert tier.begin_load(there) is not None
            for key in there:
                tier.end_load(key, ok=move == "load")
        tier.check_integrity()
        check_tree(policy, tier, granularity)
    tier.reset()
    assert len(policy.tree) == 0
    assert not policy._passed


def check_tree(policy: BoundaryPolicy, tier: HostTier, full_blocks: int) -> None:
    tree = policy.tree
    placed = [key for node in tree._nodes.values() for key in node.keys]
    assert len(placed) == len(set(placed)) == len(tree.node_of) == tier.held_keys
    for node in tree._nodes.values():
        assert node.keys or node.children
        assert all(child.parent is node for child in node.children)
        assert node.cut is (not node.loose and unreachable(node, full_blocks))
        assert all((key in policy._cut_keys) is node.cut for key in node.keys)


def unreachable(node: Node, full_blocks: int) -> bool:
    return any(sum(g == FULL for g in above.keys.values()) < full_blocks for above in node.up())


@pytest.mark.long
@pytest.mark.parametrize("slots", [2000, 4000])
def test_keeping_boundaries_saves_more_tokens_than_recency(slots: int) -> None:
    saved = {
        name: eviction_simulation.simulate(name, slots, seed=7, requests=400).hit_tokens
        for name in POLICY_NAMES
    }
    assert saved["boundary"] > 1.1 * saved["lru"]
