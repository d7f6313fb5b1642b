"""The real vLLM scheduler and KV cache manager, run without a model. Runs under vLLM's own interpreter only.

Admission, chunked prefill, preemption, hashing, block allocation, eviction and the events of every step are
vLLM's; only the model is replaced, by a sampler that returns a token computed from the request. Imported by
the driver scripts beside it, never by the test process.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import EventBatch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

DEFAULT_SEED = "vllm-none-hash"
_ENCODER_TOKENS = 1 << 20
"""Encoder budget: so large that multimodal items never delay a request."""

_DRAFT_RIGHT = 0.6
"""Chance that a drafted token is the model's own."""

_IDLE_STEPS_MAX = 20
"""A scheduler that waits for something always goes on within a step or two."""

_GROUP_DEFAULTS = {
    "sliding_window": None,
    "attention_chunk_size": None,
    "mamba_cache_mode": None,
    "is_eagle": False,
}


@dataclass(frozen=True)
class Setup:
    """One engine's cache layout; sizes in tokens, ``groups`` as in a trace header (without ``group_idx``)."""

    groups: tuple[Mapping[str, Any], ...]
    num_blocks: int
    prefix_match_unit: int | None = None
    retention_interval: int | None = 0
    hash_algo: str = "sha256"
    seed: str | None = None
    int_hashes: bool = True
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 8
    max_model_len: int = 4096
    dcp: int = 1
    """Ranks of decode context parallelism: a block of full attention is so much longer than a rank's."""
    lookahead_tokens: int = 0
    """Tokens after a block that its hash covers, as with an EAGLE or MTP drafter (vLLM 0.33)."""
    policy: str = "fcfs"
    """Order of waiting requests: ``fcfs`` or ``priority``, which also chooses whom to preempt."""
    async_scheduling: bool = False
    """A step is scheduled before the output of the one before it is known."""
    drafts: int = 0
    """Tokens that a drafter proposes after each step; a part of them is rejected."""


@dataclass(frozen=True)
class Prompt:
    """Token ids and what else enters their hashes; ``mm`` is (identifier, offset, length) per item."""

    token_ids: list[int]
    lora_name: str | None = None
    lora_path: str | None = None
    cache_salt: str | None = None
    mm: tuple[tuple[str, int, int], ...] = ()
    reports_hits: bool = False
    """Sent with ``kv_cache_report_mode=full``: the engine publishes the blocks that it hits again."""
    skips_cache: bool = False
    """Computed without reading the cache, as for prompt log-probabilities."""
    embedded: bool = False
    """Given as embeddings: the engine hashes these, and publishes tokens that were not sent."""

    def extras(self) -> dict[str, Any]:
        """The fields besides tokens that are set."""
        values: dict[str, Any] = {
            "lora_name": self.lora_name,
            "lora_path": self.lora_path,
            "cache_salt": self.cache_salt,
        }
        if self.mm:
            values["mm"] = [list(item) for item in self.mm]
        return {name: value for name, value in values.items() if value}


@dataclass
class _Recorder:
    """Stands in for the ZMQ publisher: keeps the payloads it would send."""

    payloads: list[bytes] = field(default_factory=list)
    encoder: msgspec.msgpack.Encoder = field(default_factory=msgspec.msgpack.Encoder)

    def publish(self, batch: EventBatch) -> None:
        batch.data_parallel_rank = 0
        self.payloads.append(self.encoder.encode(batch))

    def shutdown(self) -> None:
        """Nothing to close."""


