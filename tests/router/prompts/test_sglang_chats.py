"""Chats rendered for SGLang's engines, compared with the server code in its wheel (``make test-sglang``)."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvatlas.router.openai.errors import ApiError
from kvatlas.router.prompts.prompt import Prompt, TextAffinity
from kvatlas.router.prompts.settings import ModelPrompts
from tests.support.paths import ROOT
from tests.support.prompts import cases
from tests.support.prompts.readers import (
    TEMPLATES,
    byte_level_tokenizer,
    chat,
    metaspace_tokenizer,
    model_dir,
    read,
    reader,
    say,
    template_text,
)
from tests.support.sglang_wire import wheel_path

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
WORDS = (
    "Zürich",
    "東京",
    "😀",
    "e\u0301",
    "<|im_end|>",
    "<|bos|>",
    "<think>",
    "</think>",
    "[INST]",
    "<tool_call>",
    "  two spaces",
    "\n\n",
    "\t",
    "'s",
    "12345",
    "{{ x }}",
    "naïve",
    "def f(x):\n    return x",
    "\x00",
    " ",
)


def plain_chats(count: int) -> list[dict[str, Any]]:
    """Chats of roles and texts alone, that end with a user's message."""
    rng = random.Random(5)

    def text() -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(0, 12)))

    made = []
    for _ in range(count):
        turns = [say(role, text()) for _ in range(rng.randint(0, 3)) for role in ("user", "assistant")]
        first = [say("system", text())] if rng.random() < 0.5 else []
        made.append(chat(*first, *turns, say("user", text())))
    return made


# As SGLang's server code knows them; they are rendered by other code than the template.
OTHERS: dict[str, dict[str, Any]] = {
    "vicuna-7b": LLAMA,
    "InternVL2": LLAMA,
    "points": LLAMA,
    "by_type": {"model_type": "phi4mm", "architectures": ["Phi4MMForCausalLM"]},
    "llava-onevision-qwen2-7b": LLAMA,
}
PLAIN = plain_chats(60)
BODIES = [*cases.TURNS, *cases.TOOL_CHATS, *cases.random_chats(40, seed=11), *PLAIN]


def templates() -> dict[str, tuple[str, str]]:
    """Template and tokenizer by name."""
    names = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
    made = {name: (template_text(name), byte_level_tokenizer()) for name in names}
    made["metaspace first"] = made["headers"][0], metaspace_tokenizer("first")
    made["metaspace always"] = made["brackets"][0], metaspace_tokenizer("always")
    made["effort"] = "{{ reasoning_effort }}" + made["chatml"][0], byte_level_tokenizer()
    return made


def tokens_of_sglang(folders: list[Path], tmp_path: Path) -> list[list[list[int] | None]]:
    wheel, python = wheel_path(), os.environ.get("KVATLAS_VLLM_PYTHON")
    if not python:
        pytest.skip("KVATLAS_VLLM_PYTHON names no interpreter with transformers; make test-sglang sets it")
    jobs, answers = tmp_path / "jobs.json", tmp_path / "answers.json"
    jobs.write_text(json.dumps([{"directory": str(folder), "bodies": BODIES} for folder in folders]))
    command = [python, "-m", "tests.support.sglang_chat", wheel, str(jobs), str(answers)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[list[list[int] | None]] = json.loads(answers.read_text())
    return found


def made_dir(folder: Path, template: str, tokenizer: str, config: dict[str, Any]) -> Path:
    model_dir(folder, None, tokenizer=tokenizer)
    (folder / "chat_template.jinja").write_text(template)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def local(folder: Path) -> list[Prompt | None]:
    """The prompts that are made here."""
    made = reader(
        {"m": ModelPrompts(tokenizer_dir=str(folder), max_model_len=4096)},
        frontends=lambda _model: ("sglang",),
    )
    found: list[Prompt | None] = []
    for body in BODIES:
        try:
            prompt = read(made, body)
        except ApiError:
            prompt = TextAffinity((), "")
        found.append(prompt if isinstance(prompt, Prompt) else None)
    return found


@pytest.mark.timeout(600)
def test_every_local_prompt_is_that_of_sglang(tmp_path: Path) -> None:
    folders = [made_dir(tmp_path / name, *made, LLAMA) for name, made in templates().items()]
    wrong, equal, plain = [], 0, 0
    for folder, theirs in zip(folders, tokens_of_sglang(folders, tmp_path), strict=True):
        for body, ours, ids in zip(BODIES, local(folder), theirs, strict=True):
            plain += ids is not None and body in PLAIN and folder.name != "effort"
            if ours is None or ids is None:
                continue
            equal += list(ours.token_ids) == ids
            if list(ours.token_ids) != ids:
                wrong.append((folder.name, json.dumps(body)))
    assert not wrong, wrong[:5]
    assert equal > plain > 300, (equal, plain)


@pytest.mark.parametrize("name", OTHERS)
def test_models_that_sglang_renders_by_code_of_its_own_are_not_rendered_here(
    name: str, tmp_path: Path
) -> None:
    folder = made_dir(tmp_path / name, template_text("chatml"), byte_level_tokenizer(), OTHERS[name])
    assert not any(local(folder))


def test_they_are_the_models_of_its_wheel(tmp_path: Path) -> None:
    config = template_text("chatml"), byte_level_tokenizer()
    plain = made_dir(tmp_path / "plain", *config, LLAMA)
    others = [made_dir(tmp_path / name, *config, OTHERS[name]) for name in OTHERS]
    first, *rest = tokens_of_sglang([plain, *others], tmp_path)
    for folder, tokens in zip(others, rest, strict=True):
        assert tokens != first, folder.name
