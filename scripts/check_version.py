"""Whether every place that names the version names the released one: ``check_version.py 1.2.3``."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def versions() -> dict[str, str]:
    """Where a version stands -> the version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    chart = (ROOT / "charts" / "kvatlas" / "Chart.yaml").read_text(encoding="utf-8")
    found = {"pyproject.toml": str(project)}
    for key in ("version", "appVersion"):
        match = re.search(rf'^{key}: "?([^"\n]+)"?$', chart, re.MULTILINE)
        found[f"Chart.yaml {key}"] = match.group(1) if match else ""
    return found


def main(wanted: str) -> int:
    """Print what differs; returns the exit status."""
    wrong = {where: version for where, version in versions().items() if version != wanted}
    for where, version in wrong.items():
        print(f"{where}: {version}, the release is {wanted}")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if f"## [{wanted}]" not in changes:
        print(f"CHANGELOG.md: no section [{wanted}]")
    return 1 if wrong or f"## [{wanted}]" not in changes else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2] or [""]))
