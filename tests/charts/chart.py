"""Renders the chart with the real Helm engine, as a release would be; ``make release`` gives its package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

from tests.support.paths import ROOT, built

CHART = ROOT / "charts" / "kvatlas"
MINIMAL: dict[str, Any] = {"engines": {"selector": {"app": "vllm"}}}

Document = dict[str, Any]
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's reads what a release has in a tenth of the time, where PyYAML was built with it."""


class Rendered:
    """The documents of one release; its image is ``kvatlas`` unless the values name another."""

    def __init__(self, values: dict[str, Any], *, name: str = "kvatlas", namespace: str = "llm") -> None:
        values = {**values, "image": {"repository": "kvatlas", **values.get("image", {})}}
        chart = Chart.load(str(built("kvatlas-?.*.tgz") or CHART))
        try:
            chart.validate_schema(values)
            files = chart.render(values, name=name, namespace=namespace)
        finally:
            chart.close()
        self.notes = files.pop("kvatlas/templates/NOTES.txt")
        self.documents: list[Document] = [
            document
            for path, text in sorted(files.items())
            if not path.endswith(".tpl")
            for document in yaml.load_all(text, _LOADER)
            if document
        ]

    def all(self, kind: str) -> list[Document]:
        return [document for document in self.documents if document["kind"] == kind]

    def one(self, kind: str, suffix: str = "") -> Document:
        """The only document of this kind whose name ends so."""
        found = [d for d in self.all(kind) if d["metadata"]["name"].endswith(suffix)]
        assert len(found) == 1, f"{len(found)} documents of kind {kind}"
        return found[0]

    @property
    def pod(self) -> Document:
        spec: Document = self.one("Deployment")["spec"]["template"]["spec"]
        return spec

    @property
    def container(self) -> Document:
        container: Document = self.pod["containers"][0]
        return container

    @property
    def toml(self) -> str:
        return str(
            next(d for d in self.all("ConfigMap") if "kvatlas.toml" in d["data"])["data"]["kvatlas.toml"]
        )

    @property
    def config(self) -> Document:
        return tomllib.loads(self.toml)


def examples() -> list[Path]:
    """Values files that users start from; manifests of engines are none."""
    return [
        p
        for p in sorted((ROOT / "examples").glob("*.yaml"))
        if not re.search(r"^kind:", p.read_text(), re.MULTILINE)
    ]


def load(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = yaml.load(path.read_text(), _LOADER)
    return values
