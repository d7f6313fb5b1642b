"""``kvatlas doctor``: examine, check, and show as a table or as JSON."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table
from rich.text import Text

from router.config.errors import ConfigError
from router.config.flags import any_model
from router.config.load import load, parse_engine
from router.config.schema import Config
from router.prompts.reader import ModelDirError
from router.serve.logs import configure_logging
from router.tools.console import output_console
from router.tools.doctor import checks
from router.tools.doctor.evidence import Evidence
from router.tools.doctor.examine import ExamineSettings, examine
from router.tools.doctor.findings import Finding, Severity, exit_status

STYLES = {
    Severity.OK: "green",
    Severity.INFO: "cyan",
    Severity.WARNING: "yellow",
    Severity.ERROR: "bold red",
}
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
    """0: nothing amiss, 1: warnings or errors. Raises ``ConfigError`` for what cannot be run."""
    check_seconds(settings.seconds, settings.timeout_s)
    found = tuple(parse_engine(text) for text in engines)
    loaded = load(config, engines=found, models=any_model(tokenizer)).config
    if not loaded.engines and router is None:
        raise ConfigError("nothing to check: give --engine URL (repeatable), --router URL or --config FILE")
    configure_logging("error", "console")
    seen = look(loaded, settings, router=router_url(router), quiet=as_json)
    findings = checks.run_checks(seen)
    if as_json:
        sys.stdout.write(report_json(findings))
    else:
        show(findings, output_console())
    return exit_status(findings)


def check_seconds(seconds: float, timeout_s: float) -> None:
    """Raises ``ConfigError`` for times that cannot be waited."""
    if not 0 <= seconds <= _SECONDS_MAX:
        raise ConfigError(f"--seconds: {seconds} is not in 0..{_SECONDS_MAX:g}")
    if not 0 < timeout_s <= _SECONDS_MAX:
        raise ConfigError(f"--timeout: {timeout_s} is not above 0 and up to {_SECONDS_MAX:g}")


def look(config: Config, settings: ExamineSettings, *, router: str | None, quiet: bool) -> Evidence:
    """Examine, and say on a terminal what is being done. Raises ``ConfigError`` for a bad tokenizer."""
    return uvloop.run(_examine(config, router, settings, quiet=quiet))


def router_url(text: str | None) -> str | None:
    """The router's base URL. Raises ``ConfigError`` where it is none."""
    if text is None:
        return None
    try:
        parts = urlsplit(text)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"--router {text!r}: expected http://HOST:PORT")
    return text.rstrip("/").removesuffix("/v1")


async def _examine(config: Config, url: str | None, settings: ExamineSettings, *, quiet: bool) -> Evidence:
    console = Console(stderr=True)
    try:
        if quiet or not console.is_terminal:
            return await examine(config, settings, router_url=url, say=lambda _text: None)
        with console.status("looking") as status:
            return await examine(config, settings, router_url=url, say=status.update)
    except ModelDirError as problem:
        raise ConfigError(f"--tokenizer: {problem}") from None


def report_json(findings: list[Finding]) -> str:
    """One JSON object: the worst severity, counts, and every finding."""
    counts = Counter(str(finding.severity) for finding in findings)
    worst = next((str(s) for s in reversed(Severity) if counts[str(s)]), "ok")
    report = {"worst": worst, "counts": dict(counts), "findings": findings}
    return msgspec.json.format(msgspec.json.encode(report)).decode() + "\n"


def in_words(finding: Finding) -> Text:
    """Seen, and unless all is well cause and remedy."""
    text = Text(finding.seen)
    for name, more in (("cause", finding.cause), ("remedy", finding.remedy)):
        if more and finding.severity is not Severity.OK:
            text.append(f"\n{name}: {more}", style="dim")
    return text


def show(findings: list[Finding], console: Console) -> None:
    """Grouped by subject; cause and remedy under what is amiss."""
    for subject in dict.fromkeys(finding.subject for finding in findings):
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for finding in (f for f in findings if f.subject == subject):
            label = Text(f"  {finding.severity}", style=STYLES[finding.severity])
            table.add_row(label, finding.check, in_words(finding))
        console.print(Text(subject, style="bold"))
        console.print(table)
    counts = Counter(finding.severity for finding in findings)
    console.print(", ".join(f"{counts[s]} {s}" for s in reversed(Severity)))
