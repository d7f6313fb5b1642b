"""Fields and texts of a settings or counters struct, read from its source, and their form in Markdown.

The text of a field is the string literal below it, as editors show it too; its type is the annotation as
written, so that it looks the same under every Python version.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec


class Field(NamedTuple):
    """One field of a struct as its source shows it."""

    name: str
    kind: str
    default: Any
    text: str


def fields(struct: type[msgspec.Struct]) -> list[Field]:
    """The fields of a struct, then those of its parents, each as written where it is defined last."""
    found: dict[str, Field] = {}
    for cls in struct.__mro__:
        if cls is not msgspec.Struct and issubclass(cls, msgspec.Struct):
            for field in _own_fields(cls, struct):
                found.setdefault(field.name, field)
    return list(found.values())


def _own_fields(cls: type[msgspec.Struct], struct: type[msgspec.Struct]) -> list[Field]:
    """Fields that ``cls`` itself defines: the annotation as written and the literal below the field."""
    source = textwrap.dedent(inspect.getsource(cls))
    body = ast.parse(source).body[0]
    if not isinstance(body, ast.ClassDef):
        raise TypeError(f"{cls} is no class")
    defaults = {f.name: _default(f) for f in msgspec.structs.fields(struct)}
    found = []
    for node, below in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            kind = ast.get_source_segment(source, node.annotation) or ""
            name = node.target.id
            found.append(Field(name, kind, defaults[name], _literal(below)))
    return found


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def _literal(node: ast.stmt | None) -> str:
    if (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ):
        return prose(node.value.value)
    return ""


def prose(text: str | None) -> str:
    """A docstring as one Markdown paragraph per paragraph."""
    paragraphs = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(" ".join(p.split()) for p in paragraphs).replace("``", "`")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    cells = ((" ".join(cell.split()).replace("|", "\\|") for cell in line) for line in lines)
    return "".join("| " + " | ".join(line) + " |\n" for line in cells)


def code(text: object) -> str:
    """``text`` as inline code; nothing for nothing."""
    return f"`{text}`" if str(text) else ""


def shown(value: Any) -> str:
    """A default as TOML would have it."""
    if value is msgspec.NODEFAULT:
        return "must be given"
    if value is None:
        return "not set"
    if isinstance(value, msgspec.Struct):
        return "see below"
    if isinstance(value, frozenset) and len(value) > 3:
        return "see below"
    return code(_toml(value))


def _toml(value: Any) -> str:
    if isinstance(value, frozenset | set | tuple | list):
        items = sorted(value) if isinstance(value, frozenset | set) else value
        return "[" + ", ".join(map(_toml, items)) + "]"
    if isinstance(value, bool | str):
        return json.dumps(value)
    if isinstance(value, int | float) or value == {}:
        return repr(value)
    raise TypeError(f"no way to show {value!r} is known here")