class RealEngine:
    """One scheduler with its pool: ``add`` requests, ``step`` while ``busy``, ``probe`` at any time."""

    def __init__(self, setup: Setup, model: str) -> None:
        _set_environment(setup)
        self.setup = setup
        self._hash = get_hash_fn_by_name(setup.hash_algo)
        init_none_hash(self._hash)
        groups = [_group_spec(index, group, setup.drafts) for index, group in enumerate(setup.groups)]
        cache = KVCacheConfig(
            num_blocks=setup.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=setup.retention_interval,
        )
        config = _vllm_config(setup, model)
        self.scheduler_block_size, self.hash_block_size = resolve_kv_cache_block_sizes(cache, config)
        cache.hash_block_size = self.hash_block_size
        self.scheduler = (AsyncScheduler if setup.async_scheduling else Scheduler)(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=self.scheduler_block_size,
            hash_block_size=self.hash_block_size,
        )
        self._recorder = _Recorder()
        self.scheduler.kv_event_publisher = self._recorder  # type: ignore[assignment]
        self.scheduler.max_num_encoder_input_tokens = _ENCODER_TOKENS
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=_ENCODER_TOKENS)
        self.manager = self.scheduler.kv_cache_manager
        self._drop_after_eagle()
        ahead = (setup.lookahead_tokens,) if setup.lookahead_tokens else ()
        self._hasher = get_request_block_hasher(self.hash_block_size, self._hash, *ahead)
        self._count = 0
        self._idle_steps = 0
        self._drafter = random.Random(0)
        # Scheduled steps without output yet, each with the requests that sample a token in it.
        self._scheduled: deque[tuple[SchedulerOutput, frozenset[str]]] = deque()

    def _drop_after_eagle(self) -> None:
        """Effects of a drafter in the configuration: groups marked for it drop their last block,
        unless hashes look ahead."""
        setup, coordinator = self.setup, self.manager.coordinator
        drops = not setup.lookahead_tokens and any(group.get("is_eagle") for group in setup.groups)
        self.scheduler.use_eagle_block_drop = drops
        for manager in coordinator.single_type_managers:
            if isinstance(manager, MambaManager):
                manager.drop_eagle_checkpoint_block = drops
        if not drops or not hasattr(coordinator, "drop_eagle_group_ids"):
            return
        coordinator.drop_eagle_group_ids = coordinator.eagle_group_ids
        if len(setup.groups) > 1:
            coordinator.verify_and_split_kv_cache_groups()
        else:
            coordinator.single_type_managers[0].use_eagle = True

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.scheduler.has_unfinished_requests())

    def header(self) -> dict[str, Any]:
        """Fields of a trace's first line about this engine (without family, seed and version)."""
        setup = self.setup
        return {
            "groups": [
                {"group_idx": index, **_GROUP_DEFAULTS, **group, "block_size": manager.block_size}
                for index, (group, manager) in enumerate(
                    zip(setup.groups, self.manager.coordinator.single_type_managers, strict=True)
                )
            ],
            "num_blocks": setup.num_blocks,
            "scheduler_block_size": self.scheduler_block_size,
            "hash_block_size": self.hash_block_size,
            "hash_algo": setup.hash_algo,
            "none_hash_seed": setup.seed or DEFAULT_SEED,
            "int_hashes": setup.int_hashes,
            "retention_interval": setup.retention_interval,
            "partial_hash_hits": bool(self.manager.coordinator.enable_partial_hash_hits),
            "unitary": len(setup.groups) == 1,
            "report_mode": "incremental",
        }

    def add(self, prompt: Prompt, max_tokens: int, priority: int = 0) -> Request:
        """Queue a request; returns vLLM's object, whose ``all_token_ids`` grows as it runs."""
        request = self._request(prompt, max_tokens, priority)
        self.scheduler.add_request(request)
        return request

    def step(self) -> list[bytes]:
        """One scheduler step with a fake model; returns the event payloads it published (0 or 1).

        Raises ``RuntimeError`` when requests wait that can never run, being too large for the pool.
        """
        while len(self._scheduled) <= self.setup.async_scheduling:
            self._schedule()
        output, samplers = self._scheduled.popleft()
        ids = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        drafted = output.scheduled_spec_decode_tokens
        sampled = [
            self._accepted(requests[name], drafted.get(name, []))
            if name in samplers & requests.keys()
            else []
            for name in ids
        ]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
                sampled_token_ids=sampled,
            ),
        )
        if self.setup.drafts and not self.setup.async_scheduling:
            self._draft(ids)
        return self.take_payloads()

    def _accepted(self, request: Request, drafted: Sequence[int]) -> list[int]:
        """The model's next tokens: as many as there are right drafts, and one more. Placeholders of
        asynchronous scheduling are right as often as real drafts."""
        tokens = _next_tokens(request, 1 + len(drafted))
        right = 0
        for draft, token in zip(drafted, tokens, strict=False):
            if draft != token and not (draft == -1 and self._drafter.random() < _DRAFT_RIGHT):
                break
            right += 1
        return tokens[: right + 1]

    def _draft(self, names: Sequence[str]) -> None:
        """Propose the next tokens of requests that decode, some of them wrong, sometimes fewer."""
        requests, rng = self.scheduler.requests, self._drafter
        drafting = [name for name in names if name in requests]
        drafts: list[list[int]] = []
        for name in drafting:
            tokens = _next_tokens(requests[name], rng.randint(0, self.setup.drafts))
            drafts.append([token if rng.random() < _DRAFT_RIGHT else 1 for token in tokens])
        self.scheduler.update_draft_token_ids(DraftTokenIds(drafting, drafts))

    def _schedule(self) -> None:
        output = self.scheduler.schedule()
        self._idle_steps = 0 if output.num_scheduled_tokens else self._idle_steps + 1
        if self.busy and self._idle_steps > _IDLE_STEPS_MAX:
            raise RuntimeError(f"a request does not fit: {self.setup}")
        requests = [self.scheduler.requests[request_id] for request_id in output.num_scheduled_tokens]
        samplers = frozenset(request.request_id for request in requests if not request.is_prefill_chunk)
        self._scheduled.append((output, samplers))

    def take_payloads(self) -> list[bytes]:
        """Payloads published since the last call."""
        taken, self._recorder.payloads = self._recorder.payloads, []
        return taken

    def hit(self, prompt: Prompt) -> int:
        """Tokens of ``prompt`` the manager would take from its cache now."""
        return self.used(int(self.manager.get_computed_blocks(self._request(prompt, 1))[1]))

    def used(self, hit: int) -> int:
        """The part of a hit that ``Scheduler.schedule`` uses: none where all would be computed again."""
        return hit if hit > getattr(self.scheduler, "prefix_replay_tokens", 0) else 0

    def probe(self, prompt: Prompt) -> tuple[int, list[int]]:
        """Tokens of ``prompt`` the manager would take from its cache now: reconciled, and per group."""
        request = self._request(prompt, 1)
        hit = self.used(int(self.manager.get_computed_blocks(request)[1]))
        coordinator = self.manager.coordinator
        if not hasattr(coordinator, "find_longest_cache_hit_per_group"):
            return hit, [hit]
        _, per_group = coordinator.find_longest_cache_hit_per_group(
            request.block_hashes, request.num_tokens - 1
        )
        return hit, list(per_group)

    def reset(self, *, running: bool = False) -> bool:
        """Empty the prefix cache; its event leaves with the next step that publishes."""
        return bool(self.scheduler.reset_prefix_cache(reset_running_requests=running))

    def keys_per_group(self) -> list[int]:
        """How many distinct hashes each group holds."""
        counts = [0] * len(self.setup.groups)
        for key in self.manager.block_pool.cached_block_hash_to_block._cache:
            counts[get_group_id(key)] += 1
        return counts

    def _request(self, prompt: Prompt, max_tokens: int, priority: int = 0) -> Request:
        self._count += 1
        given = torch.tensor(prompt.token_ids, dtype=torch.float32)[:, None] if prompt.embedded else None
        return Request(
            request_id=f"r{self._count}",
            prompt_token_ids=None if prompt.embedded else list(prompt.token_ids),
            prompt_embeds=given,
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=True,
                skip_reading_prefix_cache=prompt.skips_cache,
                extra_args={"kv_cache_report_mode": "full"} if prompt.reports_hits else None,
            ),
            pooling_params=None,
            lora_request=_lora(prompt),
            cache_salt=prompt.cache_salt,
            mm_features=[_feature(*item) for item in prompt.mm],
            block_hasher=self._hasher,
            priority=priority,
        )


