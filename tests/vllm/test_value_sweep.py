"""Values of every kind through both frontends of vLLM: what is made here is equal to theirs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvatlas.router.openai.errors import ApiError
from kvatlas.router.prompts.prompt import Prompt
from kvatlas.router.prompts.settings import ModelPrompts
from tests.support.prompts import values
from tests.support.prompts.readers import read, reader
from tests.vllm.record_values import by_python, by_rust
from tests.vllm.test_rust_frontend import binary, python_033

__all__ = ["binary", "python_033"]
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
SEED, COUNT = int(os.environ.get("SEED", "0")) + 2, 2500


def _check(frontend: str, rendered: dict[str, list[list[int] | None]], folder: Path) -> None:
    bodies = list(values.chats(SEED, COUNT))
    for template, found in rendered.items():
        models = {"m": ModelPrompts(tokenizer_dir=str(folder / template), max_model_len=4096)}
        made = reader(models, frontends=lambda _model: (frontend,))  # type: ignore[arg-type,return-value]
        wrong, local = [], 0
        for body, ids in zip(bodies, found, strict=True):
            try:
                prompt = read(made, body)
            except ApiError:
                continue
            if isinstance(prompt, Prompt) and ids is not None:
                local += 1
                if list(prompt.token_ids) != ids:
                    wrong.append(body)
        made.close()
        print(f"{frontend}, {template}, seed {SEED}: {local} of {COUNT} are made here")
        assert not wrong, (template, SEED, wrong[:5])
        assert local > 0.15 * COUNT


def test_the_python_frontend(vllm_python: str, tmp_path: Path) -> None:
    _check("python", by_python(vllm_python, tmp_path, list(values.chats(SEED, COUNT))), tmp_path)


def test_the_rust_frontend(binary: Path, tmp_path: Path) -> None:
    _check("rust", by_rust(binary, tmp_path, list(values.chats(SEED, COUNT))), tmp_path)
