"""vLLM's own prompts: its validation, renderer and tokenizer, without a model. Runs under vLLM's Python.

``-m tests.vllm.prompt_oracle IN OUT``: IN is a JSON list of
``{"directory", "options", "requests": [[path, body]]}``; OUT gets, per request, the token ids of every
prompt, or null where vLLM refuses it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.renderers.registry import renderer_from_config


def make_renderer(
    directory: str, options: dict[str, Any], model_options: dict[str, Any] | None = None
) -> OnlineRenderer:
    model = ModelConfig(model=directory, dtype="float32", **(model_options or {}))
    renderer = renderer_from_config(VllmConfig(model_config=model))
    settings = {"chat_template": None, "chat_template_content_format": "auto", "tool_parser": "hermes"}
    settings |= options
    return OnlineRenderer(model, renderer, request_logger=None, enable_auto_tools=True, **settings)


async def token_ids(renderer: OnlineRenderer, path: str, body: dict[str, Any]) -> list[list[int]] | None:
    try:
        if path == "/v1/chat/completions":
            found = await renderer.render_chat(ChatCompletionRequest.model_validate(body))
            inputs = found[1] if isinstance(found, tuple) else None
        else:
            found = await renderer.render_completion(CompletionRequest.model_validate(body))
            inputs = found if isinstance(found, list) else None
    except Exception as error:  # noqa: BLE001  # whatever it is, the server would answer with an error
        print(f"refused: {str(error)[:200]!r}", file=sys.stderr)
        return None
    return None if inputs is None else [list(one["prompt_token_ids"]) for one in inputs]


async def answer(jobs: list[dict[str, Any]]) -> list[list[list[list[int]] | None]]:
    answers = []
    for job in jobs:
        renderer = make_renderer(job["directory"], job["options"], job.get("model"))
        answers.append([await token_ids(renderer, path, body) for path, body in job["requests"]])
    return answers


if __name__ == "__main__":
    jobs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(answer(jobs))))
