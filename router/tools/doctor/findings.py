"""What the doctor says: one finding per thing looked at, with what was seen, why, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Literal

import msgspec

FLEET = "fleet"
"""Subject of findings about several engines together."""


class Severity(StrEnum):
    """``warning``: kvatlas works, less exactly or less well; ``error``: it does not work as meant."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Finding(msgspec.Struct, frozen=True):
    """``check`` is a stable id such as ``events.flow``; ``subject`` an engine id, ``fleet`` or a router's
    URL. ``cause`` and ``remedy`` are empty where nothing is wrong."""

    check: str
    severity: Severity
    subject: str
    seen: str
    cause: str = ""
    remedy: str = ""


class CheckResult(msgspec.Struct, frozen=True):
    """What a check yields; the registry adds the check's id and the subject (unless given here)."""

    severity: Severity
    seen: str
    cause: str = ""
    remedy: str = ""
    subject: str = ""


def ok(seen: str, *, subject: str = "") -> CheckResult:
    """All well."""
    return CheckResult(Severity.OK, seen, subject=subject)


def info(seen: str, cause: str = "", remedy: str = "", *, subject: str = "") -> CheckResult:
    """Worth knowing; nothing is wrong, or it could not be found out."""
    return CheckResult(Severity.INFO, seen, cause, remedy, subject)


def warning(seen: str, cause: str, remedy: str, *, subject: str = "") -> CheckResult:
    """Works, less well than it could."""
    return CheckResult(Severity.WARNING, seen, cause, remedy, subject)


def error(seen: str, cause: str, remedy: str, *, subject: str = "") -> CheckResult:
    """Does not work as meant."""
    return CheckResult(Severity.ERROR, seen, cause, remedy, subject)


def exit_status(findings: Iterable[Finding]) -> int:
    """0 where nothing is amiss, 1 for a warning or an error."""
    return int(any(f.severity in {Severity.WARNING, Severity.ERROR} for f in findings))


# The verdict on an engine: its properties, each shown by checks, failed by checks, or not shown.
#
# ``doctor`` runs all checks that need no load; ``certify`` runs the same ones after a load, and sorts their
# findings by property. A property passes where one of the checks that show it says so and none warns. One
# that nothing shows does not pass: a check that had nothing to look at certifies nothing.


State = Literal["pass", "fail", "not_shown"]


class Property(msgspec.Struct, frozen=True):
    """``shown_by``: checks of which one must have said ok. ``failed_by``: further ones that fail it.
    ``required`` False: not certified without only where it fails."""

    name: str
    claim: str
    shown_by: tuple[str, ...]
    failed_by: tuple[str, ...] = ()
    required: bool = True


PROPERTIES = (
    Property(
        "answers",
        "the engine answers as the router asks",
        ("load.answers",),
        ("http.health", "http.models", "http.version", "load.idle", "probe.exact"),
    ),
    Property(
        "complete",
        "events are complete: no gap, and replay gives them again",
        ("load.replay",),
        (
            *("http.event_sources", "events.reach", "events.flow", "events.replay", "events.topic"),
            "events.ranks",
        ),
    ),
    Property("decodable", "events can be decoded", ("events.encoding",)),
    Property("removals", "every removal is of a block that was stored", ("events.removals",), required=False),
    Property("no_phantoms", "no block is held by the events only", ("load.phantoms",), ("cache.pool",)),
    Property(
        "tokens",
        "prompts have the same tokens here and there",
        ("tokens.parity", "load.tokens"),
        ("tokens.family",),
    ),
    Property("hashes", "hashes are those of the tokens", ("load.hashes",), ("cache.scheme", "cache.lora")),
    Property(
        "hits",
        "hits are as predicted",
        ("load.hits",),
        ("cache.prefix_caching", "cache.facts", "cache.sources", "cache.groups"),
    ),
    Property("usage", "reported cached tokens are true", ("load.usage",), ("tokens.usage",)),
)

NOTES = ("clock.skew", "cache.retention", "cache.block_size", "tokens.speed")
"""Checks whose findings say nothing about exactness: shown beside a verdict."""

_BAD = frozenset({Severity.WARNING, Severity.ERROR})


class Judged(msgspec.Struct, frozen=True):
    """One property of one engine; ``findings`` are the evidence."""

    name: str
    claim: str
    state: State
    required: bool
    findings: tuple[Finding, ...]


class EngineVerdict(msgspec.Struct, frozen=True):
    """On one engine (one data-parallel rank)."""

    engine: str
    certified: bool
    properties: tuple[Judged, ...]
    notes: tuple[Finding, ...]


def judge(engine_id: str, findings: Sequence[Finding]) -> EngineVerdict:
    """The verdict on one engine by the findings about it."""
    mine = [finding for finding in findings if finding.subject == engine_id]
    judged = tuple(_judge(each, mine) for each in PROPERTIES)
    certified = all(
        each.state == "pass" or (each.state == "not_shown" and not each.required) for each in judged
    )
    notes = tuple(finding for finding in mine if finding.check in NOTES)
    return EngineVerdict(engine_id, certified, judged, notes)


def _judge(each: Property, findings: list[Finding]) -> Judged:
    about = [finding for finding in findings if finding.check in {*each.shown_by, *each.failed_by}]
    state: State = "not_shown"
    if any(finding.severity in _BAD for finding in about):
        state = "fail"
    elif any(finding.severity is Severity.OK and finding.check in each.shown_by for finding in about):
        state = "pass"
    return Judged(each.name, each.claim, state, each.required, tuple(about))
