"""Request and response bodies of the agents' APIs ``/v1/messages`` and ``/v1/responses``.

Requests are converted to chats as in vLLM, as far as agents use them: system text, text, thinking, tool calls
and results. Independent of the router's conversion on purpose, so that tests can compare the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from kvatlas.publisher.simulator.api_protocol import ChatRequest, invalid
from kvatlas.publisher.simulator.kv_messages import TransferParams

Json = dict[str, Any]
_CLIENT_TOOLS = ("function", "custom", "namespace")


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""

    model: str
    messages: list[Json]
    system: str | list[Json] | None = None
    tools: list[Json] | None = None

    def chat(self) -> ChatRequest:
        """Convert to a chat. Raises ``EngineError`` for content that is not simulated."""
        messages: list[Json] = []
        system = self.system if isinstance(self.system, str) else _text(self.system or [])
        if system:
            messages.append({"role": "system", "content": system})
        for message in self.messages:
            messages += _converted(message)
        tools = None
        if self.tools is not None:
            tools = [_tool(tool, {"type": "object", **tool.get("input_schema", {})}) for tool in self.tools]
        return ChatRequest(model=self.model, messages=messages, tools=tools)


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of POST /v1/messages and its /render."""

    max_tokens: int
    stream: bool | None = False
    cache_salt: str | None = None
    kv_transfer_params: TransferParams | None = None

    def chat(self) -> ChatRequest:
        """Convert to a chat. Raises ``EngineError`` for content that is not simulated."""
        chat = super().chat()
        chat.max_tokens, chat.stream, chat.cache_salt = self.max_tokens, self.stream, self.cache_salt
        chat.kv_transfer_params = self.kv_transfer_params
        return chat


def _text(blocks: list[Json]) -> str:
    return "".join(block.get("text") or "" for block in blocks if block.get("type") == "text")


def _tool(tool: Json, parameters: Any) -> Json:
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": parameters}
    return {"type": "function", "function": function}


def _converted(message: Json) -> Iterator[Json]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system") or not isinstance(content, str | list):
        raise invalid("a message needs a role and content", param="messages")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    texts, calls, thoughts = [], [], []
    for block in content:
        kind = block.get("type")
        if kind == "text":
            texts.append({"type": "text", "text": block["text"]})
        elif kind == "thinking":
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block["input"])}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif kind == "tool_result":
            result = block.get("content") or ""
            if not isinstance(result, str):
                result = "\n".join(part.get("text", "") for part in result)
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": result}
        else:
            raise invalid(f"content of type {kind!r} is not simulated", param="messages")
    if role == "user" and not texts:
        return
    own: Json = {"role": role, "content": texts[0]["text"] if len(texts) == 1 else texts}
    if thoughts:
        own["reasoning"] = "".join(thoughts)
    if calls:
        own["tool_calls"] = calls
    yield own


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/responses and its /render."""

    model: str | None = None
    input: str | list[Json]
    instructions: str | None = None
    tools: list[Json] | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    background: bool | None = False
    stream: bool | None = False
    cache_salt: str | None = None
    kv_transfer_params: TransferParams | None = None
    priority: int = 0
    request_id: str | None = None
    """Id of the response."""

    @property
    def runs_tools(self) -> bool:
        """Whether it has tools that the engine runs: in this simulation, one call for each request."""
        return any(tool["type"] not in _CLIENT_TOOLS for tool in self.tools or [])

    def chat(self, earlier: list[Json]) -> ChatRequest:
        """Convert to a chat; ``earlier`` are the messages of the previous response."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        messages += [message for message in earlier if message["role"] != "system"]
        given = self.input
        for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
            _add_item(messages, item)
        tools = [
            _tool(tool, tool.get("parameters")) for tool in self.tools or [] if tool["type"] == "function"
        ]
        return ChatRequest(
            model=self.model,
            messages=messages,
            tools=tools or None,
            max_tokens=self.max_output_tokens,
            add_special_tokens=True,
            stream=self.stream,
            cache_salt=self.cache_salt,
            kv_transfer_params=self.kv_transfer_params,
        )


def _add_item(messages: list[Json], item: Json) -> None:
    """Add an input item; a function call belongs to the assistant's message before it."""
    kind, content = item.get("type", "message"), item.get("content")
    if kind == "function_call":
        function = {"name": item["name"], "arguments": json.loads(item["arguments"])}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant"})
        call = {"id": item["call_id"], "function": function, "type": "function"}
        messages[-1].setdefault("tool_calls", []).append(call)
        return
    if kind == "function_call_output":
        output = {"content": item.get("output"), "tool_call_id": item.get("call_id")}
        messages.append({"role": "tool", **output})
        return
    if kind != "message" or "role" not in item:
        raise invalid(f"input of type {kind!r} is not simulated", param="input")
    if isinstance(content, list) and item["role"] == "assistant":
        content = content[0]["text"]
    elif isinstance(content, list):
        content = [{"type": "text", "text": part["text"]} for part in content]
    messages.append({"role": item["role"], "content": content})


