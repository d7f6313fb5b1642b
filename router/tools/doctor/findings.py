"""Findings of the doctor, the registry of its checks, and the certification verdict derived from the
findings.

A finding is an observation, its cause and a remedy. Checks are shown in the order in which they are
registered; each is a function from evidence to results and uses no network. A check that raises becomes a
finding itself, so that a malformed response affects only that check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Literal

import msgspec

from router.tools.doctor.evidence import EngineEvidence, Evidence

# Subject of findings about several engines together.
FLEET = "fleet"


class Severity(StrEnum):
    """Severity of a finding.

    ``warning``: kvatlas works, but less exactly or less well; ``error``: it does not work.
    """

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Finding(msgspec.Struct, frozen=True):
    """One finding.

    ``check`` is a stable id such as ``events.flow``; ``subject`` an engine id, ``fleet`` or a router's URL.
    ``cause`` and ``remedy`` are empty if nothing is wrong.
    """

    check: str
    severity: Severity
    subject: str
    seen: str
    cause: str = ""
    remedy: str = ""


class CheckResult(msgspec.Struct, frozen=True):
    """Result of a check; the registry adds the check's id and, if not given here, the subject."""

    severity: Severity
    seen: str
    cause: str = ""
    remedy: str = ""
    subject: str = ""


def ok(seen: str, *, subject: str = "") -> CheckResult:
    """Report a passed check."""
    return CheckResult(Severity.OK, seen, subject=subject)


def info(seen: str, cause: str = "", remedy: str = "", *, subject: str = "") -> CheckResult:
    """Report something worth knowing: nothing is wrong, or it could not be determined."""
    return CheckResult(Severity.INFO, seen, cause, remedy, subject)


def warning(seen: str, cause: str, remedy: str, *, subject: str = "") -> CheckResult:
    """Report something that works less well than it could."""
    return CheckResult(Severity.WARNING, seen, cause, remedy, subject)


