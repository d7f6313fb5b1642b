"""Configuration of the prompt reader: one ``ModelPrompts`` per served model, ``PromptSettings`` for all."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ModelPrompts(msgspec.Struct, frozen=True):
    """How one model's prompts are made; must say what its engines were started with.

    ``tokenizer_dir``: a Hugging Face model directory; None: ask the engine. ``chat_template``: the engine's
    ``--chat-template`` (file or text). ``lora_paths``: adapter name -> path exactly as the engines were
    told, since block hashes cover it.
    """

    tokenizer_dir: str | None = None
    chat_template: str | None = None
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    default_chat_template_kwargs: dict[str, Any] = {}
    exclude_tools_when_tool_choice_none: bool = False
    max_model_len: int | None = None
    lora_paths: dict[str, str] = {}


class PromptSettings(msgspec.Struct, frozen=True):
    """Bounds and budgets. Sizes of the caches are estimates of resident memory."""

    prefix_cache_bytes_max: int = 256 << 20
    segment_cache_bytes_max: int = 64 << 20
    """Per model."""
    inline_chars_max: int = 4096
    """New text above this is tokenized in a worker thread: below, it takes under 4 ms."""
    inline_blocks_max: int = 1024
    """New blocks above this are hashed in a worker thread: below, it takes under 3 ms."""
    prompt_bytes_max: int = 1 << 20
    """Bodies above this go by affinity: about 260,000 tokens of English. Raising it is exact too, but taking
    over a tokenized text holds the GIL, and so the event loop, for 20 to 40 ms per megabyte."""
    worker_threads: int = 2
    worker_queue_len_max: int = 64
    engine_timeout_s: float = 1.0
    """Budget of one call to an engine's render or tokenize endpoint."""
    engine_calls_max: int = 32
    """At once; further prompts go by affinity."""
    engine_absent_s: float = 60.0
    """How long an endpoint that answered "not here" is not asked again."""
    engine_failed_s: float = 5.0
    """The same after a timeout, a broken connection or a 5xx."""
