"""Configuration of the prompt reader: one ``ModelPrompts`` per served model, ``PromptSettings`` for all."""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo
from typing import Any, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

# Name for every base model without an entry of its own.
ANY_MODEL = "*"


class ModelPrompts(msgspec.Struct, frozen=True):
    """How one model's prompts are made; must match the flags of its engines.

    ``tokenizer_dir``: a Hugging Face model directory; None: ask the engine. ``chat_template``: the engine's
    ``--chat-template`` (file or text). ``time_zone``: the engines', None: as here. ``lora_paths``: adapter
    name -> path exactly as given to the engines, since block hashes cover it.
    """

    tokenizer_dir: str | None = None
    chat_template: str | None = None
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    tokenizer_mode: Literal["auto", "cohere"] = "auto"
    default_chat_template_kwargs: dict[str, Any] = {}
    exclude_tools_when_tool_choice_none: bool = False
    anthropic_disabled_thinking_effort: str = "auto"
    max_model_len: int | None = None
    time_zone: str | None = None
    lora_paths: dict[str, str] = {}


class PromptSettings(msgspec.Struct, frozen=True):
    """Bounds of prompt processing. Sizes of caches are estimates of resident memory."""

    prefix_cache_bytes_max: int = 256 << 20
    """Cache of tokens and block hashes of earlier prompts, shared by all models."""
    fast_tokenizer: Literal["auto", "off"] = "auto"
    """``auto``: tokenize with fastokens if it gives the tokens of ``tokenizers`` for all probe texts, and
    compare again on a running sample; ``off``: always ``tokenizers``."""
    prompt_bytes_max: int = 1 << 20
    """Larger bodies are placed by text affinity, without tokens (the default is about 260,000 tokens of
    English). Raising it keeps predictions exact, but each megabyte blocks the event loop for up to 10 ms."""
    worker_threads: int = 2
    """Threads for tokenizing and hashing."""
    hub_downloads: bool = True
    """Whether tokenizers that are known by name are fetched from the model hub: only the files needed for
    rendering, never weights or code. ``false``: only its cache on this machine and directories."""
    hub_endpoint: str = ""
    """A mirror of the hub, e.g. ``https://hub.example.com``; else ``HF_ENDPOINT``, else huggingface.co."""
    hub_bytes_max: int = 256 << 20
    """Maximum size of one repository's tokenizer, templates and configuration."""
    hub_timeout_s: float = 120.0
    """Time-out of fetching them, in seconds; engines are asked for tokens meanwhile."""
    renderers: tuple[str, ...] = ()
    """Render servers (``vllm launch render``), each ``http://host:port``: asked before any engine for prompts
    that are not tokenized here. They need the engines' model and options."""
    engine_timeout_s: float = 1.0
    """Time-out of one call to an engine's or a render server's endpoint, in seconds."""


# The engines' local time, which some prompts contain.


def local_time(time_zone: str | None) -> datetime:
    """The current local time of an engine with this time zone (naive); None: of this machine."""
    zone = None if time_zone is None else zone_of(time_zone)
    return datetime.now(zone).replace(tzinfo=None)


def zone_of(name: str) -> tzinfo:
    """Return an IANA time zone. Raises ``ValueError`` for an unknown name."""
    if name == "UTC":
        return UTC  # without the system's data
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, ZoneInfoNotFoundError):
        raise ValueError("no time zone of this name is known here") from None
