"""The prompts computed here are real vLLM's, token by token, for every kind of template and request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvatlas.router.openai.apis import BATCH, CHAT, COMPLETION, MESSAGES, RESPONSES
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.prompts.reader import Prompt
from tests.support.prompts import agent_cases, cases
from tests.support.prompts.readers import (
    byte_level_tokenizer,
    local_reader,
    metaspace_tokenizer,
    model_dir,
    read,
    template_text,
)
from tests.vllm.forked import driven

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 2000,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
ARGUMENTS = (
    "{% for m in messages %}<|im_start|>{{ m | tojson }}<|im_end|>\n{% endfor %}"
    "{{ tools | default(none) | tojson }}"
    "{{ documents | default(none) | tojson }}{{ safety_mode | default(1) }}"
    "{{ citation_options | default(none) | tojson }}{{ thinking | default(none) | tojson }}"
)
"""Shows all that it is given."""
MODELS: dict[str, dict[str, Any]] = {
    "chatml": {"template": "chatml"},
    "headers": {"template": "headers"},
    "brackets": {"template": "brackets"},
    "turns": {"template": "turns"},
    "thinking_tools": {"template": "thinking_tools"},
    "generation_blocks": {"template": "generation_blocks"},
    "dumped": {"template": "dumped"},
    "metaspace_first": {"template": "headers", "tokenizer": metaspace_tokenizer("first")},
    "metaspace_always": {"template": "brackets", "tokenizer": metaspace_tokenizer("always")},
    "added_tokens": {
        "template": "chatml",
        "extra_special_tokens": ["<|more|>"],
        "unk_token": "<|unknown|>",
    },
    "arguments": {
        "template": "chatml",
        "options": {"chat_template": ARGUMENTS},
    },
    "server_options": {
        "template": "chatml",
        "options": {
            "chat_template": template_text("thinking_tools"),
            "chat_template_content_format": "string",
            "default_chat_template_kwargs": {"enable_thinking": False, "unused": 1},
            "exclude_tools_when_tool_choice_none": True,
        },
    },
}


def test_every_local_prompt_is_vllms(vllm_python: str, tmp_path: Path) -> None:
    requests = [(CHAT, body) for body in (*cases.TURNS, *cases.TOOL_CHATS, *cases.random_chats(60))]
    requests += [(COMPLETION, {"model": "m", **body}) for body in cases.COMPLETIONS]
    _check(requests, vllm_python, tmp_path, local_share=0.97)


def test_every_local_prompt_of_agents_is_vllms(vllm_python: str, tmp_path: Path) -> None:
    requests = [(MESSAGES, body) for body in (*agent_cases.MESSAGES, *agent_cases.random_messages(120))]
    requests += [(RESPONSES, body) for body in (*agent_cases.RESPONSES, *agent_cases.random_responses(120))]
    requests += [(BATCH, body) for body in agent_cases.BATCHES]
    _check(requests, vllm_python, tmp_path, local_share=0.9)


def _check(requests: list[Any], vllm_python: str, tmp_path: Path, *, local_share: float) -> None:
    jobs = [_job(tmp_path / name, requests, **spec) for name, spec in MODELS.items()]
    answers = _ask_vllm(vllm_python, jobs, tmp_path)

    wrong, local, refused = [], 0, 0
    for (name, spec), job, expected in zip(MODELS.items(), jobs, answers, strict=True):
        reader = local_reader(Path(job["directory"]), max_model_len=4096, **spec.get("options", {}))
        for (path, body), ids in zip(requests, expected, strict=True):
            found = _read(reader, body, path)
            refused += ids is None
            if found is not None and ids is not None:
                local += 1
                if list(found.token_ids) != ids[0] or found.num_prompts != len(ids):
                    wrong.append((name, json.dumps(body)))
        reader.close()
        assert reader.stats.template_mismatches == 0, name
    assert not wrong, wrong[:5]
    assert local > local_share * (len(MODELS) * len(requests) - refused), (local, refused)


def _read(reader: Any, body: Any, path: str) -> Prompt | None:
    try:
        found = read(reader, body, path)
    except ApiError:
        return None
    return found if isinstance(found, Prompt) else None


def _job(
    folder: Path, requests: list[Any], template: str, options: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    more.setdefault("tokenizer", byte_level_tokenizer())
    model_dir(folder, template, **more)
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    return {"directory": str(folder), "options": options or {}, "requests": requests}


def _ask_vllm(python: str, jobs: list[dict[str, Any]], tmp_path: Path) -> list[list[list[list[int]] | None]]:
    source, target = tmp_path / "jobs.json", tmp_path / "answers.json"
    source.write_text(json.dumps(jobs))
    driven(python, "tests.vllm.prompt_oracle", str(source), str(target), timeout=800)
    return json.loads(target.read_text())
