"""Small tokenizers, model directories and requests for the prompt tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakSet

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.prompts.reader import ModelPrompts, Prompt, PromptReader, PromptSettings, TextAffinity
from tests.support.paths import DATA
from tests.support.waiting import run

TEMPLATES = DATA / "templates"
SPECIAL = (
    "<|bos|>",
    "<|eos|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|header|>",
    "<|/header|>",
    "<|eot|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
)
CORPUS = [
    "The router asks which engine holds the longest prefix of this prompt, and sends the request there.",
    "A block hash covers everything before it; two prompts share blocks as far as they share tokens.",
    "Wetter in Zürich: 21,5 °C. 東京は晴れ。 def f(x):\n    return x * 2  # twice\n\n\tindented",
    '{"name": "get_weather", "arguments": {"place": "Zürich", "days": 2}}',
    "system user assistant tool developer You answer briefly. Hello! How are you? I'm fine, thanks. 12345",
]


@cache
def byte_level_tokenizer(vocab_size: int = 600) -> str:
    """A byte-level BPE tokenizer of GPT-2's kind, as JSON text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_tokens(
        [AddedToken("<tool_call>", normalized=False), AddedToken("<think>", normalized=True)]
    )
    return str(tokenizer.to_str())


@cache
def plain_tokenizer() -> str:
    """One token per byte, without training: its ids are the same everywhere and can be written down."""
    vocabulary = {text: number for number, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return str(tokenizer.to_str())


@cache
def metaspace_tokenizer(prepend: str = "first") -> str:
    """A BPE tokenizer of SentencePiece's kind: a space before the text, byte fallback, bos added."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    bos = tokenizer.token_to_id("<|bos|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", bos)]
    )
    return str(tokenizer.to_str())


def model_dir(folder: Path, template: str | None, *, tokenizer: str | None = None, **config: Any) -> Path:
    """Write a model directory; ``template`` is the stem of a file in tests/data/templates."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer or byte_level_tokenizer())
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": {"__type": "AddedToken", "content": "<|eos|>", "special": True},
        "model_max_length": 100000,
        **config,
    }
    if template is not None:
        settings["chat_template"] = template_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def template_text(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


async def no_engine(url: str, body: bytes, headers: dict[str, str], timeout_s: float) -> tuple[int, bytes]:
    """A ``post`` for tests in which no engine may be called."""
    raise AssertionError(f"unexpected call of {url}")


MADE: WeakSet[PromptReader] = WeakSet()
"""Readers of running tests, which a fixture closes."""


def reader(
    models: Mapping[str, ModelPrompts], settings: PromptSettings | None = None, **more: Any
) -> PromptReader:
    made = PromptReader(models, settings or PromptSettings(), more.pop("post", no_engine), **more)
    MADE.add(made)
    return made


def local_reader(folder: Path, settings: PromptSettings | None = None, **model: Any) -> PromptReader:
    """A reader of one model "m" with a local directory."""
    return reader({"m": ModelPrompts(tokenizer_dir=str(folder), **model)}, settings)


def request(body: Any, path: str = "/v1/chat/completions", model: str | None = "m") -> InboundRequest:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return InboundRequest("POST", path, b"", [], data, model)


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **fields}


def say(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def read(
    reader: PromptReader, body: Any, path: str = "/v1/chat/completions", **more: Any
) -> Prompt | TextAffinity:
    return run(reader.read(request(body, path, **more)))


def read_prompt(reader: PromptReader, body: Any, path: str = "/v1/chat/completions", **more: Any) -> Prompt:
    """The prompt, wherever its tokens came from."""
    found = read(reader, body, path, **more)
    assert isinstance(found, Prompt), found
    return found


def read_affinity(
    reader: PromptReader, body: Any, path: str = "/v1/chat/completions", **more: Any
) -> TextAffinity:
    """The affinity of a request whose tokens are not known."""
    found = read(reader, body, path, **more)
    assert isinstance(found, TextAffinity), found
    return found


def read_exact(reader: PromptReader, body: Any, path: str = "/v1/chat/completions", **more: Any) -> Prompt:
    """The prompt, which must have been computed locally."""
    found = read_prompt(reader, body, path, **more)
    assert found.source == "local"
    return found
