"""Writes recorded truth: random requests through vLLM's real scheduler, its events, the hits it then finds.

Usage, under vLLM's interpreter: ``-m tests.vllm.record_traces --model DIR --out DIR --seed N
[--family NAME]...``. One file per family of ``FAMILIES``: one JSON object per line, a header first, then
event batches (the payloads the ZMQ publisher would send) and probes (a prompt, and how many of its tokens the
manager would take from its cache at that point). Prompts branch from each other, go on from answers, repeat,
and fall out of a small pool, with several requests running together.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import vllm

from tests.publisher.pool.layouts import chunked, full, mamba, replayed, ring, window
from tests.vllm.real_scheduler import Prompt, RealEngine, Setup

VOCAB_TOKENS = 2000
_PROBES_PER_STEP = 2


@dataclass(frozen=True)
class Family:
    """A cache layout and the kind of load put on it. ``extras`` names what prompts carry besides tokens."""

    setup: Setup
    requests: int = 50
    prompt_tokens_max: int = 220
    output_tokens_max: int = 40
    extras: tuple[str, ...] = ()
    duplicates: bool = False
    resets: bool = False


def _family(groups: tuple[Mapping[str, Any], ...], num_blocks: int, **options: Any) -> Family:
    names = set(Setup.__dataclass_fields__) - {"groups", "num_blocks"}
    setup = {name: options.pop(name) for name in list(options) if name in names}
    return Family(Setup(groups, num_blocks, **setup), **options)


_GEMMA = (full(), *(window(64),) * 5)
_HYBRID = (full(), window(64))
_LONG = {"prompt_tokens_max": 6000, "requests": 16, "max_num_batched_tokens": 2048, "max_model_len": 8192}

FAMILIES: dict[str, Family] = {
    "full_attention": _family((full(),), 60),
    "full_attention_32": _family((full(32),), 40, int_hashes=False),
    "gemma_5_1": _family(_GEMMA, 230),
    "gemma_5_1_dense": _family(_GEMMA, 230, retention_interval=None),
    "gemma_full_last": _family((*(window(64, 32),) * 5, full(32)), 160),
    "gpt_oss_1_1": _family((full(), window(128)), 90),
    "gpt_oss_dense": _family((full(), window(128)), 90, retention_interval=None),
    "gpt_oss_128": _family((full(), window(128)), 90, retention_interval=128),
    "all_sliding": _family((window(96),), 50),
    "all_sliding_dense": _family((window(96),), 50, retention_interval=None),
    "two_windows": _family((full(), window(48), window(160)), 120),
    "two_windows_dense": _family((full(), window(48), window(160)), 120, retention_interval=None),
    "windows_only": _family((window(48), window(160)), 80, retention_interval=None),
    "chunked_local": _family((full(), chunked(64)), 90),
    "chunked_local_only": _family((chunked(64),), 50),
    "mamba_align": _family((full(32), mamba("align", 32)), 60),
    "mamba_align_dense": _family((full(32), mamba("align", 32)), 60, retention_interval=None),
    "mamba_align_fine": _family((full(64), mamba("align", 64)), 44, prefix_match_unit=16),
    "mamba_align_fine_dense": _family(
        (full(64), mamba("align", 64)), 44, prefix_match_unit=16, retention_interval=None
    ),
    "mamba_align_mixed": _family((full(16), mamba("align", 64)), 70),
    "mamba_all": _family((full(16), mamba("all", 16)), 80),
    "mamba_all_dense": _family((full(16), mamba("all", 16)), 80, retention_interval=None),
    "full_window_mamba": _family((full(16), window(64), mamba("align", 16)), 130),
    "mixed_block_sizes": _family((full(32), window(64, 16)), 70),
    "mixed_block_sizes_dense": _family((full(64), window(32, 16)), 60, retention_interval=None),
    "odd_windows": _family((full(), window(49), window(65)), 110, retention_interval=None),
    "three_block_sizes": _family((full(32), window(100, 16), window(100, 64)), 110, retention_interval=None),
    "three_block_sizes_0": _family((full(32), window(100, 16), window(100, 64)), 110),
    "windows_and_mamba": _family((window(64, 16), mamba("align", 32)), 70, retention_interval=None),
    "wide_window_blocks": _family((full(16), window(64, 32)), 70, retention_interval=None),
    "eagle_full": _family((full(is_eagle=True),), 60),
    "eagle_hybrid": _family((full(is_eagle=True), window(64), window(64)), 120),
    "eagle_window": _family((full(), window(64, is_eagle=True)), 90),
    "eagle_window_dense": _family((full(), window(64, is_eagle=True)), 90, retention_interval=None),
    "eagle_everywhere": _family(
        (full(is_eagle=True), window(64, is_eagle=True)), 90, retention_interval=None
    ),
    "eagle_all_sliding": _family((window(96, is_eagle=True),), 50, retention_interval=None),
    "eagle_mixed_block_sizes": _family(
        (full(32, is_eagle=True), window(64, 16)), 80, retention_interval=None
    ),
    "eagle_small_window_blocks": _family(
        (full(32), window(64, 16, is_eagle=True)), 80, retention_interval=None
    ),
    "eagle_one_of_two": _family(
        (full(), window(64, is_eagle=True), window(64)), 120, retention_interval=None
    ),
    "eagle_one_full_of_two": _family((full(is_eagle=True), full(), window(64)), 120, retention_interval=None),
    "eagle_two_windows_apart": _family(
        (full(32), window(96, 16), window(64, 16, is_eagle=True)), 110, retention_interval=None
    ),
    "eagle_mamba_fine": _family((full(64, is_eagle=True), mamba("align", 64)), 50, prefix_match_unit=16),
    "eagle_mamba": _family((full(32, is_eagle=True), mamba("align", 32)), 70, retention_interval=None),
    "short_prompts_fine": _family(
        (mamba("align", 256), full(256)), 60, prefix_match_unit=16, prompt_tokens_max=100, output_tokens_max=8
    ),
    "mamba_align_long_full": _family((full(32), mamba("align", 16)), 60),
    "mamba_align_long_full_dense": _family((mamba("align", 16), full(64)), 60, retention_interval=None),
    "mamba_align_dcp2": _family((full(16), mamba("align", 16)), 60, dcp=2),
    "mamba_align_dcp4": _family((mamba("align", 16), full(16)), 60, dcp=4),
    "bounded_replay": _family((replayed(64), full(16), ring()), 90),
    "eagle_one_visible": _family((full(is_eagle=True), ring()), 60),
    "lora": _family(_HYBRID, 90, extras=("lora",)),
    "cache_salt": _family(_HYBRID, 90, extras=("salt",)),
    "multimodal": _family(_HYBRID, 90, extras=("mm",)),
    "all_extras": _family((full(),), 70, extras=("lora", "salt", "mm")),
    "retention_128": _family(_HYBRID, 90, retention_interval=128),
    "bytes_hashes": _family(_HYBRID, 90, int_hashes=False),
    "sha256_cbor": _family(_HYBRID, 90, hash_algo="sha256_cbor", extras=("salt", "mm")),
    "python_hash_seed": _family(_HYBRID, 90, seed="42", retention_interval=None),
    "cbor_seeded": _family((full(),), 60, hash_algo="sha256_cbor", seed="0", int_hashes=False),
    "duplicates": _family((full(),), 80, duplicates=True),
    "duplicates_hybrid": _family(_HYBRID, 120, duplicates=True),
    "resets": _family(_HYBRID, 90, resets=True, retention_interval=None),
    "long_full": _family((full(),), 700, **_LONG),
    "long_gpt_oss": _family((full(), window(128)), 1200, **_LONG),
    "long_gemma_dense": _family(_GEMMA, 3000, retention_interval=None, **_LONG),
    "long_mamba": _family((full(64), mamba("align", 64)), 180, prefix_match_unit=16, **_LONG),
}


class Recorder:
    """Runs one family and writes its trace, line by line."""

    def __init__(self, name: str, seed: int, model: str, out: IO[str]) -> None:
        self.family = FAMILIES[name]
        self.engine = RealEngine(self.family.setup, model)
        self._rng = random.Random(f"{name}-{seed}")
        setup, longest = self.family.setup, 2 * self.family.prompt_tokens_max
        self._prompt_limit = min(longest, setup.max_model_len - self.family.output_tokens_max - 1)
        self._out = out
        self._seq = 0
        self._history: list[Prompt] = []
        self._running: list[tuple[Prompt, Any]] = []
        self._reset_unsent = False
        header = {"family": name, "seed": seed, "vllm": vllm.__version__, **self.engine.header()}
        self._write({"header": header})

    def run(self) -> None:
        """Add requests at random moments and step until all are done."""
        left = self.family.requests
        while left or self.engine.busy:
            while left and self._rng.random() < (0.35 if self.engine.busy else 1.0):
                self._add()
                left -= 1
            self._step()
            if self.family.resets and self._rng.random() < 0.03:
                self._reset()

    def _add(self) -> None:
        prompt = self._prompt()
        copies = 2 if self.family.duplicates and self._rng.random() < 0.4 else 1
        for _ in range(copies):
            request = self.engine.add(prompt, self._rng.randint(1, self.family.output_tokens_max))
            self._running.append((prompt, request))
        self._history.append(prompt)

    def _step(self) -> None:
        payloads = self.engine.step()
        for payload in payloads:
            self._write({"events": base64.b64encode(payload).decode(), "seq": self._seq})
            self._seq += 1
            self._reset_unsent = False
        for prompt, request in [item for item in self._running if item[1].is_finished()]:
            self._running.remove((prompt, request))
            self._history.append(_with_tokens(prompt, list(request.all_token_ids)))
        if self._reset_unsent:
            return  # the engine has forgotten what its events have not taken back yet
        self._write({"state": {"keys": self.engine.keys_per_group()}})
        if payloads or self._rng.random() < 0.1:
            for _ in range(_PROBES_PER_STEP):
                self._probe(self._prompt())

    def _probe(self, prompt: Prompt) -> None:
        hit, per_group = self.engine.probe(prompt)
        probe = {"token_ids": prompt.token_ids, **prompt.extras()}
        self._write({"probe": probe, "hit_tokens": hit, "per_group_hit": per_group})

    def _reset(self) -> None:
        if self.engine.reset(running=self._rng.random() < 0.5):
            self._reset_unsent = True
            self._write({"note": "prefix cache reset; its event leaves with the next batch"})

    def _prompt(self) -> Prompt:
        """A new prompt, or one related to an earlier prompt or answer."""
        rng, longest = self._rng, self.family.prompt_tokens_max
        if not self._history or rng.random() < 0.12:
            return self._fresh(rng.randint(1, longest))
        base = rng.choice(self._history[-12:] if rng.random() < 0.7 else self._history)
        tokens = list(base.token_ids)
        kind = rng.random()
        if kind < 0.25:
            return _with_tokens(base, tokens)
        if kind < 0.5:
            tokens = tokens[: self._cut(len(tokens))]
        if kind >= 0.4:
            tokens += self._tokens(rng.randint(1, max(2, longest // 4)))
        if kind > 0.9:
            tokens[rng.randrange(len(tokens))] = rng.randrange(3, VOCAB_TOKENS)
        if rng.random() < 0.1 and self.family.extras:
            return _with_tokens(self._fresh(len(tokens)), tokens[: self._prompt_limit])
        return _with_tokens(base, tokens[: self._prompt_limit])

    def _cut(self, length: int) -> int:
        """A place to branch: anywhere, or at and beside a block boundary."""
        rng = self._rng
        block = rng.choice(self.family.setup.groups)["block_size"]
        if rng.random() < 0.5 and length > block:
            return max(1, min(length, rng.randint(1, length // block) * block + rng.choice((-1, 0, 1))))
        return rng.randint(1, length)

    def _fresh(self, length: int) -> Prompt:
        rng, extras = self._rng, self.family.extras
        lora = rng.choice((None, "sql", "poet")) if "lora" in extras else None
        salt = rng.choice((None, "tenant-a", "tenant-b")) if "salt" in extras else None
        mm = self._items(length) if "mm" in extras and rng.random() < 0.7 else ()
        path = f"/adapters/{lora}" if lora else None
        return Prompt(self._tokens(length), lora, path, salt, mm)

    def _items(self, length: int) -> tuple[tuple[str, int, int], ...]:
        items: list[tuple[str, int, int]] = []
        offset = self._rng.randint(0, 20)
        while offset < length - 2 and len(items) < 4:
            size = min(self._rng.randint(1, 60), length - 1 - offset)
            items.append((self._rng.choice(("cat-image", "dog-image", "map-image")), offset, size))
            offset += size + self._rng.randint(0, 40)
        sizes = {identifier: size for identifier, _, size in reversed(items)}
        return tuple(item for item in items if sizes[item[0]] == item[2])  # one image, one size

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(3, VOCAB_TOKENS) for _ in range(count)]

    def _write(self, line: dict[str, Any]) -> None:
        self._out.write(json.dumps(line, separators=(",", ":")) + "\n")


def _with_tokens(prompt: Prompt, token_ids: list[int]) -> Prompt:
    """``prompt`` with other tokens and the multimodal items that still fit."""
    items = tuple(item for item in prompt.mm if item[1] + item[2] < len(token_ids))
    return Prompt(token_ids, prompt.lora_name, prompt.lora_path, prompt.cache_salt, items)


def main() -> None:
    """Record the chosen families, all by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", action="append", choices=sorted(FAMILIES))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.family or FAMILIES:
        with gzip.open(options.out / f"{name}.{options.seed}.jsonl.gz", "wt", compresslevel=1) as out:
            Recorder(name, options.seed, options.model, out).run()


if __name__ == "__main__":
    main()
