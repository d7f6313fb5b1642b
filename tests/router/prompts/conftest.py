"""Readers are closed at the end of the test that made them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.prompts.readers import MADE


@pytest.fixture(autouse=True)
def close_readers() -> Iterator[None]:
    before = set(MADE)
    yield
    for reader in set(MADE) - before:
        reader.close()
