"""A small engine of our own around both halves, without vLLM: two groups, two ranks, no prefix cache.

It plays vLLM's part of the protocol and takes every liberty the protocol leaves: it preempts and aborts at
any time, admits in any step, lets allocations fail, and hands over only what it pickled.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvatlas.connectors.group_shapes import GroupKind, GroupShape
from kvatlas.connectors.scheduler.scheduler import OffloadScheduler
from kvatlas.connectors.settings import OffloadSettings
from kvatlas.connectors.tier.base import block_key
from kvatlas.connectors.tier.eviction import LruPolicy
from kvatlas.connectors.tier.host import HostTier
from kvatlas.connectors.transfer.base import StepResults
from kvatlas.connectors.worker.worker import OffloadWorker
from tests.connectors.offload.sim_memory import SimEngine, SimMemory

BLOCK = 4
WINDOW_BLOCKS = 2
RANKS = 2


class ModelResolver:
    """Hit rules of a full group and one of ``WINDOW_BLOCKS`` blocks, written down as plainly as possible."""

    group_ids = (0, 1)
    hash_block_tokens = BLOCK
    group_shapes = (
        GroupShape(0, GroupKind.FULL, BLOCK),
        GroupShape(1, GroupKind.WINDOW, BLOCK, WINDOW_BLOCKS * BLOCK),
    )

    def lookup_keys(
        self, hashes: Any, num_tokens: int, *, num_local_tokens: int = 0, known: Any = None
    ) -> list[bytes]:
        keys = [block_key(h, g) for h in hashes[: (num_tokens - 1) // BLOCK] for g in self.group_ids]
        return [key for key in keys if key not in known]

    def find_hit(self, hashes: Any, num_tokens: int, held: Any, *, num_local_tokens: int = 0) -> int:
        for blocks in range(min(len(hashes), (num_tokens - 1) // BLOCK), 0, -1):
            mask = self.load_mask(0, blocks * BLOCK)
            if all(held(block_key(hashes[i], g)) for g, indices in mask.items() for i in indices):
                return blocks * BLOCK
        return 0

    def load_mask(self, num_local_tokens: int, hit_tokens: int) -> dict[int, list[int]]:
        end = hit_tokens // BLOCK
        return {0: list(range(end)), 1: list(range(max(0, end - WINDOW_BLOCKS), end))}

    def store_mask(
        self, computed: int, num_prompt: int, *, first_token: int = 0, shared_prefix_tokens: int = 0
    ) -> dict[int, list[int]]:
        fresh = list(range(first_token // BLOCK, computed // BLOCK))
        return {0: fresh, 1: fresh}

    def partial_tail(self, computed: int, num_prompt: int) -> dict[int, tuple[int, int]]:
        return {}

    def state_key(self, hashes: Any, group_idx: int, end: int) -> bytes:
        return block_key(hashes[end // BLOCK - 1], group_idx)

    def key_at(self, hashes: Any, group_idx: int, index: int, end: int | None = None) -> bytes:
        return block_key(hashes[index], group_idx)


class ShyTier(HostTier):
    """Does not know what it holds while ``shy``."""

    shy = False

    def held(self, request_id: str, keys: Any) -> Any:
        return None if self.shy else super().held(request_id, keys)


@dataclass
class Block:
    block_id: int
    ref_cnt: int = 0


class ModelPool:
    """vLLM's block pool as far as the halves see it; a free block is reused oldest first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_gpu_blocks = num_blocks
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free = deque(range(1, num_blocks))

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.free.remove(block.block_id)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if block.ref_cnt == 0:
                self.free.append(block.block_id)

    def take(self, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        taken = [self.free.popleft() for _ in range(count)]
        for block_id in taken:
            self.blocks[block_id].ref_cnt = 1
        return taken


@dataclass(eq=False)
class ModelRequest:
    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    num_to_generate: int
    num_computed_tokens: int = 0
    shared_prefix_boundary: int = 0
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    table: list[list[int]] = field(default_factory=lambda: [[], []])
    state: str = "waiting"

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        tokens = self.all_token_ids
        return [repr(tokens[: (i + 1) * BLOCK]).encode() for i in range(len(tokens) // BLOCK)]

    def value(self, group_idx: int, position: int) -> object:
        return group_idx, tuple(self.all_token_ids[: position + 1])


class ModelEngine:
    """``requests`` in order of arrival; every method leaves a state in which ``check`` holds."""

    def __init__(self, seed: int, *, gpu_blocks: int, host_blocks: int, pinned_share: float) -> None:
        self.now = 0.0
        self.pool = ModelPool(gpu_blocks)
        self.tier = ShyTier(host_blocks, LruPolicy())
        settings = OffloadSettings(host_bytes=1, pinned_source_blocks_max=pinned_share, lookup_deadline_s=1.0)
        self.half = OffloadScheduler(
            self.tier,
            ModelResolver(),  # type: ignore[arg-type]
            settings,
            world_size=RANKS,
            clock=lambda: self.now,
        )
        self.half.bind_gpu_block_pool(self.pool)
        self.engines = [
            SimEngine(SimMemory(), random.Random(f"{seed}/{rank}"), failure_rate=0, name_keys=rank == 0)
            for rank in range(RANKS)
        ]
        self.workers = []
        for engine in self.engines:
            worker = OffloadWorker(None, _no_cache)
            worker.use_engine(engine)
            self.workers.append(worker)
        self.requests: list[ModelRequest] = []
        self.must_compute: set[str] = set()
        self.answers: dict[str, Counter[str]] = {}
        self.dying: dict[str, ModelRequest] = {}
        self.counts: Counter[str] = Counter()
        self._names = 0

    def add(self, prompt: list[int], num_to_generate: int) -> None:
        self._names += 1
        request = ModelRequest(f"r{self._names}", list(prompt), len(prompt), num_to_generate)
        self.requests.append(request)
        self.half.on_new_request(request)

    def in_state(self, *states: str) -> list[ModelRequest]:
        return [request for request in self.requests if request.state in states]

    def preempt(self, request: ModelRequest) -> None:
        self._free(request)
        request.num_computed_tokens = 0
        request.state = "waiting"
        self.counts["preemptions"] += 1

    def finish(self, request: ModelRequest) -> None:
        """The end, or an abort. Blocks that a load still fills are kept until it ended."""
        keep, _ = self.half.request_finished_all_groups(request, request.table)
        assert not keep
        self.requests.remove(request)
        if request.state == "loading":
            self.dying[request.request_id] = request
            self.counts["aborts_while_loading"] += 1
        else:
            self._free(request)

    def step(self, budget: int) -> None:
        scheduled = self._schedule(budget)
        self._admit()
        state = SimpleNamespace(
            boundary_state_offloads={},
            get_block_ids=lambda request_id: next(
                r.table for r in self.requests if r.request_id == request_id
            ),
        )
        wire = pickle.dumps(
            self.half.build_connector_meta(
                SimpleNamespace(
                    num_scheduled_tokens={r.request_id: n for r, n in scheduled},
                    kv_connector_block_state=state,
                )
            )
        )
        merged = StepResults()
        for worker, engine in zip(self.workers, self.engines, strict=True):
            jobs = pickle.loads(wire)
            engine.tick()
            for request, count in scheduled:
                self._forward(engine._memory, request, count)
            worker.start_load_kv(jobs)
            worker.wait_for_save(jobs)
            engine.tick()
            finished, failed = worker.poll()
            assert failed <= finished
            results = worker.take_results()
            for request_id in finished:
                self.answers[request_id]["failed" if request_id in failed else "ok"] += 1
            if results is not None:
                merged = pickle.loads(pickle.dumps(results)).merge(merged)
        for request, count in scheduled:
            self._advance(request, count)
        self.half.update_connector_output(merged)
        self._end_loads()
        self.half.take_events()

    def check(self) -> None:
        pins = self.half._pins
        assert pins.count <= pins.blocks_max
        owners = Counter(
            block_id
            for request in [*self.requests, *self.dying.values()]
            for row in request.table
            for block_id in row
            if block_id
        )
        for block in self.pool.blocks[1:]:
            assert block.ref_cnt == owners[block.block_id] + pins._pins.get(block.block_id, 0)
        self.tier.check_integrity()

    def settle(self) -> None:
        """Run everything to its end, with transfers that work."""
        self.tier.shy = False
        for engine in self.engines:
            engine.lazy = False
            engine.failure_rate = 0
        for _ in range(2000):
            if not self.requests and not self.dying and not self.half.has_pending_push_work():
                break
            self.step(32)
            self.check()
        assert self.half.counts() == {"requests": 0, "jobs": 0, "pinned_blocks": 0}
        assert len(self.pool.free) == self.pool.num_gpu_blocks - 1
        assert not self.tier.busy()
        assert not self.answers

    # -- the engine's own part ---------------------------------------------------------------------------

    def _free(self, request: ModelRequest) -> None:
        held = [self.pool.blocks[b] for row in request.table for b in row if b]
        self.pool.free_blocks(reversed(held))
        request.table = [[], []]

    def _schedule(self, budget: int) -> list[tuple[ModelRequest, int]]:
        scheduled = []
        for request in self.in_state("running"):
            if request.state != "running":
                continue  # preempted below
            count = min(budget, request.num_tokens - request.num_computed_tokens)
            if not count:
                continue
            self._drop_out_of_window(request)
            while not self._grow(request, request.num_computed_tokens + count):
                if self.half.has_pending_block_frees():
                    count = 0
                    break
                victim = self.in_state("running")[-1]
                self.preempt(victim)
                scheduled = [item for item in scheduled if item[0] is not victim]
                if victim is request:
                    count = 0
                    break
            if count:
                budget -= count
                scheduled.append((request, count))
        return scheduled

    def _grow(self, request: ModelRequest, end: int) -> bool:
        missing = -(-end // BLOCK) - len(request.table[0])
        taken = self.pool.take(2 * max(0, missing))
        if taken is None:
            return False
        for row in request.table:
            row += [taken.pop() for _ in range(max(0, missing))]
        return True

    def _drop_out_of_window(self, request: ModelRequest) -> None:
        row = request.table[1]
        keep_from = max(0, request.num_computed_tokens - (WINDOW_BLOCKS - 1) * BLOCK) // BLOCK
        for index in range(min(keep_from, len(row))):
            if row[index]:
                self.pool.free_blocks([self.pool.blocks[row[index]]])
                row[index] = 0

    def _admit(self) -> None:
        for request in self.in_state("waiting"):
            external, is_async = self.half.get_num_new_matched_tokens(request, 0)
            assert (external, is_async) == self.half.get_num_new_matched_tokens(request, 0)
            if external is None:
                continue
            assert external < request.num_tokens
            if request.request_id in self.must_compute:
                assert external == 0
            end = external // BLOCK
            null = max(0, end - WINDOW_BLOCKS)
            taken = self.pool.take(2 * end - null)
            if taken is None or len(self.pool.free) < 4:
                self.pool.free_blocks([self.pool.blocks[b] for b in taken or ()])
                continue  # the allocation failed: the connector is not called
            request.table = [[taken.pop() for _ in range(end)], [0] * null]
            request.table[1] += taken
            blocks = SimpleNamespace(get_block_ids=lambda request=request: request.table)
            self.half.update_state_after_alloc(request, blocks, external)
            self.must_compute.discard(request.request_id)
            if external:
                self.counts["loads"] += 1
                self.counts["loaded_tokens"] += external
                self.answers[request.request_id] = Counter()
                request.num_computed_tokens = external
                request.state = "loading"
            else:
                request.state = "running"

    def _forward(self, memory: SimMemory, request: ModelRequest, count: int) -> None:
        start = request.num_computed_tokens
        for group_idx, row in enumerate(request.table):
            first = 0 if group_idx == 0 else max(0, start - (WINDOW_BLOCKS - 1) * BLOCK)
            for position in range(first, start):
                found = memory.read(row[position // BLOCK], position % BLOCK)
                assert found == request.value(group_idx, position), "wrong KV is read"
            for position in range(start, start + count):
                value = request.value(group_idx, position)
                memory.write(row[position // BLOCK], position % BLOCK, value)

    def _advance(self, request: ModelRequest, count: int) -> None:
        request.num_computed_tokens += count
        if request.num_computed_tokens < request.num_tokens:
            return
        if request.num_tokens - request.num_prompt_tokens >= request.num_to_generate:
            self.finish(request)
        else:
            request.all_token_ids.append((sum(request.all_token_ids[-3:]) * 31 + request.num_tokens) % 50)

    def _end_loads(self) -> None:
        for request_id, answers in list(self.answers.items()):
            assert answers.total() <= RANKS, "a rank answered twice"
            if answers.total() < RANKS:
                continue
            del self.answers[request_id]
            if request_id in self.dying:
                self._free(self.dying.pop(request_id))
                continue
            request = next(r for r in self.requests if r.request_id == request_id)
            if answers["failed"]:
                self.counts["failed_loads"] += 1
                self.preempt(request)
                self.must_compute.add(request_id)
            else:
                request.state = "running"
                self.half.update_state_after_alloc(request, None, 0)


def _no_cache(view: Any, device: str) -> Any:
    raise AssertionError("the model registers no KV caches")
