"""``POST /v1/messages`` (Anthropic's API) as the chat completion that vLLM converts it to.

Source: ``to_chat_completion_request`` in vllm/entrypoints/anthropic/serving.py of 0.32. System blocks are
joined, a client's billing header is dropped, tool results become tool messages before the user's own text,
thinking becomes reasoning, tool schemas and inputs are re-encoded. System messages within the conversation
stay or move to the first, by a trial of the chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import jinja2
import msgspec
from jinja2 import sandbox

from kvatlas.router.prompts.chat.conversions import Memory, TemplateTraits, dumped, encoded, items_of, text_of
from kvatlas.router.prompts.request import NULL, ChatBody, NotLocalError, decode_fields

_BILLING_HEADER: Final = "x-anthropic-billing-header"
_EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
_TRIAL: Final = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]


class _Converted(msgspec.Struct, frozen=True, gc=False):
    """One converted message: its chat messages, or the text of a system message."""

    messages: tuple[msgspec.Raw, ...] = ()
    is_system: bool = False
    system: str = ""


class MessagesBody(msgspec.Struct, gc=False):
    """Fields of the request that reach the prompt (vLLM 0.32 protocol)."""

    messages: list[msgspec.Raw]
    system: Any = None
    tools: msgspec.Raw = NULL
    tool_choice: Any = None
    thinking: Any = None
    output_config: Any = None
    max_tokens: Any = None
    chat_template_kwargs: Any = None
    cache_salt: Any = None
    kv_transfer_params: Any = None

    def skips_cache(self) -> bool:
        """Prompt log-probabilities cannot be asked for."""
        return False

    @property
    def disables_thinking(self) -> bool:
        """Render endpoints treat that as no effort, regardless of what the engine itself detected."""
        return isinstance(self.thinking, dict) and self.thinking.get("type") == "disabled"

    def pieces(self) -> Iterator[bytes]:
        """Tools, system text and messages, unchanged."""
        yield bytes(self.tools)
        yield str(self.system).encode(errors="replace")
        yield from map(bytes, self.messages)

    def num_pieces(self) -> int:
        """Number of messages and blocks of system text that are visited, even if all are known."""
        return len(self.messages) + (len(self.system) if isinstance(self.system, list) else 0)

    def as_chat(self, memory: Memory, traits: Callable[[], TemplateTraits]) -> ChatBody:
        """The converted chat completion. Raises ``NotLocalError``."""
        converted = [memory.get(_message, raw) for raw in self.messages]
        first = _system_text(self.system) if self.system else ""
        inline = any(one.is_system for one in converted)
        if inline and traits().merge_system:
            first += "".join(one.system for one in converted)
            converted = [one for one in converted if not one.is_system]
        messages = [encoded({"role": "system", "content": first})] if first else []
        for one in converted:
            if one.system:
                messages.append(encoded({"role": "system", "content": one.system}))
            messages.extend(one.messages)
        return ChatBody(
            messages=messages,
            tools=memory.get(_tools, self.tools),
            tool_choice="none" if _field(self.tool_choice, "type") == "none" else None,
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=self._effort(traits),
            max_tokens=self.max_tokens,
            cache_salt=self.cache_salt,
            kv_transfer_params=self.kv_transfer_params,
        )

    def _effort(self, traits: Callable[[], TemplateTraits]) -> Any:
        if _field(self.thinking, "type") == "disabled":
            return traits().disabled_effort
        return _field(self.output_config, "effort")


def _field(value: Any, name: str) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise NotLocalError("field")
    return value.get(name)


def _system_text(content: Any) -> str:
    """The request's own system text. Only blocks lose the billing header, a plain string keeps it."""
    return content if isinstance(content, str) else _blocks_text(content)


def _blocks_text(content: Any) -> str:
    texts = [block.get("text") for block in _blocks(content) if block.get("type") == "text"]
    return "".join(t for t in (text_of(t) for t in texts if t) if not t.startswith(_BILLING_HEADER))


def _blocks(content: Any) -> list[dict[str, Any]]:
    blocks = items_of(content)
    if any(block.get("type") in ("tool_addition", "tool_removal") for block in blocks):
        raise NotLocalError("tools_shape")
    return blocks


def _message(message: Any) -> _Converted:
    role = message.get("role") if isinstance(message, dict) else None
    content = message.get("content") if isinstance(message, dict) else None
    if role == "system":
        if not isinstance(content, str):
            return _Converted(is_system=True, system=_blocks_text(content))
        return _Converted(is_system=True, system="" if content.startswith(_BILLING_HEADER) else content)
    if role not in ("user", "assistant"):
        raise NotLocalError("message_shape")
    if isinstance(content, str):
        return _Converted((encoded({"role": role, "content": content}),))
    made = _Message(role)
    for block in _blocks(content):
        made.add(block)
    return _Converted(tuple(map(encoded, made.messages())))


