"""The tier that simulations keep and the connectors' own, with ``lru`` or ``hinted``: both hold the same."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.connectors.tier.base import block_key, split_key
from kvatlas.connectors.tier.eviction import HintedPolicy, LruPolicy
from kvatlas.connectors.tier.host import HostTier
from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.groups import GroupSpec
from kvatlas.publisher.pool import host_tier
from kvatlas.publisher.pool.layout import pool_layout
from kvatlas.publisher.pool.retention_order import RetentionHint
from tests.support.examples import examples

GROUPS = (GroupSpec(0, "full_attention", 16), GroupSpec(1, "sliding_window", 16, sliding_window=33))
PROMPT_BLOCKS = 10
Key = host_tier.HeldKey


def chain(prompt: int, start: int, end: int) -> list[Key]:
    """Blocks of one prompt in both groups; two prompts each share their first half."""
    names = [
        bytes([prompt // 2 if at < PROMPT_BLOCKS // 2 else 10 + prompt, at]) * 4 for at in range(start, end)
    ]
    return [(group, name) for name in names for group in (0, 1)]


def wire(keys: list[Key]) -> list[bytes]:
    return [block_key(name, group) for group, name in keys if isinstance(name, bytes)]


@settings(max_examples=examples(150))
@given(st.integers(1, 30), st.integers(0, 10_000), st.integers(1, 40), st.booleans())
def test_the_same_blocks_are_held_and_given_up(slots: int, seed: int, steps: int, hinted: bool) -> None:
    rng = random.Random(seed)
    now = 0.0
    simulated = host_tier.HostTier(pool_layout(GROUPS, HashScheme(hash_block_size=16), 0), slots)
    real = HostTier(slots, HintedPolicy(slots, 0.5, lambda: now) if hinted else LruPolicy())
    held: set[bytes] = set()
    for _ in range(steps):
        start, end = sorted(rng.sample(range(PROMPT_BLOCKS + 1), 2))
        keys = chain(rng.randrange(4), start, end)
        now += rng.random()
        hint = RetentionHint(rng.choice([1.0, 5.0]), rng.random(), rng.choice("ab"))
        given = hint if hinted and rng.random() < 0.5 else None
        if rng.random() < 0.3:
            keys = [key for key in keys if key in simulated]
            simulated.use(keys, given, now)
            assert real.begin_load(wire(keys)) is not None
            for key in wire(keys):
                real.end_load(key, ok=True)
            if given is not None:
                real.retain(wire(keys), given)
            continue
        new, gone = simulated.store(keys, given, now)
        begun = [key for key, _ in real.begin_store(wire(keys))]
        for key in begun:
            real.end_store(key, ok=True)
        if given is not None:
            real.retain(wire(keys), given)
        changes = real.take_changes().changes
        assert wire(new) == begun
        assert wire(gone) == [key for stored, key in changes if not stored]
        held = (held | set(wire(new))) - set(wire(gone))
        assert real.held("", list(held)) == held
        assert len(simulated) == len(held) == real.held_keys <= slots
        assert all((split_key(key)[1], split_key(key)[0]) in simulated for key in held)
