"""Findings about tokenizers that are found by name, here and in a router's ``/ready``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR
from kvatlas.router.config.schema import ModelConfig
from kvatlas.router.observe.findings import Severity
from kvatlas.router.prompts.settings import PromptSettings
from tests.router.tools.doctor.rig import examined
from tests.support.stand_in_hub import Repository, stand_in_hub
from tests.support.whole_router import running

AUTO = ModelConfig()


async def test_the_tokenizer_that_an_engine_names() -> None:
    async with running({"root": str(DEMO_TOKENIZER_DIR)}) as (engine,):
        found = await examined(engine.base_url, model=AUTO)
        found.expect("tokens.parity", Severity.OK, str(DEMO_TOKENIZER_DIR), "chat of three turns")


@pytest.mark.real  # threads of the hub's library
async def test_each_problem_and_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))  # of the process that fetches
    other = shutil.copytree(DEMO_TOKENIZER_DIR, tmp_path / "other")
    config = json.loads((other / "tokenizer_config.json").read_text())
    config["chat_template"] += "x"
    (other / "tokenizer_config.json").write_text(json.dumps(config))

    with stand_in_hub() as hub:
        prompts = PromptSettings(hub_endpoint=hub.url)
        hub.repositories["org/gated"] = Repository({}, error=(401, "GatedRepo"))
        roots = ("/elsewhere", "org/gated", "org/unknown", str(other))
        async with running(*({"root": root} for root in roots)) as engines:
            wrong = [await examined(engine.base_url, model=AUTO, prompts=prompts) for engine in engines]
    for found, *words in zip(
        wrong[:3],
        ("/elsewhere", "gated", "no such repository"),
        ("--tokenizer ORG/NAME or DIR", "HF_TOKEN", "--tokenizer"),
        strict=True,
    ):
        found.expect("tokens.parity", Severity.WARNING, *words)
    wrong[3].expect("tokens.parity", Severity.ERROR, "chat", "the first difference at token")
