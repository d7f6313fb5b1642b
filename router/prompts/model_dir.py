"""A model's tokenizer directory in Hugging Face's layout: tokenizer, chat templates, special tokens.

Reads ``tokenizer.json``, ``tokenizer_config.json``, ``special_tokens_map.json``, ``chat_template.jinja``,
``additional_chat_templates/*.jinja``, ``chat_template.json`` and ``config.json`` with the precedence of
transformers 5 and vLLM 0.32. If the engine would not use these files (its own renderer for some
architectures, Mistral's tokenizer), ``load_model_dir`` sets ``renderer`` instead of loading them.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec
from tokenizers import AddedToken, Tokenizer

SPECIAL_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_MORE_TEMPLATES: Final = "additional_chat_templates"
_OWN_RENDERERS: Final = {
    "MoonshotKimiaForCausalLM": "kimi_audio",
    "KimiK3ForConditionalGeneration": "kimi_k3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "DeepseekV4ForConditionalGeneration": "deepseek_v4",
    "DeepseekV41ForCausalLM": "deepseek_v41",
    "InklingForCausalLM": "inkling",
    "InklingForConditionalGeneration": "inkling",
}
"""Architectures whose chats vLLM renders with code. gpt-oss (by model_type) has its own format too."""


class ModelDirError(ValueError):
    """The directory cannot be used; ``str()`` names the file and its problem."""


class ModelDir(msgspec.Struct):
    """Contents of the directory. ``templates`` by name ("default", "tool_use", ...); ``processor_template``
    takes precedence for chats without tools. ``renderer``: "hf", or the code that renders this model's chats.
    ``tokenizer`` None: Mistral's own, which is no Hugging Face tokenizer."""

    folder: Path
    tokenizer: Tokenizer | None
    templates: dict[str, str]
    special_tokens: dict[str, str]
    processor_template: str | None = None
    renderer: str = "hf"

    def template_for(self, *, with_tools: bool) -> str | None:
        """The template source for a chat, or None."""
        if not with_tools and self.processor_template is not None:
            return self.processor_template
        if with_tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        return self.templates.get("default")


def load_model_dir(path: str | Path) -> ModelDir:
    """Read one directory; takes up to seconds for large vocabularies. Cached while it stays the same, so
    worker processes share what their parent has read. Raises ``ModelDirError``."""
    folder = Path(path)
    found = [*folder.glob("*"), *folder.glob(f"{_MORE_TEMPLATES}/*")]
    files = sorted(file for file in found if file.is_file())
    stamps = [(str(file), stat.st_mtime_ns, stat.st_size) for file in files for stat in [file.stat()]]
    return _read(folder, tuple(stamps))


@lru_cache(maxsize=4)
def _read(folder: Path, _stamps: tuple[tuple[str, int, int], ...]) -> ModelDir:
    file = folder / "tokenizer.json"
    if is_mistral(folder):
        return ModelDir(folder, None, {}, {}, renderer="mistral")
    if not file.is_file():
        raise ModelDirError(f"{file}: no such file; point tokenizer_dir at a Hugging Face model directory")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  # tokenizers raises bare Exception
        raise ModelDirError(f"{file}: {error}") from None
    config = _read_json(folder / "tokenizer_config.json")
    named = _named_tokens(folder, config)
    _add_missing_tokens(tokenizer, config, named)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return ModelDir(
        folder,
        tokenizer,
        _templates(folder, config),
        {key: _content(value) for key, value in named.items()},
        _processor_template(folder),
        _renderer(_read_json(folder / "config.json")),
    )


def is_mistral(folder: Path) -> bool:
    """Whether the engine uses Mistral's own tokenizer, which it does if it finds Mistral's own weights too.

    Weights may be missing here. A folder with both tokenizers and no weights is ambiguous: ``ModelDirError``.
    """
    if not ((folder / "tekken.json").is_file() or any(folder.glob("tokenizer.model.v*"))):
        return False
    if any(folder.glob("consolidated*.safetensors")) or not (folder / "tokenizer.json").is_file():
        return True
    if not any(folder.glob("*.safetensors")):
        raise ModelDirError(
            f"{folder}: tokenizer.json and Mistral's own tokenizer: leave out the one that engines do not "
            "use (they use Mistral's where the model has consolidated*.safetensors)"
        )
    return False


def load_chat_template(text: str) -> str:
    """The engine's ``--chat-template``: the content of a file of that name, else the text itself."""
    if "\n" not in text and len(text) < 4096:
        file = Path(text)
        try:
            return file.read_text()
        except OSError as error:
            if not any(mark in text for mark in "{}"):
                raise ModelDirError(f"chat_template {text}: {error.strerror}") from None
    return text


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelDirError(f"{file}: {error}") from None
    if not isinstance(found, dict):
        raise ModelDirError(f"{file}: not a JSON object")
    return found


def _named_tokens(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """bos_token and so on, each a string or an added-token object."""
    sources = [config]
    if "added_tokens_decoder" not in config:  # the older layout has them in a separate file
        sources.append(_read_json(folder / "special_tokens_map.json"))
    merged = {key: value for source in sources for key, value in source.items() if key in SPECIAL_TOKENS}
    return {key: value for key, value in merged.items() if value is not None}


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _add_missing_tokens(tokenizer: Tokenizer, config: dict[str, Any], named: dict[str, Any]) -> None:
    """Add tokens that the configuration names and tokenizer.json lacks, in transformers' order."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    listed = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    more = extra if isinstance(extra, list) else []
    wanted = [*(token for _, token in listed), *named.values(), *more]
    for token in wanted:
        if _content(token) not in known:
            known.add(_content(token))
            tokenizer.add_tokens([_added_token(token)])


def _added_token(token: Any) -> AddedToken:
    if not isinstance(token, dict):
        return AddedToken(str(token), special=True)
    names = ("single_word", "lstrip", "rstrip", "normalized")
    flags = {key: bool(token[key]) for key in names if key in token}
    return AddedToken(_content(token), special=bool(token.get("special", True)), **flags)


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Template files take precedence over the configuration's entry, which is a text or a list of named
    texts."""
    found: dict[str, str] = {}
    main = folder / "chat_template.jinja"
    if main.is_file():
        found["default"] = main.read_text(encoding="utf-8")
    for file in sorted((folder / _MORE_TEMPLATES).glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    if found:
        return found
    entry = config.get("chat_template")
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, list):
        return {str(item["name"]): str(item["template"]) for item in entry}
    return {}


def _processor_template(folder: Path) -> str | None:
    """Multimodal models: their processor's template, which the engine prefers for chats without tools."""
    if not any((folder / f"{name}_config.json").is_file() for name in ("processor", "preprocessor")):
        return None
    main = folder / "chat_template.jinja"
    if main.is_file():
        return main.read_text(encoding="utf-8")
    entry = _read_json(folder / "chat_template.json").get("chat_template")
    return entry if isinstance(entry, str) else None


def _renderer(config: dict[str, Any]) -> str:
    if config.get("model_type") == "gpt_oss":
        return "harmony"
    architectures = config.get("architectures") or [""]
    return _OWN_RENDERERS.get(architectures[0], "hf")
