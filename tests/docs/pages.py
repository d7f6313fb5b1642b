"""The repository's Markdown pages, and what they name: links, commands, settings, metrics."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_INLINE = re.compile(r"`([^`\n]+)`")
_PROGRAM = re.compile(
    r"\bpython (?:-m ((?:benchmarks|scripts|tests|kvatlas)[\w.]*)|([\w/]+)\.py)((?: +[^\s|>#`;]+)*)"
)


@cache
def files() -> list[Path]:
    """Existing files that git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        return [
            path for path in ROOT.rglob("*.md") if not any(part.startswith(".venv") for part in path.parts)
        ]
    names = sorted(set(listed.stdout.decode().split("\0")) - {""})
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def pages() -> list[Path]:
    """Every Markdown page."""
    return [path for path in files() if path.suffix == ".md"]


def links(page: Path) -> Iterator[str]:
    """Targets of the page's links, code left out."""
    text = _INLINE.sub("", _FENCE.sub("", page.read_text(encoding="utf-8")))
    yield from _LINK.findall(text)


def anchors(page: Path) -> set[str]:
    """Anchors of the page's headings, as GitHub makes them."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def inline_code(page: Path) -> list[str]:
    """Everything between single backticks."""
    return _INLINE.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))


def _lines(page: Path) -> Iterator[str]:
    """Lines of code blocks, and inline code."""
    for block in _FENCE.findall(page.read_text(encoding="utf-8")):
        yield from block.replace("\\\n", " ").splitlines()
    yield from inline_code(page)


def command_lines(page: Path, program: str) -> Iterator[list[str]]:
    """Words of every use of ``program`` in code blocks and inline code, also in a container (``docker``,
    ``kubectl exec``)."""
    for line in _lines(page):
        inner = re.sub(rf"^(docker|kubectl) .*\b{program} +(?=[a-z])", f"{program} ", line)
        command = inner.removeprefix("$ ")
        words = shlex.split(command, comments=True) if command.startswith(f"{program} ") else []
        if words:
            yield words[1:]


def programs(page: Path) -> Iterator[tuple[str, list[str]]]:
    """The repository's own programs that the page runs by Python: each file or folder, and its flags."""
    for line in _lines(page):
        for module, path, rest in _PROGRAM.findall(line):
            name = module.replace(".", "/") or path
            yield name if (ROOT / name).is_dir() else f"{name}.py", re.findall(r"--[a-z][\w-]*", rest)


def transfer_configs(page: Path) -> list[dict[str, Any]]:
    """Values of ``--kv-transfer-config`` on the page; every JSON argument of the page is read on the way."""
    text = page.read_text(encoding="utf-8")
    given = [(flag, json.loads(value)) for flag, value in re.findall(r"--(kv-[a-z]+-config) '([^']+)'", text)]
    return [value for flag, value in given if flag == "kv-transfer-config"]


def connector_metrics() -> dict[str, tuple[str, ...]]:
    """Metrics of the connectors as exported, with their labels; read from the source, which needs vLLM."""
    source = (ROOT / "connectors" / "reports.py").read_text(encoding="utf-8")
    values: dict[str, Any] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            values[node.target.id] = ast.literal_eval(node.value)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            values[ast.unparse(node.targets[0])] = node.value.value
    prefix = values["PREFIX"]
    counters = {f"{prefix}{name}_total": labels for name, (labels, _) in values["COUNTERS"].items()}
    return counters | {f"{prefix}{name}": labels for name, (labels, _) in values["GAUGES"].items()}


def table_rows(page: Path, header: str) -> list[list[str]]:
    """Cells of every row of the table whose first column is called ``header``."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {header} |"))
    rows = takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
