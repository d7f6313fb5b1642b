"""Imports vLLM once, where it is installed: its import warns, and in these tests warnings are errors."""

from __future__ import annotations

import contextlib
import warnings

with warnings.catch_warnings(), contextlib.suppress(ModuleNotFoundError):
    warnings.simplefilter("ignore")
    import vllm.v1.core.sched.scheduler
    import vllm.v1.worker.kv_connector_model_runner_mixin  # noqa: F401
