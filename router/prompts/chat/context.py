"""Inputs of a chat template besides the messages: tools, documents and template arguments.

Follows vLLM 0.32: tools are dumped from their schema (fixed field order, absent fields filled in, unknown
fields dropped), the request's ``chat_template_kwargs`` override server defaults, its own fields override
those, None and "auto" count as absent, and only names that the template reads are passed on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from threading import Lock
from typing import Any, Final, Protocol

import msgspec
import xxhash

from router.prompts.chat.template import UNLIKE, value_kinds
from router.prompts.request import ChatBody, NotLocalError, decode_any
from router.prompts.sizes import SHARE, compact, kept_bytes
from router.prompts.stats import PromptStats

_RESERVED: Final = frozenset({
    "chat_template", "conversation", "max_length", "messages", "model_config", "padding",
    "return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "tokenize", "tokenizer",
    "tokenizer_kwargs", "tools", "truncation",
    "cycler", "dict", "joiner", "lipsum", "namespace", "raise_exception", "range", "strftime_now",
})  # fmt: skip
"""Template arguments that affect more than the template in the engine, or shadow functions of templates."""
_UNSET: Final = (None, "auto")


_ENTRY_BYTES: Final = 2000
"""Size of a context besides its names: its keys, the structure, the cache's own."""

Key = tuple[object, ...]


class ReadsArguments(Protocol):
    """A template, or a family's code: the arguments that it reads."""

    @property
    def variables(self) -> Container[str]: ...


class ChatContext(msgspec.Struct, frozen=True):
    """``names``: the template's variables; ``key``: equal exactly if all of them are (compact), ``shape``: if
    they are of the same kinds."""

    names: dict[str, Any]
    continue_final: bool
    key: bytes
    shape: int


