"""docs/troubleshooting.md lists every problem that a running router can report, with its severity."""

from __future__ import annotations

import re

from tests.docs.pages import table_rows
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
RULES = (ROOT / "router/api/findings.py").read_text(encoding="utf-8")
_RULE = re.compile(r'_(info|warning|error)\(\s*f?"([\w.{}]+)"')


def test_every_problem_is_in_the_table_with_its_severity() -> None:
    rules = {(check.replace("{name}", "NAME"), severity) for severity, check in _RULE.findall(RULES)}
    table = {
        (check, severity)
        for ids, severity, _ in table_rows(PAGE, "id")
        for check in re.findall(r"`([\w.]+)`", ids)
    }
    assert table == rules
    assert len(rules) >= 12
