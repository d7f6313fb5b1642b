"""Interface of a model family, and the families of API servers other than vLLM's Python one.

A family reproduces the code by which vLLM 0.32 renders a model's chats: to text, which is tokenized like a
rendered template, or to ids. It refuses uncertain inputs with ``NotLocalError``; a conversation that the
engine would refuse raises ``TemplateRejectsError``. Families have no changing state; any thread may call
them.

vLLM's Rust frontend (``VLLM_USE_RUST_FRONTEND=1``, vLLM 0.33) validates and flattens messages by its own
code, so that the same body gives other tokens than behind the Python frontend. Compared with ``vllm-rs
render`` of 0.33 over the bodies and templates of the tests (``tests/vllm/test_rust_frontend.py``): every
prompt made here is equal, every other one is refused.

Reproduced differences to the Python frontend:

- The texts of a message's parts are joined without a separator; other fields of a part are dropped.
- ``developer`` stays a separate role, whether or not the template knows it.
- ``name`` is dropped, and a billing header in a system text is kept.
- Absent ``tools`` and ``documents`` are undefined, not none.
- The arguments of a tool call may be any JSON value.

Prompts that the template engines write differently are refused: a chat is rendered by jinja2 and by
minijinja, the engine of this frontend, and both texts must be equal. Lists and objects that a template prints
are refused, and numbers that Rust reads or writes differently as JSON: its parser may miss the last digit of
a float of more than 15 significant digits, and takes -0 for a float. Refused are also messages with fields
that were not compared (it reads ``thinking``), template arguments that are fields of the request
(``add_generation_prompt``), templates that ask whether a boolean is a number, or have a backslash in their
text, and texts with a token that only ``tokenizer_config.json`` names, which it splits.

SGLang (0.5.23) gives messages to the template of ``transformers`` as they are, without fields that are null.
Chats of roles and texts alone are made here, but for those that end with the assistant's message, which
SGLang turns into a user's; it is asked for the tokens of all others. Every prompt made here was equal to that
of the server code in its wheel (``tests/router/prompts/test_sglang_chats.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Sequence
from typing import Any, Final, NoReturn, Protocol

from jinja2 import nodes

from kvatlas.router.openai.apis import CHAT, COMPLETION
from kvatlas.router.prompts.chat.compiled import (
    by_fast,
    by_reference,
    compile_template,
    reference_environment,
)
from kvatlas.router.prompts.chat.messages import Message, text_message
from kvatlas.router.prompts.chat.template import UNLIKE, ChatContext, value_kinds
from kvatlas.router.prompts.cuts import Encoded, Ids
from kvatlas.router.prompts.model_dir import ModelDir
from kvatlas.router.prompts.request import ChatBody, NotLocalError
from kvatlas.router.prompts.settings import ModelPrompts


class Missing(Exception):  # noqa: N818  # a state more than an error
    """``str()`` says what is missing and how to get it."""


class MissingFamily:
    """A family whose package or vocabulary is missing: its chats are left to a render server or an engine.
    Refuses every chat, and says in ``name`` what to install or set."""

    variables: frozenset[str] = frozenset()
    takes_defaults = False
    paths: frozenset[str] = frozenset()

    def __init__(self, problem: str) -> None:
        self.name = problem

    def stamp(self) -> bytes:
        return b""

    def check(self, body: ChatBody) -> NoReturn:
        raise NotLocalError("renderer")

    def parse(self, message: Message) -> NoReturn:
        raise NotLocalError("renderer")

    def render(self, conversation: list[Message], context: ChatContext) -> NoReturn:
        raise NotLocalError("renderer")


class TextTokenizer(Protocol):
    """Interface of ``tokenizer.PromptTokenizer`` used by the reader; a family may bring its own."""

    name: str
    prefix: Ids | None
    suffix: Ids | None

    @property
    def is_fast(self) -> bool: ...

    @property
    def adds_nothing(self) -> bool: ...

    def may_cut(self, text: str, at: int, /) -> bool: ...

    def encode_cut(self, text: str, begin: int = 0) -> tuple[list[int], Encoded]: ...

    def decode(self, ids: Sequence[int], *, skips_special: bool) -> str | None: ...


class Family(Protocol):
    """Converts one family's chats to tokens. ``name`` is shown to users and names the package."""

    name: str

    @property
    def variables(self) -> Container[str]: ...

    """Template arguments that it reads."""
    takes_defaults: bool
    """Whether the server's default template arguments reach it."""

    @property
    def paths(self) -> frozenset[str]: ...

    """APIs whose prompts it makes; the engine has separate code for the others."""

    def stamp(self) -> bytes:
        """Inputs of prompts besides the request (today's date), or nothing."""

    def check(self, body: ChatBody) -> None:
        """Raise ``NotLocalError`` for fields whose effect is not reproduced."""

    def parse(self, message: Message) -> Message:
        """Convert one validated message of the request for ``render``; cached for next turns."""

    def render(self, conversation: list[Message], context: ChatContext) -> str | list[int]:
        """Return the prompt's text, to be tokenized, or its ids."""


