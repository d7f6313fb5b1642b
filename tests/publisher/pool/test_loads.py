"""A pool with a connector behind it: what a load holds, stores and makes loadable again."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.publisher.block_pool import HybridBlockPool, PoolRequest
from kvatlas.publisher.groups import GroupSpec
from kvatlas.publisher.pool.host_tier import HostTier
from tests.publisher.pool.pools import chunked, full, make_pool, mamba, window
from tests.support.examples import examples

MIXES: list[tuple[GroupSpec, ...]] = [
    (full(0),),
    (full(0), window(1, 64)),
    (*(window(idx, 64) for idx in range(3)), full(3)),
    (full(0), chunked(1, 48), window(2, 40)),
    (full(0), mamba(1, "align"), mamba(2, "align")),
    (full(0), mamba(1, "align", 64)),
    (full(0, 64), mamba(1, "align", 64)),
]


class Engine:
    """A pool, a tier behind it, and requests one after the other or side by side."""

    def __init__(self, groups: tuple[GroupSpec, ...], blocks: int, tier_blocks: int = 10_000) -> None:
        self.pool: HybridBlockPool = make_pool(*groups, blocks=blocks, chunk_tokens_max=96)
        self.tier = HostTier(self.pool.layout, tier_blocks)

    def start(self, prompt: list[int]) -> PoolRequest | None:
        request = self.pool.request(prompt)
        return None if self.pool.start(request, reach=self.tier.reach) is None else request

    def step(self, request: PoolRequest) -> bool:
        """One chunk, or the end of its load; False where the pool has no room."""
        if request.loading_to:
            self.pool.loaded(request)
        elif not (chunk := self.pool.next_chunk(request)) or not self.pool.compute(request, chunk):
            return False
        self.pool.end_step()
        self.tier.store([block.key for block in self.pool.due(request)])
        return True

    def serve(self, prompt: list[int]) -> tuple[int, int]:
        """A prompt alone: tokens that the GPU gave, and how far the load got."""
        request = self.start(prompt)
        assert request is not None, "the prompt does not fit"
        found = request.hit, request.loading_to
        while request.num_computed < request.num_tokens:
            assert self.step(request)
        self.pool.finish(request)
        return found


@pytest.mark.parametrize("groups", MIXES, ids=lambda groups: "+".join(group.kind[:6] for group in groups))
@pytest.mark.parametrize("length", [330, 345])
def test_evicted_blocks_are_loaded_up_to_the_earlier_hit(groups: tuple[GroupSpec, ...], length: int) -> None:
    engine = Engine(groups, blocks=40 * len(groups))
    prompt = list(range(length))
    assert engine.serve(prompt) == (0, 0)
    whole = engine.pool.find_hit(engine.pool.request(prompt))
    assert whole > 200
    for filler in range(20):
        engine.serve([1000 + filler] * 330)
    assert engine.pool.find_hit(engine.pool.request(prompt)) == 0
    assert engine.serve(prompt) == (0, whole)
    assert engine.pool.find_hit(engine.pool.request(prompt)) == whole, "a load makes it hit again"
    engine.pool.check_integrity()


def test_a_load_takes_only_the_blocks_that_are_read() -> None:
    engine = Engine((full(0), window(1, 64)), blocks=100)
    engine.serve(list(range(330)))
    assert engine.pool.reset()
    free = engine.pool.num_free_blocks
    request = engine.start(list(range(330)))
    assert request is not None
    assert request.loading_to == 320
    assert free - engine.pool.num_free_blocks == 20 + 4, "all of full attention, the window's last blocks"
    assert len(engine.tier.load_keys(request, 0, 320)) == 24
    with pytest.raises(ValueError, match="cannot compute"):
        engine.pool.compute(request, 1)
    engine.pool.loaded(request)
    with pytest.raises(ValueError, match="loads nothing"):
        engine.pool.loaded(request)
    assert engine.pool.next_chunk(request) == 10


def test_a_load_leaves_what_others_need() -> None:
    engine = Engine((full(0),), blocks=45)
    engine.serve(list(range(330)))
    assert engine.pool.reset()
    other = engine.pool.request([7] * 330)
    assert engine.pool.start(other) == 0
    assert engine.pool.compute(other, 96)
    assert engine.pool.blocks_to_finish(other) == 21 - 6
    loading = engine.pool.request(list(range(330)))
    assert engine.pool.start(loading, reach=engine.tier.reach, reserved_blocks=44) is None
    assert engine.pool.start(loading, reach=engine.tier.reach, reserved_blocks=15) == 0


def test_blocks_used_last_leave_host_memory_last() -> None:
    tier = HostTier(make_pool(full(0)).layout, 2)
    tier.store([(0, 1), (0, 2)])
    tier.use([(0, 2)])
    assert tier.store([(0, 3)]) == ([(0, 3)], [(0, 1)])


@settings(max_examples=examples(60))
@given(st.sampled_from(MIXES), st.integers(0, 10_000), st.sampled_from([60, 10_000]))
def test_the_books_stay_right_in_any_order(
    groups: tuple[GroupSpec, ...], seed: int, tier_blocks: int
) -> None:
    rng = random.Random(seed)
    engine = Engine(groups, blocks=35 * len(groups), tier_blocks=tier_blocks)
    texts = [[rng.randrange(500) for _ in range(300)] for _ in range(2)]
    running: list[PoolRequest] = []
    loads = 0
    for _ in range(60):
        if rng.random() < 0.3 and len(running) < 4:
            prompt = rng.choice(texts)[: rng.randint(1, 300)] + [rng.randrange(600, 700)] * rng.randint(1, 40)
            hit = engine.pool.find_hit(engine.pool.request(prompt))
            if (request := engine.start(prompt)) is not None:
                assert request.loading_to == 0 or request.loading_to > hit >= request.hit
                assert request.loading_to < len(prompt)
                loads += bool(request.loading_to)
                running.append(request)
        elif running:
            request = rng.choice(running)
            if not engine.step(request):
                running.remove(request)
                (engine.pool.finish if rng.random() < 0.5 else engine.pool.preempt)(request)
                engine.pool.end_step()
        engine.pool.check_integrity()
        assert len(engine.tier) <= tier_blocks
    for request in running:
        engine.pool.finish(request)
    engine.pool.check_integrity()
    assert engine.pool.num_free_blocks == 35 * len(groups) - 1
