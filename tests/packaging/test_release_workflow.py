"""The workflow that publishes: its steps, run with stand-ins, take the files that ``make release`` leaves.

It has never run; CONTRIBUTING.md has what a person must do before it can.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.paths import ROOT

VERSION = "1.2.3"
ARTIFACTS = [
    f"kvatlas-{VERSION}-py3-none-any.whl",
    f"kvatlas-{VERSION}.tar.gz",
    f"kvatlas-{VERSION}.tgz",
    f"kvatlas-{VERSION}-image.tar",
    f"kvatlas-{VERSION}.cdx.json",
    "SHA256SUMS",
]
JOBS: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text("utf-8"))["jobs"]
STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
for word; do
    file=${word#docker-archive:}
    case $file in dist/*) [ -e "$file" ] || { echo "no $file" >&2; exit 1; };; esac
done
"""


def scripts(job: str) -> list[dict[str, Any]]:
    """The steps of a job that are shell."""
    return [step for step in JOBS[job]["steps"] if "run" in step]


def calls(job: str, folder: Path) -> list[str]:
    """Run the shell of a job in a folder with ``dist/``; returns the programs that it called."""
    (folder / "dist").mkdir()
    for name in ARTIFACTS:
        (folder / "dist" / name).touch()
    programs = folder / "programs"
    programs.mkdir()
    for name in ("buildah", "helm", "gh"):
        (programs / name).write_text(STAND_IN)
        (programs / name).chmod(0o755)
    environ = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "GITHUB_REF_NAME": f"v{VERSION}",
        "GITHUB_ACTOR": "someone",
        "GITHUB_REPOSITORY": "Org/kvatlas",
        "GITHUB_REPOSITORY_OWNER": "Org",
    }
    for step in scripts(job):
        given = environ | dict.fromkeys(step.get("env", {}), "token")
        subprocess.run(["bash", "-e", "-c", step["run"]], cwd=folder, env=given, check=True)
    made = folder / "calls"
    return made.read_text().splitlines() if made.exists() else []


def test_the_index_gets_wheel_and_source_archive(tmp_path: Path) -> None:
    assert calls("index", tmp_path) == []
    (publish,) = [step for step in JOBS["index"]["steps"] if "pypi-publish" in step.get("uses", "")]
    offered = tmp_path / publish["with"]["packages-dir"]
    assert sorted(path.name for path in offered.iterdir()) == sorted(ARTIFACTS[:2])


def test_the_registry_gets_image_and_chart(tmp_path: Path) -> None:
    made = calls("registry", tmp_path)
    assert f"buildah push localhost/kvatlas:{VERSION} docker://ghcr.io/org/kvatlas:{VERSION}" in made
    assert f"helm push dist/kvatlas-{VERSION}.tgz oci://ghcr.io/org/charts" in made


def test_the_release_has_every_file(tmp_path: Path) -> None:
    (made,) = calls("publish", tmp_path)
    assert made.startswith(f"gh release create v{VERSION} ")
    assert set(re.findall(r"dist/(\S+)", made)) == set(ARTIFACTS)


def test_it_builds_and_tries_what_make_release_does() -> None:
    assert any(step["run"] == ".ci/run" for step in scripts("check"))
    (made,) = scripts("artifacts")
    assert re.fullmatch(r'sudo make release IMAGE=1 PYTHON="\$\(which python\)"', made["run"])
    assert "release:" in (ROOT / "Makefile").read_text("utf-8")


@pytest.mark.parametrize(
    ("job", "needs", "permissions"),
    [
        ("check", None, None),
        ("artifacts", "check", None),
        ("index", "artifacts", {"id-token": "write"}),
        ("registry", "artifacts", {"packages": "write"}),
        ("publish", ["index", "registry"], {"contents": "write"}),
    ],
)
def test_each_job_has_the_rights_it_needs_and_no_secret(job: str, needs: object, permissions: object) -> None:
    assert JOBS[job].get("needs") == needs
    assert JOBS[job].get("permissions") == permissions
    assert "secrets." not in str(JOBS[job])
    assert (JOBS[job].get("environment") == "release") is (job == "index")