_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})
_PLAIN_ROLES: Final = frozenset({"system", "user", "assistant"})


class _PrintedError(Exception):
    """A template prints a value other than by ``tojson``."""


class _Object(dict[str, Any]):
    """An object of the request; Rust prints it as JSON, Python differently."""

    def __str__(self) -> NoReturn:
        raise _PrintedError

    __repr__ = __str__


class _List(list[Any]):
    """A list of the request."""

    def __str__(self) -> NoReturn:
        raise _PrintedError

    __repr__ = __str__


def _printable(value: Any) -> Any:
    """Refuse a list or an object that the template itself made."""
    if isinstance(value, dict | list | tuple):
        raise _PrintedError
    return value


# serde_json refuses bodies with more than 128 levels, of which a few surround the values given here. The
# limit is below the recursion limit of every Python: 3.13 renders what 3.11 cannot.
_LEVELS_MAX: Final = 120


def _unprintable(value: Any, levels: int = _LEVELS_MAX) -> Any:
    if not isinstance(value, dict | list):
        return value
    if not levels:
        raise NotLocalError("frontend")
    if isinstance(value, dict):
        return _Object({name: _unprintable(one, levels - 1) for name, one in value.items()})
    return _List(_unprintable(one, levels - 1) for one in value)


# Members of messages that were compared.
_FIELDS: Final = frozenset(
    ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "tools")
)
# Template arguments that this frontend takes for fields of the request.
_FIELD_ARGUMENTS: Final = frozenset(("add_generation_prompt", "continue_final_message", "documents", "tools"))
# In Python a boolean is a number.
_NUMBER_TESTS: Final = frozenset(("number", "integer", "float"))
# ``serde_json`` divides by a power of ten, which is exact up to this number of digits.
_DIGITS_MAX: Final = 15
_UNLIKE_NUMBER: Final = re.compile(r"-0(?![.\d])|[\d.]{16,}")


def _check_number(text: str) -> None:
    """Refuse a JSON number that ``serde_json`` reads otherwise than Python."""
    digits = text.lower().partition("e")[0].replace(".", "").lstrip("-0")
    if text == "-0" or len(digits) > _DIGITS_MAX:
        raise NotLocalError("frontend")


def _check_numbers(json_text: str) -> None:
    """Refuse a JSON text with such a number."""

    def checked_int(text: str) -> int:
        if text == "-0":
            raise NotLocalError("frontend")
        return 0

    def checked_float(text: str) -> float:
        _check_number(text)
        return float(text)

    if _UNLIKE_NUMBER.search(json_text):
        try:
            json.loads(json_text, parse_int=checked_int, parse_float=checked_float)
        except (ValueError, RecursionError):
            raise NotLocalError("frontend") from None


def _reads_alike(source: str) -> tuple[bool, bool]:
    """Whether this template is read as by jinja2, and whether it asks if values are numbers."""
    tree = reference_environment().parse(source)
    plain = not any("\\" in data.data for data in tree.find_all(nodes.TemplateData))
    asks = any(test.name in _NUMBER_TESTS for test in tree.find_all(nodes.Test))
    return plain and r"\\" not in source, asks


