"""Drives vLLM's real scheduler and our block pool with the same random requests and compares every step.

Usage, under vLLM's interpreter with the repository in PYTHONPATH: ``drive_scheduler.py --model DIR --seed N
[--family NAME]...``. One JSON line per family of ``FAMILIES``: what ran, and the first difference or null.
Compared after every step: which requests were scheduled with how many tokens, what each has computed, the
payload bytes of the step's events, and the free blocks in order of reuse; before every step: hits of random
prompts. Prompts branch, go on from answers and repeat; requests are aborted, preempted and evicted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
from collections import deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import msgspec
from real_scheduler import DEFAULT_SEED, Prompt, RealEngine, Setup, _sample
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.request import Request, RequestStatus

if (
    importlib.util.find_spec("xxhash") is None
):  # vLLM's environment need not have it; no family hashes with it
    sys.modules["xxhash"] = ModuleType("xxhash")

from publisher.block_hash import HashScheme, MultimodalItem, PromptExtras
from publisher.block_pool import HybridBlockPool, PoolRequest
from publisher.events import encode_batch
from publisher.groups import GroupSpec

VOCAB_TOKENS = 2000
ABORT_CHANCE = 0.01
RESET_CHANCE = 0.02
PROBE_CHANCE = 0.5


class DifferenceError(AssertionError):
    """The pool did something else than vLLM."""


def full(size: int = 16, **extra: Any) -> dict[str, Any]:
    return {"kind": "full_attention", "block_size": size, **extra}


def window(tokens: int, size: int = 16, **extra: Any) -> dict[str, Any]:
    return {"kind": "sliding_window", "block_size": size, "sliding_window": tokens, **extra}


def chunked(chunk: int, size: int = 16) -> dict[str, Any]:
    return {"kind": "chunked_local_attention", "block_size": size, "attention_chunk_size": chunk}


def mamba(mode: str, size: int = 16, **extra: Any) -> dict[str, Any]:
    return {"kind": "mamba", "block_size": size, "mamba_cache_mode": mode, **extra}


MIXES: dict[str, tuple[dict[str, Any], ...]] = {
    "full": (full(),),
    "window": (window(64),),
    "window_odd": (window(49),),
    "chunked": (chunked(64),),
    "mamba_all_alone": (mamba("all"),),
    "mamba_align_alone": (mamba("align"),),
    "gemma": (*[window(64)] * 5, full()),
    "gpt_oss": (full(), window(128)),
    "two_windows_apart": (window(64), window(96)),
    "full_two_windows": (full(), window(32), window(96)),
    "full_two_windows_mamba": (full(), window(32), window(80), mamba("align")),
    "full_chunked": (full(), chunked(48)),
    "chunked_first": (chunked(64), chunked(64), full()),
    "full_chunked_window": (full(), chunked(64), window(40)),
    "mamba_align_equal": (full(), mamba("align"), mamba("align")),
    "mamba_align_coarse": (full(), mamba("align", 64)),
    "mamba_align_same_coarse": (full(64), mamba("align", 64)),
    "mamba_align_fine": (full(32), mamba("align", 16)),
    "mamba_align_window": (full(32), window(48), mamba("align", 32)),
    "mamba_all": (full(), mamba("all")),
    "mamba_all_window": (full(), mamba("all"), window(64)),
    "coarse_full": (full(32), window(64, 16)),
    "coarse_window": (full(16), window(64, 32)),
    "odd_sizes": (full(48), window(64, 32)),
    "three_sizes": (full(64), window(40, 16), window(100, 32)),
    "two_fulls": (full(16), full(32)),
    "eagle_full": (full(is_eagle=True),),
    "eagle_window": (window(64, is_eagle=True),),
    "eagle_hybrid": (full(is_eagle=True), window(64), window(64)),
    "eagle_window_group": (full(), window(64), window(64, is_eagle=True)),
    "eagle_sizes": (full(32, is_eagle=True), window(64, 16, is_eagle=True)),
    "eagle_mamba": (full(is_eagle=True), mamba("align")),
    "eagle_mamba_coarse": (full(16, is_eagle=True), mamba("align", 64)),
    "eagle_mamba_all": (full(is_eagle=True), mamba("all", is_eagle=True)),
}
UNITS: dict[str, int] = {"mamba_align_same_coarse": 16, "mamba_align_window": 16, "coarse_window": 8}
"""``prefix_match_unit`` where the hash block is finer than the greatest common divisor."""


def families() -> Iterator[tuple[str, Setup]]:
    """Every mix with retention 0, dense and, where it has an effect, an interval of 128 or more."""
    for name, groups in MIXES.items():
        sizes = max(group["block_size"] for group in groups)
        blocks = sum(400 // group["block_size"] + 3 for group in groups) + 12
        common = {"groups": groups, "prefix_match_unit": UNITS.get(name), "max_num_batched_tokens": 96}
        sparse = any(group["kind"] in {"sliding_window", "mamba"} for group in groups)
        for retention in (
            (0, None, 384) if sparse and name == "odd_sizes" else (0, None, 128) if sparse else (0,)
        ):
            label = "dense" if retention is None else f"r{retention}"
            yield f"{name}.{label}", Setup(**common, num_blocks=blocks, retention_interval=retention)
        if sparse:
            yield f"{name}.tight", Setup(**common, num_blocks=blocks * 2 // 3, max_num_seqs=4)
        yield (
            f"{name}.big_chunks",
            Setup(**common | {"max_num_batched_tokens": max(256, 2 * sizes)}, num_blocks=blocks * 2),
        )
    hybrid = (full(), window(64))
    yield "bytes", Setup(groups=hybrid, num_blocks=60, int_hashes=False, max_num_batched_tokens=64)
    yield "cbor", Setup(groups=hybrid, num_blocks=60, hash_algo="sha256_cbor", seed="7")


FAMILIES = dict(families())


class PoolScheduler:
    """vLLM's first-come-first-served scheduling on our pool: running requests first, preempting the last."""

    def __init__(self, setup: Setup, hash_block_size: int) -> None:
        self.setup = setup
        scheme = HashScheme(
            algo=setup.hash_algo, seed=setup.seed or DEFAULT_SEED, hash_block_size=hash_block_size
        )
        self.pool = HybridBlockPool(
            tuple(GroupSpec(index, **group) for index, group in enumerate(setup.groups)),
            num_blocks=setup.num_blocks,
            scheme=scheme,
            retention_interval=setup.retention_interval,
            int_hashes=setup.int_hashes,
            chunk_tokens_max=setup.max_num_batched_tokens,
            lora_ids={"adapter": 1},
        )
        self.waiting: deque[PoolRequest] = deque()
        self.running: list[PoolRequest] = []
        self.limits: dict[int, int] = {}
        self.preemptions = 0

    def request(self, prompt: Prompt) -> PoolRequest:
        items = tuple(MultimodalItem(*item) for item in prompt.mm)
        extras = PromptExtras(prompt.lora_name, prompt.lora_path, prompt.cache_salt, items)
        return self.pool.request(prompt.token_ids, extras)

    def add(self, prompt: Prompt, max_tokens: int) -> PoolRequest:
        request = self.request(prompt)
        self.limits[id(request)] = len(prompt.token_ids) + max_tokens
        self.waiting.append(request)
        return request

    def abort(self, request: PoolRequest) -> None:
        self.pool.finish(request)
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def step(self) -> list[tuple[PoolRequest, int]]:
        """Schedule one step and give every request that is up to date its next token."""
        self.pool.end_step()
        scheduled = self._schedule()
        for request, _ in scheduled:
            if request.num_computed < request.num_tokens:
                continue
            self.pool.append(request, _sample_of(request))
            if request.num_tokens >= self.limits[id(request)]:
                self.running.remove(request)
                self.pool.finish(request)
        return scheduled

    def _schedule(self) -> list[tuple[PoolRequest, int]]:
        budget = self.setup.max_num_batched_tokens
        scheduled: list[tuple[PoolRequest, int]] = []
        position = 0
        preempted = False
        while position < len(self.running) and budget:
            request = self.running[position]
            chunk = self.pool.next_chunk(request, budget)
            if chunk:
                while not self.pool.compute(request, chunk):
                    preempted = True
                    victim = self.running.pop()
                    self.pool.preempt(victim)
                    self.preemptions += 1
                    self.waiting.appendleft(victim)
                    if victim is request:
                        return scheduled
                scheduled.append((request, chunk))
                budget -= chunk
            position += 1
        while self.waiting and budget and not preempted and len(self.running) < self.setup.max_num_seqs:
            request = self.waiting[0]
            if self.pool.start(request, budget) is None:
                break
            chunk = self.pool.next_chunk(request, budget)
            if not self.pool.compute(request, chunk):
                raise DifferenceError("the first chunk of a started request did not fit")
            self.waiting.popleft()
            self.running.append(request)
            scheduled.append((request, chunk))
            budget -= chunk
        return scheduled


