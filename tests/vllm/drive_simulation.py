"""Gives vLLM's own Scheduler, in virtual time, the requests that a simulated engine served.

Usage, under vLLM's interpreter: ``-m tests.vllm.drive_simulation --model DIR LOG...``. A log is one JSON
object: ``groups``, ``num_blocks``, ``retention``; ``timing``: that of the simulated engine; ``unit_tokens``;
``requests``, each (arrival in seconds, prompt tokens, answer tokens, ids), where an id stands for
``unit_tokens`` tokens. One JSON line per log: for each request its hit, the times of its first and its last
token, and how often it was preempted. All choices are vLLM's; only the time that a step takes is the
simulated engine's formula.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.v1.request import Request

from tests.vllm.real_scheduler import Prompt, RealEngine, Setup

MODEL_TOKENS_MAX = 131_072
VOCAB_TOKENS = 50_021
STEP = 7_919


class TracedEngine(RealEngine):
    """Answers with the tokens that the ids of a request stand for: equal ids, equal tokens."""

    def __init__(self, log: dict[str, Any], model: str) -> None:
        groups = tuple(
            {key: value for key, value in group.items() if value is not None and key != "group_idx"}
            for group in log["groups"]
        )
        self._timing = log["timing"]
        setup = Setup(
            groups=groups,
            num_blocks=log["num_blocks"],
            retention_interval=log["retention"],
            hash_algo="xxhash",
            max_num_batched_tokens=self._timing["chunk_tokens"],
            max_num_seqs=self._timing["seqs_max"],
            max_model_len=MODEL_TOKENS_MAX,
        )
        super().__init__(setup, model)
        self.scheduler.cache_config.block_size = min(group["block_size"] for group in groups)
        self._unit, self._asked = log["unit_tokens"], log["requests"]
        self._requests: list[Request] = []
        self._index: dict[str, int] = {}
        self._answering: set[str] = set()
        self._rows: list[dict[str, Any]] = []

    def run(self) -> list[dict[str, Any]]:
        """Serve all requests, one step after the other."""
        now, coming = 0.0, list(enumerate(self._asked))[::-1]
        while coming or self.busy:
            if not self.busy:
                now = max(now, coming[-1][1][0])
            while coming and coming[-1][1][0] <= now:
                self._arrive(*coming.pop())
            now = self._one_step(now)
        return self._rows

    def _arrive(self, index: int, asked: Sequence[Any]) -> None:
        _, prompt_tokens, answer_tokens, _ = asked
        request = self.add(Prompt(self._tokens(index, 0, prompt_tokens)), answer_tokens)
        self._requests.append(request)
        self._index[request.request_id] = index
        self._rows.append({"hit": None, "first_s": None, "ended_s": None, "preempted": 0})

    def _one_step(self, now: float) -> float:
        """Schedule a step and give its tokens; returns the time at which it ends."""
        self._schedule()
        output, _ = self._scheduled[-1]
        for new in output.scheduled_new_reqs:
            self._rows[self._index[new.req_id]]["hit"] = new.num_computed_tokens
        for name in output.preempted_req_ids or ():
            self._answering.discard(name)
            self._rows[self._index[name]]["preempted"] += 1
        counts, timing = output.num_scheduled_tokens, self._timing
        generating = len(self._answering & counts.keys())
        tokens = sum(count for name, count in counts.items() if name not in self._answering)
        chunk_s = timing["chunk_s"] + timing["prefill_s_per_token"] * tokens
        seconds = chunk_s + timing["interference_s"] * generating if tokens else 0.0
        now += max(seconds, timing["decode_s"]) if generating else seconds
        self.step()
        for name in counts:
            row, request = self._rows[self._index[name]], self._requests[self._index[name]]
            if request.num_output_tokens and row["first_s"] is None:
                row["first_s"] = now
            if request.is_finished():
                row["ended_s"] = now
                self._answering.discard(name)
            elif request.num_computed_tokens == request.num_tokens - 1:
                self._answering.add(name)
        return now

    def _accepted(self, request: Request, drafted: Sequence[int]) -> list[int]:
        have = request.num_tokens
        return self._tokens(self._index[request.request_id], have, have + 1)

    def _tokens(self, index: int, start: int, end: int) -> list[int]:
        ids, unit = self._asked[index][3], self._unit
        return [(ids[at // unit] * STEP + at % unit * 31 + 5) % VOCAB_TOKENS for at in range(start, end)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("logs", nargs="+", type=Path)
    options = parser.parse_args()
    for path in options.logs:
        engine = TracedEngine(json.loads(path.read_text()), options.model)
        print(json.dumps({"log": path.stem, "rows": engine.run()}), flush=True)


if __name__ == "__main__":
    main()
