"""Random mixes of groups and traffic through vLLM's real scheduler, held against all that predicts it.

Usage, under vLLM's interpreter: ``-m tests.vllm.drive_random --model DIR --seed S --mixes N [--first K]
[--out DIR] [--mix NAME]...``. One JSON line per mix: what ran, and the first difference or null; a last line
with the total. Mix ``S_KKKK`` is the K-th of seed S; ``--mix`` runs single ones again. With ``--out`` the
traces of mixes that differ are kept there, for ``kvatlas verify``.

Held against vLLM at every probe: what the index predicts (the trace is replayed by ``kvatlas verify``; live
too, where it may know less but must never promise more), the hit of our block pool and, step by step, its
schedule, events and free blocks (vLLM 0.32 in order of arrival, with one token per step: that is what it
copies), and what the connectors' resolver would load if the same blocks lay outside the GPU.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import gzip
import json
import random
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import vllm
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.request import RequestStatus

from kvatlas.connectors.hits import HitResolver
from kvatlas.connectors.tier.base import block_key, split_key
from kvatlas.publisher.block_hash import MultimodalItem, PromptExtras
from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import BlockHash, BlockStored
from kvatlas.publisher.groups import Family
from kvatlas.router.index.base import Plane, Rows
from kvatlas.router.index.hit_rules import evaluate
from kvatlas.router.index.learn.layout import ModelFacts, make_layout
from kvatlas.router.index.memory import MemoryIndex
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.index.offloaded import loaded, tier_extents
from kvatlas.router.tools.trace_verification import ProbePrompt, verify_trace
from tests.publisher.pool.pool_load import PlacementRequest
from tests.vllm.drive_scheduler import DifferenceError, Pair, prompt_of
from tests.vllm.random_mixes import ADAPTERS, OUTPUT_TOKENS_MAX, Mix, Prompts, random_mix
from tests.vllm.real_scheduler import RealEngine, Setup

V033 = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2]) >= (0, 33)
ENGINE = "live"
STEPS_PER_REQUEST_MAX = 300
STEPS_PER_STATE = 8
PROBES_PER_LOAD = 3
"""This many probes to one that the connectors' resolver is asked about; it costs as much as all the rest."""


class Alone:
    """vLLM's side only, for engines that our pool does not copy (``pool_load.Alone``)."""

    def __init__(self, mix: Mix, rng: random.Random, model: str) -> None:
        self.real = RealEngine(setup_of(mix), model)
        self.real.scheduler.cache_config.block_size = mix.layout.engine_block_size
        self.rng = rng
        self._priorities = random.Random(f"priority/{mix.name}")
        self._mix = mix
        self.live: dict[int, tuple[PlacementRequest, Any]] = {}
        self.texts: list[PlacementRequest] = []
        self.payloads: list[bytes] = []
        self._arrived = 0

    @property
    def busy(self) -> bool:
        return self.real.busy

    def add(self, ask: PlacementRequest, max_tokens: int) -> int:
        self._arrived += 1
        mix, rng = self._mix, self._priorities
        priority = rng.randint(0, 3)
        prompt = dataclasses.replace(
            prompt_of(ask),
            reports_hits=rng.random() < mix.reports,
            skips_cache=rng.random() < mix.skips,
            embedded=rng.random() < mix.embedded and not ask.mm,
        )
        self.live[self._arrived] = (ask, self.real.add(prompt, max_tokens, priority))
        return self._arrived

    def probe(self, ask: PlacementRequest) -> int:
        return self.real.hit(prompt_of(ask))

    def step(self) -> None:
        self.payloads = self.real.step()
        for name, (ask, request) in list(self.live.items()):
            if request.is_finished():
                del self.live[name]
                self.texts.append(dataclasses.replace(ask, token_ids=list(request.all_token_ids)))

    def abort(self) -> int:
        name = self.rng.choice(list(self.live))
        request = self.live.pop(name)[1]
        self.real.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        return name

    def reset(self) -> bool:
        return self.real.reset(running=self._mix.resets_running)


