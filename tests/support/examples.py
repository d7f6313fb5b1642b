"""How many examples are tried: while developing an eighth of hypothesis's, and ``some`` of a list; in CI all.

``KVATLAS_TEST_EXAMPLES`` is ``dev`` (the default) or ``ci`` (``make test-all``). Examples have no deadline:
how long one takes says more of the machine than of the code.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

SWITCH = "KVATLAS_TEST_EXAMPLES"
DIVISORS = {"dev": 8, "ci": 1}
PROFILE = os.environ.get(SWITCH, "dev")
if PROFILE not in DIVISORS:
    raise ValueError(f"{SWITCH}={PROFILE}: expected one of {', '.join(DIVISORS)}")


def examples(count: int) -> int:
    """``max_examples`` of a test that wants another number than the default of 100; seeds as well."""
    return max(1, count // DIVISORS[PROFILE])


def fewer(count: int) -> int:
    """Of a load that costs much by the request: while developing half, which must still show the same."""
    return count if DIVISORS[PROFILE] == 1 else count // 2


def some(cases: Iterable[Any], every: int) -> list[Any]:
    """All of them, as parameters of a test: each ``every``-th from the first on is tried always, the others,
    which show the same again, are ``long``."""
    return [
        case if place % every == 0 else pytest.param(case, marks=pytest.mark.long)
        for place, case in enumerate(cases)
    ]


def load_profile() -> None:
    """Make the chosen profile the default of all tests; before any test module is imported."""
    for name, divisor in DIVISORS.items():
        settings.register_profile(name, max_examples=100 // divisor, deadline=None)
    settings.load_profile(PROFILE)