class _Message:
    """One message while its blocks are visited."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._parts: list[dict[str, Any]] = []
        self._calls: list[dict[str, Any]] = []
        self._thoughts: list[str] = []
        self._before: list[dict[str, Any]] = []

    def messages(self) -> list[dict[str, Any]]:
        """The tool results, then the message itself; a user message without text is omitted."""
        own: dict[str, Any] = {"role": self._role}
        if self._thoughts:
            own["reasoning"] = "".join(self._thoughts)
        if self._calls:
            own["tool_calls"] = self._calls
        if len(self._parts) == 1 and "text" in self._parts[0]:
            own["content"] = self._parts[0]["text"]
        elif self._parts:
            own["content"] = self._parts
        empty = self._role == "user" and "content" not in own
        return self._before if empty else [*self._before, own]

    def add(self, block: dict[str, Any]) -> None:
        """Add the next content block."""
        kind = block.get("type")
        if kind == "text":
            self._text(block.get("text") or "")
        elif kind == "thinking":
            if block.get("thinking") is not None:
                self._thoughts.append(text_of(block["thinking"]))
        elif kind == "tool_use":
            self._call(block)
        elif kind == "tool_result" and self._role == "user":
            self._before += _tool_results(block)
        elif kind == "tool_result":
            content = block.get("content")
            self._text(f"Tool result: {str(content) if content else ''}")
        elif kind == "image":
            if block.get("source"):
                self._parts.append(_image(block["source"]))
        elif kind not in ("redacted_thinking", "tool_reference"):
            raise NotLocalError("message_shape")

    def _text(self, text: Any) -> None:
        if text_of(text):
            self._parts.append({"type": "text", "text": text})

    def _call(self, block: dict[str, Any]) -> None:
        if not block.get("id"):  # the engine generates one
            raise NotLocalError("message_shape")
        function = {"name": block.get("name") or "", "arguments": dumped(block.get("input") or {})}
        self._calls.append({"id": block["id"], "type": "function", "function": function})


def _tool_results(block: dict[str, Any]) -> list[dict[str, Any]]:
    content = block.get("content")
    texts, images, references = [content] if isinstance(content, str) else [], [], []
    for item in content if isinstance(content, list) else ():
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "text":
            texts.append(text_of(item.get("text", "")))
        elif kind == "image":
            images.append(_image(item.get("source", {})))
        elif kind == "tool_reference":
            name = item.get("tool_name") or item.get("name")
            references += [{"type": "tool_reference", "name": text_of(name)}] if name else []
    same = {"role": "tool", "tool_call_id": block.get("tool_use_id") or ""}
    result = [{**same, "content": "\n".join(texts)}]
    if images:
        result.append({"role": "user", "content": images})
    return [*result, {**same, "content": references}] if references else result


def _image(source: Any) -> dict[str, Any]:
    """An image that the request contains; images at web addresses are fetched by the engine."""
    if not isinstance(source, dict) or source.get("type", "base64") != "base64":
        raise NotLocalError("multimodal")
    kind, data = source.get("media_type", "image/jpeg"), source.get("data", "")
    return {"type": "image_url", "image_url": {"url": f"data:{text_of(kind)};base64,{text_of(data)}"}}


def _tools(tools: Any) -> msgspec.Raw:
    return NULL if tools is None else encoded([_tool(tool) for tool in items_of(tools)])


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise NotLocalError("tools_shape")
    same = {name: tool.get(name) for name in ("name", "description", "strict", "defer_loading")}
    return {
        "type": "function",
        "function": {**same, "parameters": {**schema, "type": schema.get("type", "object")}},
    }


def wants_system_first(source: str | None) -> bool:
    """Whether vLLM assumes that this template accepts system messages only at the beginning."""
    if not source:
        return True
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    try:
        environment.from_string(source).render(messages=_TRIAL, add_generation_prompt=False)
    except jinja2.TemplateError:
        return True
    except Exception:  # noqa: BLE001  # an engine with this template does not start
        raise NotLocalError("template_rejected") from None
    return False


def disabled_effort(render: Callable[[str], str | list[int] | None]) -> str:
    """The effort that disabled thinking stands for: "low" if the template treats "none" like an effort.
    ``render`` gives the text or ids of a short chat with that effort, None if it is refused."""
    without = render("none")
    if without is None or any(render(effort) == without for effort in _EFFORTS):
        return "low"
    return "none"


def decode_messages(body: bytes) -> MessagesBody:
    """Implement ``decode_fields``."""
    return decode_fields(body, _BODY)


_BODY: Final = msgspec.json.Decoder(MessagesBody)
