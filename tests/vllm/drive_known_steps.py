"""The table of ``benchmarks/known_steps.py`` with vLLM's own Scheduler in its engines, in virtual time.

Usage, under vLLM's interpreter: ``-m tests.vllm.drive_known_steps --model DIR [--seeds N] [--laws ...]
[--states ...]``. One JSON line per row. The steps, what each computes and what it finds in the cache are
vLLM's, and only their time is the law's; so the figures do not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
from collections.abc import Sequence

from benchmarks.known_steps import (
    BLOCK_TOKENS,
    Asked,
    KnownEngine,
    Law,
    Step,
    arguments,
    rows,
    token_seconds,
)
from tests.vllm.real_scheduler import Prompt, RealEngine, Setup

CACHED_TOKENS = 4096
"""Known to every engine from the start: cached parts of prompts begin it."""
PROMPT_TOKENS_MAX = 1 << 18


class ScheduledEngine(KnownEngine):
    """``waiting``, ``running`` and the choice of each step's tokens are vLLM's."""

    def __init__(self, law: Law, model: str) -> None:
        super().__init__(law)
        setup = Setup(
            groups=({"kind": "full_attention", "block_size": BLOCK_TOKENS},),
            num_blocks=2 * PROMPT_TOKENS_MAX // BLOCK_TOKENS,
            hash_algo="xxhash",
            seed="one for all engines of the process",
            max_num_batched_tokens=law.budget,
            max_num_seqs=law.seqs,
            max_model_len=PROMPT_TOKENS_MAX,
            async_scheduling=law.ahead,
        )
        self._vllm = RealEngine(setup, model)
        self._asked: dict[str, Asked] = {}
        self._own_token = CACHED_TOKENS
        self.add(Asked(CACHED_TOKENS, CACHED_TOKENS, answer=1))
        while self._vllm.busy:
            self.begin_step()
            self.end_step()
        # Steps of nothing, scheduled ahead.
        self._steps.clear()
        self._vllm._scheduled.clear()

    @property
    def counts(self) -> tuple[int, int]:
        return self._vllm.scheduler.get_request_counts()

    def add(self, asked: Asked) -> None:
        self._own_token += 1
        text = [*range(asked.cached), *[self._own_token] * (asked.prompt - asked.cached)]
        self._asked[self._vllm.add(Prompt(text), asked.answer).request_id] = asked

    def alone_s(self, asked: Asked) -> float:
        # A forked process is a twin of the scheduler with all that it knows.
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.write(write, struct.pack("d", self._first_s(asked)))
            finally:
                os._exit(0)
        os.close(write)
        with open(read, "rb") as found:
            (seconds,) = struct.unpack("d", found.read())
        os.waitpid(child, 0)
        return float(seconds)

    def _schedule(self) -> Step:
        self._vllm._schedule()
        output, gives = self._vllm._scheduled[-1]
        for new in output.scheduled_new_reqs:
            self._asked[new.req_id].cached = new.num_computed_tokens
        law, requests = self.law, self._vllm.scheduler.requests
        step_s = law.fixed_s if output.num_scheduled_tokens else 0.0
        for name, tokens in output.num_scheduled_tokens.items():
            step_s += token_seconds(law, tokens, requests[name].num_computed_tokens - tokens)
        return Step(step_s, [self._asked[name] for name in output.num_scheduled_tokens if name in gives])

    def _update(self, gives: Sequence[Asked]) -> None:
        self._vllm.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    options = arguments(parser, 1, ["default", "ahead"])
    for row in rows(
        options.laws, options.states, options.seeds, lambda law: ScheduledEngine(law, options.model)
    ):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
