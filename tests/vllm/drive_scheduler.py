"""Runs vLLM's real scheduler and our block pool on the same random load and compares every step.

Usage, under vLLM's interpreter: ``-m tests.vllm.drive_scheduler --model DIR --seed N --requests N
[--family PREFIX]... [--record PATH]``. One JSON line per family: what ran, and the first
difference or null. Compared after every step: which requests were scheduled with how many tokens, what each
has computed, the payload bytes of the step's events, and the free blocks in order of reuse; between steps the
hits of random prompts. ``--record`` writes the digests of the runs for the tests that have no vLLM.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from vllm.v1.request import Request, RequestStatus

from tests.vllm.real_scheduler import Prompt, RealEngine, Setup

if importlib.util.find_spec("xxhash") is None:
    # vLLM's environment need not have it; no family hashes with it.
    sys.modules["xxhash"] = ModuleType("xxhash")

from kvatlas.publisher.events import Event, encode_batch
from tests.publisher.pool.layouts import FAMILIES, Layout
from tests.publisher.pool.pool_load import Alone, PlacementRequest, load_rng, run_load


class DifferenceError(AssertionError):
    """The pool did something else than vLLM."""


class Pair(Alone):
    """Both sides on one load, compared at every call."""

    def __init__(self, layout: Layout, rng: random.Random, model: str) -> None:
        super().__init__(layout, rng)
        self.real = RealEngine(Setup(**dataclasses.asdict(layout)), model)
        self._same("hash block", self.real.hash_block_size, layout.hash_block_size)
        self.real.scheduler.cache_config.block_size = layout.engine_block_size
        self.payloads: list[bytes] = []
        self._theirs: dict[int, Request] = {}
        self._plan: dict[str, int] = {}
        self._schedule = self.real.scheduler.schedule
        self.real.scheduler.schedule = self._watched  # type: ignore[method-assign]

    def add(self, ask: PlacementRequest, max_tokens: int) -> int:
        name = super().add(ask, max_tokens)
        self._theirs[name] = self.real.add(prompt_of(ask), max_tokens)
        return name

    def probe(self, ask: PlacementRequest) -> int:
        hit = super().probe(ask)
        self._same("hit", self.real.probe(prompt_of(ask))[0], hit)
        return hit

    def step(self) -> tuple[list[tuple[int, int]], list[Event], list[int]]:
        before = dict(self.live)
        payloads = self.payloads = self.real.step()
        names = {request.request_id: name for name, request in self._theirs.items()}
        scheduled, events, free = super().step()
        self._same("schedule", [(names[key], chunk) for key, chunk in self._plan.items()], scheduled)
        self._compare_events(payloads, events)
        queue = self.real.manager.block_pool.free_block_queue
        self._same("free blocks", [block.block_id for block in queue.get_all_free_blocks()], free)
        self.ours.pool.check_integrity()
        for name, mine in before.items():
            theirs = self._theirs[name]
            self._same(f"tokens of {name}", list(theirs.all_token_ids), mine.token_ids)
            self._same(f"end of {name}", theirs.is_finished(), name not in self.live)
            if name in self.live:
                self._same(f"computed of {name}", theirs.num_computed_tokens, mine.num_computed)
        self._same("busy", self.real.busy, self.busy)
        return scheduled, events, free

    def abort(self) -> int:
        name = super().abort()
        self.real.scheduler.finish_requests(self._theirs[name].request_id, RequestStatus.FINISHED_ABORTED)
        return name

    def reset(self) -> bool:
        done = super().reset()
        self._same("reset", self.real.reset(), done)
        return done

    def _watched(self) -> Any:
        output = self._schedule()
        self._plan = dict(output.num_scheduled_tokens)
        return output

    def _compare_events(self, payloads: list[bytes], events: list[Event]) -> None:
        if not payloads:
            self._same("events", [], events)
            return
        theirs = payloads[0]
        mine = encode_batch(msgspec.msgpack.decode(theirs)[0], events)
        if theirs == mine:
            return
        theirs_read, mine_read = (msgspec.msgpack.decode(payload)[1] for payload in (theirs, mine))
        for position, (left, right) in enumerate(zip(theirs_read, mine_read, strict=False)):
            self._same(f"event {position}", left, right)
        self._same("event count", len(theirs_read), len(mine_read))
        self._same("event bytes", theirs, mine)

    def _same(self, what: str, theirs: Any, mine: Any) -> None:
        if theirs != mine:
            raise DifferenceError(f"step {self.counts['steps']}, {what}: vLLM {theirs!r}, pool {mine!r}")


def prompt_of(ask: PlacementRequest) -> Prompt:
    return Prompt(ask.token_ids, ask.lora_name, ask.lora_path, ask.cache_salt, ask.mm)


def drive(family: str, layout: Layout, model: str, seed: int, requests: int) -> dict[str, Any]:
    """Run one family to its end; ``difference`` is the first one found, or None."""
    pair = Pair(layout, load_rng(family, seed), model)
    difference = None
    try:
        run_load(pair, requests)
    except DifferenceError as found:
        difference = str(found)[:1500]
    return {"family": family, **pair.counts, "digest": pair.digest, "difference": difference}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--family", action="append", default=[])
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    digests: dict[str, str] = {}
    for family, layout in FAMILIES.items():
        if options.family and not family.startswith(tuple(options.family)):
            continue
        result = drive(family, layout, options.model, options.seed, options.requests)
        digests[family] = result["digest"] if result["difference"] is None else "differs from vLLM"
        print(json.dumps(result), flush=True)
    if options.record:
        record = {"vllm": "0.32.0", "seed": options.seed, "requests": options.requests, "digests": digests}
        options.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
