"""vLLM's real scheduler, any connector, real memory and real copies; only the model is simulated.

The model writes, for each position and group, a number made of all tokens up to there, and checks before each
step that whatever it would read is what computing it would have given. Requests run one at a time and every
transfer ends in the step after it began, so that two connectors see the same trace.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvatlas.connectors.layout import CacheView, Piece, group_pages
from kvatlas.connectors.multi import HybridMultiConnector
from tests.vllm.real_scheduler import Setup, _group_spec, _next_tokens, _set_environment, _vllm_config

POSITIONS = 64
"""Numbers in a block: the largest block's tokens."""
PAGE_BYTES = POSITIONS * 8
_STEPS_MAX = 400
_JOB_IDS = range(4096)


@dataclass(frozen=True)
class Hit:
    """Loaded tokens of a request at its admission."""

    local: int
    external: int


class RealMemoryEngine:
    """One engine of one rank. ``run`` a prompt, ``forget_gpu`` between prompts."""

    def __init__(self, setup: Setup, transfer: dict[str, Any], model: str) -> None:
        _set_environment(setup)
        self.setup = setup
        hasher = get_hash_fn_by_name(setup.hash_algo)
        init_none_hash(hasher)
        config = _vllm_config(setup, model)
        config.kv_transfer_config = KVTransferConfig(
            kv_role="kv_both", kv_load_failure_policy="recompute", **transfer
        )
        tensor = KVCacheTensor(
            size=setup.num_blocks * PAGE_BYTES, layers=["layer.0"], layer_stride=0, block_stride=PAGE_BYTES
        )
        cache = KVCacheConfig(
            num_blocks=setup.num_blocks,
            kv_cache_tensors=[tensor],
            kv_cache_groups=[_group_spec(index, group) for index, group in enumerate(setup.groups)],
            prefix_cache_retention_interval=setup.retention_interval,
        )
        scheduler_tokens, hash_tokens = resolve_kv_cache_block_sizes(cache, config)
        cache.hash_block_size = hash_tokens
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=scheduler_tokens,
            hash_block_size=hash_tokens,
        )
        self.events: list[Any] = []
        self.scheduler.kv_event_publisher = self
        self.memory = torch.full((setup.num_blocks, POSITIONS), -1, dtype=torch.int64)
        self.engines: list[Any] = []
        connector_class = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
        self.worker = connector_class(config, KVConnectorRole.WORKER, cache)
        self._register(self.worker)
        self._hasher = get_request_block_hasher(hash_tokens, hasher)
        self._count = 0
        self._hits: dict[str, Hit] = {}
        self.answer: list[int] = []
        """Tokens of the last request's output."""
        self._watch()

    def publish(self, batch: Any) -> None:
        self.events += batch.events

    def shutdown(self) -> None:
        for connector in (self.worker, self.scheduler.connector):
            connector.shutdown()

    def _register(self, connector: Any) -> None:
        """Give a connector this memory as every group's; blocks belong to one group at a time."""
        groups = len(self.setup.groups)
        if isinstance(connector, HybridMultiConnector):
            for inner in connector.sub_connectors:
                self._register(inner)
        elif isinstance(connector, OffloadingConnector):
            pages = self.memory.view(torch.int8)
            refs = [[CanonicalKVCacheRef(0, PAGE_BYTES)] for _ in range(groups)]
            tensors = [CanonicalKVCacheTensor(pages, PAGE_BYTES)]
            connector.connector_worker._init_worker(CanonicalKVCaches(tensors, refs))
        else:
            piece = Piece(self.memory.data_ptr(), PAGE_BYTES, PAGE_BYTES)
            pages = tuple(group_pages(index, [piece], self.setup.num_blocks) for index in range(groups))
            view = CacheView(pages, self.setup.num_blocks, PAGE_BYTES)
            connector.worker.use_engine(connector.engine_factory()(view, "cpu"))
            self.engines.append(connector.worker.engine)

    def _watch(self) -> None:
        connector = self.scheduler.connector
        ask, admit = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
        local: dict[str, int] = {}

        def asked(request: Request, num_local: int) -> tuple[int | None, bool]:
            local[request.request_id] = num_local
            answer: tuple[int | None, bool] = ask(request, num_local)
            return answer

        def admitted(request: Request, blocks: Any, external: int) -> None:
            name = request.request_id
            self._hits.setdefault(name, Hit(local.get(name, 0), external))
            admit(request, blocks, external)

        connector.get_num_new_matched_tokens = asked
        connector.update_state_after_alloc = admitted

    # -- what happens from outside -----------------------------------------------------------------------

    def run(self, token_ids: list[int], max_tokens: int = 1) -> Hit:
        """One request from its arrival until nothing is under way any more."""
        self._count += 1
        request = Request(
            request_id=f"r{self._count}",
            prompt_token_ids=list(token_ids),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        for _ in range(_STEPS_MAX):
            if not self.scheduler.has_requests():
                self.answer = list(request.output_token_ids)
                return self._hits[request.request_id]
            self._step()
        raise AssertionError("the engine makes no progress")

    def forget_gpu(self) -> None:
        assert self.scheduler.reset_prefix_cache(), "blocks are in use"

    # -- one step ----------------------------------------------------------------------------------------

    def _step(self) -> None:
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        worker = self.worker
        metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        worker.handle_preemptions(metadata)
        for copy in output.kv_cache_block_copies or ():
            self.memory[copy.dst_block_id] = self.memory[copy.src_block_id]
        worker.bind_connector_metadata(metadata)
        for request in requests:
            self._forward(request, output.num_scheduled_tokens[request.request_id])
        worker.start_load_kv(None)
        worker.wait_for_save()
        for engine in self.engines:
            assert engine.wait(_JOB_IDS, 30)
        transfers = worker.get_transfer_results(output.finished_req_ids)
        result = KVConnectorOutput(
            finished_sending=transfers.finished_sending,
            finished_recving=transfers.finished_recving,
            failed_recving=transfers.failed_recving,
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_cache_events=worker.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=pickle.loads(pickle.dumps(worker.build_connector_worker_meta())),
        )
        worker.clear_connector_metadata()
        sampled = [
            _next_tokens(request, 1) if request.num_computed_tokens >= request.num_tokens else []
            for request in requests
        ]
        ran = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=result,
        )
        self.scheduler.update_from_output(output, ran)

    def _forward(self, request: Request, num_new: int) -> None:
        end = request.num_computed_tokens
        start = end - num_new
        tables = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        tokens = request.all_token_ids
        for group_idx, (group, table) in enumerate(zip(self.setup.groups, tables, strict=True)):
            size = group["block_size"]

            def value(position: int, group_idx: int = group_idx) -> int:
                return hash((group_idx, tuple(tokens[: position + 1]))) >> 1

            if group["kind"] == "mamba":
                if start:
                    assert self.memory[table[(start - 1) // size], 0] == value(start - 1), "wrong state"
                self.memory[table[(end - 1) // size], 0] = value(end - 1)
                continue
            for position in range(_first_read(group, start), start):
                found = int(self.memory[table[position // size], position % size])
                assert found == value(position), f"wrong KV of group {group_idx} at {position} of {start}"
            for position in range(start, end):
                self.memory[table[position // size], position % size] = value(position)


def _first_read(group: dict[str, Any], start: int) -> int:
    """The first position that attention from ``start`` on reads."""
    if group["kind"] == "sliding_window":
        return max(0, start - group["sliding_window"] + 1)
    if group["kind"] == "chunked_local_attention":
        return start // int(group["attention_chunk_size"]) * int(group["attention_chunk_size"])
    return 0
