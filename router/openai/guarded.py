"""Members of a client's body that only the router may send to engines, by kind of engine.

``REMOVED`` choose a peer, rank, transfer or hint, or name a request for the engine's own books; the answer is
the same without them. ``REFUSED`` name a session, conversation or cached blocks, which may be another
client's, and the answer would be another one without them. ``ADAPTERS`` name a model past ``model``. Engines
read them at the top of a body and within ``CONTAINERS``, which may lie within each other.
"""

from __future__ import annotations

from typing import Final

# Read in vLLM 0.33 (``SamplingParams.extra_args``, entrypoints/openai/*/protocol.py), SGLang 0.5.23
# (srt/managers/io_struct.py ``GenerateReqInput``, entrypoints/openai/protocol.py) and TensorRT-LLM 1.2
# (serve/openai_protocol.py). No list by the kind of the engine is applied: it is chosen after the screening.
_REMOVED_BY_KIND: Final = {
    # vLLM's process ends on wrong transfer parameters; connectors read hints (vLLM #53423).
    "vllm": ("kv_transfer_params", "ec_transfer_params", "kv_hints", "kv_hint"),
    "sglang": (
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "bootstrap_pair_key",
        "decode_tp_size",
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
        "data_parallel_rank",
        "data_parallel_rank_decode",
        "kv_hints",
        "routing_key",
        "rid",
        "conversation_id",
    ),
    "tensorrt-llm": ("disaggregated_params", "kv_cache_retention_config"),
}
_REFUSED_BY_KIND: Final = {
    # The history of a response as its client tells it, which vLLM may look up by its id.
    "vllm": {"previous_response": "send previous_response_id, or the earlier items in input"},
    "sglang": {
        "lora_id": "name the adapter in model or lora_path",
        "session_params": "send the whole conversation",
        "extra_key": "send cache_salt",
    },
    "tensorrt-llm": {
        "lora_request": "name the adapter in model",
        "conversation_params": "send the whole conversation",
    },
    "openai": {"conversation": "send the whole conversation, or previous_response_id"},
}
REMOVED: Final = frozenset(name for names in _REMOVED_BY_KIND.values() for name in names)
REFUSED: Final = {name: remedy for names in _REFUSED_BY_KIND.values() for name, remedy in names.items()}
"""With what to send instead."""
ADAPTERS: Final = frozenset({"lora_path"})
"""SGLang's: a name, or a list with one for each prompt."""
CONTAINERS: Final = frozenset({"vllm_xargs", "sampling_params", "extra_args", "extra_body"})
GUARDED: Final = tuple(sorted(REMOVED | REFUSED.keys() | ADAPTERS | CONTAINERS))
"""A body without any of these as its own member has nothing to be screened."""
