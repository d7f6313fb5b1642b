"""A receipt that shows that storage did not deliver: when the index learns of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvatlas.router.placement.candidate import Hit
from kvatlas.router.placement.placement import Placement


@pytest.mark.parametrize(
    ("actual", "told"),
    [
        (192, []),  # all came; more is no miss either
        (208, []),
        (128, [128]),
        (144, [144]),
        (112, []),  # less than lay on the GPU and in host memory: no miss of storage
    ],
)
@pytest.mark.parametrize("pulls", [False, True])
def test_a_load_that_ends_within_its_part_from_storage_is_a_miss(
    actual: int, told: list[int], pulls: bool
) -> None:
    found: list[Any] = []
    placement = cast("Any", object.__new__(Placement))
    placement._hit = Hit(gpu_tokens=64, cpu_tokens=64, storage_tokens=64)
    placement._hashes, placement._block_tokens, placement.asked_s = [1] * 12, 16, 5.0
    placement.decision = SimpleNamespace(pull=object() if pulls else None)
    placement._accounts = SimpleNamespace(now=lambda: 9.0)
    placement._learn_load = lambda: None
    residency = SimpleNamespace(not_delivered=lambda *given, **times: found.append((given, times)))
    placement._learn_outside(actual, residency)
    times = {"asked_s": 5.0, "now": 9.0}
    assert found == ([] if pulls else [(([1] * 12, at, 16), times) for at in told])
