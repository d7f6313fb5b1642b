"""All checks: importing this package registers them."""

from __future__ import annotations

from kvatlas.router.tools.doctor.checks import cache, interfaces, prompts, router
from kvatlas.router.tools.doctor.findings import names, run_checks

__all__ = ["cache", "interfaces", "names", "prompts", "router", "run_checks"]
