"""docs/architecture.md names every package, and every module it names is where it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.pages import table_rows
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "architecture.md"
_NAMED = re.compile(r"`([\w/]+(?:\.py|/))`")


def rooms(package: str) -> set[str]:
    """The folders of a package that hold modules."""
    return {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}


def described(package: str, header: str) -> dict[str, list[str]]:
    """Room -> the modules and folders that its row names."""
    rows = table_rows(PAGE, header)
    return {
        folder.rstrip("/"): [name for cell in cells for name in _NAMED.findall(cell)]
        for first, *cells in rows
        for folder in re.findall(r"`([\w/]+)/`", first)
    }


@pytest.mark.parametrize(
    ("package", "header"),
    [
        ("router", "package of `router/`"),
        ("connectors", "path, in the order in which a block passes through"),
    ],
    ids=["router", "connectors"],
)
def test_every_package_is_described_and_every_module_named_exists(package: str, header: str) -> None:
    table = described(package, header)
    assert set(table) == rooms(package)
    missing = [
        f"{room}: {name}"
        for room, names in table.items()
        for name in names
        if not any((ROOT / base / name).exists() for base in (f"{package}/{room}", package))
    ]
    assert missing == []


def words_of(path: Path) -> str:
    """Where a reader who looks for a word finds it: the name of the file, its head, and what it defines."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text.lower()
    tree = ast.parse(text)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    defined = [node.name for node in ast.walk(tree) if isinstance(node, kinds)]
    return " ".join([path.stem, ast.get_docstring(tree) or "", *defined]).replace("_", " ").lower()


def test_every_behaviour_listed_is_in_an_existing_file_that_has_a_word_of_it() -> None:
    """A name without a folder lies beside the one before it."""
    rows = table_rows(PAGE, "behaviour")
    assert len({what for what, _ in rows}) >= 20
    missing, unnamed = [], []
    for what, where in rows:
        folder, found = None, ""
        for name in re.findall(r"`([^`]+)`", where):
            path = ROOT / name if "/" in name or folder is None else folder / name
            folder = path.parent
            if path.exists():
                found += words_of(path)
            else:
                missing.append(f"{what}: {name}")
        assert folder is not None, f"{what}: no file named"
        # The first letters of a word, so that other endings count.
        stems = {word[:6] for word in re.findall(r"[a-z]{4,}", what.lower())} - {"engine", "reques", "router"}
        if stems and not any(stem in found for stem in stems):
            unnamed.append(what)
    assert missing == []
    assert unnamed == []
