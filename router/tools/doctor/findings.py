"""Evidence that the doctor collects, and findings that its checks draw from it.

Evidence is plain data, without sockets. A finding is an observation, its cause and a remedy. Checks are shown
in the order in which they are registered; each is a function from evidence to results and uses no network. A
check that raises becomes a finding itself, so that a malformed response affects only that check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import msgspec

from kvatlas.router.observe.findings import BAD, Finding, Severity
from kvatlas.router.tools.doctor.evidence import EngineEvidence, Evidence

# Subject of findings about several engines together.
FLEET = "fleet"


class CheckResult(msgspec.Struct, frozen=True):
    """Result of a check; the registry adds the check's id and subject, if not given here.

    Raises ``ValueError`` for a problem without cause or remedy.
    """

    severity: Severity
    seen: str
    cause: str = ""
    remedy: str = ""
    subject: str = ""
    check: str = ""
    since_s: float | None = None

    def __post_init__(self) -> None:
        if self.severity in BAD and not (self.cause and self.remedy):
            raise ValueError(f"{self.seen}: a problem needs a cause and a remedy")


ok = partial(CheckResult, Severity.OK)
# Nothing is wrong, or it could not be determined.
info = partial(CheckResult, Severity.INFO)
warning = partial(CheckResult, Severity.WARNING)
error = partial(CheckResult, Severity.ERROR)


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 0, or 1 if there is a warning or an error."""
    return int(any(f.severity in BAD for f in findings))


Check = Callable[[Any], Iterator[CheckResult]]

# First part of a check's id, in display order; those from ``_FLEET_AREAS`` on are about the fleet.
_AREAS = ("http", "clock", "events", "cache", "tokens", "probe", "fleet", "router")
_FLEET_AREAS = frozenset({"fleet", "router"})

_CHECKS: dict[str, Check] = {}


def check(name: str) -> Callable[[Check], Check]:
    """Register a check: of an engine, or by the first part of its id of all engines or of the router."""

    def register(work: Check) -> Check:
        _CHECKS[name] = work
        return work

    return register


def names() -> list[str]:
    """Ids of all checks."""
    return list(_CHECKS)


def run_checks(seen: Evidence) -> list[Finding]:
    """Run every check: engine by engine, then on the fleet."""
    ordered = sorted(_CHECKS.items(), key=lambda entry: _AREAS.index(entry[0].partition(".")[0]))
    subjects: list[tuple[str, EngineEvidence | Evidence]] = [(one.engine_id, one) for one in seen.engines]
    return [
        finding
        for subject, evidence in [*subjects, (FLEET, seen)]
        for name, work in ordered
        if (name.partition(".")[0] in _FLEET_AREAS) == (evidence is seen) and _applies(name, evidence)
        for finding in _run(name, subject, work(evidence))
    ]


def _applies(name: str, evidence: EngineEvidence | Evidence) -> bool:
    """Whether a check makes sense: a router answers like an engine, and is none."""
    router = isinstance(evidence, EngineEvidence) and evidence.server.is_router
    return not router or name == "http.version"


def _run(name: str, subject: str, results: Iterator[CheckResult]) -> list[Finding]:
    found: list[Finding] = []
    try:
        for one in results:
            found.append(  # noqa: PERF401  results before a failure count
                Finding(
                    one.check or name,
                    one.severity,
                    one.subject or subject,
                    one.seen,
                    one.cause,
                    one.remedy,
                    one.since_s,
                )
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
