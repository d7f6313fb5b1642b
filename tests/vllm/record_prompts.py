"""Writes tests/data/prompts/agent_apis.json.gz: what real vLLM makes of requests of the agents' APIs.

``python -m tests.vllm.record_prompts`` with ``KVATLAS_VLLM_PYTHON`` naming vLLM's interpreter. Per model: its
options, and per request its path, body and the token ids of every prompt (null: refused).
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvatlas.router.openai.apis import BATCH, MESSAGES, RESPONSES
from tests.support.paths import ROOT
from tests.support.prompts import agent_cases
from tests.support.prompts.readers import plain_tokenizer
from tests.vllm.test_prompts_match_vllm import _ask_vllm, _job

TARGET = ROOT / "tests" / "data" / "prompts" / "agent_apis.json.gz"
TEMPLATES = ("chatml", "thinking_tools", "brackets")
"""Parts as text, parts as lists, and system messages at the beginning only."""
RANDOM = 25


def main() -> None:
    requests = [(MESSAGES, body) for body in (*agent_cases.MESSAGES, *agent_cases.random_messages(RANDOM))]
    requests += [
        (RESPONSES, body) for body in (*agent_cases.RESPONSES, *agent_cases.random_responses(RANDOM))
    ]
    requests += [(BATCH, body) for body in agent_cases.BATCHES]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = plain_tokenizer()
        jobs = [_job(folder / one, requests, template=one, tokenizer=tokenizer) for one in TEMPLATES]
        answers = _ask_vllm(os.environ["KVATLAS_VLLM_PYTHON"], jobs, folder)
    recorded: dict[str, Any] = {
        "requests": requests,
        "tokens": dict(zip(TEMPLATES, answers, strict=True)),
    }
    TARGET.parent.mkdir(exist_ok=True)
    data = json.dumps(recorded, ensure_ascii=False).encode()
    TARGET.write_bytes(gzip.compress(data, 9, mtime=0))
    print(f"{TARGET}: {len(requests)} requests", file=sys.stderr)


if __name__ == "__main__":
    main()
