"""An engine's own statement of its set-up: from its Prometheus page, and from ``/server_info`` if that is
enabled (``VLLM_SERVER_DEV_MODE=1``).

Pure functions; a value of another shape than vLLM's is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

SERVER_INFO: Final = "/server_info?config_format=json"
_TOKENS_MAX: Final = 1 << 24
_METHOD: Final = re.compile(r"[\w-]{1,40}", re.ASCII)
_BOOLS: Final = {"True": True, "False": False}


class EngineStatement(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in tokens; None: not stated."""

    source: Literal["server_info", "metrics"]
    drafts: bool | None = None
    """Whether it decodes speculatively."""
    method: str = ""
    """Method of speculative decoding; "": not stated."""
    keeps_last_block: bool = False
    """Started with ``disable_eagle_block_drop``: lookups drop no block."""
    attention_block_size: int | None = None
    """Block size of its full-attention layers, over all ranks of decode context parallelism."""
    mamba_cache_mode: str | None = None
    bounded_replay: bool | None = None
    """Whether windows may be rebuilt by replay, for models that support it."""


def metrics_statement(cache_config: Mapping[str, str], *, drafts: bool) -> EngineStatement | None:
    """Read the labels of ``vllm:cache_config_info``, and whether the page has counters of drafts.

    vLLM registers the counters when an engine with speculative decoding starts, and on no other engine
    (``SpecDecodingProm``, vLLM 0.32). Its Rust frontend, whose page lacks ``cache_config_info``, always has
    them (0.33): there ``drafts`` requires one above zero. Returns None for a page with neither.
    """
    if not cache_config and not drafts:
        return None
    mode = cache_config.get("mamba_cache_mode")
    size = cache_config.get("effective_attention_block_size", "")
    return EngineStatement(
        source="metrics",
        drafts=drafts,
        attention_block_size=_tokens(int(size)) if size.isdecimal() and len(size) < 10 else None,
        mamba_cache_mode=mode if mode in {"align", "all"} else None,
        bounded_replay=_BOOLS.get(cache_config.get("swa_bounded_replay", "")),
    )


def server_info_statement(body: bytes) -> EngineStatement | None:
    """Read ``GET /server_info?config_format=json``; None for a body of another kind."""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    config = _part(answer, "vllm_config")
    cache = _part(config, "cache_config")
    if not cache:
        return None
    drafter = _part(config, "speculative_config")
    method, mode = drafter.get("method"), cache.get("mamba_cache_mode")
    replay = cache.get("swa_bounded_replay")
    return EngineStatement(
        source="server_info",
        drafts=bool(drafter),
        method=method if isinstance(method, str) and _METHOD.fullmatch(method) else "",
        keeps_last_block=drafter.get("disable_eagle_block_drop") is True,
        attention_block_size=_tokens(cache.get("effective_attention_block_size")),
        mamba_cache_mode=mode if mode in {"align", "all"} else None,
        bounded_replay=replay if isinstance(replay, bool) else None,
    )


def _part(whole: Any, name: str) -> dict[str, Any]:
    part = whole.get(name) if isinstance(whole, dict) else None
    return part if isinstance(part, dict) else {}


def _tokens(value: object) -> int | None:
    return value if type(value) is int and 0 < value <= _TOKENS_MAX else None
