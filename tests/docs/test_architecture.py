"""docs/architecture.md names every package, and every module it names is where it says."""

from __future__ import annotations

import re

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
    [("router", "package of `router/`"), ("connectors", "path")],
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


def test_every_behaviour_listed_is_in_an_existing_file() -> None:
    """A name without a folder lies beside the one before it."""
    rows = table_rows(PAGE, "behaviour")
    assert len({what for what, _ in rows}) >= 20
    missing = []
    for what, where in rows:
        folder = None
        for name in re.findall(r"`([^`]+)`", where):
            path = ROOT / name if "/" in name or folder is None else folder / name
            folder = path.parent
            if not path.exists():
                missing.append(f"{what}: {name}")
        assert folder is not None, f"{what}: no file named"
    assert missing == []
