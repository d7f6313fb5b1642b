"""All checks: importing this module registers them."""

from __future__ import annotations

from router.doctor import (  # noqa: F401  # each registers its checks
    checks_cache,
    checks_events,
    checks_fleet,
    checks_http,
    checks_prompts,
    checks_router,
)
from router.doctor.registry import names, run_checks

__all__ = ["names", "run_checks"]
