"""Where the repository, its test data and the files of a release lie."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
TRACES = sorted((DATA / "traces").glob("*.jsonl.gz"))
"""Recorded truth: one file each."""


def built(pattern: str) -> Path | None:
    """The file of ``dist/`` that ``make release`` wants tried; none in other runs, which build theirs."""
    folder = os.environ.get("KVATLAS_DIST")
    if folder is None:
        return None
    (found,) = Path(folder).glob(pattern)
    return found