def error(seen: str, cause: str, remedy: str, *, subject: str = "") -> CheckResult:
    """Report something that does not work."""
    return CheckResult(Severity.ERROR, seen, cause, remedy, subject)


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 0, or 1 if there is a warning or an error."""
    return int(any(f.severity in {Severity.WARNING, Severity.ERROR} for f in findings))


# The verdict on an engine: each property passes, fails, or is not shown. ``doctor`` runs all checks that need
# no load; ``certify`` runs the same ones after a load and sorts their findings by property. A property passes
# if one of its ``shown_by`` checks is ok and none of its checks warns. A property without evidence does not
# pass.


State = Literal["pass", "fail", "not_shown"]


class Property(msgspec.Struct, frozen=True):
    """One property of an engine.

    ``shown_by``: checks of which at least one must be ok. ``failed_by``: further checks that fail it.
    ``required`` False: the engine can be certified without evidence of it, but not if it fails.
    """

    name: str
    claim: str
    shown_by: tuple[str, ...]
    failed_by: tuple[str, ...] = ()
    required: bool = True


PROPERTIES = (
    Property(
        "answers",
        "the engine answers the router's requests",
        ("load.answers",),
        ("http.health", "http.models", "http.version", "load.idle", "probe.exact"),
    ),
    Property(
        "complete",
        "events are complete: no gap, and replay returns them again",
        ("load.replay",),
        (
            *("http.event_sources", "events.reach", "events.flow", "events.replay", "events.topic"),
            "events.ranks",
        ),
    ),
    Property("decodable", "events can be decoded", ("events.encoding",)),
    Property("removals", "every removal is of a block that was stored", ("events.removals",), required=False),
    Property(
        "no_phantoms", "no block is held only according to the events", ("load.phantoms",), ("cache.pool",)
    ),
    Property(
        "tokens",
        "prompts have the same tokens in router and engine",
        ("tokens.parity", "load.tokens"),
        ("tokens.family",),
    ),
    Property("hashes", "hashes match the tokens", ("load.hashes",), ("cache.scheme", "cache.lora")),
    Property(
        "hits",
        "hits match the predictions",
        ("load.hits",),
        ("cache.prefix_caching", "cache.facts", "cache.sources", "cache.groups"),
    ),
    Property("usage", "reported cached tokens are correct", ("load.usage",), ("tokens.usage",)),
)

# Checks whose findings do not concern exactness: shown beside a verdict.
NOTES = ("clock.skew", "cache.sglang", "cache.retention", "cache.block_size", "tokens.speed")

_BAD = frozenset({Severity.WARNING, Severity.ERROR})


class PropertyVerdict(msgspec.Struct, frozen=True):
    """Verdict on one property of one engine; ``findings`` are the evidence."""

    name: str
    claim: str
    state: State
    required: bool
    findings: tuple[Finding, ...]


class EngineVerdict(msgspec.Struct, frozen=True):
    """Verdict on one engine (one data-parallel rank)."""

    engine: str
    certified: bool
    properties: tuple[PropertyVerdict, ...]
    notes: tuple[Finding, ...]


def engine_verdict(engine_id: str, findings: Sequence[Finding]) -> EngineVerdict:
    """Derive the verdict on one engine from the findings about it."""
    mine = [finding for finding in findings if finding.subject == engine_id]
    judged = tuple(_property_verdict(each, mine) for each in PROPERTIES)
    certified = all(
        each.state == "pass" or (each.state == "not_shown" and not each.required) for each in judged
    )
    notes = tuple(finding for finding in mine if finding.check in NOTES)
    return EngineVerdict(engine_id, certified, judged, notes)


def _property_verdict(each: Property, findings: list[Finding]) -> PropertyVerdict:
    about = [finding for finding in findings if finding.check in {*each.shown_by, *each.failed_by}]
    state: State = "not_shown"
    if any(finding.severity in _BAD for finding in about):
        state = "fail"
    elif any(finding.severity is Severity.OK and finding.check in each.shown_by for finding in about):
        state = "pass"
    return PropertyVerdict(each.name, each.claim, state, each.required, tuple(about))


EngineCheck = Callable[[EngineEvidence], Iterator[CheckResult]]
FleetCheck = Callable[[Evidence], Iterator[CheckResult]]

# First part of a check's id, in display order.
_AREAS = ("http", "clock", "events", "cache", "tokens", "probe", "load", "fleet", "router")

_ENGINE_CHECKS: dict[str, EngineCheck] = {}
_FLEET_CHECKS: dict[str, FleetCheck] = {}


def engine_check(name: str) -> Callable[[EngineCheck], EngineCheck]:
    """Register a check of one engine."""

    def register(check: EngineCheck) -> EngineCheck:
        _ENGINE_CHECKS[name] = check
        return check

    return register


def fleet_check(name: str) -> Callable[[FleetCheck], FleetCheck]:
    """Register a check of all engines, or of the router."""

    def register(check: FleetCheck) -> FleetCheck:
        _FLEET_CHECKS[name] = check
        return check

    return register


def names() -> list[str]:
    """Ids of all checks."""
    return [*_ENGINE_CHECKS, *_FLEET_CHECKS]


def run_checks(seen: Evidence) -> list[Finding]:
    """Run every check: engine by engine, then on the fleet."""
    findings: list[Finding] = []
    for engine in seen.engines:
        for name, check in sorted(_ENGINE_CHECKS.items(), key=_area):
            findings += _run(name, engine.engine_id, check(engine))
    for name, fleet in sorted(_FLEET_CHECKS.items(), key=_area):
        findings += _run(name, FLEET, fleet(seen))
    return findings


def engine_checks() -> list[str]:
    """Ids of the checks of one engine."""
    return list(_ENGINE_CHECKS)


def _area(entry: tuple[str, object]) -> int:
    return _AREAS.index(entry[0].partition(".")[0])


def _run(name: str, subject: str, results: Iterator[CheckResult]) -> list[Finding]:
    found: list[Finding] = []
    try:
        for one in results:
            found.append(  # noqa: PERF401  results before a failure count
                Finding(name, one.severity, one.subject or subject, one.seen, one.cause, one.remedy)
            )
    except Exception as problem:  # noqa: BLE001  a failing check must not hide the results of others
        found.append(
            Finding(
                name,
                Severity.ERROR,
                subject,
                f"the check itself failed: {type(problem).__name__}: {problem}"[:300],
                "a response in a form this check does not know",
                "please report it with the output of --json",
            )
        )
    return found
