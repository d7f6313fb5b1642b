"""``POST /v1/responses`` as the chat that vLLM converts it to, for models with a chat template.

Source: ``construct_input_messages`` in vllm/entrypoints/openai/responses/utils.py of 0.32. An assistant's
text, reasoning and function calls are separate items; consecutive ones become one message as long as it has
no such part yet. The content of an earlier response (``previous_response_id``) is known to one engine only.
Models with their own conversation format (gpt-oss) are not converted here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Final

import msgspec

from kvatlas.router.prompts.chat.conversions import (
    Memory,
    TemplateTraits,
    decoded,
    dumped,
    encoded,
    items_of,
    text_of,
)
from kvatlas.router.prompts.request import NULL, ChatBody, NotLocalError, decode_fields

_UNFINISHED: Final = ("in_progress", "incomplete")
_STATES: Final = (None, "completed", *_UNFINISHED)
_ROLES: Final = ("user", "system", "developer")
_NAMESPACE_SEPARATOR: Final = "__"
# Schema shown for a tool that takes plain text.
_CUSTOM_PARAMETERS: Final = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}


class ResponsesChat(ChatBody, gc=False):
    """Its messages reach the template without the chat API's validation, which reorders tool calls."""

    orders_tool_calls: ClassVar[bool] = False


class _Part(msgspec.Struct, frozen=True, gc=False):
    """One input item: a whole message, or one part of an assistant's."""

    message: msgspec.Raw | None = None
    field: str = ""
    value: Any = None
    unfinished: bool = False
    """As the last item it is to be continued."""


class ResponsesBody(msgspec.Struct, gc=False):
    """Fields of the request that reach the prompt (vLLM 0.32 protocol)."""

    input: msgspec.Raw
    instructions: Any = None
    tools: msgspec.Raw = NULL
    tool_choice: Any = None
    reasoning: Any = None
    truncation: Any = "disabled"
    max_output_tokens: Any = None
    previous_response_id: Any = None
    chat_template_kwargs: Any = None
    cache_salt: Any = None
    kv_transfer_params: Any = None

    def skips_cache(self) -> bool:
        """Prompt log-probabilities cannot be asked for."""
        return False

    def pieces(self) -> Iterator[bytes]:
        """Tools, instructions and input, unchanged."""
        yield bytes(self.tools)
        yield str(self.instructions).encode(errors="replace")
        yield bytes(self.input)

    def as_chat(self, memory: Memory, traits: Callable[[], TemplateTraits]) -> ChatBody:
        """The converted chat completion. Raises ``NotLocalError``."""
        if self.previous_response_id is not None:
            raise NotLocalError("earlier_response")
        messages, unfinished = self._messages(memory)
        return ResponsesChat(
            messages=messages,
            tools=memory.get(_tools, self.tools),
            tool_choice="none" if self.tool_choice == "none" else None,
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=not unfinished,
            continue_final_message=unfinished,
            reasoning_effort=self._effort(),
            add_special_tokens=True,
            truncate_prompt_tokens=None if self.truncation == "disabled" else -1,
            max_tokens=self.max_output_tokens,
            cache_salt=self.cache_salt,
            kv_transfer_params=self.kv_transfer_params,
        )

    def _effort(self) -> Any:
        if self.reasoning is None:
            return None
        if not isinstance(self.reasoning, dict):
            raise NotLocalError("field")
        return self.reasoning.get("effort")

    def _messages(self, memory: Memory) -> tuple[list[msgspec.Raw], bool]:
        """The messages, and whether the last one is to be continued."""
        made = []
        if self.instructions:
            made.append(encoded({"role": "system", "content": text_of(self.instructions)}))
        if bytes(self.input).startswith(b'"'):
            return [*made, encoded({"role": "user", "content": decoded(self.input)})], False
        try:
            raws = _ITEMS.decode(self.input)
        except msgspec.MsgspecError:
            raise NotLocalError("message_shape") from None
        parts = [memory.get(_part, raw) for raw in raws]
        made += [encoded(one) if isinstance(one, dict) else one for one in _merged(parts)]
        return made, bool(parts) and parts[-1].unfinished


def _merged(parts: list[_Part]) -> list[msgspec.Raw | dict[str, Any]]:
    """Join parts of one assistant message while they are different ones; calls accumulate."""
    messages: list[msgspec.Raw | dict[str, Any]] = []
    for part in parts:
        last = messages[-1] if messages else None
        if part.message is not None:
            messages.append(part.message)
        elif isinstance(last, dict) and part.field == "tool_calls":
            last.setdefault("tool_calls", []).append(part.value)
        elif isinstance(last, dict) and part.field not in last:
            last[part.field] = part.value
        else:
            value = [part.value] if part.field == "tool_calls" else part.value
            messages.append({"role": "assistant", part.field: value})
    return messages


