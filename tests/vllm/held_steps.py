"""``--logits-processors tests.vllm.held_steps:HeldSteps``: a request may hold its engine's steps, or with
``SlowEngine`` a test slow them down.

For tests that do something to an engine within an answer: its API server is not busy meanwhile, and the
answer has begun and is not over, however fast or slow the machine is. Runs under vLLM's own interpreter.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

TOKENS = 4
"""Of its answer are made before it holds."""
ANSWER_TOKENS = 60
STEP_S = 0.3
_LOOK_S = 0.01


class HeldSteps(LogitsProcessor):  # type: ignore[misc]
    """With ``"vllm_xargs": {"hold_while": PATH}``: from then on, while that file is there."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._holding: dict[int, tuple[Path, list[int]]] = {}
        """By place in the batch: the file, and the tokens of the answer so far."""

    def is_argmax_invariant(self) -> bool:
        return False  # others are left out where all requests are greedy

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._holding, batch_update, _asked)

    def apply(self, logits: Any) -> Any:
        for file, tokens in self._holding.values():
            while len(tokens) >= TOKENS and file.exists():
                time.sleep(_LOOK_S)
        return logits


class SlowEngine(LogitsProcessor):  # type: ignore[misc]
    """From when some answer has ``ANSWER_TOKENS``, each step takes ``STEP_S`` longer, while the file that
    ``KVATLAS_TEST_SLOW`` names has the id of this process."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._file = Path(os.environ["KVATLAS_TEST_SLOW"])
        self._answers: dict[int, list[int]] = {}

    def is_argmax_invariant(self) -> bool:
        return False  # as above

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._answers, batch_update, lambda _params, _prompt, tokens: tokens)

    def apply(self, logits: Any) -> Any:
        long = max(map(len, self._answers.values()), default=0) >= ANSWER_TOKENS
        if long and self._file.exists() and self._file.read_text() == str(os.getpid()):
            time.sleep(STEP_S)
        return logits


def _asked(params: Any, _prompt: Any, tokens: list[int]) -> tuple[Path, list[int]] | None:
    file = (params.extra_args or {}).get("hold_while")
    return None if file is None else (Path(file), tokens)
