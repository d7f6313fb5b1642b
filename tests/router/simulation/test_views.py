"""Views of the variants: the truth, the shadow's rules, and nothing."""

from __future__ import annotations

import pytest

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.block_pool import HybridBlockPool
from kvatlas.publisher.events import BlockHash
from kvatlas.router.placement.shadow import ShadowSpec
from kvatlas.router.simulation.other_router import PrefixHit
from kvatlas.router.simulation.requests import block_hashes
from kvatlas.router.simulation.router_view import NOTHING, ExactRules, OracleView, RouterView
from kvatlas.router.simulation.variants import VARIANTS, variants_of
from tests.router.simulation.support import HYBRID, request


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
    assert RouterView(3).look(100, [BlockHash(1)], 0.0) == [NOTHING] * 3


def test_variants_by_name() -> None:
    found = variants_of(["round-robin", "kvatlas:beta=0.5"])
    assert list(found) == ["round-robin", "kvatlas:beta=0.5"]
    assert found["kvatlas:beta=0.5"].settings == (("beta", 0.5),)
    for bad in ("best", "kvatlas:beta=2", "kvatlas:gamma=1", "kvatlas:beta=nan", ""):
        with pytest.raises(ValueError, match=r"beta|unknown policy"):
            variants_of([bad])
    assert all(variant.what for variant in VARIANTS.values())