def _sample_of(request: PoolRequest) -> int:
    """The token that the real engine's fake model gives for the same text."""

    class Text:
        all_token_ids = request.token_ids
        num_tokens = request.num_tokens

    return _sample(Text)  # type: ignore[arg-type]


class Pair:
    """Both sides, stepped together."""

    def __init__(self, setup: Setup, model: str, rng: random.Random) -> None:
        self.real = RealEngine(setup, model)
        self.real.scheduler.cache_config.block_size = min(group["block_size"] for group in setup.groups)
        for manager in self.real.manager.coordinator.single_type_managers:
            if isinstance(manager, MambaManager):
                manager.drop_eagle_checkpoint_block = self.real.scheduler.use_eagle_block_drop
        self.ours = PoolScheduler(setup, self.real.hash_block_size)
        self.rng = rng
        self.requests: dict[str, tuple[Request, PoolRequest]] = {}
        self.texts: list[Prompt] = []
        self.counts = {"steps": 0, "events": 0, "probes": 0, "hit_tokens": 0, "preemptions": 0}

    def add(self, prompt: Prompt, max_tokens: int) -> None:
        request = self.real.add(prompt, max_tokens)
        self.requests[request.request_id] = (request, self.ours.add(prompt, max_tokens))

    def probe(self, prompt: Prompt) -> None:
        theirs = self.real.probe(prompt)[0]
        mine = self.ours.pool.find_hit(self.ours.request(prompt))
        self._same("hit", theirs, mine)
        self.counts["probes"] += 1
        self.counts["hit_tokens"] += theirs

    def step(self) -> None:
        before = dict(self.requests)
        real = self.real.scheduler
        schedule, plan = real.schedule, {}

        def watched() -> Any:
            output = schedule()
            plan.update(output.num_scheduled_tokens)
            return output

        real.schedule = watched
        payloads = self.real.step()
        real.schedule = schedule
        names = {id(mine): name for name, (_, mine) in before.items()}
        scheduled = {names[id(request)]: chunk for request, chunk in self.ours.step()}
        self._same("schedule", list(plan.items()), list(scheduled.items()))
        self._compare_events(payloads)
        self._same(
            "free blocks",
            [block.block_id for block in self.real.manager.block_pool.free_block_queue.get_all_free_blocks()],
            self.ours.pool._store._free_queue(),
        )
        self.ours.pool.check_integrity()
        for name, (theirs, mine) in before.items():
            self._same(f"tokens of {name}", list(theirs.all_token_ids), mine.token_ids)
            if theirs.is_finished():
                del self.requests[name]
                self.texts.append(Prompt(mine.token_ids.copy(), *_extras(mine)))
            else:
                self._same(f"computed of {name}", theirs.num_computed_tokens, mine.num_computed)
        self.counts["steps"] += 1
        self.counts["preemptions"] = self.ours.preemptions

    def abort(self) -> None:
        name = self.rng.choice(list(self.requests))
        self.real.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.ours.abort(self.requests.pop(name)[1])

    def reset(self) -> None:
        self._same("reset", self.real.reset(), self.ours.pool.reset())

    def _compare_events(self, payloads: list[bytes]) -> None:
        events = self.ours.pool.take_events()
        self.counts["events"] += len(events)
        if not payloads:
            self._same("events", [], events)
            return
        ts = msgspec.msgpack.decode(payloads[0])[0]
        mine = encode_batch(ts, events)
        if payloads[0] != mine:
            theirs_read, mine_read = (msgspec.msgpack.decode(data)[1] for data in (payloads[0], mine))
            for position, (left, right) in enumerate(zip(theirs_read, mine_read, strict=False)):
                self._same(f"event {position}", left, right)
            self._same("event count", len(theirs_read), len(mine_read))
            raise DifferenceError(f"step {self.counts['steps']}: bytes differ: {payloads[0]!r} {mine!r}")

    def _same(self, what: str, theirs: Any, mine: Any) -> None:
        if theirs != mine:
            raise DifferenceError(f"step {self.counts['steps']}, {what}: vLLM {theirs!r}, pool {mine!r}")