class ContextCache:
    """Templates and contexts of plain requests, which are usually the same ones: saves 15 us.

    Invariant: all entries take at most ``bytes_max`` together; one above a quarter of it is not cached. Any
    thread may call it.
    """

    def __init__(self, stats: PromptStats, bytes_max: int) -> None:
        self._stats = stats
        self._bytes_max = bytes_max
        self._bytes = 0
        self._entries: OrderedDict[Key, tuple[Any, ChatContext, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Key) -> tuple[Any, ChatContext] | None:
        """Return the cached entry, or None."""
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            self._entries.move_to_end(key)
        return found[0], found[1]

    def put(self, key: Key, template: ReadsArguments, context: ChatContext) -> None:
        """Cache a context; the least recently used ones are evicted."""
        size = _ENTRY_BYTES + kept_bytes(context.names)
        if size > self._bytes_max // SHARE:
            self._stats.oversized += 1
            return
        with self._lock:
            # cached by another thread, for an equal request
            _, _, before = self._entries.pop(key, (None, None, 0))
            self._entries[key] = template, context, size
            self._count(size - before)
            while self._bytes > self._bytes_max:
                _, (_, _, old) = self._entries.popitem(last=False)
                self._count(-old)
                self._stats.context_evictions += 1

    def clear(self) -> None:
        """Clear the cache: the model is not served any more."""
        with self._lock:
            self._entries.clear()
            self._count(-self._bytes)

    def _count(self, size: int) -> None:
        self._bytes += size
        self._stats.context_bytes += size


def context_key(body: ChatBody) -> Key | None:
    """Inputs of the context of a plain request; None for a request that is not plain."""
    if not (body.chat_template_kwargs is None and body.documents is None and body.chat_template is None):
        return None
    return (
        compact(bytes(body.tools)),
        body.tool_choice == "none",
        *(_plain(body.add_generation_prompt), _plain(body.continue_final_message)),
        _plain(body.reasoning_effort),
    )


def _plain(value: Any) -> object:
    """A key that distinguishes True from 1 and from "True"."""
    if value is True or value is False or value is None:
        return value
    return type(value).__name__, compact(str(value).encode(errors="replace"))


def chat_context(
    body: ChatBody,
    template: ReadsArguments,
    *,
    tools: list[dict[str, Any]] | None,
    special_tokens: dict[str, str],
    defaults: dict[str, Any],
) -> ChatContext:
    """Everything but the messages. Raises ``NotLocalError`` for arguments that are not reproduced."""
    _check_fields(body)
    own = _request_arguments(body)
    given: dict[str, Any] = {**(body.chat_template_kwargs or {})}
    given.update((key, value) for key, value in own.items() if not _unset(value))
    merged = {**defaults, **{key: value for key, value in given.items() if not _unset(value)}}
    if not _RESERVED.isdisjoint(merged):
        raise NotLocalError("template_kwargs")
    continue_final = merged.pop("continue_final_message", False)
    arguments = {key: value for key, value in merged.items() if key in template.variables}
    arguments["documents"] = merged.get("documents")
    arguments["add_generation_prompt"] = merged["add_generation_prompt"]
    if continue_final and arguments["add_generation_prompt"]:
        raise NotLocalError("template_rejected")
    shape = _shape(arguments, bytes(body.tools), tools)
    # Tools by their raw form, unless they are left out: the choice of the template depends on that.
    depends_on = [arguments, continue_final, None if tools is None else bytes(body.tools)]
    try:
        if shape == UNLIKE:  # JSON has no NaN, which configured arguments may contain: it would become null
            key = b"~" + repr(depends_on).encode(errors="backslashreplace")
        else:
            key = _ENCODER.encode(depends_on)
    except (TypeError, ValueError, RecursionError):
        raise NotLocalError("template_kwargs") from None
    names = {**special_tokens, **arguments, "tools": tools}
    return ChatContext(names, continue_final, compact(key), shape)


_ENCODER: Final = msgspec.json.Encoder()


def _unset(value: Any) -> bool:
    return any(value is unset or (isinstance(value, str) and value == unset) for unset in _UNSET)


def _request_arguments(body: ChatBody) -> dict[str, Any]:
    arguments = {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "documents": body.documents,
        "reasoning_effort": body.reasoning_effort,
    }
    if body.reasoning_effort is not None and "enable_thinking" not in (body.chat_template_kwargs or {}):
        arguments["enable_thinking"] = body.reasoning_effort != "none"
    return arguments


def _check_fields(body: ChatBody) -> None:
    """Refuse types that the engine would coerce or reject."""
    if body.chat_template is not None:
        raise NotLocalError("request_template")
    flags = (body.add_generation_prompt, body.continue_final_message)
    if not all(isinstance(flag, bool) for flag in flags):
        raise NotLocalError("field")
    if body.chat_template_kwargs is not None and not isinstance(body.chat_template_kwargs, dict):
        raise NotLocalError("field")
    if body.reasoning_effort is not None and not isinstance(body.reasoning_effort, str):
        raise NotLocalError("field")
    if body.documents is not None and not _are_documents(body.documents):
        raise NotLocalError("field")


def _are_documents(documents: Any) -> bool:
    return isinstance(documents, list) and all(
        isinstance(item, dict) and all(isinstance(value, str) for value in item.values())
        for item in documents
    )


def _shape(arguments: dict[str, Any], raw_tools: bytes, tools: list[dict[str, Any]] | None) -> int:
    """Every tool set is its own shape: templates read parameter schemas. ``UNLIKE`` if a value is."""
    kinds = [(k, v if isinstance(v, bool) else value_kinds(v)) for k, v in arguments.items()]
    if UNLIKE in value_kinds([arguments, tools]):
        return UNLIKE
    return hash((tuple(kinds), xxhash.xxh3_128_intdigest(raw_tools)))


def parse_tools(body: ChatBody, *, exclude_when_none: bool) -> list[dict[str, Any]] | None:
    """Tools as the engine dumps them; ``exclude_when_none``: leave them out for ``tool_choice="none"``.

    Raises ``NotLocalError`` for a tool the engine would coerce or reject.
    """
    tools = decode_any(body.tools)
    if tools is None or (exclude_when_none and body.tool_choice == "none"):
        return None
    if not isinstance(tools, list) or not tools:
        raise NotLocalError("tools_shape")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise NotLocalError("tools_shape")
    outer = tool.get("defer_loading")
    inner = function.get("defer_loading")
    inner = outer if inner is None else inner
    fields = {
        "name": function.get("name"),
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    optional = {"strict": function.get("strict"), "defer_loading": inner}
    if not (
        isinstance(fields["name"], str)
        and isinstance(fields["description"], str | None)
        and isinstance(fields["parameters"], dict | None)
        and all(isinstance(flag, bool | None) for flag in (*optional.values(), outer))
    ):
        raise NotLocalError("tools_shape")
    fields.update((key, value) for key, value in optional.items() if value is not None)
    result: dict[str, Any] = {"type": "function", "function": fields}
    if outer is not None:
        result["defer_loading"] = outer
    return result