class Resolver:
    """The connectors' resolver on the engine's own blocks, as if they lay outside the GPU."""

    def __init__(self, real: RealEngine, mix: Mix) -> None:
        self._real = real
        coordinator = real.manager.coordinator
        self._partial = bool(coordinator.enable_partial_hash_hits)
        self._resolver = HitResolver(
            real.scheduler.kv_cache_config,
            scheduler_block_size=real.scheduler_block_size,
            hash_block_size=real.hash_block_size,
            use_eagle=any(group.get("is_eagle") for group in mix.layout.groups),
            partial_hits=self._partial,
            dcp_world_size=mix.layout.dcp,
        )
        self._layout = make_layout(
            tuple(spec for spec in mix.layout.specs if not spec.is_hidden),
            facts_of(mix),
            real.hash_block_size,
            inside_seen=self._partial,
        )

    def check(self, ask: PlacementRequest, hit: int) -> None:
        """Raise ``DifferenceError`` unless it would load what the rules say, all blocks of it held."""
        request = self._real._request(prompt_of(ask), 1)
        names = list(request.block_hashes)
        keys = self._real.manager.block_pool.cached_block_hash_to_block._cache
        held = {block_key(get_block_hash(key), get_group_id(key)) for key in keys}
        rows = self._rows(names, held)
        empty = evaluate(Rows(rows.num_hashes, {}), self._layout, request.num_tokens)
        local = empty.hit[0]  # chunk starts are hits in an empty GPU too
        found = self._resolver.find_hit(names, request.num_tokens, held, num_local_tokens=local)
        beyond = loaded(tier_extents(rows, self._layout, request.num_tokens, 0, empty), 0, local)
        same("load", max(found, local), local + sum(beyond.values()))
        if not self._partial:
            same("load and hit", self._real.used(max(found, local)), hit)
        for group_idx, blocks in self._resolver.load_mask(local, found).items():
            for block in blocks:
                key = self._resolver.key_at(names, group_idx, block, found)
                same(f"group {group_idx} block {block} held", key in held, True)

    def _rows(self, names: list[bytes], held: set[bytes]) -> Rows:
        index = MemoryIndex()
        for key in held:
            block_hash, group_idx = split_key(key)
            index.store(ENGINE, Plane("CPU@host", group_idx), [_wire(block_hash)])
        return index.lookup([_wire(name) for name in names])


def _wire(block_hash: bytes) -> BlockHash:
    return BlockHash(int.from_bytes(block_hash[-8:], "big"))


