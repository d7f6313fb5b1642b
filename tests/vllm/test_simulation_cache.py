"""The simulated engine's cache against vLLM's KVCacheManager, on samples of every workload and model.

A simulated engine serves a sample; what it asked of its pool is written down, operation by operation, and
asked of the real manager in the same order (``drive_simulation``), with tokens made from the ids. Hits, chunk
lengths, waits for room and running out of it must be the same for every request.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.block_pool import HybridBlockPool, PoolRequest
from kvatlas.publisher.groups import GroupSpec
from kvatlas.router.simulation.cache_layouts import MODELS, POOL_BLOCKS_MIN, groups_of, pool_blocks
from kvatlas.router.simulation.engine import SimEngine
from kvatlas.router.simulation.request_run import RequestRun
from kvatlas.router.simulation.requests import Request, block_hashes, continued
from kvatlas.router.simulation.setup import Timing
from kvatlas.router.simulation.workload import GENERATORS
from tests.vllm.forked import driven

pytestmark = pytest.mark.vllm

DEADLINE_S = 600
REQUESTS = 150
CHUNK_TOKENS = 4096
ENGINE_SPEED = 3.0
"""Arrivals so much faster than one engine likes, that prompts wait and many generate together."""
GROWTH = 1.1
WORKLOADS = ("chat", "tenants", "agents", "shared")
"""Not ``documents``: prompts of 49 K tokens take minutes and no other path."""
Operation = list[Any]
COUNTS = ("starts", "hit_tokens", "chunks", "waits", "preempted")


class RecordingPool(HybridBlockPool):
    """Writes down what it is asked, and what it answered."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.operations: list[Operation] = []
        self.names: dict[int, int] = {}

    def start(self, request: PoolRequest, budget_tokens: int | None = None, **loads: Any) -> int | None:
        """``loads``: what a connector would load; these engines have none."""
        hit = super().start(request, budget_tokens, **loads)
        self.operations.append(["start", self.names[id(request)], hit])
        return hit

    def compute(self, request: PoolRequest, num_tokens: int) -> bool:
        done = super().compute(request, num_tokens)
        self.operations.append(["compute", self.names[id(request)], num_tokens, done])
        return done

    def extend(self, request: PoolRequest, token_ids: Sequence[int]) -> None:
        super().extend(request, token_ids)
        self.operations.append(["extend", self.names[id(request)], len(token_ids)])

    def preempt(self, request: PoolRequest) -> None:
        super().preempt(request)
        self.operations.append(["preempt", self.names[id(request)]])

    def finish(self, request: PoolRequest) -> None:
        super().finish(request)
        self.operations.append(["finish", self.names[id(request)]])

    def end_step(self) -> None:
        super().end_step()
        if self.operations[-1:] != [["end_step"]]:
            self.operations.append(["end_step"])


def record(
    requests: Sequence[Request], groups: tuple[GroupSpec, ...], num_blocks: int, retention: int | None
) -> dict[str, Any] | None:
    """One engine serves all requests; its log, or None where one of them does not fit into the pool."""
    unit = min(group.block_size for group in groups)
    pool = RecordingPool(
        groups,
        num_blocks=num_blocks,
        scheme=HashScheme(algo="xxhash_cbor", hash_block_size=unit),
        retention_interval=retention,
        chunk_tokens_max=CHUNK_TOKENS,
        events=False,
    )
    timing = Timing(chunk_tokens=CHUNK_TOKENS)
    ignore = lambda run, now: None  # noqa: E731
    refused: list[RequestRun] = []
    engine = SimEngine(
        pool, timing, first_token=ignore, ended=ignore, refused=lambda run, now: refused.append(run)
    )
    kept = []
    for index, request in enumerate(requests):
        at_s = request.at_s / ENGINE_SPEED
        while engine.next_s <= at_s:
            engine.advance()
        hashes = block_hashes(request, unit)
        pool_request = pool.request([0] * request.input_tokens, hashes=hashes)
        kept.append(pool_request)  # ids of objects name requests: none may be freed
        pool.names[id(pool_request)] = index
        engine.arrive(
            RequestRun(index, pool_request, request.input_tokens, request.output_tokens, at_s), at_s
        )
        if refused:
            return None
    while engine.next_s < float("inf"):
        engine.advance()
    if refused:
        return None
    return {
        "groups": msgspec.to_builtins(groups),
        "num_blocks": num_blocks,
        "retention": retention,
        "chunk_tokens": CHUNK_TOKENS,
        "unit_tokens": requests[0].unit_tokens,
        "requests": [[request.input_tokens, request.ids] for request in requests],
        "operations": pool.operations,
    }


def replay(python: str, model: Path, logs: list[Path]) -> list[dict[str, Any]]:
    """One line per log, from vLLM's interpreter."""
    words = ("tests.vllm.drive_simulation", "--model", str(model), *map(str, logs))
    lines = driven(python, *words, timeout=DEADLINE_S, VLLM_ALLOW_LONG_MAX_MODEL_LEN="1")
    return [json.loads(line) for line in lines if line.startswith("{")]


def tight(
    requests: Sequence[Request], groups: tuple[GroupSpec, ...], retention: int | None
) -> dict[str, Any]:
    """On about the smallest pool that holds every prompt: blocks are evicted, last comers preempted."""
    blocks = float(POOL_BLOCKS_MIN)
    while (log := record(requests, groups, int(blocks), retention)) is None:
        blocks *= GROWTH
    return log


def roomy(requests: Sequence[Request], groups: tuple[GroupSpec, ...]) -> dict[str, Any]:
    log = record(requests, groups, pool_blocks(requests, groups, 1, 0.5), 0)
    assert log is not None
    return log


@pytest.mark.timeout(DEADLINE_S + 60)
def test_every_hit_equals_the_real_managers(vllm_python: str, tiny_model: Path, tmp_path: Path) -> None:
    logs = []
    for workload in WORKLOADS:
        make = GENERATORS[workload]
        requests = continued(make(REQUESTS, 0.3 * REQUESTS, 3))
        for model in MODELS:
            groups = groups_of(model)
            retentions = (0,) if model == "full" else (0, 4096, None)
            made = {f"tight-{retention}": tight(requests, groups, retention) for retention in retentions}
            made["roomy-0"] = roomy(requests, groups)
            for name, log in made.items():
                logs.append(tmp_path / f"{workload}-{model}-{name}.json")
                logs[-1].write_text(json.dumps(log))
    replayed = replay(vllm_python, tiny_model, logs)
    assert [one for one in replayed if one["difference"] is not None] == []
    assert len(replayed) == len(logs)
    for model in MODELS:
        ones = [one for one in replayed if f"-{model}-" in one["log"]]
        total = {key: sum(one[key] for one in ones) for key in COUNTS}
        assert total["hit_tokens"] > 500_000, f"{model}: hits too few to say anything: {total}"
        assert total["chunks"] > 2 * total["starts"], f"{model}: no prompt was computed in chunks: {total}"
        assert min(total["preempted"], total["waits"]) > 0, f"{model}: no pool was tight enough: {total}"
