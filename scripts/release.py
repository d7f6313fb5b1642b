"""Build what a release consists of, try each part, and leave it in ``dist/``: ``make release``.

    python scripts/release.py [--image]

Wheel and source archive, the chart's package, the image where buildah can build it (``--image``: it must),
a CycloneDX bill of materials of what ``pip install`` brings, and SHA256SUMS. All have the version of
``kvatlas/__init__.py``. The tests of wheel and chart are given these files by ``KVATLAS_DIST``, so what is
tried is what would be published. Nothing leaves this machine: ``.github/workflows/release.yml`` publishes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from check_version import versions

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
TESTS = (
    *(f"tests/packaging/test_{what}.py" for what in ("wheel", "image", "first_hours")),
    "tests/charts",
    "--ignore=tests/charts/test_rollout.py",  # of its values, which are the same
)
PULL_S_MAX = 60
"""How long the base image may take before the image is skipped: where no registry of images is reached, some
machines say so at once and others never."""


def run(*command: str, **environ: str) -> None:
    """Run a command of the release; it has failed where the command does."""
    subprocess.run(command, cwd=ROOT, env={**os.environ, **environ}, check=True)  # noqa: S603 - as written below


def build_packages() -> None:
    """Wheel, source archive and chart; the times of files in them are those of the commit."""
    from helm_python import Chart  # noqa: PLC0415  # of the extra charts: the rest of the module needs none

    asked = ["git", "log", "-1", "--format=%ct"]
    shown = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603
    epoch = {"SOURCE_DATE_EPOCH": shown.stdout.strip()} if shown.stdout.strip() else {}
    run(sys.executable, "-m", "hatchling", "build", "-d", str(DIST), **epoch)
    with Chart.load(ROOT / "charts" / "kvatlas") as chart:
        chart.save(DIST)


def build_image(version: str) -> str:
    """Build ``kvatlas-VERSION-image.tar`` by buildah; returns why that was not possible, or nothing."""
    if shutil.which("buildah") is None:
        return "buildah is not installed"
    if os.geteuid():
        return "only root can start what buildah builds as the test does"
    base = os.environ.get("BASE") or next(
        line.removeprefix("ARG BASE=")
        for line in (ROOT / "Dockerfile").read_text("utf-8").splitlines()
        if line.startswith("ARG BASE=")
    )
    try:
        asked = ["buildah", "pull", "--policy", "missing", base]
        pulled = subprocess.run(asked, check=False, capture_output=True, text=True, timeout=PULL_S_MAX)  # noqa: S603
    except subprocess.TimeoutExpired:
        return f"the base image did not arrive within {PULL_S_MAX} s"
    if pulled.returncode:
        return (
            f"the base image cannot be had: {(pulled.stderr.strip().splitlines() or ['no reason given'])[-1]}"
        )
    name = f"localhost/kvatlas:{version}"
    words = ["--format", "docker", "--isolation", "chroot", "--build-arg", f"BASE={base}"]
    run("buildah", "build", *words, "--build-arg", f"VERSION={version}", "-t", name, ".")
    run("buildah", "push", name, f"docker-archive:{DIST}/kvatlas-{version}-image.tar:{name}")
    return ""


def install(into: Path) -> Path:
    """Make an environment with what ``pip install`` brings with the wheel, as tested; returns its Python."""
    venv.create(into, with_pip=False)
    python = into / "bin" / "python"
    (wheel,) = DIST.glob("*.whl")
    words = ["--disable-pip-version-check", "install", "--quiet", "--constraint", "requirements/dev.txt"]
    run(sys.executable, "-m", "pip", "--python", str(python), *words, str(wheel))
    return python


def bill_of_materials(version: str, python: Path) -> None:
    """List what is installed there: names, versions, licences, and what needs what."""
    words = ["environment", str(python), "--pyproject", "pyproject.toml", "--output-reproducible", "-o", "-"]
    asked = [sys.executable, "-m", "cyclonedx_py", *words]
    shown = subprocess.run(asked, cwd=ROOT, check=True, stdout=subprocess.PIPE)  # noqa: S603
    bill = json.loads(shown.stdout)
    bill["metadata"]["component"]["version"] = (
        version  # the tool does not read the file that pyproject.toml names
    )
    (DIST / f"kvatlas-{version}.cdx.json").write_text(json.dumps(bill, indent=1), encoding="utf-8")
    size = sum(
        path.stat().st_size
        for path in python.parents[1].rglob("*")
        if path.is_file() and not path.is_symlink()
    )
    print(f"pip install: {len(bill['components'])} packages, {size / 1e6:.0f} MB")


def checksums() -> None:
    """``sha256sum --check SHA256SUMS`` in ``dist/`` accepts every file of it."""
    lines = []
    for path in sorted(DIST.iterdir()):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    (DIST / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--image", action="store_true", help="fail where the image cannot be built")
    asked = parser.parse_args()
    named = versions()
    if len(set(named.values())) > 1:
        print("\n".join(f"{where}: {version}" for where, version in named.items()), file=sys.stderr)
        return 1
    version = named["kvatlas/__init__.py"]
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    build_packages()
    without_image = build_image(version)
    if without_image:
        print(f"no image: {without_image}", file=sys.stderr)
        if asked.image:
            return 1
    with tempfile.TemporaryDirectory() as folder:
        python = install(Path(folder) / "installed")
        bill_of_materials(version, python)
        tried = {"KVATLAS_DIST": str(DIST), "KVATLAS_INSTALLED": str(python)}
        run(sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", *TESTS, **tried)
    checksums()
    print("\n".join(path.name for path in sorted(DIST.iterdir())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
