"""Makes the chart's values.schema.json and the table in its README.md from values.yaml.

    python scripts/generate_chart_reference.py            write both
    python scripts/generate_chart_reference.py --check    status 1 where they would change

A value is documented in ``values.yaml`` only: a comment line ``# -- TEXT`` documents the key below it
(a map with keys of its own needs none), ``# @schema JSON`` is merged into its schema. A key's type is that of
its default. A map that has keys accepts only these; one that is empty, or has a text of its own, accepts any.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[1] / "charts" / "kvatlas"
BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"
_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z][A-Za-z0-9]*):")


class ValuesError(ValueError):
    """values.yaml does not say what it should."""


@dataclass
class Notes:
    """Comments by path from the root."""

    text: dict[tuple[str, ...], str] = field(default_factory=dict)
    schema: dict[tuple[str, ...], dict[str, Any]] = field(default_factory=dict)


def read_notes(source: str) -> Notes:
    """Comments of ``values.yaml`` by the path of the key below them."""
    notes, path = Notes(), list[str]()
    text: str | None = None
    schema: dict[str, Any] = {}
    hidden_indent: int | None = None  # keys below a documented map are its default's, not the chart's
    for number, line in enumerate(source.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("# -- "):
            text = stripped[5:]
            continue
        if stripped.startswith("# @schema "):
            try:
                schema = json.loads(stripped[10:])
            except ValueError as error:
                raise ValuesError(f"values.yaml:{number}: @schema: {error}") from None
            continue
        match = _KEY.match(line)
        if match is None:
            continue
        indent = len(match["indent"])
        if hidden_indent is not None and indent > hidden_indent:
            continue
        hidden_indent = None
        path = [*path[: indent // 2], match["key"]]
        if text is not None:
            notes.text[tuple(path)] = text
            notes.schema[tuple(path)] = schema
            hidden_indent = indent
        text, schema = None, {}
    return notes


def schema_of(value: Any, path: tuple[str, ...], notes: Notes) -> dict[str, Any]:
    """JSON schema of the value at ``path``. Raises ``ValuesError`` for one that no comment documents."""
    if path and path in notes.text:
        documented = {"description": notes.text[path], **_type_of(value), **notes.schema[path]}
        if documented.get("type") is None:
            raise ValuesError(f"{'.'.join(path)}: its default does not tell its type; add @schema")
        return documented
    if not isinstance(value, dict) or not value:
        raise ValuesError(f"{'.'.join(path)}: no comment that begins with `# -- ` documents it")
    properties = {key: schema_of(item, (*path, key), notes) for key, item in value.items()}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _type_of(value: Any) -> dict[str, Any]:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return {"type": kinds[type(value)]} if type(value) in kinds else {}


def schema_text(values: dict[str, Any], notes: Notes) -> str:
    root = schema_of(values, (), notes)
    # Helm puts `global` there for subcharts' sake, whether a chart has any or not.
    root["properties"]["global"] = {"type": "object"}
    whole = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "kvatlas chart values", **root}
    return json.dumps(whole, indent=2) + "\n"


def table(values: dict[str, Any], notes: Notes) -> str:
    """One Markdown row per documented value, in the file's order."""
    rows = ["| value | default | meaning |", "| --- | --- | --- |"]
    for path, text in notes.text.items():
        default: Any = values
        for key in path:
            default = default[key]
        shown = json.dumps(default).replace("|", "\\|")
        rows.append(f"| `{'.'.join(path)}` | `{shown}` | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(rows) + "\n"


def render(chart: Path) -> dict[Path, str]:
    """Expected content of the generated files. Raises ``ValuesError``."""
    source = (chart / "values.yaml").read_text()
    values, notes = yaml.safe_load(source), read_notes(source)
    readme = (chart / "README.md").read_text()
    if BEGIN not in readme or END not in readme:
        raise ValuesError(f"README.md: needs the lines {BEGIN} and {END}")
    head, tail = readme.split(BEGIN)[0], readme.split(END)[1]
    return {
        chart / "values.schema.json": schema_text(values, notes),
        chart / "README.md": f"{head}{BEGIN}\n{table(values, notes)}{END}{tail}",
    }


def main(arguments: list[str]) -> int:
    try:
        files = render(CHART)
    except ValuesError as error:
        sys.stderr.write(f"generate_chart_reference: {error}\n")
        return 2
    old = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    if "--check" in arguments:
        for path in old:
            sys.stderr.write(f"{path.name} is not up to date: run make chart-docs\n")
        return 1 if old else 0
    for path in old:
        path.write_text(files[path])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
