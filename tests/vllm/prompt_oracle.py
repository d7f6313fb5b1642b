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
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIModelRegistry
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.scale_out.render.serving import ServingRender
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
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


class Oracle:
    """One model directory, asked as a render server is; only disabled thinking is what the serving path makes
    of it, since the render endpoints do not look what the template does with it."""

    def __init__(
        self, directory: str, options: dict[str, Any], model_options: dict[str, Any] | None = None
    ) -> None:
        self.renderer = make_renderer(directory, options, model_options)
        models = OpenAIModelRegistry(self.renderer.model_config, [BaseModelPath("m", directory)])
        self._render = ServingRender(models, self.renderer)
        self._serving = AnthropicServingMessages.__new__(AnthropicServingMessages)
        self._serving.online_renderer = self.renderer
        self._serving.model_config = self.renderer.model_config
        self._serving._disabled_thinking_effort = None

    async def token_ids(self, path: str, body: dict[str, Any]) -> list[list[int]] | None:
        """The tokens of every prompt, None where the request is refused."""
        try:
            found = await self._ask(path, body)
        except Exception as error:  # noqa: BLE001  # whatever it is, the server would answer with an error
            print(f"refused: {str(error)[:200]!r}", file=sys.stderr)
            return None
        if isinstance(found, GenerateRequest):
            return [list(found.token_ids)]
        return [list(one["prompt_token_ids"]) for one in found] if isinstance(found, list) else None

    async def _ask(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/chat/completions":
            found = await self.renderer.render_chat(ChatCompletionRequest.model_validate(body))
            return found[1] if isinstance(found, tuple) else None
        if path == "/v1/chat/completions/batch":
            return await self._batch(BatchChatCompletionRequest.model_validate(body))
        if path == "/v1/responses":
            return await self._render.render_responses_request(ResponsesRequest.model_validate(body))
        if path == "/v1/messages":
            return await self._messages(AnthropicMessagesRequest.model_validate(body))
        return await self.renderer.render_completion(CompletionRequest.model_validate(body))

    async def _messages(self, request: AnthropicMessagesRequest) -> Any:
        if request.thinking is None or request.thinking.type != "disabled":
            return await self._render.render_messages_request(request)
        chat = AnthropicServingMessages.to_chat_completion_request(
            request,
            merge_inline_system=self._render._merge_inline_system,
            disabled_thinking_effort=await self._serving._get_disabled_thinking_effort(),
        )
        return await self._render.render_chat_request(chat)

    async def _batch(self, request: BatchChatCompletionRequest) -> Any:
        inputs = []
        for messages in request.messages:
            _, made = await self.renderer.preprocess_chat(
                request.to_chat_completion_request(messages),
                messages,
                default_template=self.renderer.chat_template,
                default_template_content_format=self.renderer.chat_template_content_format,
                default_template_kwargs=self.renderer.default_chat_template_kwargs,
                tool_dicts=None,
                parser=self.renderer.parser,
            )
            inputs += made
        return inputs


async def answer(jobs: list[dict[str, Any]]) -> list[list[list[list[int]] | None]]:
    answers = []
    for job in jobs:
        oracle = Oracle(job["directory"], job["options"], job.get("model"))
        answers.append([await oracle.token_ids(path, body) for path, body in job["requests"]])
    return answers


if __name__ == "__main__":
    jobs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(answer(jobs))))
