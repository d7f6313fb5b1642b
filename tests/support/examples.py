"""How many examples are tried: while developing an eighth of hypothesis's, and ``some`` of a list; in CI all.

``KVATLAS_TEST_EXAMPLES`` is ``dev`` (the default), ``ci`` (``make test-all``) or ``deep``, five times that.
Examples have no deadline and no checks of their health: how long one takes says more of the machine than of
the code, and how many a seed filters out or makes too large says nothing of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

SWITCH = "KVATLAS_TEST_EXAMPLES"
FACTORS = {"dev": 1 / 8, "ci": 1.0, "deep": 5.0}
PROFILE = os.environ.get(SWITCH, "dev")
if PROFILE not in FACTORS:
    raise ValueError(f"{SWITCH}={PROFILE}: expected one of {', '.join(FACTORS)}")


CHANCE = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
"""Checks of examples that fail by the seed or the machine."""


def examples(count: int) -> int:
    """``max_examples`` of a test that wants another number than the default of 100; seeds as well."""
    return max(1, int(count * FACTORS[PROFILE]))


def fewer(count: int) -> int:
    """Of a load that costs much by the request: while developing half, which must still show the same."""
    return count if FACTORS[PROFILE] >= 1 else count // 2


def some(cases: Iterable[Any], every: int) -> list[Any]:
    """All of them, as parameters of a test: each ``every``-th from the first on is tried always, the others,
    which show the same again, are ``long``."""
    return [
        case if place % every == 0 else pytest.param(case, marks=pytest.mark.long)
        for place, case in enumerate(cases)
    ]


def load_profile() -> None:
    """Make the chosen profile the default of all tests; before any test module is imported."""
    for name, factor in FACTORS.items():
        settings.register_profile(
            name, max_examples=int(100 * factor), deadline=None, suppress_health_check=CHANCE
        )
    settings.load_profile(PROFILE)
