"""Each configuration on a page is read by the router, or by what reads key files."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from kvatlas.router.config.load import SECTIONS
from kvatlas.router.config.schema import Config, ModelConfig
from kvatlas.router.fleet.engines import EngineAddress
from tests.docs.pages import pages
from tests.support.paths import ROOT

TENANT_KEYS = {"tenants", "keys"}
"""Of a key file: ``[[keys]]`` is a list there, ``[keys]`` a section of the configuration."""


def blocks() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every block in TOML of README and docs, by page and number."""
    for page in pages():
        if page.parent.name == "docs" or page == ROOT / "README.md":
            found = re.findall(r"^```toml\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
            for number, text in enumerate(found):
                yield f"{page.stem}-{number}", tomllib.loads(text)


def unknown(table: dict[str, Any], section: str = "") -> Iterator[str]:
    """Keys that no section has."""
    known = SECTIONS[section].__struct_fields__ if section else Config.__struct_fields__
    for key, value in table.items():
        name = f"{section}.{key}".lstrip(".")
        if name in SECTIONS and isinstance(value, dict):
            yield from unknown(value, name)
        elif key not in known:
            yield name


@pytest.mark.parametrize(("name", "table"), [pytest.param(*one, id=one[0]) for one in blocks()])
def test_a_configuration_has_settings_that_exist(name: str, table: dict[str, Any]) -> None:
    if isinstance(table.get("keys"), list) or "tenants" in table:
        assert table.keys() <= TENANT_KEYS
        return
    models, engines = table.pop("models", {}), table.pop("engines", [])
    table.pop("aliases", None)
    assert list(unknown(table)) == []
    fields = set(ModelConfig.__struct_fields__)
    assert [key for model in models.values() for key in model if key not in fields] == []
    addresses = {*EngineAddress.__struct_fields__, "drain"}  # of a watched file
    assert [key for engine in engines for key in engine if key not in addresses] == []


def test_a_missing_setting_would_be_seen() -> None:
    assert list(unknown({"pull": {"enabled": True, "speed": 1}, "fly": {}})) == ["pull.speed", "fly"]
    assert len(list(blocks())) > 10
