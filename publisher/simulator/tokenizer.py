"""Convert text to token ids like the engine: jinja2 chat templates and the ``tokenizers`` library.

Independent of the router's prompt reader on purpose, so that tests can compare the two. Facts: transformers'
``apply_chat_template`` environment, and vLLM's flattening of messages for it: text parts joined by newlines,
tool-call arguments parsed, tools in their validated form, ``developer`` messages as one system message.

Engines of one process share an instance per directory; every method is thread safe and has no side effect.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TemplateError(ValueError):
    """The conversation cannot be rendered; ``str()`` has the reason."""


class ChatTokenizer:
    """Tokenizer and chat template of one model directory. Raises ``ValueError`` if they are unusable."""

    def __init__(self, directory: str | Path) -> None:
        folder = Path(directory)
        self._tokenizer = _read_tokenizer(folder / "tokenizer.json")
        config = _read_config(folder / "tokenizer_config.json")
        self._special = {name: _token_text(config[name]) for name in _SPECIAL_NAMES if config.get(name)}
        if "eos_token" not in self._special or not isinstance(config.get("chat_template"), str):
            raise ValueError(
                f"tokenizer_dir: {folder}: tokenizer_config.json lacks eos_token or chat_template"
            )
        source = config["chat_template"]
        self._template = _environment().from_string(source)
        self._knows_developer = '"developer"' in source or "'developer'" in source
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.eos_id = self._id_of(self._special["eos_token"])
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def _id_of(self, token: str) -> int:
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise ValueError(f"tokenizer.json does not know the special token {token!r}")
        return int(token_id)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``; ``encode_batch`` because ``encode`` holds the GIL."""
        return list(self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def answer(self, prompt: Sequence[int], stop: Sequence[str] = (), min_tokens: int = 0) -> AnswerText:
        """Begin the text of an answer to ``prompt``."""
        return AnswerText(self._tokenizer, prompt, stop, min_tokens)

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        return [str(self._tokenizer.id_to_token(token_id)) for token_id in token_ids]

    def vocabulary(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab(with_added_tokens=False))

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        documents: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
        rust: bool = False,
    ) -> str:
        """The prompt text of a conversation; ``rust``: as vLLM's Rust frontend makes it.

        Raises ``TemplateError``.
        """
        conversation = [_flatten(message, "" if rust else "\n") for message in messages]
        if rust:
            conversation = [
                {name: value for name, value in message.items() if name != "name"} for message in conversation
            ]
        if not rust and not self._knows_developer:
            conversation = _developers_as_system(conversation)
        values: dict[str, Any] = {
            **self._special,
            "add_generation_prompt": add_generation_prompt,
            **(template_kwargs or {}),
            "messages": conversation,
            "tools": None if tools is None else [_validated_tool(tool) for tool in tools],
            "documents": documents,
        }
        if rust:  # what is absent is undefined there
            values = {name: value for name, value in values.items() if value is not None}
        try:
            text = self._template.render(**values)
        except (jinja2.TemplateError, TypeError) as error:
            raise TemplateError(f"the chat template cannot render this conversation: {error}") from None
        return _cut_after_final(text, conversation) if continue_final_message else text


# Tokens of a prompt that the text of an answer depends on, where they are whole characters.
_NEAR_TOKENS = 16


