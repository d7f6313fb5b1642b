"""``kvatlas doctor``: examine engines, run the checks, and print a table or JSON."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console
from rich.text import Text

from kvatlas.router.config.errors import ConfigError
from kvatlas.router.config.load import any_model, load, parse_engine
from kvatlas.router.config.schema import Config
from kvatlas.router.http.tls import TlsError
from kvatlas.router.observe.findings import Finding, Severity
from kvatlas.router.observe.log_lines import configure_logging
from kvatlas.router.prompts.model_dir import ModelDirError
from kvatlas.router.tools.doctor import checks
from kvatlas.router.tools.doctor.evidence import Evidence
from kvatlas.router.tools.doctor.examine import ExamineSettings, examine
from kvatlas.router.tools.doctor.findings import exit_status
from kvatlas.router.tools.ops_client import make_table, output_console, router_url

STYLES = {Severity.OK: "green", Severity.INFO: "cyan", Severity.WARNING: "yellow", Severity.ERROR: "bold red"}
_SECONDS_MAX = 3600.0


def run_doctor(
    *,
    engines: list[str],
    router: str | None,
    tokenizer: str | None,
    config: Path | None,
    settings: ExamineSettings,
    as_json: bool,
) -> int:
    """Run ``kvatlas doctor``.

    Returns 0, or 1 with warnings or errors. Raises ``ConfigError`` for unusable options.
    """
    _check_seconds(settings.seconds, settings.timeout_s)
    found = tuple(parse_engine(text) for text in engines)
    loaded = load(config, engines=found, models=any_model(tokenizer)).config
    if not loaded.engines and router is None:
        raise ConfigError("nothing to check: give --engine URL (repeatable), --router URL or --config FILE")
    configure_logging("error", "console")
    url = None if router is None else router_url(router)
    seen = uvloop.run(_examine(loaded, url, settings, quiet=as_json))
    findings = checks.run_checks(seen)
    if as_json:
        sys.stdout.write(report_json(findings))
    else:
        show(findings, output_console())
    return exit_status(findings)


def _check_seconds(seconds: float, timeout_s: float) -> None:
    """Validate both options. Raises ``ConfigError``."""
    if not 0 <= seconds <= _SECONDS_MAX:
        raise ConfigError(f"--seconds: {seconds} is not 0 to {_SECONDS_MAX:g}")
    if not 0 < timeout_s <= _SECONDS_MAX:
        raise ConfigError(f"--timeout: {timeout_s} is not above 0 and at most {_SECONDS_MAX:g}")


async def _examine(config: Config, url: str | None, settings: ExamineSettings, *, quiet: bool) -> Evidence:
    """Examine engines and show progress on a terminal. Raises ``ConfigError`` for a bad tokenizer."""
    console = Console(stderr=True)
    try:
        if quiet or not console.is_terminal:
            return await examine(config, settings, router_url=url, progress=lambda _text: None)
        with console.status("examining") as status:
            return await examine(config, settings, router_url=url, progress=status.update)
    except ModelDirError as problem:
        raise ConfigError(f"--tokenizer: {problem}") from None
    except TlsError as problem:
        raise ConfigError(str(problem)) from None


def report_json(findings: list[Finding]) -> str:
    """Encode one JSON object: the worst severity, counts, and every finding."""
    counts = Counter(str(finding.severity) for finding in findings)
    worst = next((str(s) for s in reversed(Severity) if counts[str(s)]), "ok")
    report = {"worst": worst, "counts": dict(counts), "findings": findings}
    return msgspec.json.format(msgspec.json.encode(report)).decode() + "\n"


def describe(finding: Finding) -> Text:
    """Format a finding: the observation, and cause and remedy unless it is ok."""
    text = Text(finding.seen)
    for name, more in (("cause", finding.cause), ("remedy", finding.remedy)):
        if more and finding.severity is not Severity.OK:
            text.append(f"\n{name}: {more}", style="dim")
    return text


def show(findings: list[Finding], console: Console) -> None:
    """Print findings grouped by subject, with cause and remedy below each problem."""
    for subject in dict.fromkeys(finding.subject for finding in findings):
        table = make_table("<", "<", "", show_header=False)
        for finding in (f for f in findings if f.subject == subject):
            label = Text(f"  {finding.severity}", style=STYLES[finding.severity])
            table.add_row(label, finding.check, describe(finding))
        console.print(Text(subject, style="bold"))
        console.print(table)
    counts = Counter(finding.severity for finding in findings)
    console.print(", ".join(f"{counts[s]} {s}" for s in reversed(Severity)))
