"""Repeats on vLLM's KV cache manager what a simulated engine asked of its pool, and compares every answer.

Usage, under vLLM's interpreter: ``-m tests.vllm.drive_simulation --model DIR LOG...``.
A log is one JSON object: ``groups``, ``num_blocks``, ``retention``, ``chunk_tokens``, ``unit_tokens``;
``requests``, each (prompt tokens, ids), where an id stands for ``unit_tokens`` tokens; ``operations`` in
order, as ``test_simulation_cache`` records them. One JSON line per log: counts, and the first difference or
null. Chunks are cut by vLLM's scheduler, hits found and blocks handed out by its cache manager.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vllm.v1.request import Request, RequestStatus

from tests.vllm.real_scheduler import Prompt, RealEngine, Setup

MODEL_TOKENS_MAX = 131_072
VOCAB_TOKENS = 50_021
STEP = 7_919


class DifferenceError(AssertionError):
    """The manager answered something else."""


class Replay:
    """One log on one real manager."""

    def __init__(self, log: dict[str, Any], model: str) -> None:
        groups = tuple(
            {key: value for key, value in group.items() if value is not None and key != "group_idx"}
            for group in log["groups"]
        )
        self._chunk_tokens = log["chunk_tokens"]
        setup = Setup(
            groups=groups,
            num_blocks=log["num_blocks"],
            retention_interval=log["retention"],
            max_num_batched_tokens=self._chunk_tokens,
            max_model_len=MODEL_TOKENS_MAX,
        )
        self._real = RealEngine(setup, model)
        self._scheduler, self._manager = self._real.scheduler, self._real.manager
        self._scheduler.cache_config.block_size = min(group["block_size"] for group in groups)
        self._unit = log["unit_tokens"]
        self._asked = log["requests"]
        self._requests: dict[int, Request] = {}
        self._chunk: dict[int, int] = {}
        self.counts = {"operations": 0, "starts": 0, "hit_tokens": 0, "chunks": 0, "waits": 0, "preempted": 0}

    def run(self, operations: list[list[Any]]) -> None:
        for name, *arguments in operations:
            self.counts["operations"] += 1
            getattr(self, f"_{name}")(*arguments)

    def _tokens(self, index: int, start: int, end: int) -> list[int]:
        """The tokens that the ids stand for: equal ids, equal tokens."""
        ids, unit = self._asked[index][1], self._unit
        return [(ids[at // unit] * STEP + at % unit * 31 + 5) % VOCAB_TOKENS for at in range(start, end)]

    def _request(self, index: int) -> Request:
        if index not in self._requests:
            prompt = Prompt(self._tokens(index, 0, self._asked[index][0]))
            self._requests[index] = self._real._request(prompt, MODEL_TOKENS_MAX)
        return self._requests[index]

    def _start(self, index: int, hit: int | None) -> None:
        """As ``Scheduler.schedule`` admits a waiting request."""
        request, manager = self._request(index), self._manager
        blocks, found, request.shared_prefix_boundary = manager.get_computed_blocks(request)
        tokens = min(request.num_tokens - found, self._chunk_tokens)
        if self._scheduler.need_mamba_block_aligned_split:
            tokens = self._scheduler._mamba_block_aligned_split(request, tokens, found)
        slots = None
        if tokens:
            slots = manager.allocate_slots(
                request,
                tokens,
                num_new_computed_tokens=found,
                new_computed_blocks=blocks,
                full_sequence_must_fit=self._scheduler.scheduler_reserve_full_isl,
            )
        if slots is None:
            self._same(index, "hit of one that must wait", None, hit)
            self.counts["waits"] += 1
            return
        self._same(index, "hit", found, hit)
        request.num_computed_tokens = found + tokens
        request.status = RequestStatus.RUNNING
        self._chunk[index] = tokens
        self.counts["starts"] += 1
        self.counts["hit_tokens"] += found

    def _compute(self, index: int, tokens: int, done: bool) -> None:
        """A chunk of a prompt, or generated tokens."""
        request = self._request(index)
        self.counts["chunks"] += 1
        admitted = self._chunk.pop(index, None)
        if admitted is not None:
            self._same(index, "first chunk", admitted, tokens)
            self._same(index, "room for the first chunk", True, done)
            return
        left = min(request.num_tokens - request.num_computed_tokens, self._chunk_tokens)
        if self._scheduler.need_mamba_block_aligned_split:
            left = self._scheduler._mamba_block_aligned_split(request, left)
        self._same(index, "chunk", left, tokens)
        slots = self._manager.allocate_slots(request, tokens)
        self._same(index, "room for a chunk", slots is not None, done)
        if done:
            request.num_computed_tokens += tokens

    def _extend(self, index: int, tokens: int) -> None:
        request = self._request(index)
        have = request.num_tokens
        request.append_output_token_ids(self._tokens(index, have, have + tokens))

    def _preempt(self, index: int) -> None:
        request = self._request(index)
        self._manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        self._chunk.pop(index, None)
        self.counts["preempted"] += 1

    def _finish(self, index: int) -> None:
        self._manager.free(self._requests.pop(index))

    def _end_step(self) -> None:
        _, retained = self._manager.take_kv_cache_block_copies()
        self._manager.block_pool.free_blocks(retained)
        self._manager.new_step_starts()

    def _same(self, index: int, what: str, theirs: object, ours: object) -> None:
        if theirs != ours:
            operation = self.counts["operations"]
            raise DifferenceError(
                f"operation {operation}, request {index}, {what}: vLLM {theirs}, simulated {ours}"
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("logs", nargs="+", type=Path)
    options = parser.parse_args()
    for path in options.logs:
        log = json.loads(path.read_text())
        replay = Replay(log, options.model)
        difference = None
        try:
            replay.run(log["operations"])
        except DifferenceError as found:
            difference = str(found)
        print(json.dumps({"log": path.stem, **replay.counts, "difference": difference}), flush=True)


if __name__ == "__main__":
    main()
