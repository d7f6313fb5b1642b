"""Writes tests/data/prompts/values.json.gz: what both frontends of vLLM make of the sweep of values.

``python -m tests.vllm.record_values`` with ``KVATLAS_VLLM_PYTHON`` naming the interpreter with vLLM 0.32, and
``KVATLAS_VLLM_033_PYTHON`` that with 0.33, whose wheel has ``vllm-rs``. By frontend and template, a digest
of the token ids of each body ("": refused).
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvatlas.router.openai.apis import CHAT
from tests.support.paths import ROOT
from tests.support.prompts import values
from tests.support.prompts.readers import byte_level_tokenizer, model_dir
from tests.vllm.test_prompts_match_vllm import TINY_LLAMA, _ask_vllm
from tests.vllm.test_rust_frontend import ask_raw, found_binary, rendering

TARGET = ROOT / "tests" / "data" / "prompts" / "values.json.gz"
SEED, COUNT = 1, 500


def folder_of(folder: Path, template: str) -> Path:
    """A model directory with this template."""
    model_dir(folder, None, tokenizer=byte_level_tokenizer())
    (folder / "chat_template.jinja").write_text(values.TEMPLATES[template])
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    return folder


def by_python(python: str, folder: Path, bodies: list[bytes]) -> dict[str, list[list[int] | None]]:
    """The token ids that vLLM's Python frontend makes, by template; None where it refuses."""
    requests = [(CHAT, json.loads(body)) for body in bodies]
    jobs: list[dict[str, Any]] = [
        {"directory": str(folder_of(folder / name, name)), "options": {}, "requests": requests}
        for name in values.TEMPLATES
    ]
    answers = _ask_vllm(python, jobs, folder)
    return {
        name: [None if ids is None else ids[0] for ids in found]
        for name, found in zip(values.TEMPLATES, answers, strict=True)
    }


def by_rust(binary: Path, folder: Path, bodies: list[bytes]) -> dict[str, list[list[int] | None]]:
    """The same of the Rust frontend."""
    found: dict[str, list[list[int] | None]] = {}
    for name in values.TEMPLATES:
        with rendering(binary, folder_of(folder / name, name)) as url:
            answers = [ask_raw(url, f"{CHAT}/render", body) for body in bodies]
        found[name] = [None if answer is None else answer["token_ids"] for answer in answers]
    return found


def main() -> None:
    bodies = list(values.chats(SEED, COUNT))
    with tempfile.TemporaryDirectory() as name:
        made = {
            "python": by_python(os.environ["KVATLAS_VLLM_PYTHON"], Path(name) / "python", bodies),
            "rust": by_rust(found_binary(os.environ["KVATLAS_VLLM_033_PYTHON"]), Path(name) / "rust", bodies),
        }
    recorded: dict[str, Any] = {"seed": SEED, "count": COUNT, "bodies": values.digest(b"".join(bodies))}
    for frontend, templates in made.items():
        recorded[frontend] = {
            template: ["" if ids is None else values.digest_of_ids(ids) for ids in found]
            for template, found in templates.items()
        }
    TARGET.write_bytes(gzip.compress(json.dumps(recorded).encode(), 9, mtime=0))
    print(f"{TARGET}: {COUNT} bodies", file=sys.stderr)


if __name__ == "__main__":
    main()
