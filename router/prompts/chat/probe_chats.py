"""Probe conversations, rendered at load by both template engines.

They cover what templates treat differently: system text or none, several turns, tool definitions, calls and
results, reasoning, empty and odd text, the generation prompt on and off, and template switches.
"""

from __future__ import annotations

from typing import Any, Final

# Python quotes these in a list, minijinja does not: reveals templates that print lists of texts.
_UNPRINTED = "\xa0\xad"
_ODD = f" <b>&\"'\\ \t{{{{ x }}}} {{% y %}} é 漢字 😀 {_UNPRINTED}\n\n</think> a\n"
_TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a place, <now> & 'later'",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "enum": ["Zürich", "b"], "default": None},
                    "days": {"type": ["integer", "null"], "minimum": 1, "maximum": 1.5},
                },
                "required": ["place"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "ping", "description": None, "parameters": None}},
]
_CALL: Final = {
    "id": "call00001",
    "function": {"arguments": {"place": "Zürich", "days": 2, "x": [1.0, None, True]}, "name": "get_weather"},
    "type": "function",
}


def _chat(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(message) for message in messages]


_SYSTEM: Final = {"role": "system", "content": f"You are brief. <&>{_UNPRINTED}"}
_USER: Final = {"role": "user", "content": "Hello"}
_ASSISTANT: Final = {"role": "assistant", "content": f" Hi {_UNPRINTED} there. "}
_THINKING: Final = {
    "role": "assistant",
    "content": "<think>\nhm\n</think>\n\nDone",
    "reasoning": f"because{_UNPRINTED}",
    "reasoning_content": f"because{_UNPRINTED}",
}
_CALLING: Final = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_CALLING_TWICE: Final = {"role": "assistant", "content": "Both:", "tool_calls": [_CALL, _CALL]}
_RESULT: Final = {"role": "tool", "content": f'{{"t": 21.5}}{_UNPRINTED}', "tool_call_id": "call00001"}
_ODD_USER: Final = {"role": "user", "content": _ODD, "name": "bob"}

_CONVERSATIONS: Final = (
    _chat(_USER),
    _chat(_SYSTEM, _USER),
    _chat(_ODD_USER),
    _chat({"role": "user", "content": ""}),
    _chat(_USER, _ASSISTANT, _ODD_USER),
    _chat(_SYSTEM, _USER, _ASSISTANT, _USER, _THINKING, _ODD_USER),
    _chat(_SYSTEM, _USER, _CALLING, _RESULT, _ASSISTANT, _USER),
    _chat(_USER, _CALLING_TWICE, _RESULT, {**_RESULT, "name": "get_weather"}),
    _chat(_USER, _ASSISTANT),
    _chat({"role": "developer", "content": "Be kind", "tools": None}, _USER),
    _chat(_USER, _USER),
    _chat({"role": "critic", "content": "custom role"}, _USER),
)
_SWITCHES: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"enable_thinking": False},
    {"enable_thinking": True, "reasoning_effort": "high", "thinking": True},
    {"documents": [{"title": "T", "text": "body"}]},
)


def _contexts(content_format: str) -> list[dict[str, Any]]:
    contexts = []
    for conversation in _CONVERSATIONS:
        # As vLLM passes them: a list of parts for templates that loop over the content.
        messages = [_as_parts(m) for m in conversation] if content_format == "openai" else conversation
        for tools in (None, _TOOLS):
            for prompt in (True, False):
                for switches in _SWITCHES:
                    base = {"messages": messages, "tools": tools, "add_generation_prompt": prompt}
                    contexts.append({**base, "documents": None, **switches})
    return contexts


def _as_parts(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


PROBES: Final = {"string": _contexts("string"), "openai": _contexts("openai")}
