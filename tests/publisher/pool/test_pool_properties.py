"""Rules that hold for any model and any order of requests, checked after every operation."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.block_pool import HybridBlockPool, PoolRequest
from kvatlas.publisher.groups import GroupSpec
from tests.publisher.pool.layouts import FAMILIES
from tests.publisher.pool.pool_load import Alone, load_rng, run_load
from tests.publisher.pool.pools import CopyCounter, chunked, full, mamba, window
from tests.support.examples import examples, some

MIXES: list[tuple[int, tuple[GroupSpec, ...]]] = [
    (16, (full(0),)),
    (16, (window(0, 49),)),
    (16, (full(0), window(1, 64))),
    (16, (*(window(idx, 64) for idx in range(5)), full(5))),
    (16, (full(0), window(1, 32), window(2, 96))),
    (16, (full(0), chunked(1, 48), window(2, 40))),
    (16, (full(0), mamba(1, "align"), mamba(2, "align"))),
    (16, (full(0), mamba(1, "align", 64))),
    (16, (full(0, 64), mamba(1, "align", 64))),
    (16, (full(0), mamba(1, "all"), window(2, 64))),
    (16, (full(0, 32), window(1, 64, 16))),
    (16, (full(0, is_eagle=True), window(1, 64))),
    (16, (full(0, 32, is_eagle=True), window(1, 64, 16, is_eagle=True))),
]


class PoolMachine(RuleBasedStateMachine):
    """Requests over a few shared texts start, compute, grow, are preempted and finish in any order."""

    @initialize(mix=st.sampled_from(MIXES), retention=st.sampled_from([0, 64, None]), seed=st.integers(0, 99))
    def make(self, mix: tuple[int, tuple[GroupSpec, ...]], retention: int | None, seed: int) -> None:
        hash_block, groups = mix
        if len(groups) == 1 and groups[0].kind == "full_attention" and retention:
            retention = 0
        self.pool = HybridBlockPool(
            groups,
            num_blocks=25 * len(groups),
            scheme=HashScheme(hash_block_size=hash_block),
            retention_interval=retention,
            chunk_tokens_max=96,
        )
        self.counter = CopyCounter(len(groups))
        rng = random.Random(seed)
        self.texts = [[rng.randrange(500) for _ in range(260)] for _ in range(2)]
        self.waiting: list[PoolRequest] = []
        self.running: list[PoolRequest] = []

    @rule(text=st.integers(0, 1), keep=st.integers(1, 260), fresh=st.integers(0, 40))
    def arrive(self, text: int, keep: int, fresh: int) -> None:
        prompt = self.texts[text][:keep] + [1000 + fresh] * fresh
        request = self.pool.request(prompt)
        hit = self.pool.find_hit(request)
        assert 0 <= hit <= len(prompt) - 1
        assert hit % self.pool.layout.alignment == 0 or self.pool.layout.partial_hits
        if len(self.waiting) < 4:
            self.waiting.append(request)

    @precondition(lambda self: self.waiting)
    @rule()
    def start(self) -> None:
        request = self.waiting[0]
        found, free = self.pool.find_hit(request), self.pool.num_free_blocks
        hit = self.pool.start(request)
        if hit is None:
            assert self.pool.num_free_blocks == free
            assert (
                self.running or self.pool.next_chunk(request) == 0 or free < self.pool._store.num_blocks - 1
            )
        else:
            assert hit == found == request.num_computed
            chunk = self.pool.next_chunk(request)
            assert 0 < chunk <= 96
            assert self.pool.compute(request, chunk), "a started request has room for its first chunk"
            self.running.append(self.waiting.pop(0))
        self.settle()

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 20), token=st.integers(0, 3))
    def go_on(self, pick: int, token: int) -> None:
        request = self.running[pick % len(self.running)]
        if request.num_computed == request.num_tokens:
            request.append(token)
        before = request.num_computed
        chunk = self.pool.next_chunk(request)
        if self.pool.compute(request, chunk):
            assert request.num_computed == before + chunk
        else:
            assert request.num_computed == before
            self.running.remove(request)
            self.pool.preempt(request)
            self.waiting.insert(0, request)
        self.settle()

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 20))
    def finish(self, pick: int) -> None:
        self.pool.finish(self.running.pop(pick % len(self.running)))
        self.settle()

    @rule()
    def reset(self) -> None:
        assert self.pool.reset() == (self.pool.usage == 0)
        self.settle()

    def settle(self) -> None:
        """The books add up, usage is a share, and events alone give what is resident."""
        self.pool.check_integrity()
        assert 0.0 <= self.pool.usage <= 1.0
        assert (self.pool.usage == 0.0) == (not self.running)
        self.counter.apply(self.pool.take_events())
        for group_idx in range(len(self.pool.layout.groups)):
            assert self.counter.resident(group_idx) == self.pool.resident(group_idx)
        self.pool.check_integrity()


PoolMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestPoolMachine = pytest.mark.timeout(120)(PoolMachine.TestCase)


RECORD = json.loads((Path(__file__).parent / "recorded_runs.json").read_text())


def test_every_family_is_recorded() -> None:
    assert set(RECORD["digests"]) == set(FAMILIES)


@pytest.mark.parametrize("family", some(FAMILIES, 4))
def test_run_equals_vllms(family: str) -> None:
    side = Alone(FAMILIES[family], load_rng(family, RECORD["seed"]))
    run_load(side, RECORD["requests"])
    assert side.digest == RECORD["digests"][family]