class AnswerText:
    """The text of one answer, token by token, as vLLM makes it (v1/engine/detokenizer.py, 0.32).

    A token inside a character gives no text. Before the first text to a prompt that ends inside a character
    comes the whole prompt (vllm#48853). With ``stop`` the text ends before the first of these strings that is
    complete after ``min_tokens``, and what may be a part of one is held back.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str], min_tokens: int
    ) -> None:
        self._tokenizer, self._stop, self._min_tokens = tokenizer, stop, min_tokens
        near = list(prompt[-_NEAR_TOKENS:])
        if str(tokenizer.decode(near, skip_special_tokens=True)).endswith("\ufffd"):
            near = list(prompt)
        self._stream = DecodeStream(ids=near, skip_special_tokens=True)
        self._held_back = max(map(len, stop), default=1) - 1
        self._num_tokens = self._taken = 0
        self.whole = ""
        self.stopped_by: str | None = None
        """The stop string that ended it."""

    def add(self, token_id: int) -> bool:
        """Add a token. Whether the answer ends here, by a stop string."""
        self._num_tokens += 1
        known = len(self.whole)
        self.whole += self._step(token_id)
        if len(self.whole) == known or self._num_tokens <= self._min_tokens:
            return False
        places = {one: self.whole.find(one, max(0, known + 1 - len(one))) for one in self._stop}
        found = [one for one, place in places.items() if place >= 0]
        if found:
            self.stopped_by = first = min(found, key=lambda one: places[one] + len(one))
            self.whole = self.whole[: places[first]]
        return bool(found)

    def take(self, *, finished: bool) -> str:
        """The text since the last call."""
        end = len(self.whole) - (0 if finished else self._held_back)
        text = self.whole[self._taken : max(end, 0)]
        self._taken = max(self._taken, end)
        return text

    def _step(self, token_id: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception:  # noqa: BLE001  # bytes that are no characters; vLLM begins again, too
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(self._tokenizer, token_id) or ""


@lru_cache(maxsize=4)
def shared_tokenizer(directory: str | Path) -> ChatTokenizer:
    """The tokenizer of a directory, read once for all engines of the process."""
    return ChatTokenizer(directory)


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ValueError(f"tokenizer_dir: no file {path}")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  # the library raises nothing more precise
        raise ValueError(f"tokenizer_dir: {path}: {error}") from None


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer_dir: {path}: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"tokenizer_dir: {path}: expected an object")  # noqa: TRY004  # a file's fault
    return config


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter as transformers defines it: no HTML escapes, keys in insertion order."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _token_text(token: str | dict[str, Any]) -> str:
    """The text of a special token of tokenizer_config.json: a string, or an object with its content."""
    return token if isinstance(token, str) else str(token["content"])


def _flatten(message: dict[str, Any], between: str) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise TemplateError("every message needs a string 'role'")
    flat = {**message, "content": _text(message.get("content"), between)}
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        flat["tool_calls"] = [_parsed_call(call) for call in calls]
    else:
        flat.pop("tool_calls", None)
    return flat


def _developers_as_system(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert role ``developer`` for a template without it (vllm/renderers/hf.py, 0.32).

    The result starts with one ``system`` message with the texts of all system and developer messages.
    """
    if not any(message["role"] == "developer" for message in conversation):
        return conversation
    texts, others, first = [], [], conversation[0]
    for message in conversation:
        if message["role"] in {"developer", "system"}:
            texts.append(message["content"] or "")
        else:
            others.append(message)
    if len(texts) == 1 and first["role"] in {"developer", "system"}:
        kept = {key: value for key, value in first.items() if key != "tools"}
        return [{**kept, "role": "system"}, *others]
    return [{"role": "system", "content": "\n\n".join(text for text in texts if text)}, *others]


def _text(content: Any, between: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise TemplateError("message content must be a string or a list of parts")
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise TemplateError("this model reads text parts only")
        texts.append(text)
    return between.join(texts)


def _parsed_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise TemplateError("assistant tool_calls entries must be objects with a 'function'")
    arguments = function.get("arguments") or {}
    # Responses API: vLLM passes these calls on unchanged.
    if arguments and isinstance(arguments, dict):
        return {**call}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    # vLLM's request model puts the fields of a call in this order, which a template may print.
    parsed = {"arguments": arguments, "name": function.get("name")}
    return {"id": call.get("id"), "function": parsed, "type": call.get("type", "function")}


def _validated_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as vLLM's request model dumps it: known fields in fixed order, unset ones null."""
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise TemplateError("every tool needs a 'function' with a 'name'")
    fields = {name: function.get(name) for name in ("name", "description", "parameters")}
    for name in ("strict", "defer_loading"):
        if function.get(name) is not None:
            fields[name] = function[name]
    return {"type": "function", "function": fields}


def _cut_after_final(text: str, conversation: list[dict[str, Any]]) -> str:
    """Cut the text after the last message, as transformers does for ``continue_final_message``."""
    final = conversation[-1]["content"] or ""
    start = text.rfind(final.strip())
    if not final.strip() or start < 0:
        raise TemplateError("continue_final_message needs a final message that the template keeps")
    whole = final.lstrip()
    kept = whole if text.startswith(whole, start) else whole.rstrip()
    return text[: start + len(kept)]