def _is_unlike_argument(value: Any) -> bool:
    """Whether it may be read otherwise: the text of a number is not known any more."""
    if isinstance(value, dict):
        return any(map(_is_unlike_argument, value.values()))
    if isinstance(value, list):
        return any(map(_is_unlike_argument, value))
    return type(value) is float or (type(value) is int and value == 0)


def _has_booleans(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_booleans, value.values()))
    if isinstance(value, list):
        return any(map(_has_booleans, value))
    return isinstance(value, bool)


class RustFrontend:
    """One model's chats behind that frontend; ``source`` is its only template."""

    name = "rust frontend"
    takes_defaults = True
    paths = frozenset({CHAT, COMPLETION})

    def __init__(self, source: str, special_tokens: dict[str, str], config: ModelPrompts) -> None:
        compiled = compile_template(source, tuple(sorted(special_tokens.items())), config.time_zone)
        content_format = config.chat_template_content_format
        self._fast = compiled.fast
        environment = reference_environment(config.time_zone)
        environment.finalize = _printable
        self._reference = environment.from_string(source)
        self._special_tokens = special_tokens
        self._form = compiled.content_format if content_format == "auto" else content_format
        self.variables = compiled.variables
        alike, self._asks_for_numbers = _reads_alike(source)
        if not alike:
            self._fast = None

    def stamp(self) -> bytes:
        return b""

    def check(self, body: ChatBody) -> None:
        """Refuse fields whose effect was not compared."""
        arguments = body.chat_template_kwargs if isinstance(body.chat_template_kwargs, dict) else {}
        nulls = None in arguments.values() or not _FIELD_ARGUMENTS.isdisjoint(arguments)
        _check_numbers(bytes(body.tools).decode(errors="replace"))
        if nulls or body.continue_final_message or body.truncate_prompt_tokens is not None:
            raise NotLocalError("frontend")

    def parse(self, message: Message) -> Message:
        role, content = message["role"], message.get("content")
        if role not in _ROLES or not _FIELDS.issuperset(message):
            raise NotLocalError("frontend")
        if message.get("tools") is not None:
            raise NotLocalError("frontend")
        texts = _texts(content)
        # All differences below were observed with ``vllm-rs render`` of the wheel of vLLM 0.33.0.
        result = text_message(role, "".join(texts), self._form)
        if self._form == "openai" and role != "assistant":
            result["content"] = [{"type": "text", "text": text} for text in texts]
        if role == "assistant":
            _add_assistant_fields(message, result)
        elif role == "tool" and "tool_call_id" in message:
            result["tool_call_id"] = message["tool_call_id"]
        # serde_json writes these floats and large integers otherwise than Python's json.
        if UNLIKE in value_kinds({name: value for name, value in result.items() if name != "content"}):
            raise NotLocalError("frontend")
        return result

    def render(self, conversation: list[Message], context: ChatContext) -> str:
        if context.shape == UNLIKE or self._fast is None:
            raise NotLocalError("frontend")
        given = {name: value for name, value in context.names.items() if value is not None}
        if any(_is_unlike_argument(value) for name, value in given.items() if name != "tools"):
            raise NotLocalError("frontend")
        others = {name: value for name, value in given.items() if name != "add_generation_prompt"}
        if self._asks_for_numbers and _has_booleans([others, conversation]):
            raise NotLocalError("frontend")
        if "tools" in given:
            given["tools"] = [{key: tool[key] for key in ("type", "function")} for tool in given["tools"]]
        names = {**self._special_tokens, **_unprintable({**given, "messages": conversation})}
        # Only if both engines agree is the text free of their differences: printed values, case, escapes.
        text = by_reference(self._reference, names)
        if by_fast(self._fast, names) != text:
            raise NotLocalError("frontend")
        return text


# Fields for which SGLang's /tokenize gives other tokens than its generation, or which it ignores and vLLM
# does not; those that divide its cache by a key of their own; and parts that are not text (protocol.py and
# serving_tokenize.py in srt/entrypoints/openai, 0.5.23).
_UNLIKE_SGLANG: Final = re.compile(
    rb'"(?:add_generation_prompt|add_special_tokens|input_ids|input_embeds|extra_key|lora_path|documents|'
    rb'prompt_embeds|truncate_prompt_tokens|chat_template|image_url|input_image|video_url|audio_url|input_audio)"'
)


