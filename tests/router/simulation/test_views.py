"""What variants believe: the history tree against a naive one, its cap, the truth, and the shadow's rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.block_pool import HybridBlockPool
from kvatlas.publisher.events import BlockHash
from kvatlas.router.placement.shadow import ShadowSpec
from kvatlas.router.simulation.requests import block_hashes
from kvatlas.router.simulation.router_view import (
    NOTHING,
    ExactRules,
    History,
    OracleView,
    PrefixHit,
    RouterView,
    history_blocks,
)
from kvatlas.router.simulation.setup import VARIANTS, variants_of
from tests.router.simulation.support import FULL, HYBRID, request

paths = st.lists(st.sampled_from("ab"), min_size=1, max_size=5).map("".join)


def hashes_of(path: str) -> list[BlockHash]:
    """Chained: one per prefix."""
    return [BlockHash(hash(path[: end + 1]) & (1 << 63) - 1) for end in range(len(path))]


@given(st.lists(st.tuples(st.integers(0, 1), paths), max_size=20), paths)
def test_an_uncapped_history_is_every_prefix_that_was_sent(sent: list[tuple[int, str]], asked: str) -> None:
    history = History(2, 16, None)
    for engine, path in sent:
        history.placed(engine, 16 * len(path) + 1, hashes_of(path))
    for engine, seen in enumerate(history.look(16 * len(asked) + 1, hashes_of(asked), 0.0)):
        prefixes = {path[:end] for where, path in sent if where == engine for end in range(1, len(path) + 1)}
        longest = max((end for end in range(1, len(asked) + 1) if asked[:end] in prefixes), default=0)
        assert seen == PrefixHit(16 * longest, 16 * longest)


def test_the_last_token_is_always_computed() -> None:
    history = History(1, 16, None)
    history.placed(0, 32, hashes_of("ab"))
    assert history.look(32, hashes_of("ab"), 0.0) == [PrefixHit(16, 16)]


@given(st.lists(paths, min_size=1, max_size=30), st.integers(1, 6))
def test_a_capped_history_holds_the_latest_blocks_and_whole_prefixes(sent: list[str], cap: int) -> None:
    history = History(1, 16, cap)
    used: list[str] = []
    for path in sent:
        history.placed(0, 16 * len(path) + 1, hashes_of(path))
        for end in range(len(path), 0, -1):  # the start of a prefix is used last
            if path[:end] in used:
                used.remove(path[:end])
            used.append(path[:end])
        used = used[-cap:]
    for path in sent:
        known = next((end for end in range(len(path)) if path[: end + 1] not in used), len(path))
        assert history.look(16 * len(path) + 1, hashes_of(path), 0.0)[0].hit == 16 * known


def test_the_truth_is_what_the_pools_hold() -> None:
    pools = [
        HybridBlockPool(HYBRID, num_blocks=100, scheme=HashScheme(hash_block_size=64), events=False)
        for _ in range(2)
    ]
    one = request(0, 640, 0, 1)
    hashes = block_hashes(one, 64)
    pooled = pools[1].request([0] * 640, hashes=hashes)
    pools[1].start(pooled)
    pools[1].compute(pooled, 640)
    pools[1].finish(pooled)
    assert OracleView(pools).look(640, hashes, 0.0) == [PrefixHit(0, 0), PrefixHit(576, 576)]
    assert OracleView(pools).look(1000, block_hashes(request(0, 1000, 0, 1), 64), 0.0)[0] == NOTHING


def test_rules_follow_the_engines_retention_without_events() -> None:
    spec = ShadowSpec(groups=HYBRID, num_blocks=100, scheme=HashScheme(hash_block_size=64), assumed=())
    rules = ExactRules(2, spec)
    one = request(0, 1300, 0, 1)
    hashes = block_hashes(one, 64)
    assert rules.look(1300, hashes, 0.0) == [NOTHING, NOTHING]
    rules.prefilled(1, 1300, hashes)
    assert rules.look(1300, hashes, 0.0) == [NOTHING, PrefixHit(1280, 1280)]
    branch = rules.look(700, hashes[:10], 0.0)[1]
    assert branch.hit < branch.shared_prefix == 640, "the window's blocks at the branch were not kept"


def test_the_blind_see_nothing() -> None:
    assert RouterView(3).look(100, hashes_of("ab"), 0.0) == [NOTHING] * 3


def test_a_capped_history_is_as_large_as_the_pool_allows_beside_the_windows() -> None:
    assert history_blocks(FULL, 1000, 6400.0, 0) == 1000
    assert history_blocks(HYBRID, 1000, 6400.0, None) == 500, "dense: both groups keep every block"
    assert 950 <= history_blocks(HYBRID, 1000, 6400.0, 0) < 1000, "two window pages per prompt"


def test_variants_by_name() -> None:
    found = variants_of(["round-robin", "kvatlas:beta=0.5"])
    assert list(found) == ["round-robin", "kvatlas:beta=0.5"]
    assert found["kvatlas:beta=0.5"].settings == (("beta", 0.5),)
    for bad in ("best", "kvatlas:beta=2", "kvatlas:gamma=1", "kvatlas:beta=nan", ""):
        with pytest.raises(ValueError, match=r"beta|unknown policy"):
            variants_of([bad])
    assert all(variant.what for variant in VARIANTS.values())
