"""``--logits-processors tests.vllm.held_steps:HeldSteps``: a request may hold its engine's steps.

For tests that do something to an engine within an answer: its API server is not busy meanwhile, and the
answer has begun and is not over, however fast or slow the machine is. Runs under vLLM's own interpreter.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

TOKENS = 4
"""Of its answer are made before it holds."""
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


def _asked(params: Any, _prompt: Any, tokens: list[int]) -> tuple[Path, list[int]] | None:
    file = (params.extra_args or {}).get("hold_while")
    return None if file is None else (Path(file), tokens)
