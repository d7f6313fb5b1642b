"""Chats of families rendered with code become real vLLM's tokens, for requests that were never recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvatlas.router.openai.errors import ApiError
from kvatlas.router.prompts.reader import Prompt, PromptSettings
from tests.support.prompts.family_cases import FAMILIES, family_dir, family_settings
from tests.support.prompts.readers import local_reader, read
from tests.vllm.record_families import DATE, ask_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_every_local_prompt_of_families_is_vllms(
    vllm_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SYSTEM_START_DATE", DATE)
    answers = ask_vllm(vllm_python, list(FAMILIES), 2, 40, tmp_path / "vllm")
    for family, requests in answers.items():
        folder, slow = family_dir(tmp_path / family, family), PromptSettings(fast_tokenizer="off")
        reader = local_reader(folder, slow, **family_settings(family))
        equal, answered = 0, 0
        for path, body, expected in requests:
            try:
                found = read(reader, body, path)
            except ApiError:
                assert expected is None, body
                continue
            answered += expected is not None
            if isinstance(found, Prompt) and expected is not None:
                assert list(found.token_ids) == expected, (family, path, body)
                equal += 1
        reader.close()
        assert equal > 0.6 * answered, (family, equal, answered)
