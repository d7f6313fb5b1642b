"""A capture: what the access log of a running router wrote (``router.observe.access_log``), read again.

Every line is a request of the workload format with what came of it. Where the engine did not say how many
tokens it generated, the time that the answer took tells, at the pace of the answers that say both. A capture
that was turned over is read whole: ``PATH.1``, then ``PATH``.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from router.observe.access_log import AccessLine
from router.simulate.timing import Timing
from router.simulate.workload.requests import Asked, WorkloadError, asked_of, in_order, lines_of
from router.simulate.workload.sessions import is_session

OUTPUT_GUESS_MAX = 32_768


class Captured(msgspec.Struct, frozen=True, kw_only=True):
    """One line. ``asked.output_tokens`` is a guess where ``output_reported`` is False."""

    asked: Asked
    model: str
    engine: str
    output_reported: bool
    predicted_tokens: int | None
    cached_tokens: int | None
    ttft_s: float | None
    duration_s: float
    queue_s: float

    @property
    def s_per_generated_token(self) -> float | None:
        """Between the first and the last token; None where that is not known."""
        more = self.asked.output_tokens - 1
        if not self.output_reported or self.ttft_s is None or more < 1:
            return None
        return max(0.0, self.duration_s - self.ttft_s) / more


def is_capture(path: Path) -> bool:
    """Whether the first line of a file is one of an access log. Raises ``WorkloadError``."""
    if is_session(path):
        return False
    with contextlib.closing(lines_of(path)) as lines:
        _, fields = next(lines)
    if "payload_b64" in fields:
        raise WorkloadError(
            f"{path}: a capture of KV events (kvatlas record), which holds no requests; name the router's "
            "access log (access_log.path), or a trace"
        )
    return "duration_s" in fields and "engine" in fields


def read_capture(path: Path, model: str | None = None) -> list[Captured]:
    """All lines of a capture, by time. ``model``: only requests of that one.

    Raises ``WorkloadError``, also for a capture of several models where none is named: they do not share
    engines' caches.
    """
    older = Path(f"{path}.1")
    pieces = [older, path] if older.is_file() else [path]
    found = [_captured(fields, where) for piece in pieces for where, fields in lines_of(piece)]
    models = Counter(one.model for one in found)
    if model is not None and model not in models:
        raise WorkloadError(f"{path}: no request of model {model!r}; there are {', '.join(models)}")
    if model is None and len(models) > 1:
        raise WorkloadError(
            f"{path}: requests of {len(models)} models, {', '.join(models)}: name one of them"
        )
    found = [one for one in found if model in {None, one.model}]
    found.sort(key=lambda one: one.asked.at_s)
    return _with_outputs(found)


def asked_in(captured: Sequence[Captured]) -> list[Asked]:
    """The workload in a capture."""
    return in_order([one.asked for one in captured])


def _captured(fields: dict[str, Any], where: str) -> Captured:
    asked = asked_of(fields, where)
    try:
        line = msgspec.convert(fields, AccessLine)
    except msgspec.ValidationError as error:
        raise WorkloadError(f"{where}: not a line of an access log: {error}") from None
    return Captured(
        asked=asked,
        model=line.model,
        engine=line.engine,
        output_reported=line.output_reported,
        predicted_tokens=line.predicted_tokens,
        cached_tokens=line.cached_tokens,
        ttft_s=line.ttft_s,
        duration_s=line.duration_s,
        queue_s=line.queue_s,
    )


def _with_outputs(found: list[Captured]) -> list[Captured]:
    paces = [pace for one in found if (pace := one.s_per_generated_token)]
    pace_s = statistics.median(paces) if paces else Timing().decode_s
    return [one if one.output_reported else _guessed(one, pace_s) for one in found]


def _guessed(one: Captured, pace_s: float) -> Captured:
    generating_s = one.duration_s - (one.ttft_s or 0.0)
    tokens = max(1, min(OUTPUT_GUESS_MAX, 1 + round(generating_s / pace_s)))
    return msgspec.structs.replace(one, asked=msgspec.structs.replace(one.asked, output_tokens=tokens))
