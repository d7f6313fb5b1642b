"""The usage record of a router (``kvatlas.router.observe.usage``) as a workload.

Only requests whose prompts were tokenized by the router and answered by an engine are used. If the engine
did not report the number of generated tokens, it is estimated from the duration of the answer, at the pace
of the answers that report both. A rotated record is read completely.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.router.observe.usage import UsageLine, rotated_files
from kvatlas.router.simulation.requests import (
    Asked,
    WorkloadError,
    asked_of,
    in_order,
    lines_of,
    with_start,
)
from kvatlas.router.simulation.session_files import is_session
from kvatlas.router.simulation.setup import Timing

OUTPUT_GUESS_MAX = 32_768
# Prompts that are longer, in the middle, share little within their first unit, and have many ids.
_START_COUNTS_TOKENS_MAX = 2048
_SUCCESS = 200, 300


class Captured(msgspec.Struct, frozen=True, kw_only=True):
    """One line. ``asked.output_tokens`` is estimated if ``output_reported`` is False."""

    asked: Asked
    model: str
    engine: str
    output_reported: bool
    predicted_tokens: int | None
    cached_tokens: int | None
    ttft_s: float | None
    duration_s: float
    queue_s: float
    start_ids: list[int] | None = None

    @property
    def s_per_generated_token(self) -> float | None:
        """Return the time per token between the first and the last one; None if unknown."""
        more = self.asked.output_tokens - 1
        if not self.output_reported or self.ttft_s is None or more < 1:
            return None
        return max(0.0, self.duration_s - self.ttft_s) / more


def is_capture(path: Path) -> bool:
    """Whether the first line of a file is one of a usage record. Raises ``WorkloadError``."""
    if is_session(path):
        return False
    with contextlib.closing(lines_of(path)) as lines:
        _, fields = next(lines)
    if "payload_b64" in fields:
        raise WorkloadError(
            f"{path}: a capture of KV events (kvatlas record), which holds no requests; name the router's "
            "usage record (usage.path), or a trace"
        )
    return "arrived_s" in fields and "hash_ids" in fields


def read_capture(path: Path, model: str | None = None) -> list[Captured]:
    """Return all lines of a capture, by time. ``model``: only requests of that one.

    Raises ``WorkloadError``, also for a capture of several models without ``model``: they do not share
    engines' caches.
    """
    lines = (line for piece in rotated_files(path) for line in lines_of(piece))
    found = [one for where, fields in lines if (one := _captured(fields, where)) is not None]
    if not found:
        raise WorkloadError(f"{path}: no answered request whose prompt the router tokenized")
    models = Counter(one.model for one in found)
    if model is not None and model not in models:
        raise WorkloadError(f"{path}: no request of model {model!r}; there are {', '.join(models)}")
    if model is None and len(models) > 1:
        raise WorkloadError(
            f"{path}: requests of {len(models)} models, {', '.join(models)}: name one of them"
        )
    found = [one for one in found if model in {None, one.model}]
    lengths = statistics.median(one.asked.input_tokens for one in found)
    if lengths <= _START_COUNTS_TOKENS_MAX and any(one.start_ids is not None for one in found):
        found = [
            msgspec.structs.replace(one, asked=with_start(one.asked, one.start_ids, str(path)))
            for one in found
        ]
    found.sort(key=lambda one: one.asked.at_s)
    return _with_outputs(found)


def cached_share(captured: Sequence[Captured]) -> float | None:
    """The share of prompt tokens that engines reported as cached; None: they did not."""
    told = [(one.cached_tokens, one.asked.input_tokens) for one in captured if one.cached_tokens is not None]
    total = sum(tokens for _, tokens in told)
    return sum(cached for cached, _ in told) / total if total else None


def asked_in(captured: Sequence[Captured]) -> list[Asked]:
    return in_order([one.asked for one in captured])


def _captured(fields: dict[str, Any], where: str) -> Captured | None:
    """Parse a line; None if nothing was computed, or the prompt is unknown."""
    try:
        line = msgspec.convert(fields, UsageLine)
    except msgspec.ValidationError as error:
        raise WorkloadError(f"{where}: not a line of a usage record: {error}") from None
    if line.hash_ids is None or line.asked_s is None or not _SUCCESS[0] <= line.status < _SUCCESS[1]:
        return None
    generated = line.generated_tokens
    asked = asked_of(
        {
            "timestamp": 1000 * (line.arrived_s + line.asked_s),
            "input_length": line.hashed_tokens,
            "output_length": generated or 0,
            "hash_ids": line.hash_ids,
        },
        where,
    )
    return Captured(
        asked=asked,
        model=line.model,
        engine=line.engine,
        output_reported=generated is not None,
        predicted_tokens=line.predicted_tokens,
        cached_tokens=line.cached_tokens,
        ttft_s=None if line.first_token_s is None else line.first_token_s - line.asked_s,
        duration_s=line.duration_s - line.asked_s,
        queue_s=line.queue_s or 0.0,
        start_ids=line.start_ids,
    )


def _with_outputs(found: list[Captured]) -> list[Captured]:
    paces = [pace for one in found if (pace := one.s_per_generated_token)]
    pace_s = statistics.median(paces) if paces else Timing().decode_s
    return [one if one.output_reported else _guessed(one, pace_s) for one in found]


def _guessed(one: Captured, pace_s: float) -> Captured:
    generating_s = one.duration_s - (one.ttft_s or 0.0)
    tokens = max(1, min(OUTPUT_GUESS_MAX, 1 + round(generating_s / pace_s)))
    return msgspec.structs.replace(one, asked=msgspec.structs.replace(one.asked, output_tokens=tokens))
