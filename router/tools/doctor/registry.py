"""The list of checks, in the order they are shown: each a function from what was seen to what is told.

A check never asks anything of the network: it reads ``Evidence``. One that fails is a finding itself, so that
an engine that answers nonsense costs the check that stumbled and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from router.tools.doctor.evidence import EngineEvidence, Evidence
from router.tools.doctor.findings import FLEET, CheckResult, Finding, Severity

EngineCheck = Callable[[EngineEvidence], Iterator[CheckResult]]
FleetCheck = Callable[[Evidence], Iterator[CheckResult]]

_AREAS = ("http", "clock", "events", "cache", "tokens", "probe", "load", "fleet", "router")
"""First part of a check's id: the order in which they are shown."""

_ENGINE_CHECKS: dict[str, EngineCheck] = {}
_FLEET_CHECKS: dict[str, FleetCheck] = {}


def engine_check(name: str) -> Callable[[EngineCheck], EngineCheck]:
    """Registers a check that looks at one engine."""

    def register(check: EngineCheck) -> EngineCheck:
        _ENGINE_CHECKS[name] = check
        return check

    return register


def fleet_check(name: str) -> Callable[[FleetCheck], FleetCheck]:
    """Registers a check that looks at all engines, or at the router."""

    def register(check: FleetCheck) -> FleetCheck:
        _FLEET_CHECKS[name] = check
        return check

    return register


def names() -> list[str]:
    """Ids of all checks."""
    return [*_ENGINE_CHECKS, *_FLEET_CHECKS]


def run_checks(seen: Evidence) -> list[Finding]:
    """Every check on everything seen: engine by engine, then the fleet."""
    findings: list[Finding] = []
    for engine in seen.engines:
        for name, check in sorted(_ENGINE_CHECKS.items(), key=_area):
            findings += _run(name, engine.engine_id, check(engine))
    for name, fleet in sorted(_FLEET_CHECKS.items(), key=_area):
        findings += _run(name, FLEET, fleet(seen))
    return findings


def engine_checks() -> list[str]:
    """Ids of the checks that look at one engine."""
    return list(_ENGINE_CHECKS)


def _area(entry: tuple[str, object]) -> int:
    return _AREAS.index(entry[0].partition(".")[0])


def _run(name: str, subject: str, told: Iterator[CheckResult]) -> list[Finding]:
    found: list[Finding] = []
    try:
        for one in told:
            found.append(  # noqa: PERF401  what was told before a failure counts
                Finding(name, one.severity, one.subject or subject, one.seen, one.cause, one.remedy)
            )
    except Exception as problem:  # noqa: BLE001  one check's stumble must not hide what the others saw
        found.append(
            Finding(
                name,
                Severity.ERROR,
                subject,
                f"the check itself failed: {type(problem).__name__}: {problem}"[:300],
                "an answer in a form this check does not know",
                "please report it with the output of --json",
            )
        )
    return found
