"""vLLM's real scheduler and our real connector, with the model and the transfers simulated.

Scheduling, block tables, hashing, preemption and eviction are vLLM's, connector objects are made by vLLM's
factory and talk through pickled metadata; every rank has its own memory. Before each forward pass the sim
checks that all KV the model would read is what computing it would have given.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvatlas.connectors.offload import HybridOffloadConnector
from tests.connectors.offload.sim_memory import SimEngine, SimMemory
from tests.vllm.real_scheduler import Prompt, Setup, _group_spec, _set_environment, _vllm_config

_PAGE_BYTES = 256
_IDLE_STEPS_MAX = 3000


@dataclass
class SimConnector:
    """How the connector and its transfers behave."""

    host_blocks: int = 200
    ranks: int = 1
    failure_rate: float = 0.0
    name_failed_keys: bool = False
    policy: str = "boundary"
    pinned_share: float = 0.3
    load_failure_policy: str = "recompute"
    steps_ahead: int = 0
    """1: vLLM's asynchronous scheduling, which plans a step before it knows the last one's tokens."""
    extra: dict[str, Any] = field(default_factory=dict)


class _Events:
    """Replays published events of medium CPU into what they say is held."""

    def __init__(self) -> None:
        self.held: set[tuple[int, Any]] = set()
        self.stored: list[Any] = []

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            if getattr(event, "medium", None) != "CPU":
                continue
            keys = {(event.group_idx, block_hash) for block_hash in event.block_hashes}
            if type(event).__name__ == "BlockStored":
                assert not keys & self.held, "a block is announced twice"
                self.stored.append(event)
                self.held |= keys
            else:
                assert keys <= self.held, "a block is removed that was never announced"
                self.held -= keys

    def shutdown(self) -> None:
        """Nothing to close."""


class SimEngineCore:
    """``add``, ``abort``, ``step`` while ``busy``; ``check_idle`` at the end."""

    def __init__(self, setup: Setup, connector: SimConnector, model: str, seed: int) -> None:
        _set_environment(setup)
        self.setup = setup
        self.rng = random.Random(seed)
        self._hash = get_hash_fn_by_name(setup.hash_algo)
        init_none_hash(self._hash)
        config, cache = self._configs(setup, connector, model)
        self.config = config
        self.scheduler_tokens, self.hash_tokens = resolve_kv_cache_block_sizes(cache, config)
        cache.hash_block_size = self.hash_tokens
        scheduler_class = AsyncScheduler if connector.steps_ahead else Scheduler
        self.scheduler = scheduler_class(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=self.scheduler_tokens,
            hash_block_size=self.hash_tokens,
        )
        self.events = _Events()
        self.scheduler.kv_event_publisher = self.events
        self.half = self.scheduler.connector.scheduler
        self.manager = self.scheduler.kv_cache_manager
        self.memories = [SimMemory() for _ in range(connector.ranks)]
        self.engines = [
            SimEngine(
                memory,
                random.Random(f"{seed}/{rank}"),
                failure_rate=connector.failure_rate,
                name_keys=connector.name_failed_keys,
            )
            for rank, memory in enumerate(self.memories)
        ]
        self.workers = []
        for engine in self.engines:
            worker = HybridOffloadConnector(config, KVConnectorRole.WORKER, cache)
            worker.worker.use_engine(engine)
            self.workers.append(worker)
        self._aggregator = KVOutputAggregator(connector.ranks)
        self._hasher = get_request_block_hasher(self.hash_tokens, self._hash)
        self._count = 0
        self._idle_steps = 0
        self._tokens: dict[str, list[int]] = {}
        self._values: dict[str, list[object]] = {}
        self._steps_ahead = connector.steps_ahead
        self._under_way: list[tuple[Any, ModelRunnerOutput]] = []
        self.received: Counter[str] = Counter()
        self.must_compute: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.reported: Counter[str] = Counter()
        """Counters from the workers' statistics."""
        self._watch_lookups()

    def _configs(self, setup: Setup, connector: SimConnector, model: str) -> tuple[Any, Any]:
        config = _vllm_config(setup, model)
        config.parallel_config.world_size = connector.ranks
        config.scheduler_config.async_scheduling = bool(connector.steps_ahead)
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="HybridOffloadConnector",
            kv_connector_module_path="kvatlas.connectors.offload",
            kv_role="kv_both",
            kv_load_failure_policy=connector.load_failure_policy,
            kv_connector_extra_config={
                "host_bytes": connector.host_blocks * _PAGE_BYTES * connector.ranks,
                "policy": connector.policy,
                "pinned_source_blocks_max": connector.pinned_share,
                **connector.extra,
            },
        )
        size = setup.num_blocks * _PAGE_BYTES
        tensor = KVCacheTensor(size=size, layers=["layer.0"], layer_stride=0, block_stride=_PAGE_BYTES)
        cache = KVCacheConfig(
            num_blocks=setup.num_blocks,
            kv_cache_tensors=[tensor],
            kv_cache_groups=[_group_spec(index, group) for index, group in enumerate(setup.groups)],
            prefix_cache_retention_interval=setup.retention_interval,
        )
        return config, cache

    # -- what happens from outside -----------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.has_requests()) or bool(self._under_way)

    def add(self, prompt: Prompt, max_tokens: int) -> Request:
        self._count += 1
        request = Request(
            request_id=f"r{self._count}",
            prompt_token_ids=list(prompt.token_ids),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            cache_salt=prompt.cache_salt,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return request

    def abort(self, request: Request) -> None:
        self.counts["aborts"] += 1
        self.counts["aborts_while_loading"] += request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def reset(self, *, connector: bool = False) -> bool:
        """Drop the GPU's prefix cache, and with ``connector`` the host tier."""
        return bool(self.scheduler.reset_prefix_cache(reset_connector=connector))

    # -- one step ----------------------------------------------------------------------------------------

    def step(self) -> None:
        """Plan and run one step; process the output of the one that is due."""
        if self.scheduler.has_requests():
            self._begin_step()
        late = len(self._under_way) > self._steps_ahead
        if late or (self._under_way and not self.scheduler.has_requests()):
            self._end_step()

    def _begin_step(self) -> None:
        output = self.scheduler.schedule()
        scheduled = output.num_scheduled_tokens
        self._idle_steps = 0 if scheduled else self._idle_steps + 1
        if self._idle_steps > _IDLE_STEPS_MAX:
            raise RuntimeError("the engine makes no progress")
        metadata = pickle.dumps(output.kv_connector_metadata)
        ids = list(scheduled)
        requests = [self.scheduler.requests[request_id] for request_id in ids]
        self.counts["preemptions"] += len(output.preempted_req_ids or ())
        for request in requests:
            self._tokens.setdefault(request.request_id, list(request.all_token_ids))
        outputs = [
            self._run_rank(rank, output, pickle.loads(metadata), requests)
            for rank in range(len(self.workers))
        ]
        sampled = [self._sample(request) for request in requests]
        merged = self._aggregator.aggregate(
            [
                ModelRunnerOutput(
                    req_ids=ids,
                    req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
                    sampled_token_ids=sampled,
                    kv_connector_output=kv_output,
                )
                for kv_output in outputs
            ]
        )
        self._under_way.append((output, merged))

    def _sample(self, request: Request) -> list[int]:
        """A token that depends on the request's text alone; none while its prompt is not done."""
        tokens = self._tokens[request.request_id]
        if request.num_computed_tokens < len(tokens):
            return []
        tokens.append(3 + (sum(tokens[-3:]) * 31 + len(tokens) * 7) % 997)
        return tokens[-1:]

    def _end_step(self) -> None:
        output, merged = self._under_way.pop(0)
        failed = merged.kv_connector_output.failed_recving
        self.received.update(merged.kv_connector_output.finished_recving or ())
        self.must_compute |= failed
        self.counts["failed_loads"] += len(failed)
        self.scheduler.update_from_output(output, merged)
        self._check_step()

    def _run_rank(self, rank: int, output: Any, metadata: Any, requests: list[Request]) -> KVConnectorOutput:
        """One worker's step, its calls in the order of vLLM's model runner."""
        worker, memory, engine = self.workers[rank], self.memories[rank], self.engines[rank]
        engine.tick()
        worker.handle_preemptions(metadata)
        for block_id in output.new_block_ids_to_zero or ():
            memory.wipe(block_id)
        for copy in output.kv_cache_block_copies or ():
            memory.blocks[copy.dst_block_id] = dict(memory.blocks.get(copy.src_block_id, {}))
        worker.bind_connector_metadata(metadata)
        for request in requests:
            self._forward(memory, request, output.num_scheduled_tokens[request.request_id])
        worker.start_load_kv(None)
        worker.wait_for_save()
        engine.tick()
        transfers = worker.get_transfer_results(output.finished_req_ids)
        stats = worker.get_kv_connector_stats()
        self.reported.update(stats.to_dict() if stats else {})
        result = KVConnectorOutput(
            finished_recving=transfers.finished_recving,
            failed_recving=transfers.failed_recving,
            kv_connector_stats=stats,
            kv_connector_worker_meta=pickle.loads(pickle.dumps(worker.build_connector_worker_meta())),
        )
        worker.clear_connector_metadata()
        return result

    # -- the model ---------------------------------------------------------------------------------------

    def _forward(self, memory: SimMemory, request: Request, num_new: int) -> None:
        end = request.num_computed_tokens
        start = end - num_new
        tables = self.manager.get_block_ids(request.request_id)
        values = self._prefix_values(request)
        for group_idx, (group, table) in enumerate(zip(self.setup.groups, tables, strict=True)):
            size = group["block_size"]
            if group["kind"] == "mamba":
                if start:
                    found = memory.read(table[(start - 1) // size], 0)
                    assert found == (group_idx, values[start - 1]), f"wrong state of {request.request_id}"
                memory.blocks[table[(end - 1) // size]] = {0: (group_idx, values[end - 1])}
                continue
            for position in range(_first_read(group, start), start):
                found = memory.read(table[position // size], position % size)
                assert found == (group_idx, values[position]), (
                    f"{request.request_id} reads wrong KV of group {group_idx} at {position} of {start}"
                )
            for position in range(start, end):
                memory.write(table[position // size], position % size, (group_idx, values[position]))

    def _prefix_values(self, request: Request) -> list[object]:
        """One value per position, of all tokens up to it."""
        values = self._values.setdefault(request.request_id, [])
        tokens = self._tokens[request.request_id]
        for position in range(len(values), len(tokens)):
            before = values[position - 1] if position else request.cache_salt
            values.append(hash((before, tokens[position])))
        return values

    # -- what must hold ----------------------------------------------------------------------------------

    def _watch_lookups(self) -> None:
        ask = self.half.get_num_new_matched_tokens
        begin = self.half.update_state_after_alloc

        def asked(request: Request, num_local: int) -> tuple[int | None, bool]:
            answer = ask(request, num_local)
            assert answer == ask(request, num_local), "asking twice gives two answers"
            if request.request_id in self.must_compute:
                assert answer == (0, False), "a request whose load failed is offered another"
            assert not answer[0] or num_local + answer[0] <= request.num_tokens - 1
            return answer

        def admitted(request: Request, blocks: Any, num_external: int) -> None:
            self.must_compute.discard(request.request_id)
            if num_external:
                self.counts["loads"] += 1
                self.counts["loaded_tokens"] += num_external
                self.received[request.request_id] -= 1
            begin(request, blocks, num_external)

        self.half.get_num_new_matched_tokens = asked
        self.half.update_state_after_alloc = admitted

    def _check_step(self) -> None:
        pool = self.manager.block_pool
        pins = self.half._pins
        assert pins.count <= pins.blocks_max
        for block_id, count in pins._pins.items():
            assert pool.blocks[block_id].ref_cnt >= count
        assert all(count in (-1, 0) for count in self.received.values()), "a load was answered twice"
        self.half._tier.check_integrity()
        held = {
            (int.from_bytes(key[-4:], "big"), int.from_bytes(key[:-4], "big") & ((1 << 64) - 1))
            for key, entry in self.half._tier._entries.items()
            if self.half._tier._is_held(entry)
        }
        assert held == self.events.held, "events and the tier disagree"

    def check_idle(self) -> None:
        """After the last request: everything taken was given back."""
        while self.busy:
            self.step()
        pool = self.manager.block_pool
        assert self.half.counts() == {"requests": 0, "jobs": 0, "pinned_blocks": 0}
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert all(count == 0 for count in self.received.values()), "a load was never answered"
        assert all(engine.idle for engine in self.engines)
        assert not self.scheduler.requests


def _first_read(group: dict[str, Any], start: int) -> int:
    """The first position that attention from ``start`` on reads."""
    if group["kind"] == "sliding_window":
        return max(0, start - group["sliding_window"] + 1)
    if group["kind"] == "chunked_local_attention":
        return start // group["attention_chunk_size"] * group["attention_chunk_size"]
    return 0
