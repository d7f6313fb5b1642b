"""Counters of the prompt reader, plain numbers that the metrics exporter reads.

Always true: every request read is counted once, in ``local``, ``engine`` or ``affinity[reason]``;
a refused one (an ``ApiError``) in ``refused``.
"""

from __future__ import annotations

import msgspec

REASONS = (
    "model_unknown",  # no configuration names this model
    "lora_path_unknown",  # hashes cover the adapter's path, which nobody told us
    "no_tokenizer",  # no local tokenizer configured
    "endpoint",  # not a text-generation endpoint this reader knows
    "renderer",  # the engine renders this model's chats with code, not with a template
    "no_template",  # chat, but the tokenizer directory has no chat template
    "template_rejected",  # the chat template raised an error
    "request_template",  # the request brings its own chat template
    "template_kwargs",  # chat_template_kwargs reach past the template
    "multimodal",  # images, audio, video
    "embeds",  # prompt embeddings
    "message_shape",  # a message part whose rendering is not reproduced
    "tools_shape",  # a tool whose rendering is not reproduced
    "truncation",  # truncation that depends on what is not known here
    "field",  # another field of a type or use that is not reproduced
    "unusual_json",  # JSON that only some parsers accept
    "too_large",  # over prompt_bytes_max
    "busy",  # the worker queue is full
    "empty",  # a prompt without tokens
)
"""Why a prompt is not computed locally, and (where the engine did not help) routed by affinity."""


class PromptStats(msgspec.Struct):
    """Counts since start; ``*_bytes`` are gauges."""

    local: int = 0
    engine: int = 0
    refused: int = 0
    not_local: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    affinity: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    multi_prompt: int = 0
    """Requests with several prompts; routed by the first."""

    rendered: int = 0
    rendered_jinja2: int = 0
    """Renderings by jinja2, the slower engine, because minijinja is not in use for that template."""
    template_checks: int = 0
    template_mismatches: int = 0
    """Renderings where minijinja and jinja2 disagreed; that template stays with jinja2 from then on."""

    prefix_hits: int = 0
    prefix_misses: int = 0
    prefix_evictions: int = 0
    prefix_bytes: int = 0
    segment_hits: int = 0
    segment_misses: int = 0
    segment_evictions: int = 0
    segment_bytes: int = 0
    context_bytes: int = 0
    context_evictions: int = 0
    not_kept: int = 0
    """Prompts, texts and tool lists too large for their cache: used once."""
    tokens_reused: int = 0
    tokens_new: int = 0
    blocks_reused: int = 0
    blocks_hashed: int = 0

    worker_jobs: int = 0
    worker_full: int = 0
    """Prompts that went to affinity because the worker queue was full."""

    engine_calls: int = 0
    engine_failures: int = 0
    engine_skipped: int = 0
    """Engine calls not made: endpoint known to be absent or failing, or too many calls at once."""
