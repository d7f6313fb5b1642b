"""A model's tokenizer: its directory, and prompt text to token ids by fastokens if that is proven equal.

Every ``CHECK_EVERY``-th job of fastokens is compared with ``tokenizers`` on a short piece of its own text;
after the first difference fastokens is not used any more (``name`` says so, ``tokenizer_mismatches`` counts).

Texts are cut at safe places (``cuts.py``). Invariant: ``encode`` returns exactly
``Tokenizer.encode(text).ids``, or was equal to it on every probe and sample. Encoding releases the GIL.

The directory has Hugging Face's layout: ``tokenizer.json``, ``tokenizer_config.json``,
``special_tokens_map.json``, ``chat_template.jinja``, ``additional_chat_templates/*.jinja``,
``chat_template.json`` and ``config.json`` are read with the precedence of transformers 5 and vLLM 0.32. If
the engine would not use these files (its own renderer for some architectures, Mistral's tokenizer),
``load_model_dir`` sets ``renderer`` instead of loading them.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import msgspec
from tokenizers import AddedToken, Tokenizer

from kvatlas.router.prompts.cuts import Encoded, Ids, cuts_of, whole
from kvatlas.router.prompts.request import ChatBody, CompletionBody, NotLocalError
from kvatlas.router.prompts.settings import PromptStats

# Probe texts: two tokenizers of one ``tokenizer.json`` must agree on them before the faster one is used.
#
# They cover what normalizers, splitters and models treat differently: white space and digits in runs, letters
# of many scripts, combining marks, contractions, code, added tokens between and inside words, and mixtures of
# the vocabulary's own tokens, which reach every script and every long merge of the tokenizer.


_PIECES: Final = (
    *("", " ", "  ", "\n", "\n\n", "\r\n", "\t", " \n ", "a", "A", "word", " Word", "HTTPServer2", "x_y-z"),
    *("'s", "I'LL", "don't", "\u2019s", "0", "7", "12", "12345", "3.14", "1,000,000", "...", "!?", "://"),
    *("é", "e\u0301", "Å", "ß", "ﬁ", "日本語", "한국어", "العربية", "हिन्दी", "ไทย", "Ωmega", "🙂", "\u200b"),
    *("👩\u200d👩\u200d👧", "#!", "\u00a0", "\u3000", "\u2028", "\u0000", "\u007f", "\ufffd", "\ue000"),
    *("<", "<|", "|>", "</s>", "{%", "\\n"),
)
_ALPHABETS: Final = (
    "abcdefghijklmnopqrstuvwxyz",
    "ABCdef 019_-.,;:!?'\"()[]{}<>/\\|@#$%^&*+=~`\n\t",
    " \n\t\r\u00a0\u3000",
    "aàáâãäåæçèéêëìíîïñòóôõöøùúûüýÿ\u0300\u0301\u0308\u0323",
    "абвгдежзийклмнопрстуфхцчшщъыьэюя ",
    "的一是不了人我在有他这中大来上国日本語のはをが、。 ",
    "ابتثجحخدذرزسشصضطظعغفقكلمنهوي ",
    "0123456789 .,-",
    "🙂🚀❤\ufe0f👍🏽\u200d🏳🌈 ",
)
_PAIRED: Final = 24
_SOUPS: Final = 600
_FUZZ: Final = 400
_LONG: Final = "The quick brown fox, 42 of them: jumps()\n\tover {the: 'lazy'} dog — naïve café; 東京。\r\n"


def probe_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """About 2,500 texts, the same ones at every start."""
    rng = random.Random(1)
    added = _added_tokens(tokenizer)
    yield from _PIECES
    yield from (a + b for a in _PIECES for b in rng.sample(_PIECES, _PAIRED))
    for token in added:
        yield from (left + token + rng.choice(_PIECES) + rng.choice(added) for left in _PIECES[::4])
    size = tokenizer.get_vocab_size()
    for _ in range(_SOUPS):
        ids = [rng.randrange(size) for _ in range(rng.randint(1, 8))]
        yield str(tokenizer.decode(ids, skip_special_tokens=False))
    for _ in range(_FUZZ):
        alphabet = "".join(rng.sample(_ALPHABETS, 2))
        yield "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 40)))
    yield from (_LONG * 20, "a" * 300, "ab" * 200, " " * 300, "\n" * 200, "1" * 200, "日" * 200)


def _added_tokens(tokenizer: Tokenizer) -> list[str]:
    """Contents of added tokens: those with unusual flags first, since the others are all alike."""

    def plain(token: Any) -> bool:
        return not (token.lstrip or token.rstrip or token.single_word or token.normalized)

    tokens = sorted(tokenizer.get_added_tokens_decoder().values(), key=plain)
    return [token.content for token in tokens[:_PAIRED]]


# fastokens in front of ``tokenizers``: the same ids, ten to twenty times faster.
#
# ``tokenizers`` is the reference, which engines run. fastokens reads the same ``tokenizer.json`` but does not
# support every normalizer, splitter and model. So it is used only if it loads and gives the reference's ids
# for every probe text; in use, the two are compared again on a running sample.
#
# Measured on one shared core with DeepSeek V3's vocabulary: 400 KB of new text 2-20 ms of CPU, by the
# reference 250-310 ms. Its cache of words takes up to about 180 MB for random texts, and no more.


os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
"""A long text split over cores would cost more CPU, and take the event loop's core."""
try:
    import fastokens