def _extras(request: PoolRequest) -> tuple[str | None, str | None, str | None, Any]:
    extras = request.extras
    items = tuple((item.identifier, item.offset, item.length) for item in extras.multimodal)
    return extras.lora_name, extras.lora_path, extras.cache_salt, items


def new_prompt(rng: random.Random, texts: list[Prompt], roots: list[list[int]], longest: int) -> Prompt:
    """Fresh, from a shared root, a branch or a continuation of an earlier text, or that text again."""
    kind = rng.random()
    fresh = [rng.randrange(3, VOCAB_TOKENS) for _ in range(rng.randint(1, 80))]
    if kind < 0.3 or not texts:
        root = rng.choice(roots)
        prompt = Prompt(root[: rng.randint(0, len(root))] + fresh, **random_extras(rng))
    else:
        old = rng.choice(texts[-12:])
        keep = len(old.token_ids)
        if kind < 0.55:
            keep = rng.randint(1, keep)
        elif kind < 0.7:
            keep -= keep % 16
            fresh = []
        tokens = (old.token_ids[:keep] + fresh) or fresh or [3]
        prompt = Prompt(tokens, old.lora_name, old.lora_path, old.cache_salt, old.mm)
    tokens = prompt.token_ids[:longest]
    items = tuple(item for item in prompt.mm if item[1] + item[2] <= len(tokens))
    return Prompt(tokens, prompt.lora_name, prompt.lora_path, prompt.cache_salt, items)


