"""Registry of the checks in the order they are shown: each is a function from evidence to results.

Checks use no network: they read ``Evidence``. A check that raises becomes a finding itself, so that a
malformed response affects only that check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from router.tools.doctor.evidence import EngineEvidence, Evidence
from router.tools.doctor.findings import FLEET, CheckResult, Finding, Severity

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
