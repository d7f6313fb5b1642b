"""Where the repository and its test data lie."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
TRACES = sorted((DATA / "traces").glob("*.jsonl.gz"))
"""Recorded truth: one file each."""
