"""A seeded sweep of values, against both frontends of vLLM (``tests/vllm/record_values.py``)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvatlas.router.fleet.status import Frontend
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.prompts.prompt import Prompt
from kvatlas.router.prompts.settings import ModelPrompts
from tests.support.paths import DATA
from tests.support.prompts import values
from tests.support.prompts.readers import byte_level_tokenizer, model_dir, read, reader

RECORDED = json.loads(gzip.decompress((DATA / "prompts" / "values.json.gz").read_bytes()))
BODIES = list(values.chats(RECORDED["seed"], RECORDED["count"]))
LEAST = {"python": 0.6, "rust": 0.2}
"""Share of the prompts that an engine renders, which must be made here."""


def test_the_recording_is_of_this_sweep() -> None:
    assert values.digest(b"".join(BODIES)) == RECORDED["bodies"], "record again: tests/vllm/record_values.py"


@pytest.mark.parametrize("template", values.TEMPLATES)
@pytest.mark.parametrize("frontend", ["python", "rust"])
def test_every_prompt_made_here_is_the_frontends(frontend: Frontend, template: str, tmp_path: Path) -> None:
    model_dir(tmp_path, None, tokenizer=byte_level_tokenizer())
    models = {
        "m": ModelPrompts(
            tokenizer_dir=str(tmp_path), chat_template=values.TEMPLATES[template], max_model_len=4096
        )
    }
    made = reader(models, frontends=lambda _model: (frontend,))
    wrong, local, rendered = list[Any](), 0, 0
    for body, recorded in zip(BODIES, RECORDED[frontend][template], strict=True):
        rendered += recorded != ""
        try:
            found = read(made, body)
        except ApiError:
            continue
        if isinstance(found, Prompt) and recorded:
            local += 1
            if values.digest_of_ids(list(found.token_ids)) != recorded:
                wrong.append(body)
    assert not wrong, (len(wrong), wrong[:5])
    assert local > LEAST[frontend] * rendered, (local, rendered)
