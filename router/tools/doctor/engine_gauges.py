"""An engine's set-up by its Prometheus page: cache configuration, prompt lengths, speculation."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

_SERIES = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+([^\s]+)", re.MULTILINE)
_SUMMED = (
    "prompt_tokens_total",
    "request_success_total",
    "spec_decode_num_drafts_total",
    "request_prompt_tokens_sum",
    "request_prompt_tokens_count",
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class EngineGauges(msgspec.Struct, frozen=True):
    """Facts from an engine's metrics page; ``cache_config``: the labels of ``vllm:cache_config_info``."""

    cache_config: dict[str, str] = {}
    mean_prompt_tokens: float | None = None
    requests: int = 0
    speculates: bool = False

    @property
    def pool_blocks(self) -> int | None:
        """Number of blocks of the GPU pool, over all groups."""
        return _size(self.cache_config.get("num_gpu_blocks_override")) or _size(
            self.cache_config.get("num_gpu_blocks")
        )


def _size(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) < 12 else None


def series(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield (name, labels, value) of every sample in a Prometheus page; malformed lines are skipped."""
    for match in _SERIES.finditer(text):
        try:
            value = float(match[3])
        except ValueError:
            continue
        yield match[1], dict(_LABEL.findall(match[2] or "")), value


def read_engine_gauges(page: bytes, dp_rank: int | None) -> EngineGauges:
    """Read the gauges of one rank (None: of the whole server). Never raises."""
    cache_config: dict[str, str] = {}
    sums = dict.fromkeys(_SUMMED, 0.0)
    counters = drafted = False
    for name, labels, value in series(page.decode("utf-8", "replace")):
        if dp_rank is not None and labels.get("engine", str(dp_rank)) != str(dp_rank):
            continue
        short = name.removeprefix("vllm:")
        if short == "cache_config_info" and not cache_config:
            cache_config = labels
        elif short in sums and 0 <= value < 1e18:
            sums[short] += value
            if short.startswith("spec_decode"):
                counters, drafted = True, drafted or value > 0
    tokens, requests = sums["request_prompt_tokens_sum"], sums["request_prompt_tokens_count"]
    if not requests:
        tokens, requests = sums["prompt_tokens_total"], sums["request_success_total"]
    mean = tokens / requests if requests else None
    # As ``metrics_statement`` reads them.
    speculates = drafted or (counters and bool(cache_config))
    return EngineGauges(cache_config, mean, int(requests), speculates)
