"""``HybridOffloadConnector`` beside vLLM's own OffloadingConnector: what do they load?

Both run the same trace under vLLM's real scheduler, with real copies and every KV read checked. They load the
same, to the token, in all these layouts, with four exceptions that the tests below pin down one by one:

1. Generated tokens. vLLM's connector leaves them out unless ``offload_prompt_only`` is false; ours stores
   them unless ``store_generated`` is false. Where both settings say the same, the loads are the same.
2. Groups whose block sizes are not multiples of one another (48 and 32 tokens). Ours ends hits where the
   engine's own prefix cache can, at multiples of all block sizes; vLLM's connector at those of one group,
   so it may load more than the GPU would have kept.
3. Windows of larger blocks than full attention, with sparse retention. There vLLM's connector stores the
   window's blocks of all boundaries; ours those that the engine keeps reachable itself. With dense retention
   the loads are the same.
4. Prompts that are held to their last token, without windows or states. vLLM's connector loads all of it, and
   the last token is computed into the block that was loaded; ours leaves that block to be computed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch; make test-connectors runs it")
pytest.importorskip("vllm.v1", reason="needs vLLM; make test-connectors runs it")

from kvatlas.connectors.transfer.base import Direction, TransferJob
from tests.connectors.multi.real_memory_engine import PAGE_BYTES, Hit, RealMemoryEngine, Setup
from tests.publisher.pool.layouts import MIXES
from tests.vllm.tiny_model import write_tiny_model

HOST_BYTES = 4000 * PAGE_BYTES
BLOCK = 16
"""Common divisor of all block sizes."""
SAME = (
    "full",
    "window",
    "gemma",
    "gpt_oss",
    "full_two_windows",
    "full_chunked_window",
    "coarse_full",
    "three_sizes",
    "two_fulls",
    "mamba_align_equal",
    "mamba_align_same_coarse",
    "full_two_windows_mamba",
    "mamba_align_window",
)


def ours(**extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "HybridOffloadConnector",
        "kv_connector_module_path": "kvatlas.connectors.offload",
        "kv_connector_extra_config": {
            "host_bytes": HOST_BYTES, "policy": "lru", "pinned_source_blocks_max": 1.0, **extra
        },
    }  # fmt: skip


def theirs(**extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {
            "spec_name": "TorchOffloadingSpec",
            "spec_module_path": "tests.connectors.multi.cpu_spec",
            "cpu_bytes_to_use": HOST_BYTES,
            **extra,
        },
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny-model")))


Open = Callable[..., RealMemoryEngine]


@pytest.fixture
def start(model: str) -> Iterator[Open]:
    running: list[RealMemoryEngine] = []

    def start(mix: str, transfer: dict[str, Any], *, dense: bool = False) -> RealMemoryEngine:
        setup = Setup(
            groups=MIXES[mix],
            num_blocks=900,
            max_num_batched_tokens=96,
            retention_interval=None if dense else 0,
        )
        running.append(RealMemoryEngine(setup, transfer, model))
        return running[-1]

    yield start
    for engine in running:
        engine.shutdown()


@dataclass
class Turn:
    """One request of the trace. ``follows``: its prompt begins with the last prompt and its answer."""

    prompt: list[int]
    max_tokens: int
    follows: bool
    forget: bool


def trace(seed: int, turns: int = 24) -> list[Turn]:
    rng = random.Random(seed)

    def text(length: int) -> list[int]:
        return [rng.randrange(3, 900) for _ in range(length)]

    shared_prefixes = [text(rng.randint(80, 260)) for _ in range(4)]
    made = []
    for _ in range(turns):
        shared_prefix = rng.choice(shared_prefixes)
        kept = rng.choice([len(shared_prefix), rng.randint(20, len(shared_prefix))])
        follows = rng.random() < 0.4
        made.append(
            Turn(
                prompt=text(rng.randint(1, 40))
                if follows
                else shared_prefix[:kept] + text(rng.choice([0, 1, 30])),
                max_tokens=rng.choice([1, 30, 60]),
                follows=follows,
                forget=rng.random() < 0.6,
            )
        )
    return made


def run(engine: RealMemoryEngine, turns: list[Turn], *, forget: bool = True) -> list[Hit]:
    hits = []
    before: list[int] = []
    for turn in turns:
        if turn.forget and forget:
            engine.forget_gpu()
        prompt = (before if turn.follows and len(before) < 800 else []) + turn.prompt
        if len(prompt) % BLOCK == 0:  # exception 4
            prompt = [*prompt, 5]
        hits.append(engine.run(prompt, turn.max_tokens))
        before = prompt + engine.answer
    return hits


@pytest.mark.parametrize("mix", SAME)
@pytest.mark.parametrize("generated", [False, True], ids=["prompts", "all tokens"])
def test_both_load_the_same(start: Open, mix: str, generated: bool) -> None:
    turns = trace(len(mix))
    own = run(start(mix, ours(store_generated=generated)), turns)
    assert own == run(start(mix, theirs(offload_prompt_only=not generated)), turns)
    assert sum(hit.external > 0 for hit in own) > len(turns) // 4


def test_generated_tokens_are_left_out_by_theirs_unless_told(start: Open) -> None:
    """Exception 1."""
    first, more = Turn(list(range(10, 110)), 60, follows=False, forget=False), [7] * 5
    turns = [first, Turn(more, 1, follows=True, forget=True)]
    assert run(start("full", ours()), turns)[1] == Hit(0, (100 + 60 - 1) // 16 * 16)
    assert run(start("full", theirs()), turns)[1] == Hit(0, 100 // 16 * 16)


def test_ours_ends_hits_where_the_engine_can(start: Open) -> None:
    """Exception 2: lengths that 48 and 32 both divide, though full attention's 48 alone would be more."""
    turns = [turn for turn in trace(3) if not turn.follows]
    for turn in turns:
        turn.forget = True
    own = run(start("odd_sizes", ours(), dense=True), turns)
    gpu = run(start("odd_sizes", ours(), dense=True), turns, forget=False)
    other = run(start("odd_sizes", theirs(), dense=True), turns)
    assert [hit.external for hit in own] == [hit.local + hit.external for hit in gpu]
    assert all(hit.external % 96 == 0 for hit in own)
    assert all(0 <= b.external - a.external < 96 for a, b in zip(own, other, strict=True))
    assert own != other


