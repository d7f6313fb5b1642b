"""``--logits-processors tests.vllm.written_answers:WrittenAnswers``: chats get answers written before.

A prompt that says ``answer 3.`` last is answered by the tokens of the third list in ``answers.json`` of the
model's directory, then by the end of the sequence, also where it ends with a part of this answer. So a model
without weights calls tools, and an answer that goes on elsewhere is the same. Runs under vLLM's own
interpreter.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.interface import MoveDirectionality

_ASKED = re.compile(r"answer (\d+)\.")
_EOS = 1
_AFTER_MARK = 2
"""``<|assistant|>`` and a line end open an answer."""


class WrittenAnswers(LogitsProcessor):
    """Allows one token at each place."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        directory = Path(vllm_config.model_config.model)
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._mark = self._tokenizer.token_to_id("<|assistant|>")
        self._answers = json.loads((directory / "answers.json").read_text())
        self._rows: dict[int, tuple[list[int], int, list[int]]] = {}
        """By row: the answer, its tokens in the prompt, and those that have been generated."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, _, prompt, output in batch_update.added:
            self._rows.pop(row, None)
            found = self._answer_of(list(prompt or ()))
            if found is not None:
                self._rows[row] = (*found, output)
        for one, other, direction in batch_update.moved:
            moved, replaced = self._rows.pop(one, None), self._rows.pop(other, None)
            if moved is not None:
                self._rows[other] = moved
            if replaced is not None and direction is MoveDirectionality.SWAP:
                self._rows[one] = replaced

    def _answer_of(self, prompt: list[int]) -> tuple[list[int], int] | None:
        if self._mark not in prompt:
            return None
        at = len(prompt) - 1 - prompt[::-1].index(self._mark)
        asked = _ASKED.findall(self._tokenizer.decode(prompt[:at]))
        return (self._answers[int(asked[-1])], len(prompt) - at - _AFTER_MARK) if asked else None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (answer, before, output) in self._rows.items():
            place = before + len(output)
            token = answer[place] if place < len(answer) else _EOS
            logits[row] = float("-inf")
            logits[row, token] = 0.0
        return logits