class Judge:
    """Writes the trace of one mix, and holds index and resolver against what vLLM says."""

    def __init__(self, mix: Mix, real: RealEngine, path: Path) -> None:
        self._real = real
        self._path = path
        self._lines: list[str] = []
        self._seq = 0
        self._steps = self._probes = 0
        self._unseen = {(spec.group_idx, spec.block_size) for spec in mix.layout.specs if not spec.is_hidden}
        self._fleet = FleetResidency(facts_of(mix))
        # Prompts within a chunk hit in an empty cache and publish nothing ("Known holes", docs/exactness.md).
        self._chunks_only = all(spec.is_hidden or spec.family is Family.CHUNKED for spec in mix.layout.specs)
        self._reports = mix.reports
        self._resolver = None if mix.lookahead else Resolver(real, mix)
        self.silent = False
        """The engine has forgotten what its events have not taken back yet."""
        self.counts = {"probes": 0, "hit_tokens": 0, "live_exact": 0}
        header = {"family": f"rnd{mix.name}", "vllm": vllm.__version__, **real.header()}
        header["report_mode"] = "full" if mix.reports else "incremental"
        if not unproven_inside(mix):
            del header["partial_hash_hits"]  # events show it
        self._write({"header": header | {"hash_lookahead_tokens": mix.lookahead}})

    def saw(self, payloads: list[bytes]) -> None:
        """The batches of one step."""
        for payload in payloads:
            batch = decode_batch(payload)
            self._fleet.apply(ENGINE, batch)
            stored = [event for event in batch.events if isinstance(event, BlockStored)]
            self._unseen -= {(event.group_idx, event.block_size) for event in stored}
            self._write({"events": base64.b64encode(payload).decode(), "seq": self._seq})
            self._seq += 1
            self.silent = False
        self._fleet.engine(ENGINE).finish_detection()
        self._steps += 1
        if not self.silent and self._steps % STEPS_PER_STATE == 0:
            self._write({"state": {"keys": self._real.keys_per_group()}})

    def probed(self, ask: PlacementRequest, hit: int) -> None:
        """vLLM would take ``hit`` tokens of this prompt now."""
        self._probes += 1
        if self._resolver is not None and self._probes % PROBES_PER_LOAD == 0:
            self._resolver.check(ask, hit)
        if self.silent:
            return
        items = tuple(MultimodalItem(*item) for item in ask.mm)
        extras = PromptExtras(ask.lora_name, ask.lora_path, ask.cache_salt, items)
        found = self._fleet.predict(ProbePrompt(ask.token_ids, extras), [ENGINE])[ENGINE]
        self.counts["probes"] += 1
        self.counts["hit_tokens"] += hit
        self.counts["live_exact"] += found.hit_tokens == hit
        self._write({"probe": {"token_ids": ask.token_ids, **prompt_of(ask).extras()}, "hit_tokens": hit})
        if found.hit_tokens > hit and not self._unseen:
            raise DifferenceError(f"live: vLLM {hit}, index promised {found.hit_tokens} ({found.mode})")

    def verdict(self) -> str | None:
        """Write the trace; what ``kvatlas verify`` says of it: None if it is exact."""
        with gzip.open(self._path, "wt", compresslevel=1) as out:
            out.writelines(self._lines)
        result = verify_trace(self._path)
        if result.all_exact or (not self._seq and self._chunks_only):
            return None
        # A prompt of exactly one block that is computed again publishes the same as a report of its hit.
        if self._reports and not result.over:
            return None
        keys = ("probes", "exact", "over", "under", "abs_error_tokens", "states", "states_exact")
        return f"verify: { {key: getattr(result, key) for key in keys} } {result.detected}"

    def _write(self, line: dict[str, Any]) -> None:
        self._lines.append(json.dumps(line, separators=(",", ":")) + "\n")


def same(what: str, theirs: Any, ours: Any) -> None:
    if theirs != ours:
        raise DifferenceError(f"{what}: {theirs!r} is not {ours!r}")


def setup_of(mix: Mix) -> Setup:
    return Setup(
        **dataclasses.asdict(mix.layout),
        lookahead_tokens=mix.lookahead,
        policy="priority" if mix.by_priority else "fcfs",
        async_scheduling=mix.async_scheduling,
        drafts=mix.drafts,
    )


def unproven_inside(mix: Mix) -> bool:
    """Whether no event may ever prove hits inside a block: decode context parallelism with EAGLE, or with
    hashes that look ahead ("Known holes", docs/exactness.md)."""
    marked = any(spec.is_eagle for spec in mix.layout.specs)
    return mix.layout.dcp > 1 and (marked or bool(mix.lookahead))


def facts_of(mix: Mix) -> ModelFacts:
    """An operator's settings for this engine."""
    groups = mix.layout.groups
    modes = {group["mamba_cache_mode"] for group in groups if group.get("mamba_cache_mode")}
    chunks = {i: g["attention_chunk_size"] for i, g in enumerate(groups) if g.get("attention_chunk_size")}
    hidden = [group for group in groups if not group.get("cacheable", True)]
    return ModelFacts(
        attention_chunk_sizes=chunks,
        mamba_cache_mode=next(iter(modes), None),
        eagle_groups=tuple(i for i, group in enumerate(groups) if group.get("is_eagle")),
        eagle_groups_apart=any(group.get("apart") for group in groups),
        hidden_groups=bool(hidden),
        replay_tokens=max((group.get("sliding_window", 0) for group in hidden), default=0),
        report_mode_full=bool(mix.reports),
        partial_hash_hits=True if unproven_inside(mix) else None,
        lora_paths=ADAPTERS,
    )


