"""``POST /cohere/v2/chat`` as the chat completion that vLLM converts it to.

Source: ``_convert_v2_to_chat_completion`` in vllm/entrypoints/cohere/serving.py of 0.32. Thinking and tool
plan become reasoning, documents within a tool's result become JSON text; documents, safety mode, citation
options and thinking are template arguments, unless the request's own ``chat_template_kwargs`` name them. With
``--tokenizer-mode cohere`` all parts of a tool's result become documents; citations of earlier answers are
not converted then. The request types are those of Cohere's SDK: values that it would coerce, fill in or pass
on beyond them are not converted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Final

import msgspec

from router.prompts.chat.messages import Memory, TemplateTraits, decoded, dumped, encoded, items_of, text_of
from router.prompts.request import NULL, ChatBody, NotLocalError, decode_fields

_TOOL_CHOICES: Final = {None: None, "REQUIRED": "required", "NONE": "none"}
_MODE: Final = ("mode",)
_THINKING: Final = ("type", "token_budget")


class CohereBody(msgspec.Struct, gc=False):
    """Fields of the request that reach the prompt (vLLM 0.32 protocol); it has no salt."""

    cache_salt: ClassVar[None] = None
    messages: list[msgspec.Raw]
    tools: msgspec.Raw = NULL
    strict_tools: Any = None
    tool_choice: Any = None
    documents: msgspec.Raw = NULL
    citation_options: Any = None
    safety_mode: Any = None
    thinking: Any = None
    max_tokens: Any = None
    chat_template_kwargs: Any = None
    kv_transfer_params: Any = None

    def skips_cache(self) -> bool:
        """Prompt log-probabilities cannot be asked for."""
        return False

    def pieces(self) -> Iterator[bytes]:
        """Tools, documents and messages, unchanged."""
        yield bytes(self.tools)
        yield bytes(self.documents)
        yield from map(bytes, self.messages)

    def as_chat(self, memory: Memory, traits: Callable[[], TemplateTraits]) -> ChatBody:
        """The converted chat completion. Raises ``NotLocalError``."""
        if not isinstance(self.strict_tools, bool | None) or not isinstance(self.tool_choice, str | None):
            raise NotLocalError("field")
        if self.tool_choice not in _TOOL_CHOICES:
            raise NotLocalError("field")
        convert = _cited_message if traits().keeps_documents else _message
        tools = memory.get(_strict_tools if self.strict_tools else _tools, self.tools)
        return ChatBody(
            messages=[memory.get(convert, raw) for raw in self.messages],
            tools=tools,
            tool_choice=_TOOL_CHOICES[self.tool_choice],
            chat_template_kwargs=self._arguments(),
            max_tokens=self.max_tokens,
            max_completion_tokens=self.max_tokens,
            kv_transfer_params=self.kv_transfer_params,
        )

    def _arguments(self) -> dict[str, Any] | None:
        given = self.chat_template_kwargs
        if not isinstance(given, dict | None):
            raise NotLocalError("field")
        found: dict[str, Any] = {}
        documents = decoded(self.documents)
        if documents:
            found["documents"] = _documents(documents)
        if self.safety_mode is not None:
            found["safety_mode"] = text_of(self.safety_mode).lower()
        if self.citation_options is not None:
            found["citation_options"] = _known(self.citation_options, _MODE)
        if self.thinking is not None:
            found["thinking"] = _known(self.thinking, _THINKING)
        return {**found, **(given or {})} or None


def _known(value: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """An object of these fields in their order, without nulls."""
    if not isinstance(value, dict) or not value.keys() <= set(names):
        raise NotLocalError("template_kwargs")
    return {name: value[name] for name in names if value.get(name) is not None}


def _documents(documents: Any) -> list[dict[str, Any]]:
    if not isinstance(documents, list):
        raise NotLocalError("field")
    made = []
    for number, given in enumerate(documents):
        document = {"data": {"text": given}} if isinstance(given, str) else _document(given)
        made.append({"id": document.get("id") or f"doc_{number}", "data": document["data"]})
    return made


def _document(document: Any) -> dict[str, Any]:
    """A document in the SDK's form: its data, then its id."""
    found = _known(document, ("data", "id"))
    if not isinstance(found.get("data"), dict) or not isinstance(found.get("id"), str | None):
        raise NotLocalError("field")
    return found


def _message(message: Any) -> msgspec.Raw:
    role = message.get("role") if isinstance(message, dict) else None
    make = _ROLES.get(role) if isinstance(role, str) else None
    if make is None:
        raise NotLocalError("message_shape")
    return encoded({"role": role, **make(message)})


