"""The parts of kvatlas: what belongs to each, its tests, and how imports run between them.

    python scripts/parts.py serve       # print the tests of a part, for pytest (make test-serve)

A part is what one works on without knowing the others; docs/architecture.md describes each. Imports run
towards ``serve`` only, and ``publisher/`` is below all: contracts of import-linter in pyproject.toml hold
that, with their exceptions. ``faults`` reports what belongs to no part, or to two.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Part(NamedTuple):
    """``code`` and ``tests`` are paths from the repository's root, without ``.py``."""

    code: tuple[str, ...]
    tests: tuple[str, ...]


def _below(folder: str, names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}" for name in names.split())


_ROOMS = "admission api config feeds fleet http index observe openai pd placement prompts proxy replication"

PARTS = {
    "serve": Part(
        (
            *_below("router", f"{_ROOMS} workers"),
            *_below(
                "router",
                "__init__ __main__ app cli engine_lifecycle health_check reloads serve server_lifecycle"
                " startup_check",
            ),
        ),
        (*_below("tests/router", f"{_ROOMS} workers app cli serve"), "tests/world"),
    ),
    "services": Part(("router/services",), ("tests/router/services",)),
    "tools": Part(("router/tools",), ("tests/router/tools",)),
    "simulation": Part(("router/simulation",), ("tests/router/simulation",)),
    "connectors": Part(("connectors", "publisher"), ("tests/connectors", "tests/publisher")),
    # The repository as a whole: pages, wheel, chart, and the tests' own rules.
    "repository": Part(
        (), ("tests/docs", "tests/packaging", "tests/charts", "tests/upgrade", "tests/test_hangs")
    ),
}

OF_NO_PART = {
    "tests/vllm": "compares every part with real engines; make test-vllm",
    "tests/support": "helpers of all tests",
    "tests/conftest": "for all tests",
    "tests/__init__": "for all tests",
    "tests/router/conftest": "for all tests of the router",
    "tests/router/__init__": "for all tests of the router",
}
"""Files without a part, with the reason."""


def tests(part: str) -> list[str]:
    """Paths for pytest."""
    return [path if (ROOT / path).is_dir() else f"{path}.py" for path in PARTS[part].tests]


def faults() -> Iterator[str]:
    """Folders and modules that no part names, two parts name, or that are not there."""
    named = Counter(path for part in PARTS.values() for path in (*part.code, *part.tests))
    present = {"connectors", "publisher"}
    for folder in ("router", "tests", "tests/router"):
        present |= {
            f"{folder}/{path.stem}"
            for path in (ROOT / folder).iterdir()
            if path.suffix == ".py" or (path.is_dir() and any(path.rglob("*.py")))
        }
    for path in sorted(present - named.keys() - OF_NO_PART.keys() - {"tests/router"}):
        yield f"{path}: belongs to no part; enter it in PARTS of scripts/parts.py"
    for path in sorted((named.keys() | OF_NO_PART.keys()) - present):
        yield f"{path}: is in scripts/parts.py, and not there"
    yield from (f"{path}: belongs to {count} parts" for path, count in sorted(named.items()) if count > 1)


def main() -> int:
    """Print the tests of the part that is named."""
    if len(sys.argv) != 2 or sys.argv[1] not in PARTS:
        print(f"usage: python scripts/parts.py {'|'.join(PARTS)}", file=sys.stderr)
        return 2
    print(*tests(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
