"""How many examples hypothesis tries: a fifth of them while developing, all of them in CI.

``KVATLAS_TEST_EXAMPLES`` is ``dev`` (the default) or ``ci`` (``make test-all``). Examples have no deadline:
how long one takes says more of the machine than of the code.
"""

from __future__ import annotations

import os

from hypothesis import settings

SWITCH = "KVATLAS_TEST_EXAMPLES"
DIVISORS = {"dev": 5, "ci": 1}
PROFILE = os.environ.get(SWITCH, "dev")
if PROFILE not in DIVISORS:
    raise ValueError(f"{SWITCH}={PROFILE}: expected one of {', '.join(DIVISORS)}")


def examples(count: int) -> int:
    """``max_examples`` of a test that wants another number than the default of 100; seeds as well."""
    return max(1, count // DIVISORS[PROFILE])


def load_profile() -> None:
    """Make the chosen profile the default of all tests; before any test module is imported."""
    for name, divisor in DIVISORS.items():
        settings.register_profile(name, max_examples=100 // divisor, deadline=None)
    settings.load_profile(PROFILE)