def is_unlike_sglang(body: bytes) -> bool:
    """Whether neither we nor SGLang's ``/tokenize`` surely know the tokens that it would compute."""
    return _UNLIKE_SGLANG.search(body) is not None


# Models whose chats SGLang 0.5.23 renders by a conversation or code of its own: by their path, as given to
# ``--model-path`` (the matching functions of srt/parser/conversation.py), by ``model_type``
# (``MODEL_TYPE_TO_TEMPLATE`` there; serving_chat.py) and by architecture (python_chat_template.py).
_SGLANG_NAMES: Final = re.compile(
    r"\bpoints\b|moss.*vl|internvl|janus|vicuna|llava|deepseek.*vl2|minicpm-[vo]|phi-4-multimodal|"
    r"deepseek-ocr|unlimited|paddleocr|whisper",
    re.IGNORECASE,
)
_SGLANG_TYPES: Final = frozenset(
    {
        "internvl_chat",
        "deepseek_vl_v2",
        "multi_modality",
        "phi4mm",
        "minicpmv",
        "minicpmo",
        "moss_vl",
        "deepseek-ocr",
        "unlimited-ocr",
        "paddleocr_vl",
        "whisper",
        "minimax_m3_vl",
    }
)
_SGLANG_ARCHITECTURES: Final = frozenset({"GlmMoeDsaForCausalLM", "Glm5NextForConditionalGeneration"})


def is_rendered_by_sglang(directory: ModelDir) -> bool:
    """Whether SGLang does not use the template of this model's directory."""
    return (
        directory.model_type in _SGLANG_TYPES
        or directory.architecture in _SGLANG_ARCHITECTURES
        or _SGLANG_NAMES.search(str(directory.folder)) is not None
    )


class SglangFrontend:
    """One model's chats at SGLang; ``source`` is its only template."""

    name = "sglang"
    takes_defaults = True
    paths = frozenset({CHAT, COMPLETION})

    def __init__(self, source: str, special_tokens: dict[str, str], config: ModelPrompts) -> None:
        compiled = compile_template(source, tuple(sorted(special_tokens.items())), config.time_zone)
        self._reference = compiled.reference
        self._special_tokens = special_tokens
        self.variables = compiled.variables

    def stamp(self) -> bytes:
        return b""

    def check(self, body: ChatBody) -> None:
        """Refuse every field that reaches the prompt besides the messages."""
        # Some reasoning parsers set an effort themselves (srt/parser/hunyuan_reasoning.py).
        if not body.is_bare() or "reasoning_effort" in self.variables:
            raise NotLocalError("frontend")

    def parse(self, message: Message) -> Message:
        if message.keys() != {"role", "content"} or message["role"] not in _PLAIN_ROLES:
            raise NotLocalError("frontend")
        if not isinstance(message["content"], str):
            raise NotLocalError("frontend")
        return {"role": message["role"], "content": message["content"]}

    def render(self, conversation: list[Message], context: ChatContext) -> str:
        if conversation[-1]["role"] == "assistant":
            raise NotLocalError("frontend")
        names = {**self._special_tokens, **context.names, "messages": conversation}
        return by_reference(self._reference, names)


def _texts(content: Any) -> list[str]:
    if content is None or isinstance(content, str):
        return [content or ""]
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise NotLocalError("frontend")
        texts.append(text)
    return texts


def _add_assistant_fields(message: Message, result: Message) -> None:
    # An empty one is absent, and both names come before the calls: ``tojson`` shows the order.
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if not isinstance(reasoning, str | None):
        raise NotLocalError("frontend")
    if reasoning:
        result["reasoning"] = result["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        result["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]


def _tool_call(call: Any) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise NotLocalError("frontend")
    made, name, arguments = call.get("id"), function.get("name"), function.get("arguments")
    if not (isinstance(made, str) and isinstance(name, str) and isinstance(arguments, str)):
        raise NotLocalError("frontend")
    _check_numbers(arguments)
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        raise NotLocalError("frontend") from None
    return {"id": made, "type": "function", "function": {"name": name, "arguments": parsed}}
