"""``kvatlas verify``: replay recorded truth through the serving code and compare every predicted hit.

A trace's events go through ``FleetResidency`` exactly as a feed's batches do; each probe is then predicted
and compared with what the engine's scheduler found at that point. The events are played twice. The first
time stands for the engine's life before the recording: groups, layout and hash scheme are learned from it,
and from the prompts that were placed; the engine then restarts, so that residency starts empty. Only the
second time are probes answered. A *cold* run leaves the first time out: each probe is predicted from what
came before it, as of an engine nothing is known of; to say that nothing is known is not wrong then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from publisher.block_hash import HashScheme, PromptExtras, block_hashes
from publisher.event_decoder import decode_batch
from publisher.events import BlockHash
from router.index.base import Plane
from router.index.engine import EngineResidency
from router.index.model import FleetResidency
from router.tools.verify.traces import TraceError, TraceLine, TraceProbe, read_trace, trace_facts

RECORDED = "recorded"
"""The one engine of a trace."""
_SUMMED = (
    "probes",
    "exact",
    "over",
    "under",
    "truth_tokens",
    "abs_error_tokens",
    "states",
    "states_exact",
    "unknown",
)


class TraceResult(msgspec.Struct):
    """How the predictions for one trace (or for all of them) compare with its truth."""

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
    """Probes of a cold run for which nothing was predicted."""
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
        """Every prediction exact, and every recorded residency count reproduced."""
        return self.probes == self.exact + self.unknown and self.states == self.states_exact


class ProbePrompt:
    """A probe in the form the predictor takes."""

    def __init__(self, token_ids: list[int], extras: PromptExtras) -> None:
        self.token_ids = token_ids
        self.extras = extras

    @classmethod
    def of(cls, probe: TraceProbe) -> ProbePrompt:
        return cls(probe.token_ids, probe.extras())

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def hashes(self, scheme: HashScheme) -> list[BlockHash]:
        return block_hashes(self.token_ids, scheme, self.extras)


def verify_trace(path: Path, *, cold: bool = False) -> TraceResult:
    """Replay one trace; ``cold``: nothing is learned before. Raises ``TraceError`` naming file and line where
    it cannot be read."""
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
            hit = fleet.predict(ProbePrompt.of(line.probe), [RECORDED])[RECORDED]
            if cold and hit.mode == "unknown":
                result.probes += 1
                result.unknown += 1
            else:
                result.add(hit.hit_tokens, line.hit_tokens)
    result.detected = detected(engine)
    return result


def learn_trace(fleet: FleetResidency, path: Path) -> None:
    """Show the engine's events and prompts to find its groups and hash scheme; then nothing is held.

    Raises ``TraceError``.
    """
    for number, line in read_trace(path):
        if line.events is not None:
            apply_line(fleet, path, number, line)
        elif line.probe is not None:
            fleet.predict(ProbePrompt.of(line.probe), [RECORDED])
            fleet.engine(RECORDED).finish_detection()
    fleet.forget(RECORDED)


def apply_line(fleet: FleetResidency, path: Path, number: int, line: TraceLine) -> None:
    """One batch of a trace; a search for the hash scheme is brought to its end. Raises ``TraceError``."""
    try:
        fleet.apply(RECORDED, decode_batch(line.payload()))
    except ValueError as error:  # not base64 (binascii.Error), not ASCII, or no batch (EventDecodeError)
        raise TraceError(f"{path}:{number}: {error}") from None
    fleet.engine(RECORDED).finish_detection()


def detected(engine: EngineResidency) -> dict[str, Any]:
    """What was found out about an engine."""
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
    """All results added up."""
    summed = TraceResult("total", "")
    for name in _SUMMED:
        setattr(summed, name, sum(getattr(result, name) for result in results))
    return summed
