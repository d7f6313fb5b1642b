"""Tokens that SGLang's own server code makes of chats: run by vLLM's interpreter, which has transformers.

    python -m tests.support.sglang_chat WHEEL JOBS ANSWERS

JOBS is JSON: a list of ``{"directory": of the tokenizer, "bodies": of chats}``; ANSWERS gets a list
of token ids for each body, or null where SGLang refuses it. Chats go through the wheel's request classes,
template manager and ``OpenAIServingChat._process_messages``; modules without a part in this are stand-ins.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from transformers import AutoTokenizer  # type: ignore[import-not-found]

from tests.support.sglang_wire import Wheel

_OPENAI, _PARSER = "sglang.srt.entrypoints.openai.", "sglang.srt.parser."
_REAL = {
    *(
        _OPENAI + name
        for name in (
            "chat_encoding",
            "chat_encoding_adapters",
            "protocol",
            "serving_base",
            "serving_chat",
            "utils",
        )
    ),
    *(_PARSER + name for name in ("conversation", "jinja_template_utils", "template_detection")),
    *(_PARSER + name for name in ("hunyuan_reasoning", "template_manager")),
}


def _stand_in_for_orjson() -> None:
    """vLLM's environment lacks it; here it only makes keys of a cache."""
    module = ModuleType("orjson")
    vars(module).update(loads=json.loads, JSONDecodeError=json.JSONDecodeError)
    vars(module).update(dumps=lambda value: json.dumps(value).encode())
    sys.modules.setdefault("orjson", module)


class Server:
    """SGLang's rendering of chats with this tokenizer."""

    def __init__(self, directory: str) -> None:
        serving = importlib.import_module(_OPENAI + "serving_chat")
        # Without server options and parsers.
        vars(serving)["get_serving"] = lambda: SimpleNamespace(default_chat_template_kwargs=None)
        # Long prompts are encoded in parts by threads, with the same result (parallel_prompt_encode.py).
        vars(serving)["parallel_prompt_encode"] = lambda tokenizer, text, options: tokenizer.encode(
            text, **options
        )
        config = SimpleNamespace(**json.loads((Path(directory) / "config.json").read_text()))
        model = SimpleNamespace(hf_config=config, get_default_sampling_params=dict, is_multimodal=False)
        tokenizers = SimpleNamespace(
            tokenizer=AutoTokenizer.from_pretrained(directory),
            model_config=model,
            model_path=directory,
            config_value=lambda _name: None,
            processor=None,
            served_model_name="m",
            server_args=SimpleNamespace(),
        )
        templates = importlib.import_module(_PARSER + "template_manager").TemplateManager()
        vars(importlib.import_module(_PARSER + "template_manager"))["resolve_python_chat_template"] = (
            lambda *_: None
        )
        templates.initialize_templates(tokenizers, directory)
        self._request = importlib.import_module(_OPENAI + "protocol").ChatCompletionRequest
        self._serving = serving.OpenAIServingChat(tokenizers, templates)
        # They constrain what is generated, not the prompt.
        self._serving._takes_turn_grammar = lambda *_, **__: False
        self._serving._requires_response_template_detokenization = lambda *_: False

    def tokens(self, body: Any) -> list[int] | None:
        """Token ids of a chat; None: it is refused."""
        try:
            made = self._serving._process_messages(self._request.model_validate(body), is_multimodal=False)
        except ValueError:  # pydantic's and those that SGLang answers with 400
            return None
        return list(made.prompt_ids)


def main(wheel: str, jobs: str, answers: str) -> None:
    """Answer all jobs."""
    _stand_in_for_orjson()
    sys.meta_path.insert(0, Wheel(wheel, _REAL))
    found = []
    for job in json.loads(Path(jobs).read_text()):
        server = Server(job["directory"])
        found.append([server.tokens(body) for body in job["bodies"]])
    Path(answers).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
