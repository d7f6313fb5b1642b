"""The wheel of this tree, and environments that have it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


def build(source: Path, target: str, into: Path) -> Path:
    """Build one target by hatchling, as ``pip install`` and the Dockerfile do, without a network."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = into.iterdir()
    return built


def installed(wheel: Path, environment: Path) -> Path:
    """Python of an environment with this wheel: that which ``make release`` filled by pip, else as below."""
    made = os.environ.get("KVATLAS_INSTALLED")
    return Path(made) if made else with_extras(wheel, environment)


def with_extras(wheel: Path, environment: Path) -> Path:
    """Python of an environment with this wheel and the dependencies of the tests, extras too."""
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install"]
    install += ["--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    (packages,) = environment.glob("lib/python3*/site-packages")
    # What its own .pth files add is not taken.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return python
