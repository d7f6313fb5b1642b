"""``kvatlas certify``: examine one engine under a small load, judge its properties, and show the verdict."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from router.config.errors import ConfigError
from router.config.flags import any_model
from router.config.load import load, parse_engine
from router.serve.logs import configure_logging
from router.tools.console import output_console
from router.tools.doctor import checks
from router.tools.doctor.command import STYLES, check_seconds, in_words, look
from router.tools.doctor.evidence import EngineEvidence
from router.tools.doctor.examine import ExamineSettings
from router.tools.doctor.findings import Finding, Severity
from router.tools.doctor.verdict import EngineVerdict, Judged, judge

_STATES = {"pass": Severity.OK, "fail": Severity.ERROR, "not_shown": Severity.WARNING}


class _EngineReport(msgspec.Struct):
    """A verdict, and the load it rests on."""

    verdict: EngineVerdict
    version: str
    requests: int
    out_of_time: bool


def run_certify(
    *, engine: str, tokenizer: str | None, config: Path | None, settings: ExamineSettings, as_json: bool
) -> int:
    """0: certified, 1: not. Raises ``ConfigError`` for what cannot be run."""
    if settings.load is not None:
        check_seconds(settings.load.seconds_max, settings.timeout_s)
        if not settings.load.seconds_max:
            raise ConfigError("--seconds: 0 leaves no time for a load")
    # the engines of the configuration file are those of the router, not to be loaded here
    loaded = load(config, engines=(parse_engine(engine),), models=any_model(tokenizer)).config
    configure_logging("error", "console")
    began = time.monotonic()
    seen = look(loaded, settings, router=None, quiet=as_json)
    findings = checks.run_checks(seen)
    reports = [_report(one, findings) for one in seen.engines]
    took_s = time.monotonic() - began
    certified = all(report.verdict.certified for report in reports)
    if as_json:
        sys.stdout.write(_json(reports, certified, took_s))
    else:
        _show(reports, took_s, output_console())
    return int(not certified)


def _report(engine: EngineEvidence, findings: list[Finding]) -> _EngineReport:
    sent = engine.load
    return _EngineReport(
        judge(engine.engine_id, findings),
        engine.server.version_text,
        0 if sent is None else sent.sent,
        sent is not None and sent.out_of_time,
    )


def _json(reports: list[_EngineReport], certified: bool, took_s: float) -> str:
    engines = [
        {**msgspec.to_builtins(report.verdict), "version": report.version, "requests": report.requests}
        for report in reports
    ]
    report = {"certified": certified, "took_s": round(took_s, 1), "engines": engines}
    return msgspec.json.format(msgspec.json.encode(report)).decode() + "\n"


def _show(reports: list[_EngineReport], took_s: float, console: Console) -> None:
    """Property by property: what shows it, or what fails it with cause and remedy."""
    for report in reports:
        verdict = report.verdict
        title = "certified" if verdict.certified else "not certified"
        style = STYLES[Severity.OK if verdict.certified else Severity.ERROR]
        version = f"vLLM {report.version}, " if report.version else ""
        console.print(
            Text.assemble((f"{title}: ", style), (verdict.engine, "bold")),
            f"({version}{report.requests} requests, {took_s:.0f} s)",
        )
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for each in verdict.properties:
            table.add_row(
                Text(f"  {each.state.replace('_', ' ')}", style=STYLES[_STATES[each.state]]),
                each.name,
                _evidence(each),
            )
        for note in verdict.notes:
            if note.severity in {Severity.WARNING, Severity.ERROR}:
                table.add_row(Text("  note", style=STYLES[note.severity]), note.check, in_words(note))
        console.print(table)


def _evidence(each: Judged) -> Text:
    """The claim, and below it the findings that decided."""
    deciding = {
        "pass": {Severity.OK},
        "fail": {Severity.WARNING, Severity.ERROR},
        "not_shown": {Severity.INFO},
    }
    text = Text(each.claim)
    for finding in each.findings:
        if finding.severity in deciding[each.state]:
            text.append(f"\n{finding.check}: ").append_text(in_words(finding))
    return text
