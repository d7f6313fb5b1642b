"""Dependencies: each is imported and described, nothing else is needed, and engines need hardly any."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterable

import pytest

from tests.docs.pages import table_rows
from tests.support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PAGE = ROOT / "docs" / "container.md"
DISTRIBUTIONS = {"zmq": "pyzmq"}
"""Modules whose distribution has another name."""
EXTRAS = {"lightkube", "dns", "opentelemetry", "openai_harmony", "mistral_common", "torch", "mooncake"}
"""Modules that an extra installs."""
BROUGHT = {"httpx2": "huggingface-hub", "yaml": "huggingface-hub", "tqdm": "huggingface-hub"}
"""Modules that are imported and come with a dependency whose interface they are part of."""
OF_VLLM = {"vllm", "torch", "triton", "numpy", "msgspec", "zmq", "cbor2"}
"""Modules in every environment that has vLLM."""
STORES = {"redis", "mooncake"}
"""Modules of one store each; docs/connectors.md says how to install them."""


def normal(name: str) -> str:
    """A distribution's name, as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required(lines: Iterable[str] = PROJECT["dependencies"]) -> set[str]:
    return {normal(re.split(r"[\[<>=;~ ]", line)[0]) for line in lines}


def foreign(folder: str, without: str = "-") -> set[str]:
    """Modules of others that the code below a folder imports, also inside functions."""
    statement = re.compile(r"^ *(?:from (\w+)[\w.]* import |import (\w+))", re.MULTILINE)
    names = {
        of or plain
        for path in (ROOT / folder).rglob("*.py")
        if without not in path.parts
        for of, plain in statement.findall(path.read_text("utf-8"))
    }
    return names - sys.stdlib_module_names - {"kvatlas"}


def test_the_dependencies_are_what_the_router_imports() -> None:
    """Its own and those of the publisher, which it decodes events and computes hashes with."""
    modules = (foreign("router") | foreign("publisher")) - EXTRAS - BROUGHT.keys() - {"vllm"}
    assert {normal(DISTRIBUTIONS.get(name, name)) for name in modules} - {"hiredis"} == required()
    assert set(BROUGHT.values()) <= required()


def test_an_engine_needs_one_package_that_vllm_does_not_bring() -> None:
    """`pip install --no-deps . xxhash`, as docs/connectors.md says."""
    needed = foreign("connectors") | foreign("publisher", without="simulator")
    assert needed - OF_VLLM - STORES == {"xxhash"}
    assert "--no-deps . xxhash`" in " ".join((ROOT / "docs" / "connectors.md").read_text("utf-8").split())


def test_the_page_says_what_each_is_for() -> None:
    rows = {normal(name.strip("`")): (what, brings) for name, what, brings in table_rows(PAGE, "package")}
    assert set(rows) == required()
    assert all(what for what, _ in rows.values())


def test_every_package_of_the_image_is_on_the_page() -> None:
    pinned = re.findall(
        r"^([\w.-]+)==", (ROOT / "requirements" / "image.txt").read_text("utf-8"), re.MULTILINE
    )
    named = {normal(name) for name in re.findall(r"`([\w.-]+)`", PAGE.read_text("utf-8"))}
    assert [name for name in pinned if normal(name) not in named] == []


def test_the_image_has_what_each_source_of_engines_needs() -> None:
    pinned = (ROOT / "requirements" / "image.txt").read_text("utf-8")
    extras = PROJECT["optional-dependencies"]
    for name in required([*PROJECT["dependencies"], *extras["kubernetes"], *extras["dns"]]):
        assert re.search(rf"^{name}==", pinned, re.MULTILINE), name


@pytest.mark.parametrize("extra", sorted(PROJECT["optional-dependencies"]))
def test_the_page_names_every_extra(extra: str) -> None:
    assert f"`{extra}`" in PAGE.read_text("utf-8")


def test_indirect_dependencies_are_not_listed_as_direct() -> None:
    brought = {
        normal(name) for *_, cell in table_rows(PAGE, "package") for name in re.findall(r"`([\w.-]+)`", cell)
    }
    assert brought & required() == set()
    assert all(importlib.metadata.distribution(name) for name in brought)