def _part(item: Any) -> _Part:
    if not isinstance(item, dict):
        raise NotLocalError("message_shape")
    kind = item.get("type")
    if kind in (None, "message"):
        return _said(item, kind)
    make = _MAKE.get(kind) if isinstance(kind, str) else None
    if make is None:
        raise NotLocalError("message_shape")
    return make(item)


def _said(item: dict[str, Any], kind: str | None) -> _Part:
    role, content = item.get("role"), item.get("content")
    unfinished = item.get("status") in _UNFINISHED
    if role == "assistant":
        return _Part(field="content", value=_answer(item, kind), unfinished=unfinished)
    if role not in _ROLES:
        raise NotLocalError("message_shape")
    if not isinstance(content, str):
        _only_text(content)
    return _Part(message=encoded(item), unfinished=unfinished)


def _only_text(parts: Any) -> None:
    if any(part.get("type") != "input_text" for part in items_of(parts)):
        raise NotLocalError("multimodal")


def _answer(item: dict[str, Any], kind: str | None) -> str:
    """The text of an assistant's message: only its first part, as in the engine."""
    content = item.get("content")
    if isinstance(content, str):
        return content
    parts = items_of(content)
    plain = all(part.get("type") == "output_text" and not part.get("annotations") for part in parts)
    if kind is None or not parts or not plain or item.get("status") not in _STATES:
        raise NotLocalError("message_shape")
    return text_of(parts[0].get("text"))


def _reasoning(item: dict[str, Any]) -> _Part:
    if item.get("encrypted_content") or item.get("status") not in _STATES:
        raise NotLocalError("message_shape")
    texts = items_of(item.get("content") or []) or items_of(item.get("summary") or [])
    text = text_of(texts[0].get("text")) if texts else ""
    return _Part(field="reasoning", value=text, unfinished=item.get("status") in _UNFINISHED)


def _function_call(item: dict[str, Any]) -> _Part:
    name = text_of(item.get("name"))
    if item.get("namespace"):
        name = text_of(item["namespace"]) + _NAMESPACE_SEPARATOR + name
    return _call(item, name, text_of(item.get("arguments")))


def _custom_call(item: dict[str, Any]) -> _Part:
    payload = {"input": text_of(item.get("input") or "")}
    return _call(item, text_of(item.get("name")), dumped(payload, ascii_only=False))


def _call(item: dict[str, Any], name: str, arguments: str) -> _Part:
    function = {"name": name, "arguments": arguments}
    call = {"id": text_of(item.get("call_id")), "function": function, "type": "function"}
    return _Part(field="tool_calls", value=call)


def _output(item: dict[str, Any]) -> _Part:
    output = item.get("output")
    if not isinstance(output, str):
        # The engine cannot read the parts of a custom tool's output.
        if item["type"] != "function_call_output":
            raise NotLocalError("message_shape")
        _only_text(output)
    message = {"role": "tool", "content": output, "tool_call_id": item.get("call_id")}
    return _Part(message=encoded(message))


_MAKE: Final[dict[str, Callable[[dict[str, Any]], _Part]]] = {
    "reasoning": _reasoning,
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
    "function_call_output": _output,
    "custom_tool_call_output": _output,
}


def _tools(tools: Any) -> msgspec.Raw:
    if tools is None or tools == []:
        return NULL
    return encoded([made for tool in items_of(tools) for made in _shown(tool)])


def _shown(tool: dict[str, Any]) -> list[dict[str, Any]]:
    """Forms in which a tool is shown to the model; other kinds are not shown."""
    kind, name = tool.get("type"), tool.get("name")
    if kind == "function":
        return [_function(tool, name)]
    if kind == "custom":
        return [_function({"description": tool.get("description"), "parameters": _CUSTOM_PARAMETERS}, name)]
    if kind == "namespace":
        prefix = text_of(name) + _NAMESPACE_SEPARATOR
        inner = [one for one in items_of(tool.get("tools")) if one.get("type") == "function"]
        return [_function(one, prefix + text_of(one.get("name"))) for one in inner]
    return []


def _function(tool: dict[str, Any], name: Any) -> dict[str, Any]:
    fields = {field: tool.get(field) for field in ("description", "parameters", "strict", "defer_loading")}
    return {"type": "function", "function": {"name": name, **fields}}


def decode_responses(body: bytes) -> ResponsesBody:
    """Implement ``decode_fields``."""
    return decode_fields(body, _BODY)


_BODY: Final = msgspec.json.Decoder(ResponsesBody)
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])
