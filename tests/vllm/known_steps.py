"""``--worker-extension-cls tests.vllm.known_steps.KnownSteps``: each scheduler step lasts a given time.

A step takes ``KVATLAS_STEP_S`` and ``KVATLAS_TOKEN_S`` per token scheduled in it, times the number in the
file ``KVATLAS_STEP_FACTOR``; everything else is vLLM's. So a tiny model has the times of a known engine, as
long as its own computing is shorter. Runs under vLLM's own interpreter.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class KnownSteps:
    """Nothing is added to the worker; importing this module is enough."""


_computed = GPUModelRunner.execute_model


def _execute_model(runner: Any, scheduled: Any, *args: Any, **options: Any) -> Any:
    began_s = time.monotonic()
    result = _computed(runner, scheduled, *args, **options)
    tokens = scheduled.total_num_scheduled_tokens
    if tokens and "KVATLAS_STEP_S" in os.environ:
        step_s, token_s = float(os.environ["KVATLAS_STEP_S"]), float(os.environ["KVATLAS_TOKEN_S"])
        factor = float(Path(os.environ["KVATLAS_STEP_FACTOR"]).read_text())
        time.sleep(max(0.0, factor * (step_s + token_s * tokens) - (time.monotonic() - began_s)))
    return result


GPUModelRunner.execute_model = _execute_model
