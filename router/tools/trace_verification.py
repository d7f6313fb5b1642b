"""Replay of recorded traces through the serving code, to compare every predicted hit (``kvatlas verify``).

A trace's events go through ``FleetResidency`` exactly as a feed's batches do; each probe is then predicted
and compared with the hit that the engine's scheduler found at that point. The events are played twice. The
first pass represents the engine's life before the recording: groups, layout and hash scheme are learned from
it and from the prompts; the engine then restarts, so that residency starts empty. Probes are predicted in the
second pass only. A *cold* run has no first pass: each probe is predicted from the events before it, and
"unknown" is then a valid prediction.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvatlas.publisher.block_hash import HashScheme, PromptExtras, block_hashes
from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import BlockHash
from kvatlas.router.index.base import Plane
from kvatlas.router.index.engine import EngineResidency
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.tools.trace_file import RecordingError, TraceLine, TraceProbe, read_trace, trace_facts

# Id of the single engine of a trace.
RECORDED = "recorded"


class TraceResult(msgspec.Struct):
    """Comparison of the predictions for one trace (or for all traces) with the recorded hits."""

    trace: str
    family: str
    probes: int = 0
    exact: int = 0
    over: int = 0
    under: int = 0
    truth_tokens: int = 0
    abs_error_tokens: int = 0
    states: int = 0
    states_exact: int = 0
    unknown: int = 0
    """Probes of a cold run without a prediction."""
    detected: dict[str, Any] | None = None

    def add(self, predicted: int, truth: int) -> None:
        """Count one probe."""
        self.probes += 1
        self.exact += predicted == truth
        self.over += predicted > truth
        self.under += predicted < truth
        self.truth_tokens += truth
        self.abs_error_tokens += abs(predicted - truth)

    @property
    def all_exact(self) -> bool:
        """Whether every prediction is exact and every recorded residency count is reproduced."""
        return self.probes == self.exact + self.unknown and self.states == self.states_exact


class ProbePrompt:
    """A prompt given as token ids, in the form the predictor takes."""

    def __init__(self, token_ids: list[int], extras: PromptExtras) -> None:
        self.token_ids = token_ids
        self.extras = extras

    @classmethod
    def from_probe(cls, probe: TraceProbe) -> ProbePrompt:
        return cls(probe.token_ids, probe.extras())

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def hashes(self, scheme: HashScheme) -> list[BlockHash]:
        return block_hashes(self.token_ids, scheme, self.extras)


def verify_trace(path: Path, *, cold: bool = False) -> TraceResult:
    """Replay one trace; ``cold``: learn nothing beforehand. Raises ``RecordingError``."""
    fleet = FleetResidency(trace_facts(path))
    engine = fleet.engine(RECORDED)
    if not cold:
        learn_trace(fleet, path)
    result = TraceResult(path.name, "")
    for number, line in read_trace(path):
        if line.header is not None:
            result.family = line.header.family
        elif line.events is not None:
            apply_line(fleet, path, number, line)
        elif line.state is not None:
            result.states += 1
            held = [fleet.index.copies(RECORDED, Plane("GPU", g)) for g in range(len(line.state.keys))]
            result.states_exact += held == line.state.keys
        elif line.probe is not None and line.hit_tokens is not None:
            hit = fleet.predict(ProbePrompt.from_probe(line.probe), [RECORDED])[RECORDED]
            if cold and hit.mode == "unknown":
                result.probes += 1
                result.unknown += 1
            else:
                result.add(hit.hit_tokens, line.hit_tokens)
    result.detected = detected(engine)
    return result


def learn_trace(fleet: FleetResidency, path: Path) -> None:
    """Apply the events and prompts to find the engine's groups and hash scheme; then discard the residency.

    Raises ``RecordingError``.
    """
    for number, line in read_trace(path):
        if line.events is not None:
            apply_line(fleet, path, number, line)
        elif line.probe is not None:
            fleet.predict(ProbePrompt.from_probe(line.probe), [RECORDED])
            fleet.engine(RECORDED).finish_detection()
    fleet.forget(RECORDED)


def apply_line(fleet: FleetResidency, path: Path, number: int, line: TraceLine) -> None:
    """Apply one batch and complete a pending search for the hash scheme. Raises ``RecordingError``."""
    try:
        fleet.apply(RECORDED, decode_batch(line.payload()))
    except ValueError as error:
        # Not base64 (binascii.Error), not ASCII, or not a batch (EventDecodeError).
        raise RecordingError(f"{path}:{number}: {error}") from None
    fleet.engine(RECORDED).finish_detection()


def detected(engine: EngineResidency) -> dict[str, Any]:
    layout = engine.layout
    return {
        "mode": str(engine.detection),
        "scheme": None if engine.scheme is None else msgspec.to_builtins(engine.scheme),
        "groups": [] if layout is None else msgspec.to_builtins(layout.groups),
        "alignment": None if layout is None else layout.alignment,
        "rejected": dict(engine.rejected),
        "unknown_types": dict(engine.unknown_types),
    }


def total(results: list[TraceResult]) -> TraceResult:
    summed = TraceResult("total", "")
    for field in msgspec.structs.fields(TraceResult):
        if field.type is int:
            setattr(summed, field.name, sum(getattr(result, field.name) for result in results))
    return summed
