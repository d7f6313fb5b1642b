"""Parts: import-linter's contracts name what scripts/parts.py says; each has its target and step."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.scripts import script

parts = script("parts")
OF_ROUTER = ("serve", "services", "tools", "simulation")
CONTRACTS = {
    contract["name"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
}


def modules(*names: str) -> set[str]:
    return {
        f"kvatlas.{path.replace('/', '.')}"
        for name in names
        for path in parts.PARTS[name].code
        if not path.endswith("__init__")
    }


@pytest.mark.parametrize("part", OF_ROUTER)
def test_a_contract_holds_the_direction_of_imports(part: str) -> None:
    name = "serve imports no other part" if part == "serve" else None
    contract = CONTRACTS[name or next(key for key in CONTRACTS if key.startswith(f"{part} import"))]
    others = [other for other in OF_ROUTER if other not in {part, "serve"}]
    assert set(contract["source_modules"]) == modules(part)
    assert set(contract["forbidden_modules"]) == modules(*others)


def test_each_has_a_target_a_step_and_half_a_page() -> None:
    makefile, steps, page = (
        (ROOT / name).read_text("utf-8") for name in ("Makefile", ".ci/run", "docs/architecture.md")
    )
    for part in parts.PARTS:
        target = "connectors-fast" if part == "connectors" else part
        assert f"\ntest-{target}: " in makefile
        assert f" {target}" in steps.partition("others >")[0].partition("for part in")[2] or part == "serve"
        assert f"\n### {part.capitalize()}" in page or part == "repository"


def test_files_without_a_part_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(parts.faults()) == []
    for folder in ("router/unknown", "tests/router/elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "module.py").touch()
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    said = [fault for fault in parts.faults() if "no part" in fault]
    assert [fault.partition(":")[0] for fault in said] == ["router/unknown", "tests/router/elsewhere"]


@pytest.mark.parametrize("part", sorted(parts.PARTS))
def test_pytest_is_given_what_is_there(part: str) -> None:
    assert all((ROOT / path).exists() for path in parts.tests(part))