except ImportError:
    # No wheel for this platform: use the reference.
    fastokens = None


class FastEncoder:
    """One ``tokenizer.json`` in fastokens; safe in any thread, releases the GIL."""

    def __init__(self, json_text: str) -> None:
        self._tokenizer = fastokens.Tokenizer.from_json_str(json_text)
        self.name = f"fastokens {version('fastokens')}"

    def encode(self, texts: list[str]) -> Encoded:
        """Like ``add_special_tokens=False``, every text separately."""
        data, offsets = self._tokenizer.encode_batch_flat(texts)
        return Encoded(array("I", data), array("Q", offsets).tolist())


class NoFastEncoder(msgspec.Struct, frozen=True):
    """Why the reference is used; ``reason`` is shown to users."""

    reason: str


@lru_cache(maxsize=4)
def fast_encoder(tokenizer: Tokenizer) -> FastEncoder | NoFastEncoder:
    """Return fastokens for this tokenizer, if it agrees on all probes; takes up to two seconds."""
    if fastokens is None:
        return NoFastEncoder("fastokens is not installed")
    try:
        encoder = FastEncoder(tokenizer.to_str())
        texts = list(probe_texts(tokenizer))
        found = encoder.encode(texts)
    except Exception as error:  # noqa: BLE001  # whatever it cannot read, the reference can
        return NoFastEncoder(f"fastokens cannot read this tokenizer: {str(error)[:200]}")
    expected = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    for number, (text, encoding) in enumerate(zip(texts, expected, strict=True)):
        if found.piece(number).tolist() != encoding.ids:
            return NoFastEncoder(f"fastokens differs for {text[:40]!r}")
    return encoder


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
"""The library's own threads gain nothing for one text and use more CPU waiting than the text costs."""

# One job of fastokens in this many is compared; costs 1-2 us each on average.
CHECK_EVERY: Final = 1024
_CHECKED_CHARS: Final = 1024


