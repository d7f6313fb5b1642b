"""Cut a failing plan down: fewer faults and requests, while the same oracle still objects."""

from __future__ import annotations

from collections.abc import Callable

from tests.world.plan import Plan


def shrink(plan: Plan, fails: Callable[[Plan], bool], *, runs_max: int = 200) -> Plan:
    """The least plan found that ``fails``: halves of the lists are left out, then quarters, down to single
    ones."""
    runs = 0

    def still(trial: Plan) -> bool:
        nonlocal runs
        runs += 1
        return runs <= runs_max and fails(trial)

    for name in ("faults", "requests", "faults"):
        size = max(1, len(getattr(plan, name)) // 2)
        while size and len(getattr(plan, name)):
            at = 0
            while at < len(getattr(plan, name)):
                kept = [i for i in range(len(getattr(plan, name))) if not at <= i < at + size]
                trial = plan.without(**{name: set(kept)})
                if still(trial):
                    plan = trial
                else:
                    at += size
            size //= 2
    return plan
