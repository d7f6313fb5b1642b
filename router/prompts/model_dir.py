"""A model's directory: its tokenizer, chat templates and kind, read from its files."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
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
# Architectures whose chats vLLM renders with code. gpt-oss (by model_type) has its own format too.
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
    model_type: str = ""
    architecture: str = ""
    """Both from ``config.json``; "" where that does not say."""
    rebuilt: bool = False
    """Engines make another tokenizer of this one: transformers 5 builds ``LlamaTokenizer`` by its own code
    and takes only vocabulary and merges of ``tokenizer.json``."""
    identity: bytes = b""
    """Digest of all that makes the tokens of a text; empty: the family makes them."""
    config_tokens: re.Pattern[str] | None = None
    """Tokens that ``tokenizer.json`` lacks; None: there are none."""

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
        content = file.read_bytes()
        sha256 = hashlib.sha256(content).digest()
    except OSError as error:
        raise ModelDirError(f"{file}: {error.strerror}") from None
    config = _read_json(folder / "tokenizer_config.json")
    named = _named_tokens(folder, config)
    model_type, architecture = _model_kind(_read_json(folder / "config.json"))
    listed = _listed_tokens(config, named)
    tokens = json.dumps(listed)
    tokenizer = _load_tokenizer(_TokenizerFile(sha256, tokens, file))
    # The vocabulary is skipped: it may have 20 MB.
    parts = msgspec.json.decode(content, type=_Parts)
    return ModelDir(
        folder,
        tokenizer,
        _templates(folder, config),
        {key: _content(value) for key, value in named.items()},
        _processor_template(folder),
        "harmony" if model_type == "gpt_oss" else _OWN_RENDERERS.get(architecture, "hf"),
        model_type,
        architecture,
        _is_rebuilt(parts, config, model_type),
        sha256 + hashlib.sha256(tokens.encode()).digest(),
        _missing_tokens(parts, tokenizer, listed),
    )


# transformers 5.19, ``LlamaTokenizer``: for the types that its list of wrong class names does not have.
_REBUILT: Final = frozenset({"LlamaTokenizer", "LlamaTokenizerFast"})
_REBUILT_TYPES: Final = frozenset({"", "llama"})


class _AddedToken(msgspec.Struct):
    content: str = ""


class _Parts(msgspec.Struct):
    """Parts of ``tokenizer.json``."""

    pre_tokenizer: Any = None
    normalizer: Any = None
    added_tokens: list[_AddedToken] | None = None


def _is_rebuilt(parts: _Parts, config: dict[str, Any], model_type: str) -> bool:
    if config.get("tokenizer_class") not in _REBUILT or model_type not in _REBUILT_TYPES:
        return False
    scheme = "always" if config.get("legacy") else "first"
    scheme = "never" if config.get("add_prefix_space") is False else scheme
    made = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    return parts.pre_tokenizer != made or parts.normalizer is not None


def _missing_tokens(parts: _Parts, tokenizer: Tokenizer, listed: list[Any]) -> re.Pattern[str] | None:
    own = {token.content for token in parts.added_tokens or ()}
    names = [name for name in dict.fromkeys(map(_content, listed)) if name and name not in own]
    if not names:
        return None
    # One that is looked for in the normalized text may come of any text.
    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    any_text = tokenizer.normalizer is not None and any(
        added[one].normalized for one in names if one in added
    )
    return re.compile("" if any_text else "|".join(map(re.escape, names)))


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
    # The older layout has them in a separate file.
    if "added_tokens_decoder" not in config:
        sources.append(_read_json(folder / "special_tokens_map.json"))
    merged = {key: value for source in sources for key, value in source.items() if key in SPECIAL_TOKENS}
    return {key: value for key, value in merged.items() if value is not None}


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _listed_tokens(config: dict[str, Any], named: dict[str, Any]) -> list[Any]:
    """Tokens that the configuration names, in transformers' order."""
    listed = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    return [*(token for _, token in listed), *named.values(), *(extra if isinstance(extra, list) else [])]


@dataclass(frozen=True)
class _TokenizerFile:
    """A ``tokenizer.json`` by its content, and the tokens of the configuration as JSON."""

    sha256: bytes
    tokens: str
    file: Path = field(compare=False)


@lru_cache(maxsize=4)
def _load_tokenizer(source: _TokenizerFile) -> Tokenizer:
    """Models of one tokenizer, wherever their directories are, share it, the probes and fastokens' cache."""
    try:
        tokenizer = Tokenizer.from_file(str(source.file))
    except Exception as error:  # noqa: BLE001  # tokenizers raises bare Exception
        raise ModelDirError(f"{source.file}: {error}") from None
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for token in json.loads(source.tokens):
        if _content(token) not in known:  # tokenizer.json lacks it
            known.add(_content(token))
            tokenizer.add_tokens([_added_token(token)])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


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


def _model_kind(config: dict[str, Any]) -> tuple[str, str]:
    """Return ``model_type`` and the first architecture."""
    architectures = config.get("architectures") or [""]
    return str(config.get("model_type") or ""), str(architectures[0])
