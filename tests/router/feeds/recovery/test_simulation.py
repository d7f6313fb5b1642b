"""Recovery under every fault at once, on hundreds of seeds (``KVATLAS_RECOVERY_SEEDS=5000`` for more).

A failing seed is named with the command that runs it alone.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.support.examples import some
from tests.support.feed_world import run

BLOCK = 30
SEEDS = int(os.environ.get("KVATLAS_RECOVERY_SEEDS") or 300)
ONE = os.environ.get("KVATLAS_RECOVERY_SEED")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", [int(ONE)] if ONE else some(range(0, SEEDS, BLOCK), 10))
def test_nothing_is_lost_and_nothing_is_invented(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + (1 if ONE else BLOCK)):
        try:
            world = run(seed)
        except Exception as error:
            command = f"KVATLAS_RECOVERY_SEED={seed} python -m pytest {os.path.relpath(__file__)}"
            raise AssertionError(f"seed {seed}: {error}; again with: {command}") from error
        seen[str(world.stats.state)] += 1
        seen["snapshots"] += world.stats.snapshots
        seen["replays"] += world.stats.replays
        seen["restarts"] += world.stats.restarts
        seen["gaps"] += world.stats.gaps
    if not ONE:  # the faults really happened
        assert min(seen["ready"], seen["snapshots"], seen["replays"], seen["restarts"], seen["gaps"]) > 5, (
            seen
        )
