"""What the doctor says: one finding per thing looked at, with what was seen, why, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

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