class MessagesAnswer(msgspec.Struct, frozen=True):
    """Bodies of one answer of /v1/messages."""

    request_id: str
    model: str
    num_prompt_tokens: int

    def full(
        self,
        text: str,
        num_output_tokens: int,
        cached_tokens: int,
        finish_reason: str,
        handed: Json | None = None,
    ) -> Json:
        """The complete body, without null fields."""
        whole = {
            **self._head(self.usage(num_output_tokens, cached_tokens)),
            "content": [{"type": "text", "text": text}],
            "stop_reason": _stop_reason(finish_reason),
            "kv_transfer_params": handed,
        }
        left_out = ("stop_reason", "kv_transfer_params")
        return {key: value for key, value in whole.items() if value is not None or key not in left_out}

    def usage(self, num_output_tokens: int, cached_tokens: int | None) -> Json:
        """The ``usage`` object; ``input_tokens`` excludes cached tokens."""
        usage = {"input_tokens": self.num_prompt_tokens - (cached_tokens or 0)}
        if cached_tokens is not None:
            usage["cache_read_input_tokens"] = cached_tokens
        return {**usage, "output_tokens": num_output_tokens}

    def opening(self) -> tuple[bytes, ...]:
        """The stream's events before the first text delta."""
        block = {"index": 0, "content_block": {"type": "text", "text": ""}}
        message = {**self._head(self.usage(0, None)), "content": [], "stop_reason": None}
        return event("message_start", {"message": message}), event("content_block_start", block)

    def delta(self, text: str, _number: int) -> bytes:
        return event("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": text}})

    def closing(
        self, text: str, num_output_tokens: int, cached_tokens: int, finish_reason: str, _number: int
    ) -> bytes:
        """The stream's events after the last text delta."""
        usage = self.usage(num_output_tokens, cached_tokens)
        delta = {"stop_reason": _stop_reason(finish_reason), "stop_sequence": None}
        return (
            event("content_block_stop", {"index": 0})
            + event("message_delta", {"delta": delta, "usage": usage})
            + event("message_stop", {})
        )

    def _head(self, usage: Json) -> Json:
        head = {"id": self.request_id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "stop_sequence": None, "usage": usage}


def _stop_reason(finish_reason: str) -> str | None:
    """None for an answer that the engine aborted (vllm/entrypoints/anthropic/serving.py
    ``_to_anthropic_stop_reason``, 0.32)."""
    return {"length": "max_tokens", "stop": "end_turn"}.get(finish_reason)


class ResponsesAnswer(msgspec.Struct, frozen=True):
    """Bodies of one answer of /v1/responses."""

    request_id: str
    model: str
    num_prompt_tokens: int
    previous_response_id: str | None = None

    def full(
        self,
        text: str,
        num_output_tokens: int,
        cached_tokens: int,
        finish_reason: str,
        handed: Json | None = None,
    ) -> Json:
        """The complete body."""
        part = {"type": "output_text", "text": text, "annotations": []}
        item = {"id": f"msg_{self.request_id}", "type": "message", "role": "assistant", "status": "completed"}
        usage = {
            "input_tokens": self.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.num_prompt_tokens + num_output_tokens,
        }
        status = "incomplete" if finish_reason == "length" else "completed"
        whole = {**self._head(status), "output": [{**item, "content": [part]}], "usage": usage}
        return {**whole, "kv_transfer_params": handed}

    def opening(self) -> tuple[bytes, ...]:
        """The stream's first events, sent before there is any text
        (vllm/entrypoints/openai/responses/serving.py, 0.32)."""
        head, names = self._head("in_progress"), ("response.created", "response.in_progress")
        return tuple(event(name, {"response": head, "sequence_number": n}) for n, name in enumerate(names))

    def delta(self, text: str, number: int) -> bytes:
        """The event of a text delta; ``number`` is its sequence number."""
        place = {"item_id": f"msg_{self.request_id}", "output_index": 0, "content_index": 0}
        return event("response.output_text.delta", {**place, "delta": text, "sequence_number": number})

    def closing(
        self, text: str, num_output_tokens: int, cached_tokens: int, finish_reason: str, number: int
    ) -> bytes:
        """The stream's last event."""
        whole = self.full(text, num_output_tokens, cached_tokens, finish_reason)
        return event(f"response.{whole['status']}", {"response": whole, "sequence_number": number})

    def _head(self, status: str) -> Json:
        head = {"id": self.request_id, "object": "response", "model": self.model, "status": status}
        more: Json = {
            "previous_response_id": self.previous_response_id,
            "parallel_tool_calls": True,
            "tools": [],
        }
        return {**head, **more, "created_at": 0, "tool_choice": "auto", "output": [], "usage": None}


def event(name: str, data: Json) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **data}))
