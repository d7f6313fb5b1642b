"""Both halves under a model of the engine that takes every liberty the protocol leaves; needs no vLLM.

Whatever the order of events: the model never reads wrong KV, pins return to zero, every load is answered once
by each rank, no row is read before it is whole, and a request whose load failed is computed next.
"""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.examples import examples

pytest.importorskip("numpy", reason="needs numpy")

from tests.connectors.offload.model_engine import BLOCK, ModelEngine

TRUNKS = [[(shared_prefix * 7 + i * 3) % 40 for i in range(40)] for shared_prefix in range(3)]


class Protocol(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 1000),
        gpu_blocks=st.integers(40, 70),
        host_blocks=st.sampled_from([6, 30, 200]),
        pinned_share=st.sampled_from([0.05, 0.3, 1.0]),
    )
    def begin(self, seed: int, gpu_blocks: int, host_blocks: int, pinned_share: float) -> None:
        self.engine = ModelEngine(
            seed, gpu_blocks=gpu_blocks, host_blocks=host_blocks, pinned_share=pinned_share
        )

    @rule(
        shared_prefix=st.sampled_from(TRUNKS),
        shared=st.integers(1, 40),
        own=st.integers(0, 9),
        answer=st.integers(1, 9),
    )
    def add(self, shared_prefix: list[int], shared: int, own: int, answer: int) -> None:
        if len(self.engine.requests) < 6:
            self.engine.add(shared_prefix[:shared] + [own] * own + [1], answer)

    @rule(budget=st.integers(1, 32))
    def step(self, budget: int) -> None:
        self.engine.step(budget)

    @rule(steps=st.integers(2, 12))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step(24)

    @rule(pick=st.randoms(use_true_random=False))
    def preempt(self, pick: random.Random) -> None:
        if running := self.engine.in_state("running"):
            self.engine.preempt(pick.choice(running))

    @rule(
        pick=st.randoms(use_true_random=False), states=st.sampled_from([("loading",), ("waiting", "running")])
    )
    def abort(self, pick: random.Random, states: tuple[str, ...]) -> None:
        if candidates := self.engine.in_state(*states):
            self.engine.finish(pick.choice(candidates))

    @rule(rate=st.sampled_from([0.0, 0.0, 0.3, 1.0]), rank=st.sampled_from([0, 1]))
    def faults(self, rate: float, rank: int) -> None:
        self.engine.engines[rank].failure_rate = rate

    @rule(lazy=st.booleans(), rank=st.sampled_from([0, 1]))
    def speed(self, lazy: bool, rank: int) -> None:
        self.engine.engines[rank].lazy = lazy

    @rule(shy=st.booleans(), wait=st.sampled_from([0.0, 0.4, 2.0]))
    def answers(self, shy: bool, wait: float) -> None:
        self.engine.tier.shy = shy
        self.engine.now += wait

    @rule()
    def reset(self) -> None:
        self.engine.half.reset_cache()

    @invariant()
    def accounts_agree(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.settle()


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(max_examples=examples(60), stateful_step_count=50)


def test_the_model_loads_preempts_and_fails() -> None:
    """One long seeded run reaches every case that the state machine above can explore."""
    rng = random.Random(1)
    engine = ModelEngine(1, gpu_blocks=50, host_blocks=60, pinned_share=0.5)
    engine.engines[0].failure_rate = 0.05
    for _ in range(1500):
        if len(engine.requests) < 5 and rng.random() < 0.4:
            shared_prefix = rng.choice(TRUNKS)
            engine.add([*shared_prefix[: rng.randint(20, 40)], rng.randrange(50)], rng.randint(1, 8))
        if (loading := engine.in_state("loading")) and rng.random() < 0.05:
            engine.finish(rng.choice(loading))
        engine.step(24)
        engine.check()
    engine.settle()
    assert all(
        engine.counts[what] > 3 for what in ("loads", "preemptions", "failed_loads", "aborts_while_loading")
    ), engine.counts
    told = engine.half.counters.take()
    assert told["blocks_stored"] - told["blocks_removed"] == engine.tier.held_keys
    loads = engine.counts["loads"], engine.counts["loaded_tokens"]
    assert (told["lookups/loaded"], told["hit_tokens"]) == loads


def test_a_tier_that_does_not_answer_costs_its_deadline_and_no_more() -> None:
    engine = ModelEngine(2, gpu_blocks=40, host_blocks=60, pinned_share=1.0)
    engine.tier.shy = True
    engine.add(list(range(3 * BLOCK)), 1)
    for _ in range(5):
        engine.step(32)
    assert [request.state for request in engine.requests] == ["waiting"]
    engine.now += 0.9
    engine.step(32)
    assert [request.state for request in engine.requests] == ["waiting"]
    engine.now += 0.2
    engine.step(32)
    assert [request.state for request in engine.requests] == ["running"]
    assert engine.half.counters.take()["lookups/late"] >= 1


def test_without_a_block_pool_stores_are_refused_loudly() -> None:
    engine = ModelEngine(3, gpu_blocks=40, host_blocks=60, pinned_share=1.0)
    engine.half._pins._pool = None
    engine.add(list(range(3 * BLOCK)), 1)
    engine.step(32)  # admits it
    with pytest.raises(RuntimeError, match="bind_gpu_block_pool"):
        engine.step(32)
