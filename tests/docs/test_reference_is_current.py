"""The reference pages are what the code says now, byte for byte, and their example can be used."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from kvatlas.router.config.load import load
from tests.support.paths import ROOT
from tests.support.scripts import script


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return script("generate_reference")


@pytest.mark.parametrize("name", ["cli.md", "configuration.md", "metrics.md"])
def test_page_is_what_the_code_says(reference: ModuleType, name: str) -> None:
    kept = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert kept == reference.PAGES[name](), f"docs/{name} is out of date: run `make docs`"


@pytest.mark.parametrize("name", ["cli.md", "configuration.md"])
def test_every_key_and_flag_is_explained(name: str) -> None:
    rows = [line for line in (ROOT / "docs" / name).read_text().splitlines() if line.startswith("| `")]
    assert rows
    assert [row for row in rows if row.endswith("|  |")] == []


_WHEN = re.compile(
    r"\b([Ss]et|[Rr]aise|[Ll]ower|[Ss]witch|[Cc]hange|[Rr]estrict|[Ee]xtend|[Gg]ive|[Oo]ne per|[Nn]eeded)\b"
    r"|`refuse`|`strip`|`off`"
)


def test_every_setting_says_when_to_change_it() -> None:
    """In the operator's terms; a key for which no sentence can be found should be a constant."""
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `") and line.count(" | ") >= 3]
    assert [row for row in rows if not _WHEN.search(row.rpartition(" | ")[2])] == []


def test_no_page_is_left_out(reference: ModuleType) -> None:
    assert set(reference.PAGES) == {"cli.md", "configuration.md", "metrics.md"}


def test_the_configuration_example_can_be_used(reference: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    example = tmp_path / "kvatlas.toml"
    example.write_text(reference.EXAMPLE.replace("/models/my-model", str(tmp_path)))
    config = load(example, environ={}).config
    assert [engine.base_url for engine in config.engines] == [
        "http://10.0.0.11:8000",
        "http://10.0.0.12:8000",
    ]
    assert config.engines[1].events == "tcp://10.0.0.12:5557"
    assert config.model("any").tokenizer == str(tmp_path)
