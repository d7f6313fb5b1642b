"""The demo's conversations as requests of each API, and what the events of their streams say.

A conversation is a chat's messages; an assistant's tool calls have their results behind them.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from router.openai.apis import CHAT, MESSAGES, RESPONSES
from router.openai.request import Usage
from router.proxy.answers.usage import read_usage

Api = Literal["chat", "messages", "responses"]
Message = dict[str, Any]
PATHS: dict[Api, str] = {"chat": CHAT, "messages": MESSAGES, "responses": RESPONSES}


def request_body(api: Api, model: str, messages: list[Message], max_tokens: int) -> dict[str, Any]:
    """A streamed request; the first message is the system prompt."""
    body: dict[str, Any] = {"model": model, "stream": True}
    if api == "chat":
        usage = {"stream_options": {"include_usage": True}}
        return {**body, "messages": messages, "max_tokens": max_tokens, **usage}
    system, *turns = messages
    if api == "messages":
        given = [_as_blocks(message) for message in turns]
        return {**body, "system": system["content"], "messages": given, "max_tokens": max_tokens}
    items = [item for message in turns for item in _as_items(message)]
    return {**body, "instructions": system["content"], "input": items, "max_output_tokens": max_tokens}


def _as_blocks(message: Message) -> Message:
    if message["role"] == "tool":
        result = {
            "type": "tool_result",
            "tool_use_id": message["tool_call_id"],
            "content": message["content"],
        }
        return {"role": "user", "content": [result]}
    calls = [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": json.loads(call["function"]["arguments"]),
        }
        for call in message.get("tool_calls", ())
    ]
    if not calls:
        return message
    return {"role": "assistant", "content": [{"type": "text", "text": message["content"]}, *calls]}


def _as_items(message: Message) -> list[Message]:
    if message["role"] == "tool":
        said = {"call_id": message["tool_call_id"], "output": message["content"]}
        return [{"type": "function_call_output", **said}]
    text = {"role": message["role"], "content": message["content"]}
    calls = [
        {"type": "function_call", "call_id": call["id"], **call["function"]}
        for call in message.get("tool_calls", ())
    ]
    return [text, *calls]


def text_of(event: dict[str, Any]) -> str:
    """The text that an event of a stream adds."""
    delta = event.get("delta")
    if isinstance(delta, str):
        return delta
    if isinstance(delta, dict):
        return delta.get("text") or ""
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))


def usage_of(data: bytes) -> Usage | None:
    """The usage that an event tells."""
    return read_usage(data) if b'"usage"' in data else None
