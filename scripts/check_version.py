"""Whether every place that names the version names the released one: ``check_version.py 1.2.3``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def versions() -> dict[str, str]:
    """Where a version stands -> the version."""
    package = (ROOT / "kvatlas" / "__init__.py").read_text(encoding="utf-8")
    chart = (ROOT / "charts" / "kvatlas" / "Chart.yaml").read_text(encoding="utf-8")
    found = {"kvatlas/__init__.py": _named(r"__version__ =", package)}
    for key in ("version", "appVersion"):
        found[f"Chart.yaml {key}"] = _named(f"{key}:", chart)
    for page in sorted(p for folder in ("docs", "examples", "charts") for p in (ROOT / folder).rglob("*.*")):
        if page.suffix in {".md", ".yaml"}:  # files of the release that readers type, as kvatlas-1.2.3.tgz
            text = page.read_text(encoding="utf-8")
            for version in re.findall(r"(?<![-\w])kvatlas[-:](\d+\.\d+\.\d+)", text):
                found[str(page.relative_to(ROOT))] = version
    return found


def _named(before: str, text: str) -> str:
    match = re.search(rf'^{before} "?([^"\n]+)"?$', text, re.MULTILINE)
    return match[1] if match else ""


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
