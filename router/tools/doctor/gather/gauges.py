"""What an engine's Prometheus page tells of its set-up: cache configuration, prompt lengths, speculation."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

_SERIES = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+([^\s]+)", re.MULTILINE)
_SUMMED = (
    *("prompt_tokens_total", "request_success_total", "spec_decode_num_drafts_total"),
    *("request_prompt_tokens_sum", "request_prompt_tokens_count"),
)
_HITS = ("prefix_cache_hits_total", "external_prefix_cache_hits_total")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class EngineGauges(msgspec.Struct, frozen=True):
    """``cache_config`` are the labels of ``vllm:cache_config_info`` (empty where the engine has none)."""

    cache_config: dict[str, str] = {}
    mean_prompt_tokens: float | None = None
    requests: int = 0
    speculates: bool = False
    hit_tokens: int | None = None
    """Tokens taken from caches since the start, by the engine's own counters; None where it has none."""

    @property
    def pool_blocks(self) -> int | None:
        """Blocks of the GPU pool, all groups together."""
        return _size(self.cache_config.get("num_gpu_blocks_override")) or _size(
            self.cache_config.get("num_gpu_blocks")
        )

    @property
    def pool_tokens(self) -> int | None:
        """Most tokens that the pool can hold."""
        blocks, size = self.pool_blocks, _size(self.cache_config.get("block_size"))
        return blocks * size if blocks and size else None


def _size(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) < 12 else None


def series(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of every sample in a Prometheus page; lines that are none are left out."""
    for match in _SERIES.finditer(text):
        try:
            value = float(match[3])
        except ValueError:
            continue
        yield match[1], dict(_LABEL.findall(match[2] or "")), value


def read_engine_gauges(page: bytes, dp_rank: int | None) -> EngineGauges:
    """The gauges of one rank (None: of the whole server). Never raises."""
    cache_config: dict[str, str] = {}
    sums = dict.fromkeys(_SUMMED, 0.0)
    hits: float | None = None
    speculates = False
    for name, labels, value in series(page.decode("utf-8", "replace")):
        if dp_rank is not None and labels.get("engine", str(dp_rank)) != str(dp_rank):
            continue
        short = name.removeprefix("vllm:")
        if short == "cache_config_info" and not cache_config:
            cache_config = labels
        elif short in _HITS and 0 <= value < 1e18:
            hits = (hits or 0.0) + value
        elif short in sums and 0 <= value < 1e18:
            sums[short] += value
            speculates = speculates or short.startswith("spec_decode")
    tokens, requests = sums["request_prompt_tokens_sum"], sums["request_prompt_tokens_count"]
    if not requests:
        tokens, requests = sums["prompt_tokens_total"], sums["request_success_total"]
    mean = tokens / requests if requests else None
    return EngineGauges(cache_config, mean, int(requests), speculates, None if hits is None else int(hits))