class PromptTokenizer:
    """One model's tokenizer. ``fast``: use fastokens if it agrees. Any thread may call it.

    ``name``: the library in use, and why not fastokens.
    """

    def __init__(self, tokenizer: Tokenizer, stats: PromptStats, *, fast: bool = True) -> None:
        self._tokenizer = tokenizer
        self._stats = stats
        self._jobs = 0
        if getattr(tokenizer.model, "dropout", None):
            raise ValueError("the tokenizer's model has dropout: its tokens are random")
        found = fast_encoder(tokenizer) if fast else NoFastEncoder("prompts.fast_tokenizer is off")
        self._fast = found if isinstance(found, FastEncoder) else None
        self.name = found.name if isinstance(found, FastEncoder) else f"tokenizers ({found.reason})"
        self.cuts = cuts_of(tokenizer)
        self.may_cut, self.prefix, self.suffix = self.cuts.may_cut, self.cuts.prefix, self.cuts.suffix

    @property
    def is_fast(self) -> bool:
        """Whether fastokens is in use."""
        return self._fast is not None

    def encode_cut(self, text: str, begin: int = 0) -> tuple[list[int], Encoded]:
        """The cuts of a text from ``begin`` on, and the ids of its pieces."""
        starts = self.cuts.split(text, begin)
        texts: list[str] = []
        for end in starts[1:]:
            texts.append(text[begin:end])
            begin = end
        texts.append(text[begin:])
        return starts, self.encode_pieces(texts)

    def encode_pieces(self, texts: list[str]) -> Encoded:
        """The ids of every text separately."""
        fast = self._fast
        if fast is None:
            return self._by_reference(texts)
        found = fast.encode(texts)
        self._jobs += 1
        if self._jobs % CHECK_EVERY == 0 and not self._agrees(fast, texts):
            return self._by_reference(texts)
        self._stats.tokens_fast += len(found.ids)
        return found

    def _agrees(self, fast: FastEncoder, texts: list[str]) -> bool:
        """Compare both on one of the texts, or on a part of a long one."""
        text = texts[self._jobs // CHECK_EVERY % len(texts)]
        begin = self._jobs % max(1, len(text) - _CHECKED_CHARS)
        sample = text[begin : begin + _CHECKED_CHARS]
        self._stats.tokenizer_checks += 1
        if fast.encode([sample]).ids.tolist() == whole(self._tokenizer, sample):
            return True
        self._stats.tokenizer_mismatches += 1
        self._fast, self.name = None, "tokenizers (fastokens gave other tokens for a prompt)"
        return False

    def _by_reference(self, texts: list[str]) -> Encoded:
        ids, offsets = array("I"), [0]
        for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            ids.extend(encoding.ids)
            offsets.append(len(ids))
        return Encoded(ids, offsets)

    def encode(self, text: str) -> Ids:
        """Ids of a whole text, at once; for small texts and tests."""
        return self.encode_cut(text)[1].ids

    @property
    def adds_nothing(self) -> bool:
        """Whether texts have no special tokens around them."""
        return self.prefix is not None and self.suffix is not None and not self.prefix and not self.suffix


# ``truncate_prompt_tokens`` as vLLM 0.32 applies it, if that can be known here.
#
# Without ``truncation_side`` the tokenizer itself truncates, keeping the end (vLLM sets its side to "left"
# for generation); with it, the finished ids are sliced, after a cut by characters of texts that exceed the
# model's length anyway.


def ids_of(tokens: Iterable[int]) -> Ids:
    """Ids as an array. Raises ``NotLocalError`` for numbers that are not token ids."""
    try:
        return array("I", tokens)
    except OverflowError:
        raise NotLocalError("field") from None


def truncated(
    ids: Ids,
    body: ChatBody | CompletionBody,
    *,
    max_model_len: int | None,
    from_text: bool,
    frame: int = 0,
) -> Ids:
    """The ids after truncation. ``frame``: special tokens added around the text's own ids.

    Raises ``NotLocalError("truncation")`` if the result depends on unknown facts.
    """
    keep = body.truncate_prompt_tokens
    if keep is None:
        return ids
    if type(keep) is not int or keep < -1 or body.truncation_side not in (None, "left", "right"):
        raise NotLocalError("field")
    if keep == -1:
        if max_model_len is None:
            raise NotLocalError("truncation")
        keep = max_model_len - 1 if _max_output(body) else max_model_len
    if len(ids) <= keep:
        return ids
    if keep == 0:
        raise NotLocalError("empty")
    if from_text and body.truncation_side is None and frame:
        # The tokenizer keeps its frame and cuts within it.
        raise NotLocalError("truncation")
    if from_text and body.truncation_side is not None and len(ids) > (max_model_len or 0):
        # The text may have been cut by characters before.
        raise NotLocalError("truncation")
    return ids[:keep] if body.truncation_side == "right" else ids[-keep:]


def _max_output(body: ChatBody | CompletionBody) -> int:
    asked = body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        asked = body.max_completion_tokens
    return asked if isinstance(asked, int) else 0


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
    tokenizer = _load_tokenizer(_TokenizerFile(sha256, json.dumps(listed), file))
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
