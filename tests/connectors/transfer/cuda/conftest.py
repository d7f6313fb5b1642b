"""Engines over fake devices, closed at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.connectors.transfer.cuda.bench import Bench


@pytest.fixture
def benches() -> Iterator[Any]:
    made: list[Bench] = []

    def make(**options: Any) -> Bench:
        made.append(Bench(**options))
        return made[-1]

    yield make
    for bench in made:
        bench.device.held = False
        bench.engine.close()
        assert bench.device.violations == []
