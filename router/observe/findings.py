"""Findings: what was seen, its cause and its remedy, with a stable id; and those that hold now, since when.

One noun for everything that a user should know of. The rules in ``router/api/findings.py`` draw findings
about a running router and its engines; log, ``/ready``, ``/kvatlas/problems``, status page, ``kvatlas top``
and ``kvatlas doctor`` show that one list. The doctor's own checks draw further findings of the same kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final

import msgspec
import structlog

_log = structlog.get_logger()

# Subject of findings about the router itself.
ROUTER: Final = "router"
# What to do where a source of engines fails, or finds none.
SOURCE_REMEDIES: Final = {
    "kubernetes": "check RBAC (get, list, watch on pods and endpointslices), namespace and selector",
    "dns": "check fleet.dns.names, and that the router's host can resolve them",
    "file": "correct the file; its last valid content stays in effect",
    "admin": "add engines: POST /admin/engines",
}
# A finding that ends sooner is not logged: a breaker that opens for a moment, an engine that starts.
LOGGED_AFTER_S: Final = 5.0
# Lines for findings of one check that begin together, as when a whole rack goes; the last one counts the
# others.
_LINES_MAX: Final = 8


class Severity(StrEnum):
    """Severity of a finding.

    ``info``: intended; ``warning``: kvatlas works, but less exactly or less well; ``error``: it does not
    work.
    """

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


BAD: Final = frozenset({Severity.WARNING, Severity.ERROR})


class Finding(msgspec.Struct, frozen=True):
    """One finding.

    ``check`` is a stable id such as ``events.flow``; ``subject`` an engine id, a model, ``router``, or for
    the doctor ``fleet`` or a router's URL. ``cause`` and ``remedy`` are empty if nothing is wrong.
    ``since_s``: Unix time since when it holds; None if it was looked at once.
    """

    check: str
    severity: Severity
    subject: str
    seen: str
    cause: str = ""
    remedy: str = ""
    since_s: float | None = None


def counts(findings: Iterable[Finding]) -> dict[str, int]:
    """Number of errors and warnings, by severity; empty without any."""
    found = Counter(str(one.severity) for one in findings)
    return {severity: found[severity] for severity in ("error", "warning") if found[severity]}


def joined(lists: Iterable[Iterable[Finding]]) -> list[Finding]:
    """Join the lists of several workers: one finding for each subject and check, the worst, since the
    first."""
    found: dict[tuple[str, str], Finding] = {}
    for one in (finding for findings in lists for finding in findings):
        known = found.setdefault((one.subject, one.check), one)
        if known is not one:
            order = list(Severity)
            worst = max(known, one, key=lambda each: order.index(each.severity))
            since = min((each.since_s for each in (known, one) if each.since_s is not None), default=None)
            found[one.subject, one.check] = msgspec.structs.replace(worst, since_s=since)
    return list(found.values())


class FindingLog:
    """The findings that hold now, one for each subject and check. Logs each that lasts, and its end."""

    def __init__(self) -> None:
        self.current: Sequence[Finding] = ()
        self._since: dict[tuple[str, str], float] = {}
        self._logged: set[tuple[str, str]] = set()

    def update(self, found: Iterable[Finding], unix_s: float) -> Sequence[Finding]:
        """Replace the list by what was found at this Unix time. Returns it with ``since_s``."""
        by_key = {(one.subject, one.check): one for one in found}
        self._since = {key: min(self._since.get(key, unix_s), unix_s) for key in by_key}
        self.current = [msgspec.structs.replace(one, since_s=self._since[key]) for key, one in by_key.items()]
        self._log(by_key, unix_s)
        return self.current

    def _log(self, by_key: dict[tuple[str, str], Finding], unix_s: float) -> None:
        lasting = {key for key, since_s in self._since.items() if unix_s - since_s >= LOGGED_AFTER_S}
        begun = Counter[str]()
        for key, one in by_key.items():
            if key in self._logged or key not in lasting:
                continue
            begun[one.check] += 1
            if begun[one.check] <= _LINES_MAX:
                line = _log.info if one.severity is Severity.INFO else _log.warning
                fields = {"cause": one.cause, "remedy": one.remedy}
                line("problem", check=one.check, subject=one.subject, seen=one.seen, **fields)
        ended = Counter(check for _, check in self._logged - by_key.keys())
        for subject, check in sorted(self._logged - by_key.keys()):
            if ended[check] <= _LINES_MAX:
                _log.info("problem ended", check=check, subject=subject)
        for event, several in (("problem", begun), ("problem ended", ended)):
            for check, number in several.items():
                if number > _LINES_MAX:
                    shown = _LINES_MAX if event == "problem" else 0
                    _log.warning(event, check=check, subjects_not_shown=number - shown)
        self._logged = (self._logged & by_key.keys()) | lasting