def _set_environment(setup: Setup) -> None:
    os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "1" if setup.int_hashes else "0"
    os.environ.pop("PYTHONHASHSEED", None)
    if setup.seed is not None:
        os.environ["PYTHONHASHSEED"] = setup.seed


def _vllm_config(setup: Setup, model: str) -> VllmConfig:
    cache = CacheConfig(
        block_size=max(group["block_size"] for group in setup.groups),
        enable_prefix_caching=True,
        prefix_caching_hash_algo=setup.hash_algo,
        prefix_cache_retention_interval=setup.retention_interval,
        prefix_match_unit=setup.prefix_match_unit,
    )
    config = VllmConfig(
        model_config=_model_config(model, setup.max_model_len),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_model_len=setup.max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,  # the scheduler is chosen here, not by a worker
            policy=setup.policy,
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    if hasattr(VllmConfig, "num_hash_lookahead_tokens"):  # a property of the drafter's configuration
        VllmConfig.num_hash_lookahead_tokens = setup.lookahead_tokens
    # Properties of the drafter's configuration too. A drafter with layers of its own needs pages ahead.
    reads_ahead = bool(setup.lookahead_tokens) or any(group.get("is_eagle") for group in setup.groups)
    VllmConfig.num_speculative_tokens = setup.drafts
    VllmConfig.num_lookahead_tokens = setup.drafts if reads_ahead else 0
    VllmConfig.num_prefill_lookahead_tokens = setup.lookahead_tokens or int(reads_ahead)
    config.scheduler_config.async_scheduling = setup.async_scheduling
    modes = {group["mamba_cache_mode"] for group in setup.groups if group.get("mamba_cache_mode")}
    config.parallel_config.decode_context_parallel_size = setup.dcp  # no ranks are started here
    cache.num_gpu_blocks = setup.num_blocks
    cache.block_size = max(group["block_size"] for group in setup.groups)
    cache.mamba_cache_mode = modes.pop() if modes else "none"
    cache.prefix_cache_retention_interval = setup.retention_interval
    return config


_MODEL_CONFIGS: dict[tuple[str, int], ModelConfig] = {}


def _model_config(model: str, max_model_len: int) -> ModelConfig:
    key = (model, max_model_len)
    if key not in _MODEL_CONFIGS:  # reading a model's config takes seconds, and every setup shares one
        # vLLM may inspect the model in a new interpreter, whose seed of hashes must be a whole number.
        seed = os.environ.pop("PYTHONHASHSEED", None)
        _MODEL_CONFIGS[key] = ModelConfig(
            model=model, dtype="float32", max_model_len=max_model_len, skip_tokenizer_init=True
        )
        if seed is not None:
            os.environ["PYTHONHASHSEED"] = seed
    return _MODEL_CONFIGS[key]


def _group_spec(index: int, group: Mapping[str, Any], drafts: int = 0) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(
        layer_names=[f"layer.{index}"],
        kv_cache_spec=_spec(group, drafts),
        is_eagle_group=bool(group.get("is_eagle")),
    )


def _spec(group: Mapping[str, Any], drafts: int) -> KVCacheSpec:
    block_size = group["block_size"]
    attention: dict[str, Any] = {
        "block_size": block_size,
        "num_kv_heads": 2 if group.get("apart") else 1,
        "head_size": 1,
        "dtype": torch.float32,
    }
    match group["kind"]:
        case "full_attention":
            return FullAttentionSpec(**attention)
        case "sliding_window":
            return SlidingWindowSpec(**attention, sliding_window=group["sliding_window"])
        case "sliding_window_mla":
            return SlidingWindowMLASpec(
                **attention,
                sliding_window=group["sliding_window"],
                bounded_replay=not group.get("cacheable", True),
            )
        case "circular_buffer":
            return CircularBufferSpec(**attention)
        case "chunked_local_attention":
            return ChunkedLocalAttentionSpec(**attention, attention_chunk_size=group["attention_chunk_size"])
        case "mamba":
            return MambaSpec(
                block_size=block_size,
                shapes=((1,),),
                dtypes=(torch.float32,),
                mamba_cache_mode=group["mamba_cache_mode"],
                num_speculative_blocks=drafts,
            )
        case kind:
            raise ValueError(f"no spec for group kind {kind!r}")


def _lora(prompt: Prompt) -> LoRARequest | None:
    if prompt.lora_name is None:
        return None
    # Equal strings must be distinct objects here as in a server, where name and path come off a socket.
    path = (prompt.lora_path or "").encode().decode()
    return LoRARequest(lora_name=prompt.lora_name, lora_int_id=1, lora_path=path)


def _feature(identifier: str, offset: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier.encode().decode(),
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


def _next_tokens(request: Request, count: int) -> list[int]:
    """Tokens that depend on the request's text alone, so that equal prompts decode equal answers."""
    text: list[int] = list(request.all_token_ids[-3:])
    for number in range(count):
        text.append(3 + (sum(text[-3:]) * 31 + (request.num_tokens + number) * 7) % 997)
    return text[len(text) - count :]
