"""The wheel has one top-level name, and serves beside files of the names that its folders have here.

``make release`` has the files of ``dist/`` tried instead of those built here, with all that pip installs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import pytest

from kvatlas import __version__
from tests.support.paths import ROOT, built
from tests.support.ports import free_port
from tests.support.wheels import build, installed

pytestmark = pytest.mark.real  # builds, installs and serves in processes of its own

FOLDERS = ("router", "publisher", "connectors")
NONSENSE = "raise AssertionError('a file of the folder where kvatlas was started was imported')\n"


def content(wheel: Path) -> dict[str, bytes]:
    """Name -> bytes of each file in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("*.whl") or build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


def test_it_has_one_top_level_name_and_every_module(wheel: Path) -> None:
    names = content(wheel).keys()
    about = f"kvatlas-{__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"kvatlas", about}
    modules = {
        path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
    }
    assert {f"kvatlas/{module}" for module in modules} - names == set()
    assert "kvatlas/router/api/status_page.html" in names


def test_a_wheel_from_the_source_archive_is_the_same(wheel: Path, tmp_path: Path) -> None:
    """The links are followed once: the archive holds files, wherever it is unpacked."""
    archive = built("*[0-9].tar.gz") or build(ROOT, "sdist", tmp_path / "sdist")
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    subprocess.run(["tar", "xzf", str(archive), "-C", str(unpacked)], check=True)
    (source,) = unpacked.iterdir()
    assert not any(path.is_symlink() for path in source.rglob("*"))
    assert not any((source / name).exists() for name in (*FOLDERS, "tests"))
    assert content(build(source, "wheel", tmp_path / "wheel")) == content(wheel)


def test_the_image_copies_what_the_wheel_is_built_from(wheel: Path, tmp_path: Path) -> None:
    """Docker copies links as links, so the folders that they name have to be there too."""
    stage = (ROOT / "Dockerfile").read_text("utf-8").partition("RUN /opt/build/bin/hatchling")[0]
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line[:1] == "!"}
    source = tmp_path / "src"
    source.mkdir()
    for names, target in re.findall(r"^COPY (?!--)(.+) (\S+)$", stage, re.MULTILINE):
        for name in names.split():
            assert name in kept, f".dockerignore leaves out {name}"
            if (ROOT / name).is_dir():
                # Other workers import, and replace files of bytecode meanwhile.
                bytecode = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, source / target, symlinks=True, ignore=bytecode)
            else:
                shutil.copy(ROOT / name, source / target)
    assert content(build(source, "wheel", tmp_path / "wheel")) == content(wheel)


@pytest.mark.process
def test_installed_it_serves_beside_files_of_the_same_names(wheel: Path, tmp_path: Path) -> None:
    """An empty environment; ``python -m`` looks into the folder where it is started first."""
    here = tmp_path / "here"
    for name in FOLDERS:
        (here / name).mkdir(parents=True)
        (here / name / "__init__.py").write_text(NONSENSE)
        (here / f"{name}.py").write_text(NONSENSE)
    python = str(installed(wheel, tmp_path / "environment"))
    packages = next(Path(python).parents[1].glob("lib/python3*/site-packages"))
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVATLAS"))
    }

    def said(*command: str) -> str:
        done = subprocess.run(command, cwd=here, env=environ, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert said(python, "-c", "import kvatlas.router as r; print(r.__file__)").startswith(str(packages))
    for command in ([python, "-m", "kvatlas"], [str(Path(python).with_name("kvatlas"))]):
        assert said(*command, "--version") == __version__
    for module in ("kvatlas.publisher.vllm_plugin", "kvatlas.connectors"):
        said(python, "-c", f"import {module}")

    shown = json.loads(said(python, "-m", "kvatlas", "demo", "--seconds", "5", "--engines", "2", "--json"))
    assert shown["errors"] == 0
    assert 0 < shown["predicted_exact"] <= shown["predicted_total"]

    port = free_port()
    words = ["serve", "--port", str(port), "--ops-port", "0", "--engine", f"http://127.0.0.1:{free_port()}"]
    with subprocess.Popen(
        [python, "-m", "kvatlas", *words], cwd=here, env=environ, stderr=subprocess.PIPE, text=True
    ) as router:
        try:
            assert answers(router, f"http://127.0.0.1:{port}/health") == 200
        finally:
            router.terminate()
        assert router.wait() == 0


def answers(router: subprocess.Popen[str], url: str) -> int:
    """Status of the first answer; fails as soon as the router has ended."""
    while router.poll() is None:
        try:
            with urllib.request.urlopen(url) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            time.sleep(0.05)
    raise AssertionError(router.stderr.read())