def traffic(mix: Mix, side: Any, judge: Judge) -> None:
    """The traffic of a mix on one side until all requests are done."""
    rng = side.rng
    prompts = Prompts(mix, rng)
    left, steps = mix.requests, 0
    while left or side.busy:
        while left and (rng.random() < mix.arrival or not side.busy):
            side.add(prompts.ask(), rng.randint(1, OUTPUT_TOKENS_MAX))
            left -= 1
        side.step()
        judge.saw(side.payloads)
        steps += 1
        same("end of the load", steps <= STEPS_PER_REQUEST_MAX * mix.requests, True)
        prompts.history += side.texts
        side.texts.clear()
        if rng.random() < mix.probe:
            probe(prompts, side, judge, 2)
        if side.live and rng.random() < mix.abort:
            side.abort()
        if rng.random() < (0.03 if mix.resets_running else mix.reset) and side.reset():
            judge.silent = True
    probe(prompts, side, judge, 6)


def probe(prompts: Prompts, side: Any, judge: Judge, times: int) -> None:
    for _ in range(times):
        ask = prompts.ask(asked=False)
        judge.probed(ask, side.probe(ask))


def run(mix: Mix, model: str, out: Path) -> dict[str, Any]:
    """One mix to its end; ``difference`` is the first one found, or None. Its trace stays if there is one."""
    rng = random.Random(f"traffic/{mix.name}")
    path = out / f"rnd{mix.name}.jsonl.gz"
    began, difference, judge = time.process_time(), None, None
    try:
        pooled = not V033 and not mix.lookahead and mix.is_plain
        side = Pair(mix.layout, rng, model) if pooled else Alone(mix, rng, model)
        judge = Judge(mix, side.real, path)
        traffic(mix, side, judge)
    except Exception as found:  # noqa: BLE001  # whatever breaks, the mix is named and the next one runs
        difference = f"{type(found).__name__}: {found}"[:1500]
        if not isinstance(found, DifferenceError):
            difference += traceback.format_exc()[-1500:]
    counts = {} if judge is None else judge.counts
    if judge is not None:
        verdict = judge.verdict()
        difference = difference or verdict
    if difference is None:
        path.unlink()
    groups = [" ".join(str(value) for value in group.values()) for group in mix.layout.groups]
    cpu_s = round(time.process_time() - began, 2)
    order = {
        "by_priority": mix.by_priority,
        "async": mix.async_scheduling,
        "drafts": mix.drafts,
        "dcp": mix.layout.dcp,
        "reports": mix.reports,
        "resets_running": mix.resets_running,
        "skips": mix.skips,
        "embedded": mix.embedded,
    }
    return {"mix": mix.name, "groups": groups, **order, **counts, "cpu_s": cpu_s, "difference": difference}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--mixes", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--mix", action="append", default=[])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = [f"{options.seed}_{k:04}" for k in range(options.first, options.first + options.mixes)]
    total = {"mixes": 0, "differ": 0, "probes": 0, "hit_tokens": 0, "live_exact": 0}
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        for name in names + options.mix:
            result = run(random_mix(name, v033=V033), options.model, out)
            total["mixes"] += 1
            total["differ"] += result["difference"] is not None
            for key in ("probes", "hit_tokens", "live_exact"):
                total[key] += result.get(key, 0)
            print(json.dumps(result), flush=True)
    print(json.dumps({"total": total, "vllm": vllm.__version__}), flush=True)


if __name__ == "__main__":
    main()