def _cited_message(message: Any) -> msgspec.Raw:
    """A message whose documents answers may cite, for families that support them."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(message, dict) and message.get("citations"):
        raise NotLocalError("message_shape")
    if not isinstance(content, list) or not content or message.get("role") != "tool":
        return _message(message)
    parts = [{"type": "document", "document": _result_fields(part)} for part in items_of(content)]
    return encoded({"role": "tool", **_tool_result({**message, "content": ""}), "content": parts})


def _result_fields(part: dict[str, Any]) -> dict[str, Any]:
    """A tool's result as fields: a document's data, or the object that a text encodes."""
    if part.get("type") == "document":
        data: dict[str, Any] = _document(part.get("document"))["data"]
        return data
    text = _text(part)
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    except RecursionError:
        raise NotLocalError("message_shape") from None
    return found if isinstance(found, dict) else {"content": text}


def _system(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        content = "".join(_text(part) for part in items_of(content))
    return {"role": "system", "content": content}  # a developer's too


def _user(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return {"content": content}
    parts = [_user_part(part) for part in items_of(content)]
    if len(parts) == 1 and parts[0]["type"] == "text":
        return {"content": parts[0]["text"]}
    return {"content": parts}


def _user_part(part: dict[str, Any]) -> dict[str, Any]:
    if part.get("type") != "image_url":
        return {"type": "text", "text": _text(part)}
    image = part.get("image_url")
    if not isinstance(image, dict):
        raise NotLocalError("message_shape")
    detail = {} if image.get("detail") is None else {"detail": text_of(image["detail"])}
    return {"type": "image_url", "image_url": {"url": text_of(image.get("url")), **detail}}


def _text(part: dict[str, Any]) -> str:
    if part.get("type") != "text":
        raise NotLocalError("message_shape")
    return text_of(part.get("text"))


def _assistant(message: dict[str, Any]) -> dict[str, Any]:
    content, plan, calls = message.get("content"), message.get("tool_plan"), message.get("tool_calls")
    texts = [content] if isinstance(content, str) else []
    thoughts = []
    for part in items_of(content) if not isinstance(content, str | None) else ():
        if part.get("type") == "thinking":
            thoughts.append(text_of(part.get("thinking")))
        else:
            texts.append(_text(part))
    if plan is not None:
        thoughts += [text_of(plan)] if plan else []
    made: dict[str, Any] = {}
    if texts:
        made["content"] = "".join(texts)
    if thoughts:
        made["reasoning"] = "".join(thoughts)
    if calls is not None and items_of(calls):
        made["tool_calls"] = [_call(call) for call in calls]
    return made


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict | None):
        raise NotLocalError("message_shape")
    name, arguments = ((function or {}).get(field) for field in ("name", "arguments"))
    if not isinstance(name, str | None) or not isinstance(arguments, str | None):
        raise NotLocalError("message_shape")
    shown = {"name": name or "", "arguments": arguments or "{}"}
    return {"id": text_of(call.get("id")), "type": "function", "function": shown}


def _tool_result(message: dict[str, Any]) -> dict[str, Any]:
    content: Any = message.get("content")
    if not isinstance(content, str):
        content = [{"type": "text", "text": _result_text(part)} for part in items_of(content)]
    return {"tool_call_id": text_of(message.get("tool_call_id")), "content": content}


def _result_text(part: dict[str, Any]) -> str:
    if part.get("type") != "document":
        return _text(part)
    return dumped(_document(part.get("document")))


_ROLES: Final[dict[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "system": _system,
    "developer": _system,
    "user": _user,
    "assistant": _assistant,
    "tool": _tool_result,
}


def _tools(tools: Any) -> msgspec.Raw:
    return encoded([_tool(tool) for tool in items_of(tools)]) if tools else NULL


def _strict_tools(tools: Any) -> msgspec.Raw:
    made = [_tool(tool) for tool in items_of(tools or [])]
    for tool in made:
        tool["function"]["strict"] = True
    return encoded(made) if made else NULL


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("parameters"), dict):
        raise NotLocalError("tools_shape")
    shown = {name: function.get(name) for name in ("name", "description", "parameters")}
    return {"type": tool.get("type", "function"), "function": shown}


def decode_cohere(body: bytes) -> CohereBody:
    """Implement ``decode_fields``."""
    return decode_fields(body, _BODY)


_BODY: Final = msgspec.json.Decoder(CohereBody)
