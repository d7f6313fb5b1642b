"""docs/connectors.md says of the connectors what their code says: settings, defaults, commands, metrics."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvatlas.connectors import CONNECTORS
from kvatlas.connectors.settings import OffloadSettings, Options
from kvatlas.connectors.store import open as store_open
from kvatlas.connectors.store.mooncake import MooncakeSettings
from kvatlas.connectors.store.open import SharedSettings
from tests.docs.pages import connector_metrics, transfer_configs
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "connectors.md"
GIVEN = object()
"""Stands for a default where there is none."""
STORE = {"kind": "redis", "url": "redis://localhost"}


class Recorder(Options):
    """Keeps the name and default of every setting that is read."""

    read: dict[str, Any]

    def _get(self, name: str, default: object) -> Any:
        type(self).read[name] = GIVEN if default is None else default
        return super()._get(name, default)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings read through ``Options`` from now on, by name."""
    Recorder.read = {}
    monkeypatch.setattr(store_open, "Options", Recorder)
    return Recorder.read


def tables() -> list[dict[str, Any]]:
    """Every table of settings on the page: name -> default."""
    found = []
    for part in PAGE.read_text(encoding="utf-8").split("| key | default | meaning |\n")[1:]:
        rows = part.partition("\n\n")[0].splitlines()[1:]
        cells = [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in rows]
        found.append({name.strip("`"): default_of(default) for name, default, *_ in cells})
    return found


def default_of(cell: str) -> Any:
    return json.loads(cell.strip("`")) if cell.startswith("`") else GIVEN if "given" in cell else cell


def test_settings_of_the_offload_connector() -> None:
    fields = dataclasses.fields(OffloadSettings)
    in_code = {f.name: GIVEN if f.default is dataclasses.MISSING else f.default for f in fields}
    assert tables()[0] == in_code


def test_settings_of_the_shared_store_connector(recorded: dict[str, Any]) -> None:
    SharedSettings.parse({"host_bytes": "1GiB", "store": STORE}, "extra")
    assert tables()[1] == recorded | {"store": GIVEN}


def test_settings_of_every_store(recorded: dict[str, Any], tmp_path: Path) -> None:
    everyone, file, redis, mooncake = tables()[2:]
    with_kind = {"kind": GIVEN, "name": "the kind"}
    assert everyone == with_kind
    store_open.open_store({"kind": "file", "path": str(tmp_path / "store")}, lookup_only=True).close()
    assert with_kind | file == recorded | {"name": "the kind"}
    recorded.clear()
    store_open.open_store(STORE).close()
    assert with_kind | redis == recorded | {"name": "the kind"}
    recorded.clear()
    MooncakeSettings.parse(Recorder({"master": "localhost:1"}, "store"))
    assert mooncake == recorded


def test_every_command_would_be_understood(tmp_path: Path) -> None:
    configs = transfer_configs(PAGE)
    assert {config["kv_connector"] for config in configs} == set(CONNECTORS)
    kinds = {config["kv_connector_extra_config"].get("store", {}).get("kind") for config in configs}
    assert kinds == {None, *store_open.KINDS}
    for config in configs:
        assert config["kv_role"] == "kv_both"
        check(config)


def check(config: Mapping[str, Any]) -> None:
    """One connector's settings, read by its own code."""
    extra, name = config["kv_connector_extra_config"], config["kv_connector"]
    assert config["kv_connector_module_path"] == CONNECTORS[name]
    if name == "HybridMultiConnector":
        assert set(extra) == {"connectors"}
        for child in extra["connectors"]:
            check(child)
    elif name == "SharedStoreConnector":
        store = SharedSettings.parse(extra, "extra").store
        if store["kind"] == "mooncake":
            options = Options({key: value for key, value in store.items() if key != "kind"}, "store")
            MooncakeSettings.parse(options)
            options.finish()
        elif store["kind"] == "redis":
            store_open.open_store(store).close()
        else:
            assert set(store) <= set(tables()[3]) | {"kind"}
    else:
        OffloadSettings.parse(extra, "extra")


def test_every_metric_is_explained() -> None:
    rows = re.findall(r"^\| `(kvatlas_offload_[a-z_]+)` \| ([^|]*)\|", PAGE.read_text(), re.MULTILINE)
    told = {name: tuple(re.findall(r"`([a-z]+)`", labels)) for name, labels in rows}
    assert told == connector_metrics()
