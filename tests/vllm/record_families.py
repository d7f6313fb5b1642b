"""Records what vLLM makes of family chats: ``python -m tests.vllm.record_families VLLM_PYTHON``.

Writes tests/data/families/FAMILY.json.gz: a list of [path, body, ids of the first prompt, or null where vLLM
refuses it].
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.support.prompts.agent_cases import random_messages, random_responses
from tests.support.prompts.family_cases import (
    FAMILIES,
    chats,
    completions,
    deepseek_chats,
    family_dir,
)

DATE = "2026-11-22"
DATA = Path(__file__).parent.parent / "data" / "families"
OPTIONS: dict[str, dict[str, Any]] = {
    "harmony": {},
    "mistral_tekken": {"tokenizer_mode": "mistral"},
    "mistral_v3": {"tokenizer_mode": "mistral"},
    "deepseek_v32": {"tokenizer_mode": "deepseek_v32"},
    "deepseek_v4": {"tokenizer_mode": "deepseek_v4"},
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
TOOL_PARSERS = {
    "harmony": "openai",
    "mistral_tekken": "mistral",
    "mistral_v3": "mistral",
    "deepseek_v32": "deepseek_v32",
    "deepseek_v4": "deepseek_v4",
}


def requests_of(family: str, seed: int, count: int) -> list[list[Any]]:
    found: list[list[Any]] = [["/v1/chat/completions", body] for body in chats(seed, count)]
    if family != "harmony":  # its directory has no completion tokenizer of its own here
        found += [["/v1/completions", body] for body in completions()]
    found += [["/v1/messages", body] for body in random_messages(count // 2, seed)]
    if family.startswith("deepseek"):
        found += [["/v1/chat/completions", body] for body in deepseek_chats()]
        found += [["/v1/responses", body] for body in random_responses(count // 2, seed)]
    return found


def _for_vllm(folder: Path, family: str) -> Path:
    """DeepSeek's attention wants a GPU; its renderer and tokenizer do not ask what model they serve."""
    if family.startswith("deepseek"):
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **LLAMA}))
    return folder


def ask_vllm(python: str, families: list[str], seed: int, count: int, folder: Path) -> dict[str, list[Any]]:
    """Per family: [path, body, ids or null] of every request."""
    requests = {family: requests_of(family, seed, count) for family in families}
    jobs = [
        {
            "directory": str(_for_vllm(family_dir(folder / family, family), family)),
            "options": {"tool_parser": TOOL_PARSERS[family]},
            "model": OPTIONS[family],
            "requests": requests[family],
        }
        for family in families
    ]
    folder.mkdir(exist_ok=True)
    source, target = folder / "jobs.json", folder / "answers.json"
    source.write_text(json.dumps(jobs))
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_SYSTEM_START_DATE": DATE,
    }
    script = Path(__file__).with_name("prompt_oracle.py")
    subprocess.run([python, str(script), str(source), str(target)], check=True, env=environment, timeout=900)
    answers = json.loads(target.read_text())
    return {
        family: [
            [*request, None if ids is None else ids[0]]
            for request, ids in zip(requests[family], found, strict=True)
        ]
        for family, found in zip(families, answers, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--family", action="append", choices=list(FAMILIES))
    arguments = parser.parse_args()
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        families = arguments.family or list(FAMILIES)
        for family, found in ask_vllm(arguments.python, families, 1, arguments.count, Path(folder)).items():
            data = json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()
            (DATA / f"{family}.json.gz").write_bytes(gzip.compress(data, mtime=0))
            refused = sum(ids is None for _, _, ids in found)
            print(f"{family}: {len(found)} requests, {refused} refused by vLLM, {len(data)} bytes")


if __name__ == "__main__":
    main()