def test_ours_stores_what_sparse_retention_keeps(start: Open) -> None:
    """Exception 3."""
    turns = [turn for turn in trace(4) if not turn.follows]
    for turn in turns:
        turn.forget = True
    assert run(start("coarse_window", ours(), dense=True), turns) == run(
        start("coarse_window", theirs(), dense=True), turns
    )
    sparse = run(start("coarse_window", ours()), turns)
    other = run(start("coarse_window", theirs()), turns)
    assert all(a.external <= b.external for a, b in zip(sparse, other, strict=True))
    assert sparse != other


def test_the_last_block_of_a_prompt_is_left_to_be_computed(start: Open) -> None:
    """Exception 4."""
    for engine, again in ((start("full", ours()), 144), (start("full", theirs()), 160)):
        prompt = list(range(10, 170))
        engine.run(prompt)
        engine.forget_gpu()
        assert engine.run(prompt) == Hit(0, again)


@pytest.mark.parametrize("mix", ["gemma", "full_two_windows_mamba"])
def test_side_by_side_they_load_the_same_again(start: Open, mix: str) -> None:
    """Both in one ``HybridMultiConnector``: each holds what it would hold alone."""
    turns = trace(6)
    both = {
        "kv_connector": "HybridMultiConnector",
        "kv_connector_module_path": "kvatlas.connectors.multi",
        "kv_connector_extra_config": {
            "connectors": [ours(), theirs(offload_prompt_only=False)],
        },
    }
    engine = start(mix, both)
    assert run(engine, turns) == run(start(mix, ours()), turns)
    announced = {
        (event.medium, event.ownership)
        for event in engine.events
        if getattr(event, "medium", None) not in {None, "GPU"}
    }
    assert announced == {("CPU", "kvatlas-host"), ("CPU", None)}


def test_a_failed_load_of_one_child_is_computed_and_the_other_loads_next(start: Open) -> None:
    both = {
        "kv_connector": "HybridMultiConnector",
        "kv_connector_module_path": "kvatlas.connectors.multi",
        "kv_connector_extra_config": {"connectors": [ours(), ours()]},
    }
    engine = start("gemma", both)
    prompt = list(range(10, 210))
    engine.run(prompt)
    engine.forget_gpu()
    failed = []

    def fault(job: TransferJob, copy: Callable[[], None]) -> None:
        if job.direction is Direction.LOAD:
            failed.append(job.job_id)
            raise OSError("the link is down")
        copy()

    for transfers in engine.engines:
        transfers._engine._fault = fault
    assert engine.run(prompt, 5) == Hit(0, 192)
    assert len(failed) == 1, "a request whose load failed is offered another"
    for transfers in engine.engines:
        transfers._engine._fault = None
    engine.forget_gpu()
    assert engine.run(prompt, 5) == Hit(0, 192)