def random_extras(rng: random.Random) -> dict[str, Any]:
    """Mostly nothing; else a LoRA adapter, a salt, or images."""
    match rng.randrange(12):
        case 0:
            return {"lora_name": "adapter", "lora_path": "/adapters/a"}
        case 1:
            return {"cache_salt": "pepper"}
        case 2:
            first = rng.randint(0, 20)
            return {"mm": (("image-a", first, 30), ("image-b", first + 40, 25))}
        case _:
            return {}


def drive(name: str, setup: Setup, model: str, seed: int, requests: int) -> dict[str, Any]:
    """Run one family to its end; ``difference`` is the first one found, or None."""
    rng = random.Random(f"{name}/{seed}")
    pair = Pair(setup, model, rng)
    roots = [[rng.randrange(3, VOCAB_TOKENS) for _ in range(150)] for _ in range(3)]
    difference = None
    left = requests
    try:
        while left or pair.real.busy:
            while left and (rng.random() < 0.3 or not pair.real.busy):
                pair.add(new_prompt(rng, pair.texts, roots, 300), rng.randint(1, 45))
                left -= 1
            if rng.random() < PROBE_CHANCE:
                pair.probe(new_prompt(rng, pair.texts, roots, 400))
            pair.step()
            if pair.requests and rng.random() < ABORT_CHANCE:
                pair.abort()
            if rng.random() < RESET_CHANCE:
                pair.reset()
            if pair.counts["steps"] > 200 * requests:
                raise DifferenceError("the load never ends")
    except DifferenceError as found:
        difference = str(found)[:1500]
    return {"family": name, "seed": seed, **pair.counts, "difference": difference}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--family", action="append", default=[])
    options = parser.parse_args()
    for name, setup in FAMILIES.items():
        if options.family and not any(name.startswith(wanted) for wanted in options.family):
            continue
        print(json.dumps(drive(name, setup, options.model, options.seed, options.requests)), flush=True)


if __name__ == "__main__":
    main()
