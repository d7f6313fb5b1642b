"""Model families rendered with code: the tokens are vLLM's own (recorded), or the prompt is refused."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvatlas.router.openai.errors import ApiError
from kvatlas.router.prompts.families import harmony
from kvatlas.router.prompts.model_dir import ModelDirError, load_model_dir
from kvatlas.router.prompts.reader import Prompt, PromptSettings
from tests.support.examples import some
from tests.support.prompts.family_cases import FAMILIES, family_dir, family_settings
from tests.support.prompts.readers import chat, local_reader, model_dir, read, read_affinity, read_exact, say

DATA = Path(__file__).parents[2] / "data" / "families"
RECORDED_ON = "2026-11-22"
REASONS = {
    "truncation",
    "field",
    "template_kwargs",
    "message_shape",
    "template_rejected",
    "tools_shape",
    "multimodal",
    "request_template",
}
SLOW = PromptSettings(fast_tokenizer="off")
"""Vocabularies load in a second less without fastokens."""


@pytest.fixture(autouse=True)
def date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SYSTEM_START_DATE", RECORDED_ON)


@pytest.mark.parametrize("family", some(FAMILIES, 2))
def test_chats_become_vllms_tokens(family: str, tmp_path: Path) -> None:
    requests = json.loads(gzip.decompress((DATA / f"{family}.json.gz").read_bytes()))
    folder = family_dir(tmp_path / family, family)
    reader = local_reader(folder, SLOW, **family_settings(family))
    wrong, reasons, equal = [], Counter[str](), 0
    for path, body, expected in requests:
        try:
            found = read(reader, body, path)
        except ApiError:
            reasons["refused"] += 1
            continue
        if not isinstance(found, Prompt):
            reasons[found.reason if expected is not None else "refused"] += 1
        elif expected is not None and list(found.token_ids) == expected:
            equal += 1
        elif expected is not None:
            wrong.append(body)
    assert not wrong, wrong[:3]
    assert set(reasons) <= REASONS | {"refused"}
    answered = sum(expected is not None for _, _, expected in requests)
    assert equal > 0.6 * answered, (equal, answered, reasons)


def test_a_next_turn_reuses_hashes_and_says_what_read_it(tmp_path: Path) -> None:
    reader = local_reader(family_dir(tmp_path / "h", "harmony"), SLOW)
    history = [say("system", "Be brief."), say("user", "word " * 400), say("assistant", "Yes.")]
    read_exact(reader, chat(*history[:2]))
    prompt = read_exact(reader, chat(*history, say("user", "And?")))
    assert prompt.by.startswith("harmony (oss-harmony ")
    assert reader.stats.prefix_hits == 1
    assert reader.stats.tokens_reused > 400


def test_a_missing_package_is_named_and_chats_are_left_to_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harmony, "library", None)
    reader = local_reader(family_dir(tmp_path / "harmony", "harmony"), SLOW, **family_settings("harmony"))
    assert read_affinity(reader, chat(say("user", "Hello"))).reason == "renderer"
    assert reader.stats.not_local["renderer"] == 1
    assert (reader.tokenized_by("m") or "").startswith(
        "harmony (gpt-oss) needs a package; in a checkout: python -m pip install '.[harmony]'"
    )


def test_the_date_is_of_the_engines_time_zone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_SYSTEM_START_DATE")
    folder = family_dir(tmp_path / "harmony", "harmony")
    texts = set()
    for zone in ("Pacific/Kiritimati", "Pacific/Honolulu"):  # 24 hours apart: always two dates
        reader = local_reader(folder, SLOW, time_zone=zone)
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        texts.add(tuple(read_exact(reader, body).token_ids))
    assert len(texts) == 2


def test_fields_whose_effect_is_not_known_are_refused(tmp_path: Path) -> None:
    fields: dict[str, list[dict[str, Any]]] = {
        "harmony": [{"truncate_prompt_tokens": 4}, {"reasoning_effort": "none"}, {"chat_template": "x"}],
        "mistral_tekken": [{"truncate_prompt_tokens": 4}, {"chat_template_kwargs": {}}],
    }
    for family, unknown in fields.items():
        reader = local_reader(family_dir(tmp_path / family, family), SLOW)
        for extra in unknown:
            assert not isinstance(read(reader, chat(say("user", "Hello"), **extra)), Prompt), extra
        image = [{"type": "image_url", "image_url": {"url": "data:,x"}}]
        assert read_affinity(reader, chat(say("user", image))).reason == "multimodal"


def test_which_tokenizer_a_directory_with_two_means_is_asked(tmp_path: Path) -> None:
    folder = model_dir(tmp_path / "both", "chatml")
    (folder / "tekken.json").write_text("{}")
    with pytest.raises(ModelDirError, match="leave out the one that engines do not use"):
        load_model_dir(folder)
    (folder / "model.safetensors").touch()
    assert load_model_dir(folder).renderer == "hf"
    (folder / "consolidated.safetensors").touch()
    assert load_model_dir(folder).renderer == "mistral"
