"""The ways to run a router without Kubernetes: their commands are the real ones, what they name exists."""

from __future__ import annotations

import configparser
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from kvatlas.router.cli import app
from kvatlas.router.config.load import load
from tests.support.paths import ROOT

SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "examples/docker/compose.yaml").read_text())["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def check(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """``kvatlas serve`` takes them."""
    with pytest.raises(SystemExit) as end:
        app([*arguments, "--check-config"])
    assert end.value.code == 0, capsys.readouterr().err


def test_the_documented_docker_run_is_reached_from_outside(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/container.md").read_text()
    found = re.search(r"^docker run (.*?[^\\])$", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    words = shlex.split(found[1].replace("\\\n", " "))
    options, arguments = words[: words.index("kvatlas")], words[words.index("kvatlas") + 1 :]
    assert options[options.index("-p") + 1].endswith(":8000")
    assert arguments[arguments.index("--host") + 1] == "0.0.0.0"
    check(arguments, capsys)


def test_the_composed_router_finds_its_engines(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = SERVICES["router"]["command"]
    check(arguments, capsys)
    engines = [argument.removeprefix("--engine=") for argument in arguments if "--engine" in argument]
    assert engines == [f"http://{name}:8000" for name in SERVICES if name != "router"]
    for name in SERVICES:
        assert "--host=0.0.0.0" in SERVICES[name]["command"]
        assert SERVICES[name]["image"] == SERVICES["router"]["image"]


def test_the_systemd_unit_runs_the_real_command(capsys: pytest.CaptureFixture[str]) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(ROOT / "examples/systemd/kvatlas.service")
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program).name == "kvatlas"
    file = ROOT / "examples/systemd/kvatlas.toml"
    arguments[arguments.index("--config") + 1] = str(file)
    check(arguments, capsys)
    drain_s = load(file, environ={}).config.listen.drain_s_max
    assert int(unit["Service"]["TimeoutStopSec"]) > drain_s


def test_the_image_is_pinned() -> None:
    assert re.search(r"^ARG BASE=python:3\.\d+\.\d+-\S+@sha256:[0-9a-f]{64}$", DOCKERFILE, re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)) == {"${BASE}"}
    copied = set(re.findall(r"^COPY ((?!--)[^\n]+) \S+$", DOCKERFILE, re.MULTILINE))
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {name for names in copied for name in names.split()} == kept


def test_the_lock_has_what_the_router_needs() -> None:
    """After a change of pyproject.toml: ``make lock``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = {
        "image": project["project"]["dependencies"],
        "build": project["build-system"]["requires"],
    }
    for name, requirements in wanted.items():
        text = (ROOT / f"requirements/{name}.txt").read_text()
        pinned = dict(
            re.findall(r"^([a-z0-9-]+)==(\S+) .*\\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE)
        )
        for requirement in map(Requirement, requirements):
            version = pinned[requirement.name.lower().replace("_", "-")]
            assert Version(version) in requirement.specifier, requirement
