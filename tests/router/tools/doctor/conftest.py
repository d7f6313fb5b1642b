"""Fixtures of the doctor's tests."""

from __future__ import annotations

import pytest

from kvatlas.router.index.learn import hash_scheme


@pytest.fixture(autouse=True)
def few_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes that no seed gives are looked at: all the seeds there are take seconds and find the same."""
    monkeypatch.setattr(hash_scheme, "SEEDS_MAX", 100)
